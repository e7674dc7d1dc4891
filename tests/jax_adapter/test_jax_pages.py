"""A JAX engine's pages are stored as records, and loaded into exactly the blocks that a prompt has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax_arrays import NUMPY, bits, flat
from run_sizes import examples

from kvkit.adapters.jax import pages as adapter
from kvkit.cache import Cache, SequencePages
from kvkit.config import load_config
from kvkit.format.layout import LayerGroup
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages.api import Pages
from kvkit.kernels.pages.jax import JaxPages
from kvkit.settings import ConfigError

BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 11, 4, 8
PARAMS = {"wq": np.ones((3, 5), np.float32), "layers": [np.arange(4, dtype=np.int32)]}


def random_pages(
    shapes: list[tuple[int, int, int, str]], apart: bool, seed: int | None, blocks: int = BLOCKS
) -> JaxPages:
    """Pages of random bytes, or of poison, per layer (heads, K, V, dtype)."""
    random = np.random.default_rng(seed)

    def part(heads: int, channels: int, dtype: str) -> jax.Array:
        kind = np.dtype(NUMPY[dtype])
        shape = blocks, heads, BLOCK_TOKENS, channels * kind.itemsize
        raw = np.full(shape, 0xA5, np.uint8) if seed is None else random.integers(0, 256, shape, np.uint8)
        return jnp.asarray(raw.view(kind))

    if apart:
        return [(part(h, k, dtype), part(h, v, dtype)) for h, k, v, dtype in shapes]
    return [part(h, k + v, dtype) for h, k, v, dtype in shapes]


def open_folder(
    folder: Path, pages: JaxPages, params: Any = PARAMS, k_size: int | None = None, **options: Any
) -> Cache:
    config = load_config(
        chunk_tokens=CHUNK_TOKENS, staging="16MiB", tiers={"disk": {"url": f"file://{folder}"}}, **options
    )
    return adapter.open_cache_for(config, pages, model="decoder", params=params, k_size=k_size)


def stored(folder: Path, tokens: Any, pages: JaxPages, blocks: Any, **options: Any) -> None:
    with open_folder(folder, pages, **options) as cache:
        adapter.store(cache, tokens, pages, blocks)
        cache.flush()


def copied(pages: JaxPages) -> list[Any]:
    return [np.array(part) for part in flat(pages)]


def check_blocks(pages: JaxPages, source: list[Any], before: list[Any], table: Any, origin: Any) -> None:
    """Blocks of `table` hold the bytes of `origin` in the source; all others hold those from before."""
    for part, wanted, untouched in zip(flat(pages), source, before, strict=True):
        expected = untouched.copy()
        expected[table] = wanted[origin]
        np.testing.assert_array_equal(bits(part), bits(expected))


@settings(
    max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shapes=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from([1, 6, 16]),
            st.sampled_from([0, 5, 16]),
            st.sampled_from(["bfloat16", "bfloat16", "float32", "float16", "float8_e4m3fn"]),
        ),
        min_size=1,
        max_size=3,
    ),
    apart=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_another_cache_loads_what_was_stored(
    tmp_path_factory: pytest.TempPathFactory, shapes: Any, apart: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    k_size = None if apart else shapes[0][1]
    shapes = [(h, k, v or 1, d) if apart else (h, k_size, v, d) for h, k, v, d in shapes]
    pages, random = random_pages(shapes, apart, seed), np.random.default_rng(seed)
    tokens, blocks = random.integers(0, 9, 3 * CHUNK_TOKENS + 3), random.permutation(BLOCKS)[:7]
    stored(folder, tokens, pages, blocks, k_size=k_size)

    others = random_pages(shapes, apart, None)
    before, table = copied(others), random.permutation(BLOCKS)[:7]
    with open_folder(folder, others, k_size=k_size) as cache:
        filled, loaded = adapter.load(cache, tokens, others, table)
        assert loaded.tokens == 3 * CHUNK_TOKENS
        assert loaded.by_tier == {"disk": 3 * CHUNK_TOKENS}
    check_blocks(filled, copied(pages), before, table[:6], blocks[:6])


SHAPES = [(2, 8, 8, "bfloat16")] * 3
TOKENS = np.arange(3 * CHUNK_TOKENS + 1, dtype=np.int32)
TABLE = np.array([7, 2, 9, 0, 4, 1, 5])


def test_the_last_token_is_left_to_the_engine(tmp_path: Path) -> None:
    pages = random_pages(SHAPES, False, 1)
    stored(tmp_path, TOKENS, pages, TABLE)
    with open_folder(tmp_path, pages) as cache:
        for length, wanted in ((24, 16), (25, 24), (8, 0), (1, 0)):
            pages, loaded = adapter.load(cache, TOKENS[:length], pages, TABLE)
            assert loaded.tokens == wanted


def test_a_load_ends_before_a_damaged_record(tmp_path: Path) -> None:
    pages = random_pages(SHAPES, False, 1)
    with open_folder(tmp_path, pages) as cache:
        adapter.store(cache, TOKENS, pages, TABLE)
        cache.flush()
        name = cache.chunks(TOKENS).names[1]
    record = bytearray((tmp_path / name).read_bytes())
    record[-1] ^= 1
    (tmp_path / name).write_bytes(record)

    others = random_pages(SHAPES, False, None)
    before = copied(others)
    with open_folder(tmp_path, others) as cache:
        filled, loaded = adapter.load(cache, TOKENS, others, TABLE)
    assert loaded.tokens == CHUNK_TOKENS
    check_blocks(filled, copied(pages), before, TABLE[:2], TABLE[:2])


def test_tokens_that_were_loaded_are_not_stored(tmp_path: Path) -> None:
    pages = random_pages(SHAPES, False, 1)
    with open_folder(tmp_path, pages) as cache:
        done = adapter.store(cache, TOKENS, pages, TABLE, first=2 * CHUNK_TOKENS)
        assert (done.tokens, done.new_tokens) == (CHUNK_TOKENS, CHUNK_TOKENS)
        assert cache.lookup(TOKENS).tokens == 0
        cache.flush()
        done = adapter.store(cache, TOKENS, pages, TABLE)
        assert (done.tokens, done.new_tokens) == (3 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)
        cache.flush()
        assert cache.lookup(TOKENS).tokens == 3 * CHUNK_TOKENS


def test_absent_blocks_are_zeros_in_records_and_skipped_in_pages(tmp_path: Path) -> None:
    pages = random_pages(SHAPES, True, 1)
    stored(tmp_path, TOKENS, pages, np.where(TABLE == 2, -1, TABLE))
    others = random_pages(SHAPES, True, None)
    before, source = copied(others), copied(pages)
    with open_folder(tmp_path, others) as cache:
        filled, _ = adapter.load(cache, TOKENS, others, np.where(TABLE == 9, -(2**40), TABLE))
    for part in source:
        part[2] = 0
    held = TABLE[[0, 1, 3, 4, 5]]
    check_blocks(filled, source, before, held, held)


def test_other_weights_or_another_name_share_nothing(tmp_path: Path) -> None:
    pages = random_pages(SHAPES, False, 1)
    stored(tmp_path, TOKENS, pages, TABLE)
    with open_folder(tmp_path, pages, params={**PARAMS, "wq": np.zeros((3, 5), np.float32)}) as cache:
        assert cache.lookup(TOKENS).tokens == 0
    config = load_config(
        chunk_tokens=CHUNK_TOKENS, staging="16MiB", tiers={"disk": {"url": f"file://{tmp_path}"}}
    )
    with adapter.open_cache_for(config, pages, model="decoder with other norms", params=PARAMS) as cache:
        assert cache.lookup(TOKENS).tokens == 0


def test_a_fingerprint_depends_on_every_byte_name_and_shape() -> None:
    found = adapter.fingerprint(PARAMS)
    assert found == adapter.fingerprint(jax.tree.map(jnp.asarray, PARAMS))
    others = [
        {"wk": PARAMS["wq"], "layers": PARAMS["layers"]},
        {"wq": PARAMS["wq"].reshape(5, 3), "layers": PARAMS["layers"]},
        {"wq": PARAMS["wq"].view(np.int32), "layers": PARAMS["layers"]},
        {"wq": PARAMS["wq"], "layers": [*PARAMS["layers"], np.int32(3)]},
    ]
    for i in range(PARAMS["wq"].nbytes):
        raw = PARAMS["wq"].copy().view(np.uint8).reshape(-1)
        raw[i] ^= 1
        others.append({"wq": raw.view(np.float32).reshape(3, 5), "layers": PARAMS["layers"]})
    assert len({found, *map(adapter.fingerprint, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (TABLE[:5], "blocks: 5 given, 3 chunks take 6"),
        (np.array([7, 2, 9, 0, 4, 11, 5]), "blocks: 11 is out of range, the pages have 11 blocks"),
    ],
)
def test_blocks_that_the_pages_lack_are_refused(tmp_path: Path, blocks: Any, message: str) -> None:
    pages = random_pages(SHAPES, False, 1)
    stored(tmp_path, TOKENS, pages, TABLE)
    before = copied(pages)
    with open_folder(tmp_path, pages) as cache:
        with pytest.raises(LaunchError, match=message):
            adapter.store(cache, TOKENS, pages, blocks)
        with pytest.raises(LaunchError, match=message):
            adapter.load(cache, TOKENS, pages, blocks)
    for part, kept in zip(flat(pages), before, strict=True):  # nothing was donated
        np.testing.assert_array_equal(bits(part), bits(kept))


def test_pages_that_the_layout_does_not_have_are_refused(tmp_path: Path) -> None:
    pages = random_pages(SHAPES, False, 1)
    stored(tmp_path, TOKENS, pages, TABLE)
    wider = random_pages([(2, 8, 8, "bfloat16")] * 2 + [(2, 8, 9, "bfloat16")], False, 1)
    with open_folder(tmp_path, pages) as cache:
        for move in (adapter.load, adapter.store):
            with pytest.raises(LaunchError, match="pages: 2 layers given, the layout has layer 2"):
                move(cache, TOKENS, pages[:2], TABLE)
            with pytest.raises(LaunchError, match=r"pages\[2\].*want \[B, 2, N, 16\] bfloat16"):
                move(cache, TOKENS, wider, TABLE)
    for part in flat(wider):
        part.block_until_ready()  # nothing was donated


def test_records_of_fewer_bits_are_asked_for_and_approximate(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pages = [
        jnp.asarray(random.standard_normal((BLOCKS, 2, BLOCK_TOKENS, 16)).astype(np.float32)) for _ in "ab"
    ]
    with pytest.raises(ConfigError, match="unchecked_precision = true"):
        open_folder(tmp_path, pages, precision="fp8")
    options = {"precision": "fp8", "unchecked_precision": True}
    stored(tmp_path, TOKENS, pages, TABLE, **options)
    others = [jnp.zeros_like(page) for page in pages]
    with open_folder(tmp_path, others, **options) as cache:
        filled, loaded = adapter.load(cache, TOKENS, others, TABLE)
    assert loaded.tokens == 24
    for mine, wanted in zip(filled, pages, strict=True):
        got, want = np.asarray(mine)[TABLE[:6]], np.asarray(wanted)[TABLE[:6]]
        np.testing.assert_allclose(got, want, rtol=2**-4, atol=0.02)
        assert (got != want).any()


def test_chunks_in_pinned_host_memory_are_moved_by_the_cache_itself(tmp_path: Path) -> None:
    """Arrays as tpu-inference 0.32 keeps them: one per block, [1, L, N, H, 2, D], K and V in turn."""
    layers, heads, size = 2, 3, 8
    group = LayerGroup(tuple(range(layers)), heads, size, size, "bfloat16", CHUNK_TOKENS)
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (3, 1, layers, CHUNK_TOKENS, heads, 2, 2 * size), np.uint8)
    chunks = [jax.device_put(chunk.view(NUMPY["bfloat16"]), pinned) for chunk in raw]

    def pages_of(tensor: torch.Tensor) -> SequencePages:
        """Describe K and V of [chunks, L, N, H, 2, D]."""
        kv = tensor.permute(1, 4, 0, 3, 2, 5)  # L, 2, chunks, H, N, D
        slots = np.arange(len(tensor) * CHUNK_TOKENS)
        return SequencePages(Pages.of(group, [(k, v) for k, v in kv]), slots=slots)

    with open_folder(tmp_path, [(jnp.zeros((1, heads, CHUNK_TOKENS, size), jnp.bfloat16),) * 2] * 2) as cache:
        for i, chunk in enumerate(chunks):
            tensor = adapter.host_tensor(chunk)
            assert tensor.data_ptr() == np.asarray(chunk).ctypes.data  # no copy
            cache.store(TOKENS[: (i + 1) * CHUNK_TOKENS], pages_of(tensor), first=i)
        cache.flush()
        hit = cache.lookup(TOKENS)
        buffer = torch.full((3, layers, CHUNK_TOKENS, heads, 2, size), -1.0, dtype=torch.bfloat16)
        cache.load(hit, pages_of(buffer))
        loaded = [jax.device_put(chunk[None], pinned) for chunk in adapter.host_array(buffer)]
    for mine, wanted in zip(loaded, chunks, strict=True):
        assert mine.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(bits(mine), bits(wanted))


def test_a_tensor_keeps_the_memory_of_its_array() -> None:
    tensors = [adapter.host_tensor(jnp.full((1 << 20,), i, jnp.bfloat16)) for i in range(9)]
    assert [float(tensor.min()) for tensor in tensors] == list(range(9))
    assert [float(tensor.max()) for tensor in tensors] == list(range(9))


def test_a_killed_engine_leaves_what_it_flushed(tmp_path: Path) -> None:
    program = f"""
import signal
from pathlib import Path
from test_jax_pages import *
pages = random_pages(SHAPES, False, 5)
cache = open_folder(Path({str(tmp_path)!r}), pages)
adapter.store(cache, TOKENS, pages, TABLE)
cache.flush()
print("flushed", flush=True)
signal.pause()
"""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "support")])}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        process.send_signal(signal.SIGKILL)
    others = random_pages(SHAPES, False, None)
    before = copied(others)
    with open_folder(tmp_path, others) as cache:
        filled, loaded = adapter.load(cache, TOKENS, others, TABLE)
    assert loaded.tokens == 24
    check_blocks(filled, copied(random_pages(SHAPES, False, 5)), before, TABLE[:6], TABLE[:6])
