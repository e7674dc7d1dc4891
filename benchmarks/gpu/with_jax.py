"""`make gpu`: pages of JAX arrays against the same on the host, their attention against Triton's kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.peers import LLAMA_8K, SMALL
from kvkit.format.layout import LayerGroup
from kvkit.kernels.attention import api as attention
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages.api import Pages, pack


def run(bench: Bench) -> None:
    """Records for each function whether it is right, and seconds of its calls with the wait for them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others want the memory, too
    import jax

    bench.results.record("jax", version=jax.__version__, devices=[str(device) for device in jax.devices()])
    _pages(bench)
    _attention(bench)


def _pages(bench: Bench) -> None:
    import jax
    import jax.numpy as jnp

    from kvkit.kernels.pages import jax as pages_jax

    group, tokens, blocks = LayerGroup((0, 1), 2, 64, 64, "float32", block_tokens=16), 64, np.arange(8)[::-1]
    host = group.pages(8)
    for tensor in host:
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    records = np.zeros((2, group.chunk_bytes(tokens)), np.uint8)
    ids = blocks.reshape(2, 4).copy()
    pack(Pages.of(group, host), list(records), blocks=ids)
    arrays = [jnp.asarray(tensor.numpy()) for tensor in host]
    call = partial(jax.jit(partial(pages_jax.pack, group)), arrays, blocks=jnp.asarray(ids, jnp.int32))
    found = np.asarray(call()).reshape(2, -1).view(np.uint8)
    _record(bench, "pack", call, different_bytes=int((found != records).sum()))


def _attention(bench: Bench) -> None:
    import jax
    import jax.numpy as jnp

    from kvkit.kernels.attention import jax as attention_jax
    from kvkit.kernels.attention import jax_choice

    reason = jax_choice.unusable()
    path = f"XLA: {reason}" if reason else "the Triton kernels, through jax-triton"
    print(f"JAX's attention is computed by {path}", flush=True)
    shape = LLAMA_8K if bench.device.type == "cuda" else SMALL
    positions = shape.positions
    table = np.random.default_rng(1).permutation(shape.tokens // shape.block_tokens)[None]
    starts, lengths = np.array([0, len(positions)]), np.array([shape.tokens])
    scoring = Scoring(shape.size**-0.5)
    generator = torch.Generator().manual_seed(0)
    pages = table.size, shape.heads, shape.block_tokens, shape.size
    rows = len(positions), shape.heads * shape.group, shape.size
    tensors = [torch.randn(size, generator=generator).bfloat16() for size in (rows, pages, pages)]
    arrays = [jnp.asarray(tensor.float().numpy(), jnp.bfloat16) for tensor in tensors]
    requests = Requests(*(jnp.asarray(x, jnp.int32) for x in (table, positions, starts, lengths)))
    call = partial(
        jax.jit(lambda *given: attention_jax.blend_attention(*given, requests, scoring)[0]), *arrays
    )
    on_device = [tensor.to(bench.device) for tensor in tensors]
    plan = Rows.of(positions, starts, lengths, table, shape.block_tokens, bench.device)
    want = attention.blend_attention(*on_device, plan, scoring)[0].float().cpu()
    got = torch.from_numpy(np.asarray(call(), np.float32))
    off = ((got - want).norm() / want.norm()).item()
    different = int((got != want).sum())  # 0 with the same kernels
    _record(bench, "blend_attention", call, off=off, different=different, path=path)


def _record(bench: Bench, what: str, call: Callable[[], object], **found: object) -> None:
    import jax

    times = []
    for _ in range(bench.sizes.calls):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    bench.results.record(what, **found, median_s=median(times), min_s=min(times))
