"""`make gpu`: an engine of a page of code with kvkit's cache: the first token of a hit against computing.

The decoder has Llama-3.1-8B's sizes and random weights: its KV is as large and as expensive as the model's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import rms_norm, silu

from benchmarks.gpu.bench import Bench
from kvkit import SequencePages, load_config, open_cache
from kvkit.cache import Cache
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.format.rope import Rope
from kvkit.kernels.attention.api import blend_attention, rope_scatter
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages.api import Pages

SAMPLES = 5
QUESTION = 64
"""Tokens after the cached prompt."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder, and of the prompt that is cached."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    mlp: int = 14336
    vocabulary: int = 32000
    tokens: int = 8192


SMALL = DecoderSizes(layers=2, hidden=32, heads=4, kv_heads=2, size=16, mlp=64, vocabulary=64, tokens=64)


class Decoder:
    """A Llama with random weights over paged KV.

    Args:
        sizes: of its layers.
        device: of the weights and pages.
        blocks: number of blocks of 16 tokens in the pages.
    """

    def __init__(self, sizes: DecoderSizes, device: torch.device, blocks: int) -> None:
        self.sizes, self.device = sizes, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            empty = torch.empty(rows, columns, dtype=dtype, device=device)
            return empty.normal_(std=rows**-0.5, generator=made)

        attention = (sizes.heads + 2 * sizes.kv_heads) * sizes.size
        self.embedding = weight(sizes.vocabulary, sizes.hidden)
        self.weights = [
            (
                weight(sizes.hidden, attention),
                weight(sizes.heads * sizes.size, sizes.hidden),
                weight(sizes.hidden, 2 * sizes.mlp),
                weight(sizes.mlp, sizes.hidden),
            )
            for _ in range(sizes.layers)
        ]
        name = str(dtype).removeprefix("torch.")
        heads = sizes.kv_heads, sizes.size, sizes.size
        self.group = LayerGroup(tuple(range(sizes.layers)), *heads, name, block_tokens=16)
        self.pages = self.group.pages(blocks, device=str(device))
        half = sizes.size // 2
        self.rope = Rope(tuple((500000.0 ** -(np.arange(half) / half)).tolist()))

    def prefill(self, tokens: torch.Tensor, first: int, blocks: NDArray[np.int64]) -> torch.Tensor:
        """Compute `tokens` from position `first` on, whose KV before is in `blocks`; return the last logits.

        Mutates the pages of these tokens.
        """
        sizes, count = self.sizes, len(tokens)
        positions = np.arange(first, first + count)
        starts, lengths = np.array([0, count]), np.array([first + count])
        rows = Rows.of(positions, starts, lengths, blocks[None], 16, self.device)
        rotations = RowRotations(self.rope, torch.from_numpy(self.rope.table(positions)).to(self.device))
        hidden = self.embedding[tokens]
        parts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        for (to_qkv, to_hidden, to_mlp, from_mlp), pages in zip(self.weights, self.pages, strict=True):
            k_pages, v_pages = pages[..., : sizes.size], pages[..., sizes.size :]
            fused = rms_norm(hidden, hidden.shape[1:]) @ to_qkv
            q, k, v = fused.view(count, -1, sizes.size).split(parts, 1)
            q = rope_scatter(q, k, v, rotations, rows.slots, k_pages, v_pages)
            o, _ = blend_attention(q, k_pages, v_pages, rows, Scoring(sizes.size**-0.5))
            hidden = hidden + o.flatten(1) @ to_hidden
            gate, up = (rms_norm(hidden, hidden.shape[1:]) @ to_mlp).chunk(2, 1)
            hidden = hidden + (silu(gate) * up) @ from_mlp
        return rms_norm(hidden[-1], hidden.shape[1:]) @ self.embedding.T


def run(bench: Bench) -> None:
    """Record seconds to the first token: computed, from memory, alone and beside a prefill, and the floor."""
    sizes = DecoderSizes() if bench.device.type == "cuda" else SMALL
    prompt_blocks, question_blocks = sizes.tokens // 16, QUESTION // 16
    per_request = prompt_blocks + question_blocks
    decoder = Decoder(sizes, bench.device, 3 * per_request)
    order = np.random.default_rng(0).permutation(3 * per_request).reshape(3, -1)
    random = np.random.default_rng(1)
    tokens = random.integers(0, sizes.vocabulary, sizes.tokens + QUESTION, np.int32)
    on_device = torch.from_numpy(tokens.astype(np.int64)).to(bench.device)
    layout = KVLayout((decoder.group,))
    config = load_config(tiers={"memory": {"capacity": "4GiB" if sizes is not SMALL else "16MiB"}})
    namespace = config.namespace(layout, model="random", dtype=decoder.group.dtype)
    pages = Pages.of(decoder.group, decoder.pages)

    def blocks_of(request: int) -> SequencePages:
        return SequencePages(pages, blocks=order[request][:prompt_blocks])

    with open_cache(config, layout, namespace) as cache:
        prompt = tokens[: sizes.tokens]
        logits = decoder.prefill(on_device, 0, order[0])
        cache.store(prompt, blocks_of(0))
        cache.flush()
        hit = partial(_hit, decoder, cache, prompt, on_device, blocks_of(1), order[1])
        off = float(((hit() - logits).norm() / logits.norm()).item())
        cold = partial(decoder.prefill, on_device, 0, order[0])
        bench.results.record("computed", **_timed(bench, cold), tokens=len(tokens))
        bench.results.record("from memory", **_timed(bench, hit), off=off, right=off < 0.02)
        size = decoder.group.chunk_bytes(sizes.tokens)
        source = bench.pinned(size)
        target = torch.empty(size, dtype=torch.uint8, device=bench.device)
        floor = partial(target.copy_, source, non_blocking=True)
        bench.results.record("copy of as many bytes", **_timed(bench, floor), bytes=size)
        _beside(bench, hit, partial(decoder.prefill, on_device, 0, order[2]))


def _hit(
    decoder: Decoder,
    cache: Cache,
    prompt: NDArray[np.int32],
    tokens: torch.Tensor,
    pages: SequencePages,
    blocks: NDArray[np.int64],
) -> torch.Tensor:
    """Load the prompt's KV, compute the tokens after it, and return the last logits."""
    loaded = cache.load(cache.lookup(prompt), pages).tokens
    return decoder.prefill(tokens[loaded:], loaded, blocks)


def _beside(bench: Bench, hit: Callable[[], object], prefill: Callable[[], object]) -> None:
    """Record the hit's time while another thread computes prefills, and theirs meanwhile."""
    stop, ready, times = threading.Event(), threading.Event(), list[float]()

    def compute() -> None:
        with bench.streams.stream(bench.streams.Stream()):
            while not stop.is_set():
                began = time.perf_counter()
                prefill()
                _wait(bench)
                times.append(time.perf_counter() - began)
                ready.set()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        ready.wait()
        bench.results.record("from memory, beside a prefill", **_timed(bench, hit))
    finally:
        stop.set()
        thread.join()
    bench.results.record("computed, beside hits", s=median(times), min_s=min(times))


def _timed(bench: Bench, function: Callable[[], object]) -> dict[str, Any]:
    """Time calls by the host's clock, with the wait for the device."""
    times = []
    for _ in range(SAMPLES):
        bench.streams.synchronize()
        began = time.perf_counter()
        function()
        _wait(bench)
        times.append(time.perf_counter() - began)
    return {"s": median(times), "min_s": min(times)}


def _wait(bench: Bench) -> None:
    """Wait for the current stream alone, not for other threads' streams."""
    if bench.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
