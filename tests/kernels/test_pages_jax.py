"""Pages of JAX arrays are packed and unpacked as the reference does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_arrays import (
    NUMPY,
    POISON,
    ROPES,
    SMALL,
    as_jax,
    bits,
    close,
    flat,
    maybe_jit,
    normal,
    pools,
    random_slots,
    spec,
    to_jax,
    to_torch,
)
from numpy.typing import NDArray
from run_sizes import nightly

from kvkit.format.layout import ITEM_BYTES, LayerGroup, Precision
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import api, reference
from kvkit.kernels.pages import jax as kernels


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
    reference.pack(group, api.Pages.of(group, tensors).parts, records, slots)
    poisoned = np.full((chunks, *shape), POISON, np.uint8).view(NUMPY[group.dtype])
    pack = maybe_jit(lambda p, r: kernels.pack(group, p, records=r, **ids), compiled)
    packed = pack(as_jax(tensors), jnp.asarray(poisoned))
    np.testing.assert_array_equal(bits(packed), np.concatenate(records))

    others = pools(group, total, apart, None, n)
    unpack = maybe_jit(lambda p, r: kernels.unpack(group, p, r, **ids), compiled)
    filled = unpack(as_jax(others), packed)
    reference.unpack(group, api.Pages.of(group, others).parts, records, slots)
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


@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32", "float16")])
@pytest.mark.parametrize("v_size", [0, 6])
def test_codes_equal_the_reference_bit_by_bit(to: Precision, dtype: str, v_size: int) -> None:
    group = replace(SMALL, dtype=dtype, v_size=v_size, precision=to)
    pages = normal(group, 64, 0)
    pages[0][0] = 0
    pages[0][1] = 1e-32 if dtype != "float16" else 6e-8  # below the smallest amax; float16's least
    pages[0][2, :, :, 1:] = 0
    slots = np.arange(256).reshape(2, 128)
    packed = kernels.pack(group, [to_jax(p) for p in pages], slots=slots)
    rows = torch.stack([p.transpose(1, 2).reshape(2, 128, group.kv_heads, -1) for p in pages], 1)
    wanted = reference.quantise(rows.swapaxes(2, 3), group.k_size, to)
    np.testing.assert_array_equal(bits(packed), bits(wanted))
    assert packed.shape == (2, *group.record_shape(128))

    poisoned = pools(group, 65, False, None)
    filled = kernels.unpack(group, as_jax(poisoned), packed, slots=slots)
    values = reference.dequantise(wanted, group.k_size, v_size, to).to(getattr(torch, dtype))
    for layer, (mine, tensor) in enumerate(zip(filled, poisoned, strict=True)):
        tensor[:64] = values[:, layer].swapaxes(1, 2).reshape(64, 4, group.kv_heads, -1).swapaxes(1, 2)
        np.testing.assert_array_equal(bits(mine), bits(tensor))


@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_own_row(to: Precision, bad: float) -> None:
    pages, group = normal(SMALL, 2, 0), replace(SMALL, precision=to)
    good = kernels.pack(group, [to_jax(p) for p in pages], slots=np.arange(8)[None])
    pages[0][1, 1, 2, 3] = bad  # K of token 6
    packed = kernels.pack(group, [to_jax(p) for p in pages], slots=np.arange(8)[None])
    back = np.array(kernels.dequantise(packed, 8, 6, to))
    assert not np.isfinite(back[0, 0, 1, 6, 3])
    back[0, 0, 1, 6, :8] = np.asarray(kernels.dequantise(good, 8, 6, to))[0, 0, 1, 6, :8]
    np.testing.assert_array_equal(back, np.asarray(kernels.dequantise(good, 8, 6, to)))


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32", "float16")])
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("by", "compiled"), [("chunk", False), ("token", True)])
def test_unpack_rotates(dtype: str, name: str, by: str, compiled: bool) -> None:
    rope, group = ROPES[name], replace(SMALL, dtype=dtype)
    pages = normal(group, 6, 0)
    packed = kernels.pack(group, [to_jax(p) for p in pages], slots=np.arange(20).reshape(2, 10))
    delta = np.array([5, -1000]) if by == "chunk" else np.arange(20).reshape(2, 10) * 997 - 3
    turns, row = Rotation(rope, delta).resolve(2, 10)
    by_row = rope.delta_table(delta) if by == "chunk" else turns[row]
    poisoned = as_jax(pools(group, 6, False, None))
    slots = jnp.asarray(np.arange(20).reshape(2, 10)[::-1] + 4)
    unpack = maybe_jit(
        lambda p, r, s, t: kernels.unpack(group, p, r, slots=s, rope=rope, cos_sin=t), compiled
    )
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
@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32", "float16")])
def test_unpack_rotates_what_was_quantised(to: Precision, dtype: str) -> None:
    """In float32 from the codes on: rounded once."""
    rope, group = ROPES["half"], replace(SMALL, dtype=dtype, precision=to)
    slots = np.arange(8)[None]
    packed = kernels.pack(group, [to_jax(p) for p in normal(group, 2, 0)], slots=slots)
    pages = as_jax(pools(group, 2, False, None))
    turns = rope.delta_table(np.array([77]))
    filled = kernels.unpack(group, pages, packed, slots=slots, rope=rope, cos_sin=turns)
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
        there, back = (rope.delta_table(sign * np.arange(5) * 100)[:, None] for sign in (1, -1))
        twice = kernels.rotate(kernels.rotate(to_jax(x), there, rope), back, rope)
        torch.testing.assert_close(to_torch(twice), x, atol=2e-6, rtol=0)


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
        ({"group": replace(SMALL, precision="fp8")}, r"records: .*want \(1, 2, 2, 8, 22\) uint8"),
        ({"rope": ROPES["half"]}, r"rope, cos_sin: give both"),
        (
            {"rope": ROPES["half"], "cos_sin": jnp.zeros((1, 7, 8))},
            r"cos_sin: \(1, 7, 8\) float32, want \(1, 8, 8\)",
        ),
        (
            {"rope": ROPES["half"], "cos_sin": jnp.zeros((1, 6))},
            r"cos_sin: \(1, 1, 6\) float32, want \(1, 1, 8\)",
        ),
        (
            {"rope": Rope((1.0,), first=7), "cos_sin": jnp.zeros((1, 2))},
            r"rope: channels 7 to 9, but a head of K has 8",
        ),
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
        kernels.pack(replace(SMALL, precision="int8"), PAGES, slots=SLOTS, records=RECORDS)


def test_blocks_of_another_size_are_refused() -> None:
    pages = [jnp.zeros((1, 2, 100, 14)) for _ in range(2)]
    with pytest.raises(LaunchError, match="N = 100 is not block_tokens = 4"):
        kernels.pack(SMALL, pages, blocks=np.array([[0]]))


def test_a_pool_beyond_32_bits_is_refused() -> None:
    pages = [spec((2**29, 2, 4, 14), "float32")] * 2
    with pytest.raises(LaunchError, match=r"slots: the pages have 2147483648, want fewer"):
        jax.eval_shape(lambda p, s: kernels.pack(SMALL, p, slots=s), pages, spec((1, 8), "int32"))
