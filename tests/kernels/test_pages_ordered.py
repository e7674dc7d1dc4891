"""Tokens in opaque pages of a known inner order move as a plain numpy statement says."""

from __future__ import annotations

import ctypes
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages.api import Pages
from kvkit.kernels.pages.ordered import unpack_ordered
from kvkit.kernels.pages.reference import rotate

HEADS, BLOCK, SIZE, RATIO, BLOCKS = 2, 4, 6, 2, 5
PAGE_TOKENS = BLOCK * RATIO
CHUNK = 2 * PAGE_TOKENS
ROPES = (
    Rope((1.0, 0.3, 0.01)),
    None,
    Rope((0.5, 0.2), interleaved=True, first=1),
)


def pages_of(dtype: str, seed: int) -> tuple[Pages, list[torch.Tensor]]:
    kind = getattr(torch, dtype)
    elements = RATIO * HEADS * BLOCK * 2 * SIZE
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(BLOCKS, elements, generator=generator).to(kind) for _ in ROPES]
    group = LayerGroup(
        layers=tuple(range(len(ROPES))),
        kv_heads=HEADS,
        k_size=2 * SIZE,
        v_size=0,
        dtype=dtype,
        block_tokens=PAGE_TOKENS,
        page_bytes=elements * kind.itemsize,
    )
    return Pages.of(group, tensors), tensors


def order_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    shuffled = np.random.default_rng(seed).permutation(HEADS * BLOCK * 2 * SIZE).astype(np.int64)
    k, v = shuffled.reshape(2, HEADS, BLOCK, SIZE)
    return k, v


def tokens_of(pages: torch.Tensor, order: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [tokens, H, D] of pages [B, RATIO blocks of `order`]."""
    blocks = pages.reshape(-1, HEADS * BLOCK * 2 * SIZE)
    k, v = (blocks[:, torch.from_numpy(part)].transpose(1, 2).flatten(0, 1) for part in order)
    return k, v


@given(st.data(), st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(-5000, 5000))
def test_tokens_get_to_their_slots_with_turned_keys_and_nothing_else_changes(
    data: st.DataObject, dtype: str, delta: int
) -> None:
    chunks = data.draw(st.integers(0, 2))
    pages, tensors = pages_of(dtype, 0)
    _, records = pages_of(dtype, 1)
    order, before = order_of(2), [tensor.clone() for tensor in tensors]
    tokens = chunks * CHUNK
    free = data.draw(st.permutations(range(BLOCKS * PAGE_TOKENS)))[:tokens]
    kept = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    slots = np.array([s if keep else -1 for s, keep in zip(free, kept, strict=True)], np.int64)
    payloads = [
        np.stack([tensor[2 * chunk : 2 * chunk + 2].view(torch.uint8).numpy() for tensor in records]).reshape(
            -1
        )
        for chunk in range(chunks)
    ]
    unpack_ordered(pages, payloads, slots.reshape(chunks, CHUNK), order, ROPES, delta)
    there = np.flatnonzero(slots >= 0)
    for now, old, record, rope in zip(tensors, before, records, ROPES, strict=True):
        k, v = (part.clone() for part in tokens_of(old, order))
        new_k, new_v = tokens_of(record, order)
        if rope is not None and delta:
            turns = torch.from_numpy(rope.delta_table(np.array([delta])))[:, None]
            new_k = rotate(new_k, turns, rope)
        k[slots[there]], v[slots[there]] = new_k[there], new_v[there]
        found_k, found_v = tokens_of(now, order)
        assert torch.equal(found_v, v)
        tolerance = 1e-6 if dtype == "float32" else 0.02  # the last bit may fall either way
        torch.testing.assert_close(found_k, k, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    pages, tensors = pages_of("float32", 0)
    before = [tensor.clone() for tensor in tensors]
    k, v = order_of(2)
    record = [np.zeros(pages.group.chunk_bytes(PAGE_TOKENS), np.uint8)]
    slots = np.arange(PAGE_TOKENS)[None]
    for ids, order, ropes, wrong in (
        (slots + BLOCKS * PAGE_TOKENS, (k, v), ROPES, "slots: "),
        (slots, (k + 1, v), ROPES, "order: "),
        (slots, (k, v[:1]), ROPES, "order: "),
        (slots, (k, v), (Rope((1.0,) * 4), None, None), "ropes: "),
    ):
        with pytest.raises(LaunchError, match=wrong):
            unpack_ordered(pages, record, ids, order, ropes, 1)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_keys_turn_in_memory_that_nobody_else_can_get() -> None:
    """In the child, what is freed is gone: touching it ends the child, and changes nobody else's memory."""
    child = multiprocessing.get_context("spawn").Process(target=turn_a_wide_key)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def turn_a_wide_key(size: int = 1 << 21) -> None:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is larger is unmapped when it is freed
    page = torch.zeros(1, 2 * size)
    group = LayerGroup((0,), 1, 2 * size, 0, "float32", 1, page_bytes=8 * size)
    record, (k, v) = np.zeros(8 * size, np.uint8), np.arange(2 * size).reshape(2, 1, 1, size)
    unpack_ordered(Pages.of(group, [page]), [record], np.zeros((1, 1), np.int64), (k, v), [Rope((1.0,))], 1)
