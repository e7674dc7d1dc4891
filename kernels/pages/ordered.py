"""Pages on a CPU with a known order: rows of tokens, and opaque records to any slots, keys rotated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from kvkit.format.rope import Rope
from kvkit.kernels.checks import LaunchError, check_rope
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.numba import DTYPES, at, jit, narrow, rotate, widen

Offsets = NDArray[np.int64]
"""[H, N, D]: offset of each element of K or V in a block of N tokens, in elements."""


def read_block_elements(pages: Pages, layer: int, slots: NDArray[np.int64]) -> torch.Tensor:
    """Copy rows [H, K, C] of tokens at slots [K] (block * N + index) out of pages with an `order`."""
    block, place = _elements(pages, slots)
    found: torch.Tensor = _block_rows(pages, layer)[block, place].transpose(0, 1)
    return found


def write_block_elements(pages: Pages, layer: int, slots: NDArray[np.int64], rows: torch.Tensor) -> None:
    """Write rows to pages: the inverse of `read_block_elements`. Mutates the pages."""
    block, place = _elements(pages, slots)
    _block_rows(pages, layer)[block, place] = rows.transpose(0, 1)


def _elements(pages: Pages, slots: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block [K, 1, 1] of each element, and its offset [K, H, C] in the block."""
    assert pages.order is not None
    block, token = np.divmod(slots, pages.tokens)
    return torch.from_numpy(block)[:, None, None], pages.order.transpose(0, 1)[torch.from_numpy(token)]


def _block_rows(pages: Pages, layer: int) -> torch.Tensor:
    """Return the elements [B, size of a block] of a layer's pages: a view."""
    return pages.parts[layer].pages[:, 0, 0].view(getattr(torch, pages.group.dtype))


def unpack_ordered(
    pages: Pages,
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    order: tuple[Offsets, Offsets],
    ropes: Sequence[Rope | None],
    delta: int,
) -> None:
    """Scatter the tokens of chunks into opaque pages, each to a slot of its own. Mutates the pages.

    Other bytes of a page stay unchanged. Keys are rotated in float32, rounded once.

    Args:
        pages: opaque pages on a CPU. A page is one block of `order`, or several contiguous ones.
        records: per chunk [L, 1, pages, page_bytes], as `pack` makes them of opaque pages.
        slots: int64 [chunks, T], each token's block * N + index in the block, with the N of the pages'
            group; a token with a slot < 0 is left out.
        order: offsets of K and of V in a block.
        ropes: rotary embedding of each layer of the group; None: its keys are not rotated.
        delta: number of positions that keys move by.

    Raises:
        LaunchError: the order, a rope or a slot does not fit the pages; nothing was written.
    """
    group, (k, v) = pages.group, order
    if group.page_bytes is None or group.dtype not in DTYPES:
        raise LaunchError(f"pages: {group.dtype}, want opaque ones of {', '.join(DTYPES)}")
    heads, tokens, channels = k.shape
    block_bytes = group.page_bytes * tokens // group.block_tokens
    largest = max(int(k.max()), int(v.max()))
    if v.shape[:2] != (heads, tokens) or (largest + 1) * group.item_bytes > block_bytes:
        raise LaunchError(
            f"order: k {k.shape}, v {v.shape} up to element {largest}, but a block has {block_bytes} bytes"
        )
    limit = pages.blocks * group.block_tokens
    if slots.size and slots.max() >= limit:
        raise LaunchError(f"slots: {slots.max()}, but there are {limit}")
    for rope in filter(None, ropes):
        check_rope("ropes", rope, channels)
    addresses = np.array([record.ctypes.data for record in records], np.int64)
    sizes = group.page_bytes, group.block_tokens, block_bytes, tokens, group.item_bytes
    for common in dict.fromkeys(ropes):
        layers = np.array([i for i, rope in enumerate(ropes) if rope == common], np.int64)
        turns, first, interleaved = np.empty(0, np.float32), 0, False
        if common is not None and delta:
            turns, first, interleaved = (
                common.delta_table(np.array([delta]))[0],
                common.first,
                common.interleaved,
            )
        kind = DTYPES.index(group.dtype)
        offsets = (
            np.ascontiguousarray(k.reshape(-1, channels)),
            np.ascontiguousarray(v.reshape(-1, v.shape[2])),
        )
        # made here: in a kernel, numba frees an array after the last use of its name, not of its address
        row, wide = np.empty(channels, np.uint32), np.empty(max(len(turns), 1), np.float32)
        rotation = turns, first, interleaved, kind
        _fill(pages.table[layers], addresses, slots, sizes, offsets, rotation, row, wide)


@jit
def _fill(
    parts: NDArray[np.int64],
    records: NDArray[np.int64],
    slots: NDArray[np.int64],
    sizes: tuple[int, int, int, int, int],
    places: tuple[Offsets, Offsets],
    rotation: tuple[NDArray[np.float32], int, bool, int],
    row: NDArray[np.uint32],
    wide: NDArray[np.float32],
) -> None:
    """Run `unpack_ordered` for layers with one rope; `parts` has their rows of `Pages.table`.

    `row` and `wide` have room for a token's K, and for its rotary channels.
    """
    page_bytes, page_tokens, block_bytes, block_tokens, item = sizes
    k, v = places
    turns, first, interleaved, kind = rotation
    heads, channels = len(k) // block_tokens, k.shape[1]
    chunks, tokens = slots.shape
    rotary, straight = len(turns), np.arange(channels).reshape(1, channels)
    held, turned = row.ctypes.data, row.ctypes.data + first * item
    for chunk in range(chunks):
        for p in range(len(parts)):
            layer, address, stride = parts[p, 0], parts[p, 3], parts[p, 4]
            record = records[chunk] + layer * (tokens // page_tokens) * page_bytes
            for t in range(tokens):
                slot = slots[chunk, t]
                if slot < 0:
                    continue
                source = record + t // page_tokens * page_bytes
                source += t % page_tokens // block_tokens * block_bytes
                target = address + slot // page_tokens * stride
                target += slot % page_tokens // block_tokens * block_bytes
                n, m = t % block_tokens, slot % block_tokens
                for base in range(0, heads * block_tokens, block_tokens):
                    _copy(source, v, base + n, target, v, base + m, item)
                    if not rotary:
                        _copy(source, k, base + n, target, k, base + m, item)
                        continue
                    _copy(source, k, base + n, held, straight, 0, item)
                    if kind:
                        widen(turned, wide.ctypes.data, rotary, kind)
                        rotate(wide.ctypes.data, turns.ctypes.data, rotary // 2, interleaved)
                        narrow(wide.ctypes.data, turned, rotary, kind)
                    else:
                        rotate(turned, turns.ctypes.data, rotary // 2, interleaved)
                    _copy(held, straight, 0, target, k, base + m, item)


@jit
def _copy(source: int, a: Offsets, i: int, target: int, b: Offsets, j: int, item: int) -> None:
    """Copy elements a[i] of one block to b[j] of another."""
    count = a.shape[1]
    if item == 4:
        words, to_words = carray(at(source, np.uint32), count), carray(at(target, np.uint32), count)
        for c in range(count):
            to_words[b[j, c]] = words[a[i, c]]
    else:
        halves, to_halves = carray(at(source, np.uint16), count), carray(at(target, np.uint16), count)
        for c in range(count):
            to_halves[b[j, c]] = halves[a[i, c]]
