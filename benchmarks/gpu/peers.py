"""`make gpu`: attention of others beside ours: torch's SDPA with a mask, FlexAttention, flashinfer.

And what this GPU can do at all: causal attention of all rows by the kernels of FlashAttention and cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.bench import Bench
from kvkit.kernels.attention.api import blend_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows

Contender = Callable[[], torch.Tensor]
"""Computes the rows' output, [M, query heads, channels]."""

OURS, MASKED, FLEX = "kvkit", "SDPA with a mask", "FlexAttention"
FLEX_TUNED = "FlexAttention, max-autotune"
DENSE = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
"""Kernels of torch's SDPA, which take no mask of single rows."""
QUESTION = 64


@dataclass(frozen=True)
class BlendShape:
    """One layer's blend: N keys, 15 % of the rows, and a question at the end."""

    tokens: int
    heads: int
    group: int
    size: int = 128
    block_tokens: int = 16

    @property
    def positions(self) -> NDArray[np.int64]:
        """Of the rows, ascending."""
        chosen = np.random.default_rng(0).choice(self.tokens, int(0.15 * self.tokens), replace=False)
        return np.union1d(chosen, np.arange(self.tokens - QUESTION, self.tokens))

    @property
    def flops(self) -> int:
        """Of the visible keys only."""
        return 4 * self.size * self.heads * self.group * int((self.positions + 1).sum())


LLAMA_8K = BlendShape(8192, 8, 4)
SMALL = BlendShape(128, 2, 2, 16)


def run(bench: Bench) -> None:
    """Records each contender's time for Llama-3.1-8B at 8k, and how far its output is from SDPA's."""
    on_gpu = bench.device.type == "cuda"
    dense(bench, (4096, 8192, 32768) if on_gpu else (64,))
    shape = LLAMA_8K if on_gpu else SMALL
    makers = contenders(shape, bench.device)
    want = makers[MASKED]()().double()
    for name, make in makers.items():
        try:
            function = make()
            off = ((function().double() - want).norm() / want.norm()).item()
            times = bench.seconds(function)
        except Exception as error:  # a peer that is missing or cannot do it must not hide the others
            bench.results.record(name, error=f"{type(error).__name__}: {error}"[:300])
            continue
        speed = shape.flops / min(times) / 1e12
        us = {"us": median(times) * 1e6, "min_us": min(times) * 1e6}
        bench.results.record(name, **us, **{"TFLOP/s of visible keys": speed, "off": off})


def dense(bench: Bench, lengths: Sequence[int]) -> None:
    """Record the rate of causal attention of every row, by each of DENSE, as the GPU's reach."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    for length in lengths:
        shape = 1, 32, length, 128
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=bench.device) for _ in range(3))
        flops = 4 * 128 * 32 * length * (length + 1) // 2
        for name in DENSE:
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    times = bench.seconds(partial(attend, q, k, v, is_causal=True))
            except Exception as error:  # not every torch has every kernel
                bench.results.record(f"{name}, {length} rows", error=f"{type(error).__name__}: {error}"[:300])
                continue
            us = {"us": median(times) * 1e6, "min_us": min(times) * 1e6}
            bench.results.record(
                f"{name}, {length} rows", **us, **{"TFLOP/s of visible keys": flops / min(times) / 1e12}
            )


def contenders(shape: BlendShape, device: torch.device) -> Mapping[str, Callable[[], Contender]]:
    """What makes each contender ready, over the same random numbers; what they need is made outside."""
    positions = shape.positions
    blocks = np.random.default_rng(1).permutation(shape.tokens // shape.block_tokens)
    starts, lengths = np.array([0, len(positions)]), np.array([shape.tokens])
    rows = Rows.of(positions, starts, lengths, blocks[None], shape.block_tokens, device)
    pages = len(blocks), shape.heads, shape.block_tokens, shape.size
    bf16 = {"dtype": torch.bfloat16, "device": device}
    k, v = (torch.randn(pages, **bf16) for _ in range(2))
    q = torch.randn(len(positions), shape.heads * shape.group, shape.size, **bf16)
    keys, values = (x[blocks].transpose(0, 1).reshape(1, shape.heads, shape.tokens, -1) for x in (k, v))
    ordered = q.transpose(0, 1)[None].contiguous()  # [1, query heads, M, channels]
    on_device = torch.from_numpy(positions).to(device)
    mask = torch.arange(shape.tokens, device=device) <= on_device[:, None]
    gqa = shape.group > 1

    def ours() -> Contender:
        return lambda: blend_attention(q, k, v, rows, Scoring(shape.size**-0.5))[0]

    def masked() -> Contender:
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(ordered, keys, values, attn_mask=mask, enable_gqa=gqa)[0].transpose(0, 1)

    def flex(**options: str) -> Contender:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return j <= on_device[i]

        found = create_block_mask(visible, None, None, len(positions), shape.tokens, device=str(device))
        compiled = torch.compile(flex_attention, dynamic=False, **options)
        return lambda: compiled(ordered, keys, values, block_mask=found, enable_gqa=gqa)[0].transpose(0, 1)

    def flashinfer() -> Contender:
        import flashinfer

        flat = [x[0].transpose(0, 1).contiguous() for x in (keys, values)]
        return lambda: flashinfer.single_prefill_with_kv_cache(q, *flat, custom_mask=mask)

    tuned = partial(flex, mode="max-autotune-no-cudagraphs")
    return {OURS: ours, MASKED: masked, FLEX: flex, "flashinfer": flashinfer, FLEX_TUNED: tuned}
