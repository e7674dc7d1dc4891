"""Kernels for JAX arrays: what XLA computes is what the reference says, compiled once for equal shapes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkit.format.layout import ITEM_BYTES, LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention import pallas
from kvkit.kernels.attention import reference as meaning
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import api, reference
from kvkit.kernels.pages import jax as kernels
from kvkit.kernels.pages.reference import Quantised

POISON = 0xA5
FLOATS = ["float32", "float16", "bfloat16"]
NUMPY = {name: getattr(ml_dtypes, name, None) or getattr(np, name) for name in ITEM_BYTES}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of attention to keys of unit variance
SMALL = LayerGroup(layers=(0, 1), kv_heads=2, k_size=8, v_size=6, dtype="float32", block_tokens=4)
ROPES = {
    "half": Rope((1.0, 0.1, 0.01, 0.001)),
    "interleaved": Rope((1.0, 0.1, 0.01, 0.001), interleaved=True),
    "partial": Rope((0.5, 0.25), first=3),
    "partial interleaved": Rope((0.5,), interleaved=True, first=1),
}
# the two forms of attention: XLA's, which a CPU takes, and a GPU's in Pallas' interpreter
PALLAS = jax.jit(partial(pallas.blend_attention, interpret=True), static_argnums=(7, 8, 9))
FORMS = {"xla": attention.blend_attention, "pallas": PALLAS}
TRITON_CALL = "__gpu$xla.gpu.triton"
Tensors = list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def to_jax(x: torch.Tensor) -> jax.Array:
    """The same bytes as a JAX array."""
    name = str(x.dtype).removeprefix("torch.")
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return jnp.asarray(raw.view(NUMPY.get(name, name)).reshape(x.shape))


def to_torch(x: jax.Array) -> torch.Tensor:
    """And back."""
    raw = np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw.copy()).view(getattr(torch, str(x.dtype))).reshape(x.shape)


def bits(x: torch.Tensor | jax.Array | NDArray[Any]) -> NDArray[np.uint8]:
    """Its bytes, in which a NaN equals itself."""
    if isinstance(x, torch.Tensor):
        return x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def pools(
    group: LayerGroup, blocks: int, apart: bool, seed: int | None, tokens: int | None = None
) -> Tensors:
    """A layer's pages each, of random bytes, or poisoned; for floats of random bytes, many a NaN."""
    random = np.random.default_rng(seed)

    def part(channels: int) -> torch.Tensor:
        shape = (blocks, group.kv_heads, tokens or group.block_tokens, channels * group.item_bytes)
        raw = np.full(shape, POISON, np.uint8) if seed is None else random.integers(0, 256, shape, np.uint8)
        return torch.from_numpy(raw).view(getattr(torch, group.dtype))

    if apart:
        return [(part(group.k_size), part(group.v_size)) for _ in group.layers]
    return [part(group.channels) for _ in group.layers]


def normal(group: LayerGroup, blocks: int, seed: int) -> list[torch.Tensor]:
    """Pages of numbers of many sizes."""
    random = np.random.default_rng(seed)
    shape = (len(group.layers), blocks, group.kv_heads, group.block_tokens, group.channels)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, (*shape[:-1], 1))
    return [*torch.from_numpy(values).to(getattr(torch, group.dtype)).unbind(0)]


def as_jax(tensors: Tensors) -> kernels.JaxPages:
    return [tuple(map(to_jax, t)) if isinstance(t, tuple) else to_jax(t) for t in tensors]


def flat(pages: Tensors | kernels.JaxPages) -> list[Any]:
    """Every part of every layer."""
    return [part for layer in pages for part in (layer if isinstance(layer, tuple) else (layer,))]


def maybe_jit(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return jax.jit(function) if compiled else function


def random_slots(total: int, chunks: int, tokens: int, seed: int, skip: bool) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    slots = random.permutation(total)[: chunks * tokens].reshape(chunks, tokens).astype(np.int64)
    if skip:
        slots[random.random(slots.shape) < 0.3] = random.choice([-1, -(2**62)])
    return slots


def check_moves(
    group: LayerGroup, apart: bool, n: int, slots: NDArray[np.int64], ids: dict[str, Any], compiled: bool
) -> None:
    """Pack and unpack: exactly the named bytes are taken, and exactly those of the reference."""
    total = int(slots.max(initial=0)) // n + 2
    tensors = pools(group, total, apart, 0, n)
    chunks, tokens = slots.shape
    row_bytes = group.channels * group.item_bytes
    shape = (len(group.layers), group.kv_heads, tokens, row_bytes)
    records = [np.full(np.prod(shape), POISON, np.uint8) for _ in range(chunks)]
    reference.pack(api.Pages.of(group, tensors).parts, records, slots, shape)
    poisoned = np.full((chunks, *shape), POISON, np.uint8).view(NUMPY[group.dtype])
    pack = maybe_jit(lambda p, r: kernels.pack(group, p, records=r, **ids), compiled)
    packed = pack(as_jax(tensors), jnp.asarray(poisoned))
    np.testing.assert_array_equal(bits(packed), np.concatenate(records))

    others = pools(group, total, apart, None, n)
    unpack = maybe_jit(lambda p, r: kernels.unpack(group, p, r, **ids), compiled)
    filled = unpack(as_jax(others), packed)
    reference.unpack(api.Pages.of(group, others).parts, records, slots, shape)
    for mine, wanted in zip(flat(filled), flat(others), strict=True):
        np.testing.assert_array_equal(bits(mine), bits(wanted))


@settings(max_examples=8, deadline=None)
@given(
    heads=st.integers(1, 3),
    k_size=st.sampled_from([1, 7, 64]),
    v_size=st.sampled_from([0, 5, 64]),
    layers=st.integers(1, 3),
    n=st.integers(1, 5),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    chunks=st.integers(1, 3),
    tokens=st.integers(1, 9),
    apart=st.booleans(),
    compiled=st.booleans(),
    skip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_moves(
    heads: int,
    k_size: int,
    v_size: int,
    layers: int,
    n: int,
    dtype: str,
    chunks: int,
    tokens: int,
    apart: bool,
    compiled: bool,
    skip: bool,
    seed: int,
) -> None:
    group = LayerGroup(tuple(range(layers)), heads, k_size, v_size, dtype)
    slots = random_slots(chunks * tokens + n, chunks, tokens, seed, skip)
    check_moves(group, apart and v_size > 0, n, slots, {"slots": slots}, compiled)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_moves_its_bytes(dtype: str) -> None:
    slots = random_slots(20, 2, 7, 1, True)
    check_moves(replace(SMALL, dtype=dtype), False, 4, slots, {"slots": slots}, True)


@pytest.mark.parametrize("compiled", [True, False])
def test_blocks(compiled: bool) -> None:
    blocks = np.array([[5, 0, -1], [1, -(2**62), 3]])
    slots = np.where(blocks[:, :, None] < 0, -1, blocks[:, :, None] * 4 + np.arange(4)).reshape(2, -1)
    check_moves(SMALL, False, 4, slots, {"blocks": blocks}, compiled)


def test_without_records_skipped_rows_are_zeros() -> None:
    pages = as_jax(pools(SMALL, 3, False, 0))
    packed = to_torch(kernels.pack(SMALL, pages, slots=np.array([[-1, 3]])))
    assert not packed[:, :, :, 0].view(torch.uint8).any()
    assert packed[:, :, :, 1].view(torch.uint8).any()


def test_slots_out_of_range_are_skipped_where_they_cannot_be_seen() -> None:
    """As JAX arrays, under jit or not; NumPy's would have been refused."""
    tensors = pools(SMALL, 3, False, 0)
    slots = jnp.array([[12, 11, -13, 2**31 - 1]])
    records = jnp.full((1, 2, 2, 4, 14), 7.0)
    packed = np.asarray(kernels.pack(SMALL, as_jax(tensors), slots=slots, records=records))
    assert (packed[:, :, :, [0, 2, 3]] == 7).all()
    filled = kernels.unpack(SMALL, as_jax(tensors), records, slots=slots)
    for mine, tensor in zip(filled, tensors, strict=True):
        wanted = tensor.clone()
        wanted[2, :, 3] = 7.0
        np.testing.assert_array_equal(bits(mine), bits(wanted))


def test_64_bit_slots() -> None:
    """With JAX's x64 mode on, ids stay as wide as they came."""
    slots = random_slots(20, 2, 7, 3, True)
    with jax.enable_x64(True):
        check_moves(SMALL, False, 4, slots, {"slots": jnp.asarray(slots)}, True)
        for form in FORMS:
            attention_case(0, "float32", 9, 2.0, form)
        check_scores(0, None, None, True)


@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("v_size", [0, 6])
def test_codes_equal_the_reference_bit_by_bit(to: Quantised, dtype: str, v_size: int) -> None:
    group = replace(SMALL, dtype=dtype, v_size=v_size)
    pages = normal(group, 64, 0)
    pages[0][0] = 0
    pages[0][1] = 1e-32 if dtype != "float16" else 6e-8  # below the smallest amax; float16's least
    pages[0][2, :, :, 1:] = 0
    slots = np.arange(256).reshape(2, 128)
    packed = kernels.pack(group, [to_jax(p) for p in pages], slots=slots, quantised=to)
    rows = torch.stack([p.transpose(1, 2).reshape(2, 128, group.kv_heads, -1) for p in pages], 1)
    wanted = reference.quantise(rows.swapaxes(2, 3), group.k_size, to)
    np.testing.assert_array_equal(bits(packed), bits(wanted))
    assert packed.shape == (2, *group.quantised().record_shape(128))

    poisoned = pools(group, 65, False, None)
    filled = kernels.unpack(group, as_jax(poisoned), packed, slots=slots, quantised=to)
    values = reference.dequantise(wanted, group.k_size, v_size, to).to(getattr(torch, dtype))
    for layer, (mine, tensor) in enumerate(zip(filled, poisoned, strict=True)):
        tensor[:64] = values[:, layer].swapaxes(1, 2).reshape(64, 4, group.kv_heads, -1).swapaxes(1, 2)
        np.testing.assert_array_equal(bits(mine), bits(tensor))


@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_own_row(to: Quantised, bad: float) -> None:
    pages = normal(SMALL, 2, 0)
    good = kernels.pack(SMALL, [to_jax(p) for p in pages], slots=np.arange(8)[None], quantised=to)
    pages[0][1, 1, 2, 3] = bad  # K of token 6
    packed = kernels.pack(SMALL, [to_jax(p) for p in pages], slots=np.arange(8)[None], quantised=to)
    back = np.array(kernels.dequantise(packed, 8, 6, to))
    assert not np.isfinite(back[0, 0, 1, 6, 3])
    back[0, 0, 1, 6, :8] = np.asarray(kernels.dequantise(good, 8, 6, to))[0, 0, 1, 6, :8]
    np.testing.assert_array_equal(back, np.asarray(kernels.dequantise(good, 8, 6, to)))


def close(mine: jax.Array, wanted: torch.Tensor, original: torch.Tensor, rope: Rope) -> None:
    """Rotated alike but for the last bit of a float32 and the rounding; the other channels bit by bit."""
    got, last = to_torch(mine), rope.first + rope.channels
    for outside in (slice(0, rope.first), slice(last, None)):
        np.testing.assert_array_equal(bits(got[..., outside]), bits(original[..., outside]))
    size = original[..., rope.first : last].float().abs().amax(-1, keepdim=True)
    error = (got.float() - wanted.float())[..., rope.first : last].abs()
    step = torch.finfo(wanted.dtype).eps * (1 if wanted.dtype != torch.float32 else 2)
    assert (error <= step * size).all()
    assert not torch.equal(got, original)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("by", "compiled"), [("chunk", False), ("token", True)])
def test_unpack_rotates(dtype: str, name: str, by: str, compiled: bool) -> None:
    rope, group = ROPES[name], replace(SMALL, dtype=dtype)
    pages = normal(group, 6, 0)
    packed = kernels.pack(group, [to_jax(p) for p in pages], slots=np.arange(20).reshape(2, 10))
    delta = np.array([5, -1000]) if by == "chunk" else np.arange(20).reshape(2, 10) * 997 - 3
    turns, row = Rotation(rope, delta).resolve(2, 10)
    by_row = rope.turns(delta) if by == "chunk" else turns[row]
    poisoned = as_jax(pools(group, 6, False, None))
    slots = jnp.asarray(np.arange(20).reshape(2, 10)[::-1] + 4)
    unpack = maybe_jit(lambda p, r, s, t: kernels.unpack(group, p, r, slots=s, rope=rope, turns=t), compiled)
    filled = unpack(poisoned, packed, slots, by_row)
    records = to_torch(packed)
    for layer, mine in enumerate(filled):
        tokens = to_torch(mine).swapaxes(1, 2).reshape(24, 2, 14)
        for chunk in range(2):
            original = records[chunk, layer].swapaxes(0, 1)  # [T, H, C]
            got = tokens[slots[chunk, 0] : slots[chunk, 0] + 10]
            cos_sin = torch.from_numpy(turns[row[chunk]])[:, None]
            k = original[..., :8]
            close(to_jax(got[..., :8]), reference.rotate(k, cos_sin, rope), k, rope)
            np.testing.assert_array_equal(bits(got[..., 8:]), bits(original[..., 8:]))
        assert (bits(tokens[:4]) == POISON).all()


@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unpack_rotates_what_was_quantised(to: Quantised, dtype: str) -> None:
    """In float32 from the codes on: rounded once."""
    rope, group = ROPES["half"], replace(SMALL, dtype=dtype)
    slots = np.arange(8)[None]
    packed = kernels.pack(group, [to_jax(p) for p in normal(group, 2, 0)], slots=slots, quantised=to)
    pages = as_jax(pools(group, 2, False, None))
    turns = rope.turns(np.array([77]))
    filled = kernels.unpack(group, pages, packed, slots=slots, rope=rope, turns=turns, quantised=to)
    values = reference.dequantise(to_torch(packed), 8, 6, to)[0]  # [L, H, T, C]
    values[..., :8] = reference.rotate(values[..., :8], torch.from_numpy(turns), rope)
    for layer, mine in enumerate(filled):
        got = to_torch(mine).transpose(1, 2).reshape(8, 2, 14).transpose(0, 1).float()
        size = values[layer].abs().amax(-1, keepdim=True)
        step = torch.finfo(getattr(torch, dtype)).eps
        assert ((got - values[layer]).abs() <= step * size).all()


def test_a_turn_and_back_is_the_identity() -> None:
    x = torch.randn(5, 3, 8)
    for rope in ROPES.values():
        there, back = (rope.turns(sign * np.arange(5) * 100)[:, None] for sign in (1, -1))
        twice = kernels.rotate(kernels.rotate(to_jax(x), there, rope), back, rope)
        torch.testing.assert_close(to_torch(twice), x, atol=2e-6, rtol=0)


def paged(
    requests: int, heads: int, n: int, sizes: tuple[int, int], dtype: str, per: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V pages and tables [requests, per] of blocks that are nobody else's."""
    torch.manual_seed(seed)
    blocks = requests * per + 2
    k, v = (torch.randn(blocks, heads, n, size).to(getattr(torch, dtype)) for size in sizes)
    return k, v, torch.randperm(blocks)[: requests * per].reshape(requests, per)


def spoil(k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """NaN in every slot that is no request's key, and nonsense in the tables beyond their lengths."""
    n = k.shape[2]
    owned = torch.zeros(k.shape[0], n, dtype=torch.bool)
    tables = tables.clone()
    for r, length in enumerate(lengths.tolist()):
        j = torch.arange(length)
        owned[tables[r, j // n], j % n] = True
        beyond = tables[r, -(-length // n) :]
        beyond[:] = torch.tensor([-1, 2**31 - 1, -(2**31)]).repeat(len(beyond))[: len(beyond)]
    for pages in (k, v):
        pages.swapaxes(1, 2)[~owned] = torch.nan
    return tables


def int32(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.numpy().astype(np.int32))


def random_rows(
    random: np.random.Generator, requests: int, m: int, capacity: int
) -> tuple[torch.Tensor, ...]:
    """Lengths, row starts (the last may be below m) and ascending positions, some beyond their lengths."""
    lengths = torch.from_numpy(random.integers(0, capacity + 1, requests))
    starts = torch.from_numpy(np.sort(random.integers(0, m + 1, requests + 1)))
    starts[0] = 0
    positions = torch.from_numpy(random.integers(0, capacity, m))
    for first, last in itertools.pairwise(starts.tolist()):
        positions[first:last] = positions[first:last].sort().values
    return lengths, starts, positions


def attention_case(
    seed: int,
    dtype: str,
    window: int | None,
    softcap: float | None,
    form: str = "xla",
    shape: tuple[int, int, int, int, int, int, int, int] = (3, 2, 3, 8, 6, 4, 11, 37),
) -> None:
    requests, heads, group, size, v_size, n, per, m = shape
    k, v, tables = paged(requests, heads, n, (size, v_size), dtype, per, seed)
    lengths, starts, positions = random_rows(np.random.default_rng(seed), requests, m, per * n)
    q = torch.randn(m, heads * group, size).to(k.dtype)
    rows = int(starts[-1])
    wanted, sums = meaning.blend_attention(
        q[:rows], k, v, tables, positions[:rows], starts, lengths, size**-0.5, window, softcap
    )
    tables = spoil(k, v, tables, lengths)
    o, lse = FORMS[form](
        to_jax(q),
        to_jax(k),
        to_jax(v),
        int32(tables),
        int32(positions),
        int32(starts),
        int32(lengths),
        size**-0.5,
        window,
        softcap,
    )
    assert o.dtype == NUMPY[dtype]
    torch.testing.assert_close(to_torch(o)[:rows], wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(to_torch(lse)[:rows], sums, atol=1e-4, rtol=1e-5)
    assert not np.asarray(o[rows:], np.float32).any()
    assert (np.asarray(lse[rows:]) == -np.inf).all()


@contextmanager
def tiles(rows: int, keys: int) -> Iterator[None]:
    """Small problems of many tiles."""
    compiled = attention._blend_attention, attention._query_scores, PALLAS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ROW_TILE", rows)
        patch.setattr(attention, "KEY_TILE", keys)
        patch.setattr(pallas, "_tile", lambda *_: (16, 16, 4, 1))
        for function in compiled:
            function.clear_cache()
        yield
    for function in compiled:
        function.clear_cache()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, 2.0), (1, None)])
def test_attention(form: str, dtype: str, window: int | None, softcap: float | None) -> None:
    """Rows, lengths, positions and tables are data: 12 problems, compiled once."""
    with tiles(8, 12):
        for seed in range(12):
            attention_case(seed, dtype, window, softcap, form)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 1, 5, 8, 6, 32, 3, 37),  # tiles of keys within blocks
        (2, 1, 34, 16, 16, 4, 9, 9),  # more query heads than a tile has rows, no channels to pad
        (2, 1, 17, 16, 16, 4, 9, 9),  # and a prime number of them
    ],
)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_in_tiles_of_16(shape: Any, window: int | None) -> None:
    with tiles(8, 12):
        for seed in range(4):
            attention_case(seed, "float32", window, None, "pallas", shape)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=4, deadline=None)
@given(
    requests=st.integers(1, 4),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    size=st.sampled_from([1, 5, 64]),
    v_size=st.sampled_from([1, 7, 64]),
    n=st.sampled_from([1, 3, 16, 50]),
    per=st.integers(1, 5),
    m=st.integers(1, 150),
    seed=st.integers(0, 2**32),
)
def test_attention_of_any_shape(
    form: str,
    requests: int,
    heads: int,
    group: int,
    size: int,
    v_size: int,
    n: int,
    per: int,
    m: int,
    seed: int,
) -> None:
    attention_case(seed, "float32", None, None, form, (requests, heads, group, size, v_size, n, per, m))


@pytest.mark.parametrize("form", FORMS)
def test_keys_beyond_a_row_do_not_change_it(form: str) -> None:
    k, v, tables = paged(1, 1, 4, (8, 8), "float32", 6, 0)
    q, positions = torch.randn(3, 2, 8), torch.tensor([0, 5, 11])
    attend = partial(FORMS[form], to_jax(q))
    rows = int32(tables), int32(positions), jnp.array([0, 3]), jnp.array([24]), 0.3, None, None
    before = attend(to_jax(k), to_jax(v), *rows)
    j = torch.arange(12, 24)
    for pages in (k, v):
        pages[tables[0, j // 4], :, j % 4] = 1e6
    after = attend(to_jax(k), to_jax(v), *rows)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(before[0][0, 0], to_torch(to_jax(v))[tables[0, 0], 0, 0], rtol=1e-6)  # p = 0


def check_scores(seed: int, window: int | None, softcap: float | None, with_v: bool) -> None:
    k, v, tables = paged(1, 2, 4, (8, 6), "float32", 11, seed)
    lengths, _, positions = random_rows(np.random.default_rng(seed), 1, 19, 44)
    q, length = torch.randn(19, 6, 8), int(lengths[0])
    rest = (0.35, window, softcap)
    wanted = meaning.query_scores(q, k, v if with_v else None, tables[0], positions, length, *rest)
    tables = spoil(k, v, tables, lengths)
    jq, jk, jv = map(to_jax, (q, k, v))
    at = int32(tables[0]), int32(positions), jnp.int32(length)
    found = attention.query_scores(jq, jk, jv if with_v else None, *at, *rest)
    assert found.shape == (6, 44)
    torch.testing.assert_close(to_torch(found)[:, :length], wanted, atol=1e-5, rtol=1e-5)
    assert not np.asarray(found)[:, length:].any()
    request = int32(tables), int32(positions), jnp.array([0, 19]), int32(lengths)
    _, lse = attention.blend_attention(jq, jk, jv, *request, *rest)
    again = attention.query_scores(jq, jk, jv if with_v else None, *at, *rest, lse=lse)
    np.testing.assert_allclose(found, again, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap", "with_v"), [(None, None, False), (9, 2.0, True)])
def test_query_scores(window: int | None, softcap: float | None, with_v: bool) -> None:
    with tiles(8, 12):
        for seed in range(6):
            check_scores(seed, window, softcap, with_v)


def test_every_row_pays_one_per_head() -> None:
    """At the tiles' own sizes: the scores add up to the rows that see a key times the heads."""
    k, _, tables = paged(1, 2, 16, (16, 16), "bfloat16", 70, 0)
    q, positions = torch.randn(150, 4, 16).bfloat16(), torch.arange(150) * 7
    at = int32(tables[0]), int32(positions), 1000
    found = attention.query_scores(to_jax(q), to_jax(k), None, *at, 0.25)
    np.testing.assert_allclose(found.sum(1), [150] * 4, rtol=1e-4)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("dtype", "compiled"), [("float32", False), ("float16", True), ("bfloat16", True)])
def test_rope_scatter(name: str, dtype: str, compiled: bool) -> None:
    rope = ROPES[name]
    torch.manual_seed(0)
    m, kind = 13, getattr(torch, dtype)
    q, k, v = (torch.randn(m, heads, size).to(kind) for heads, size in ((6, 8), (2, 8), (2, 6)))
    k_pages, v_pages = (torch.randn(5, 2, 4, size).to(kind) for size in (8, 6))
    slots = torch.randperm(20)[:m]
    slots[[2, 7]] = torch.tensor([-1, -9])
    cos_sin = rope.table(np.arange(m) * 31 + 1)
    scatter = maybe_jit(lambda *x: attention.rope_scatter(*x, rope, True), compiled)
    made = scatter(*map(to_jax, (q, k, v)), cos_sin, int32(slots), to_jax(k_pages), to_jax(v_pages))
    deviation = torch.full((m,), torch.nan)
    k_wanted, v_wanted = k_pages.clone(), v_pages.clone()
    table = torch.from_numpy(cos_sin)
    turned = meaning.rope_scatter(q, k, v, table, slots, k_wanted, v_wanted, rope, deviation)
    close(made.q, turned, q, rope)
    np.testing.assert_array_equal(bits(made.v_pages), bits(v_wanted))
    got = to_torch(made.k_pages)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, n = divmod(slot, 4)
            close(to_jax(got[block, :, n]), k_wanted[block, :, n], k[row], rope)
            got[block, :, n] = k_wanted[block, :, n]
    np.testing.assert_array_equal(bits(got), bits(k_wanted))
    torch.testing.assert_close(to_torch(made.deviation), deviation, rtol=TOLERANCE[dtype], atol=1e-6)
    assert (np.asarray(made.deviation)[[2, 7]] == 0).all()


def test_rope_scatter_without_deviation() -> None:
    pages = jnp.zeros((1, 1, 4, 8))
    row = jnp.ones((2, 1, 8))
    rope = ROPES["half"]
    made = attention.rope_scatter(
        row, row, row, rope.table(np.arange(2)), np.array([0, 2]), pages, pages, rope
    )
    assert made.deviation is None
    np.testing.assert_array_equal(made.k_pages[0, 0, 0], row[0, 0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_token_deviation(dtype: str) -> None:
    new, old = (torch.randn(9, 3, 5).to(getattr(torch, dtype)) for _ in range(2))
    found = attention.token_deviation(to_jax(new), to_jax(old))
    torch.testing.assert_close(to_torch(found), meaning.token_deviation(new, old), rtol=1e-5, atol=0)


@contextmanager
def traces() -> Iterator[list[str]]:
    """The functions that JAX traces meanwhile."""
    seen: list[str] = []

    def note(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            seen.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def all_calls(seed: int) -> None:
    """Every operation, on arrays whose values and not whose shapes follow the seed."""
    random = np.random.default_rng(seed)
    rope = ROPES["half"]
    pages = as_jax(pools(SMALL, 8, False, seed))
    slots = random_slots(32, 2, 5, seed, False)
    packed = kernels.pack(SMALL, pages, slots=slots)
    delta = random.integers(-9, 9, (2, 5))
    kernels.unpack(
        SMALL, pages, packed, slots=slots, rope=rope, turns=rope.turns(delta.ravel()).reshape(2, 5, -1)
    )
    k, v, tables = paged(2, 2, 4, (8, 6), "float32", 3, seed)
    lengths, starts, positions = random_rows(random, 2, 7, 12)
    q = to_jax(torch.randn(7, 4, 8))
    rows = int32(tables), int32(positions), int32(starts), int32(lengths)
    attention.blend_attention(q, to_jax(k), to_jax(v), *rows, 0.3)
    attention.query_scores(q, to_jax(k), None, rows[0][0], rows[1], int(lengths[0]), 0.3)
    new, old = (to_jax(x) for x in torch.randn(2, 7, 2, 8))
    attention.token_deviation(new, old)
    to = random.permutation(20)[:7]
    attention.rope_scatter(q, new, new, rope.table(positions.numpy()), to, to_jax(k), to_jax(k), rope, True)


def test_equal_shapes_are_traced_once() -> None:
    all_calls(0)
    with traces() as seen:
        all_calls(1)
    assert seen == []
    with traces() as seen:
        attention.token_deviation(jnp.zeros((77, 1, 1)), jnp.zeros((77, 1, 1)))
    assert "token_deviation" in seen  # the counter counts


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def attention_specs(m: int, heads: int, kv_heads: int, blocks: int, n: int, dtype: str) -> tuple[Any, ...]:
    pages = spec((blocks, kv_heads, n, 64), dtype)
    rows = spec((1, blocks), "int32"), spec((m,), "int32"), spec((2,), "int32"), spec((1,), "int32")
    return spec((m, heads, 64), dtype), pages, pages, *rows


def test_attention_needs_no_matrix_of_scores() -> None:
    """4,096 rows and 32,768 keys: working memory below a hundredth of it."""
    specs = attention_specs(4096, 8, 2, 2048, 16, "float32")
    matrix_bytes = 4 * 8 * 4096 * 32768
    attend = jax.jit(partial(attention.blend_attention, scale=0.125))
    assert attend.lower(*specs).compile().memory_analysis().temp_size_in_bytes < matrix_bytes / 100
    scores = jax.jit(partial(attention.query_scores, scale=0.125))
    q, k, v, tables, positions, _, _ = specs
    of_one = spec(tables.shape[1:], "int32"), positions, spec((), "int32")
    assert scores.lower(q, k, v, *of_one).compile().memory_analysis().temp_size_in_bytes < matrix_bytes / 100


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_donated_pages_are_written_in_place(dtype: str) -> None:
    group = LayerGroup((0, 1), 2, 64, 64, dtype)
    pages = [spec((4096, 2, 16, 128), dtype) for _ in range(2)]
    unpack = jax.jit(lambda p, r, s: kernels.unpack(group, p, r, slots=s), donate_argnums=0)
    lowered = unpack.lower(pages, spec((1, 2, 2, 32, 128), dtype), spec((1, 32), "int32"))
    memory = lowered.compile().memory_analysis()
    pages_bytes = 2 * 4096 * 2 * 16 * 128 * group.item_bytes
    assert memory.alias_size_in_bytes == pages_bytes
    assert memory.temp_size_in_bytes < pages_bytes / 10


@pytest.mark.parametrize("form", FORMS)
def test_without_values_or_rows(form: str) -> None:
    k, v, tables = paged(1, 2, 4, (8, 6), "float32", 6, 0)
    q, jk, jv, table = to_jax(torch.randn(3, 4, 8)), to_jax(k), to_jax(v), int32(tables)
    rest = jnp.array([0, 5, 11]), jnp.array([0, 3]), jnp.array([24]), 0.3, None, None
    nothing, lse = FORMS[form](q, jk, jv[..., :0], table, *rest)
    assert nothing.shape == (3, 4, 0)
    np.testing.assert_array_equal(lse, FORMS[form](q, jk, jv, table, *rest)[1])
    o, lse = FORMS[form](q[:0], jk, jv, table, rest[0][:0], jnp.array([0, 0]), *rest[2:])
    assert (o.shape, o.dtype) == ((0, 4, 6), jnp.float32)
    assert (lse.shape, lse.dtype) == ((0, 4), jnp.float32)


def test_hostile_tables_and_lengths_read_nothing_outside() -> None:
    """What they hold beyond the pages is cut off: the same as of the nearest that there is."""
    k, v, _ = paged(1, 2, 4, (8, 8), "float32", 3, 0)
    q, positions = to_jax(torch.randn(5, 4, 8)), jnp.arange(5) * 5
    attend = partial(PALLAS, q, to_jax(k), to_jax(v))
    rest = positions, jnp.array([0, 5])
    found = attend(jnp.array([[-2, 2**31 - 1, 1]]), *rest, jnp.array([2**31 - 1]), 0.3, None, None)
    wanted = attend(jnp.array([[0, len(k) - 1, 1]]), *rest, jnp.array([12]), 0.3, None, None)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_lowers_for(platform: str) -> None:
    """Every operation has StableHLO for a platform that is not at hand; attention a kernel on NVIDIA's."""
    kernel = jax.export.DisabledSafetyCheck.custom_call(TRITON_CALL)
    lower = partial(jax.export.export, platforms=[platform], disabled_checks=[kernel])
    rope, group = Rope(tuple(0.1 for _ in range(32))), replace(SMALL, k_size=64, v_size=64, dtype="bfloat16")
    pages = [spec((64, 2, 4, 128), "bfloat16")] * 2
    slots, turns = spec((2, 8), "int32"), spec((2, 8, 64), "float32")
    specs = attention_specs(96, 8, 2, 64, 16, "bfloat16")
    q, k, v, tables, positions, _, _ = specs
    row, cos_sin = spec((96, 2, 64), "bfloat16"), spec((96, 64), "float32")

    def move(p: kernels.JaxPages, s: jax.Array, t: jax.Array) -> kernels.JaxPages:
        packed = kernels.pack(group, p, slots=s, quantised="fp8")
        return kernels.unpack(group, p, packed, slots=s, rope=rope, turns=t, quantised="fp8")

    one = spec(tables.shape[1:], "int32"), positions, spec((), "int32")
    for function, arguments, attends in (
        (move, (pages, slots, turns), False),
        (partial(attention.blend_attention, scale=0.125, window=77, softcap=30.0), specs, True),
        (partial(attention.query_scores, scale=0.125), (q, k, v, *one), True),
        (
            partial(attention.rope_scatter, rope=rope, deviation=True),
            (q, row, row, cos_sin, positions, k, v),
            False,
        ),
    ):
        exported = lower(jax.jit(function))(*arguments)
        assert exported.platforms == (platform,)
        assert (TRITON_CALL in exported.mlir_module()) == (attends and platform == "cuda")


def test_one_function_serves_both_platforms() -> None:
    """Lowered for CUDA it holds the kernel; called here it runs, also under `jax.vmap`."""
    k, v, tables = paged(1, 2, 4, (8, 8), "float32", 6, 0)
    rows = int32(tables), jnp.array([0, 5, 11]), jnp.array([0, 3]), jnp.array([24])
    attend = jax.jit(partial(attention.blend_attention, scale=0.3))
    q = to_jax(torch.randn(2, 3, 4, 8))
    arguments = q[0], to_jax(k), to_jax(v), *rows
    assert TRITON_CALL in attend.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    every, _ = jax.vmap(lambda x: attend(x, *arguments[1:]))(q)
    for o, x in zip(every, q, strict=True):
        np.testing.assert_allclose(o, attend(x, *arguments[1:])[0], atol=1e-6)


def test_nothing_else_imports_jax() -> None:
    code = (
        "import sys, kvkit.cache, kvkit.kernels.attention.api, kvkit.kernels.pages.numba;"
        "print('jax' in sys.modules);"
        "import kvkit.kernels.attention.jax, jax; print('site-packages' in jax.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


PAGES = [jnp.zeros((3, 2, 4, 14)) for _ in range(2)]
RECORDS = jnp.zeros((1, 2, 2, 8, 14))
SLOTS = jnp.zeros((1, 8), jnp.int32)
OPAQUE = replace(SMALL, page_bytes=SMALL.block_bytes)
INTS = replace(SMALL, dtype="int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": None}, r"blocks, slots: give one"),
        ({"blocks": SLOTS}, r"blocks, slots: give one"),
        ({"slots": SLOTS[0]}, r"slots: \(8,\)"),
        ({"slots": SLOTS[:, :0]}, r"slots: \(1, 0\)"),
        ({"slots": SLOTS * 1.0}, r"slots: float32, want an array of int32"),
        ({"slots": np.full((1, 8), 12)}, r"slots: 12 is out of range, the pages have 12 slots"),
        ({"slots": None, "blocks": np.array([[0, 3]])}, r"blocks: 3 is out of range, the pages have 3"),
        ({"slots": SLOTS[:, :7]}, r"records: \(1, 2, 2, 8, 14\) float32, want \(1, 2, 2, 7, 14\)"),
        ({"records": RECORDS.astype(jnp.float16)}, r"records: .* float16, want .* float32"),
        ({"pages": PAGES[:1]}, r"pages: 1 given, the group has 2 layers"),
        ({"pages": [PAGES[0], PAGES[0][:2]]}, r"pages\[1\]: \(2, 2, 4, 14\)"),
        ({"pages": [PAGES[0], PAGES[0][0]]}, r"pages\[1\]: \(2, 4, 14\)"),
        ({"pages": [(PAGES[0][..., :8], PAGES[0][..., 8:-1])] * 2}, r"pages\[0\]\[1\]: \(3, 2, 4, 5\)"),
        ({"group": INTS}, r"pages\[0\]: .*float32, want .*int8"),
        ({"group": OPAQUE}, r"group: opaque"),
        ({"quantised": "int4"}, r"quantised='int4': want one of fp8, int8"),
        ({"quantised": "fp8"}, r"records: .*want \(1, 2, 2, 8, 22\) uint8"),
        ({"group": INTS, "quantised": "fp8"}, r"quantised: pages hold int8"),
        ({"rope": ROPES["half"]}, r"rope, turns: give both"),
        (
            {"rope": ROPES["half"], "turns": jnp.zeros((1, 7, 8))},
            r"turns: \(1, 7, 8\) float32, want \(1, 8, 8\)",
        ),
        (
            {"rope": ROPES["half"], "turns": jnp.zeros((1, 6))},
            r"turns: \(1, 1, 6\) float32, want \(1, 1, 8\)",
        ),
        ({"rope": Rope((1.0,), first=7), "turns": jnp.zeros((1, 2))}, r"rope: channels 7 to 9, a head has 8"),
    ],
)
def test_unpack_refuses(change: dict[str, Any], message: str) -> None:
    """Called as it is or while it is traced."""
    arguments = {"group": SMALL, "pages": PAGES, "records": RECORDS, "slots": SLOTS} | change
    data = {k: v for k, v in arguments.items() if isinstance(v, jax.Array)}
    rest = {k: v for k, v in arguments.items() if k not in data}
    for call in (kernels.unpack, jax.jit(partial(kernels.unpack, **rest))):
        with pytest.raises(LaunchError, match=message):
            call(**(data if call is not kernels.unpack else arguments))


def test_pack_refuses_records_of_another_form() -> None:
    with pytest.raises(LaunchError, match=r"records: .* float32, want \(1, 2, 2, 8, 22\) uint8"):
        kernels.pack(SMALL, PAGES, slots=SLOTS, records=RECORDS, quantised="int8")


def test_blocks_of_another_size_are_refused() -> None:
    pages = [jnp.zeros((1, 2, 100, 14)) for _ in range(2)]
    with pytest.raises(LaunchError, match="N = 100 is not block_tokens = 4"):
        kernels.pack(SMALL, pages, blocks=np.array([[0]]))


def test_a_pool_beyond_32_bits_is_refused() -> None:
    pages = [spec((2**29, 2, 4, 14), "float32")] * 2
    with pytest.raises(LaunchError, match=r"slots: the pages have 2147483648, want fewer"):
        jax.eval_shape(lambda p, s: kernels.pack(SMALL, p, slots=s), pages, spec((1, 8), "int32"))


Q, K = jnp.zeros((5, 4, 8)), jnp.zeros((3, 2, 4, 8))
ROWS = {
    "tables": jnp.zeros((2, 3), jnp.int32),
    "positions": jnp.zeros(5, jnp.int32),
    "row_starts": jnp.zeros(3, jnp.int32),
    "lengths": jnp.zeros(2, jnp.int32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: \(4, 8\)"),
        ({"q": Q.astype(jnp.int32)}, r"q: .* int32"),
        ({"q": Q[:, :3]}, r"q: 3 query heads, want a multiple of the 2 KV heads"),
        ({"k_pages": K[0]}, r"k_pages: \(2, 4, 8\)"),
        ({"k_pages": K[..., :7]}, r"k_pages: \(3, 2, 4, 7\)"),
        ({"k_pages": K.astype(jnp.float16)}, r"k_pages: .* float16"),
        ({"v_pages": K[:2]}, r"v_pages: \(2, 2, 4, 8\)"),
        ({"v_pages": K[0]}, r"v_pages: \(2, 4, 8\)"),
        ({"tables": ROWS["tables"][0]}, r"tables: \(3,\)"),
        ({"tables": ROWS["tables"] * 1.0}, r"tables: float32"),
        ({"positions": ROWS["positions"][:4]}, r"positions: \(4,\), want \(5,\)"),
        ({"row_starts": ROWS["row_starts"][:2]}, r"row_starts: \(2,\), want \(3,\)"),
        ({"lengths": ROWS["lengths"][:1]}, r"lengths: \(1,\), want \(2,\)"),
        ({"scale": float("nan")}, r"scale=nan"),
        ({"window": 0}, r"window=0"),
        ({"softcap": 0.0}, r"softcap=0\.0"),
    ],
)
def test_attention_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        attention.blend_attention(**{"q": Q, "k_pages": K, "v_pages": K, "scale": 1.0} | ROWS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": ROWS["tables"]}, r"table: \(2, 3\)"),
        ({"positions": ROWS["positions"][:4]}, r"positions: \(4,\), want \(5,\)"),
        ({"length": 1.5}, r"length: float"),
        ({"lse": Q[:, :3, 0]}, r"lse: \(5, 3\) float32, want \(5, 4\)"),
        ({"v_pages": K[:2]}, r"v_pages: \(2, 2, 4, 8\)"),
    ],
)
def test_query_scores_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {"q": Q, "k_pages": K, "v_pages": None, "table": ROWS["tables"][0], "length": 3, "scale": 1.0}
    with pytest.raises(LaunchError, match=message):
        attention.query_scores(**arguments | {"positions": ROWS["positions"]} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[..., :7]}, r"q: \(5, 4, 7\), want 8 channels"),
        ({"k": Q[:4, :2]}, r"k: \(4, 2, 8\), want \[M, H, channels\], M = 5"),
        ({"k": Q[:, :2].astype(jnp.int8)}, r"k: int8"),
        ({"v": Q[:, :1]}, r"v: \(5, 1, 8\), want 2 heads"),
        ({"k_pages": K[:, :1]}, r"k_pages: \(3, 1, 4, 8\)"),
        ({"v_pages": K.astype(jnp.float16)}, r"v_pages: .* float16"),
        ({"cos_sin": jnp.zeros((5, 6))}, r"cos_sin: \(5, 6\) float32, want \(5, 8\)"),
        ({"slots": np.full(5, 12)}, r"slots: 12 is out of range"),
        ({"slots": np.zeros(4, int)}, r"slots: \(4,\), want \(5,\)"),
        ({"rope": Rope((1.0,) * 5)}, r"rope: channels 0 to 10, a head has 8"),
    ],
)
def test_rope_scatter_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": Q,
        "k": Q[:, :2],
        "v": Q[:, :2],
        "cos_sin": jnp.zeros((5, 8)),
        "slots": np.arange(5),
        "k_pages": K,
        "v_pages": K,
        "rope": ROPES["half"],
    }
    with pytest.raises(LaunchError, match=message):
        attention.rope_scatter(**arguments | change)
