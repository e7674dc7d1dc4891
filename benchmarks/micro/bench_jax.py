"""The kernels under XLA on a CPU: pack, unpack and attention against the host kernels and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks.timing import interleaved, ratio
from kvkit.adapters.jax import pages as engine_pages
from kvkit.config import load_config
from kvkit.format.layout import LayerGroup
from kvkit.kernels.attention import api as attention
from kvkit.kernels.attention import jax as attention_jax
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages import api
from kvkit.kernels.pages import jax as pages_jax
from kvkit.kernels.pages.api import Pages

SMOLLM2 = LayerGroup(
    layers=tuple(range(8)), kv_heads=3, k_size=64, v_size=64, dtype="float32", block_tokens=16
)
TINY = LayerGroup(layers=(0, 1), kv_heads=1, k_size=8, v_size=8, dtype="float32", block_tokens=4)


def compare(benchmark: Any, functions: Mapping[str, Callable[[], object]], against: str) -> None:
    """Keep each function's time over that of `against`, from calls that take turns."""
    times = interleaved(functions, 20 if benchmark.enabled else 1, warmup=3 if benchmark.enabled else 1)
    benchmark.extra_info["against"] = against
    for name in functions:
        found = ratio(times, name, against)
        us = min(times[name]) * 1e6
        benchmark.extra_info[name] = {"us": us, "ratio_min": found["min"], "ratio_median": found["median"]}


@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_pages(benchmark: Any, way: str) -> None:
    """Chunks in random blocks of a pool twice as large; donated pages."""
    group, chunk_tokens = (SMOLLM2, 256) if benchmark.enabled else (TINY, 8)
    chunks = 8
    per_chunk = chunk_tokens // group.block_tokens
    ids = np.random.default_rng(0).permutation(2 * chunks * per_chunk)[: chunks * per_chunk]
    blocks = ids.reshape(chunks, per_chunk)
    tensors = group.pages(ids.size * 2)
    for i, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + i)
    host, records = Pages.of(group, tensors), np.zeros((chunks, group.chunk_bytes(chunk_tokens)), np.uint8)
    api.pack(host, list(records), blocks=blocks)
    copied = np.zeros_like(records)
    pages: list[pages_jax.JaxPages] = [[jnp.asarray(t.numpy()) for t in tensors]]
    pack = jax.jit(partial(pages_jax.pack, group))
    unpack = jax.jit(partial(pages_jax.unpack, group), donate_argnums=0)
    on_device = jnp.asarray(blocks, jnp.int32)
    packed = pack(pages[0], blocks=on_device)
    np.testing.assert_array_equal(np.asarray(packed).reshape(chunks, -1).view(np.uint8), records)

    def ours() -> None:
        if way == "pack":
            jax.block_until_ready(pack(pages[0], blocks=on_device))
        else:
            pages[0] = jax.block_until_ready(unpack(pages[0], packed, blocks=on_device))

    move = api.pack if way == "pack" else api.unpack
    functions = {
        "XLA": ours,
        "numba": lambda: move(host, list(records), blocks=blocks),
        "copy": lambda: np.copyto(copied, records),
    }
    benchmark(ours)
    compare(benchmark, functions, "copy")
    for mine, tensor in zip(pages[0], tensors, strict=True):
        np.testing.assert_array_equal(mine, tensor.numpy())


def test_engine_pages(benchmark: Any, tmp_path: Path) -> None:
    """A prompt's chunks from a folder into pages, against a file of the bytes, not verified."""
    group, chunk_tokens = (SMOLLM2, 256) if benchmark.enabled else (TINY, 8)
    chunks = 8
    ids = np.random.default_rng(0).permutation(2 * chunks * chunk_tokens // group.block_tokens)
    table = ids[: chunks * chunk_tokens // group.block_tokens].astype(np.int32)
    tokens = np.arange(chunks * chunk_tokens + 1, dtype=np.int32)
    shape = len(ids), group.kv_heads, group.block_tokens, group.channels
    stored = [jax.random.normal(jax.random.key(i), shape) for i in group.layers]
    blocks = table.reshape(chunks, -1)
    np.asarray(pages_jax.pack(group, stored, blocks=blocks)).tofile(tmp_path / "file")
    record_shape = chunks, len(group.layers), group.kv_heads, chunk_tokens, group.channels
    copied = np.zeros(record_shape, np.float32)
    source = np.ones_like(copied)
    unpack = jax.jit(partial(pages_jax.unpack, group), donate_argnums=0)
    pages: dict[str, Any] = {
        name: [jnp.zeros_like(layer) for layer in stored] for name in ("kvkit", "one file")
    }
    config = load_config(
        chunk_tokens=chunk_tokens, staging="256MiB", tiers={"disk": {"url": f"file://{tmp_path / 'store'}"}}
    )
    with engine_pages.open_cache_for(config, stored, model="layers", params={}) as cache:
        engine_pages.store(cache, tokens, stored, table)
        cache.flush()

        def ours() -> None:
            pages["kvkit"], loaded = engine_pages.load(cache, tokens, pages["kvkit"], table)
            assert loaded.tokens == len(tokens) - 1
            jax.block_until_ready(pages["kvkit"])

        def one_file() -> None:
            records = np.fromfile(tmp_path / "file", np.float32).reshape(record_shape)
            pages["one file"] = jax.block_until_ready(unpack(pages["one file"], records, blocks=blocks))

        benchmark(ours)
        functions = {"kvkit": ours, "one file": one_file, "copy": lambda: np.copyto(copied, source)}
        compare(benchmark, functions, "one file")
    for mine, theirs, wanted in zip(pages["kvkit"], pages["one file"], stored, strict=True):
        np.testing.assert_array_equal(mine[table], wanted[table])
        np.testing.assert_array_equal(mine, theirs)


def test_attention(benchmark: Any) -> None:
    """15 % of a request's rows and a question of 64, one layer of SmolLM2."""
    keys, heads, kv_heads, size, tokens = (4096, 9, 3, 64, 16) if benchmark.enabled else (64, 2, 1, 8, 4)
    random = np.random.default_rng(0)
    chosen = random.choice(keys - keys // 64, int(0.15 * keys), replace=False)
    positions = np.concatenate([np.sort(chosen), np.arange(keys - keys // 64, keys)])
    shape = (keys // tokens, kv_heads, tokens, size)
    k, v = (random.standard_normal(shape, np.float32) for _ in range(2))
    q = random.standard_normal((len(positions), heads, size), np.float32)
    table = random.permutation(len(k))
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    starts, lengths = np.array([0, len(positions)]), np.array([keys])
    rows = Rows.of(positions, starts, lengths, table[None], tokens)
    request = Requests(*(jnp.asarray(x, jnp.int32) for x in (table[None], positions, starts, lengths)))
    scoring = Scoring(size**-0.5)
    host = partial(attention.blend_attention, *tensors, rows, scoring)

    def ours() -> None:
        jax.block_until_ready(attention_jax.blend_attention(*arrays, request, scoring))

    o, _ = attention_jax.blend_attention(*arrays, request, scoring)
    np.testing.assert_allclose(o, host()[0].numpy(), atol=1e-4)
    benchmark(ours)
    compare(benchmark, {"XLA": ours, "host": host}, "host")
