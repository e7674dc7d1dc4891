"""The one way to the pack and unpack kernels: checks everything, then picks the backend by device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.kernels import reference
from kvkit.kernels.reference import Part
from kvkit.layout import LayerGroup
from kvkit.rope import Rope


class LaunchError(ValueError):
    """A kernel cannot run on these arguments; nothing was written. Names the argument and its value."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """An engine's KV of one group of layers, checked and made ready for the kernels. Make it with `of`.

    Args:
        group: the layers' form.
        blocks: B, blocks of the pool.
        tokens: N of the tensors: slots of a block. Opaque: 1, a slot is a whole page.
        heads: H. Opaque: 1.
        row_bytes: C in bytes, one head of one token. Opaque: the bytes of a page.
        parts: the bytes of every layer, K and V apart where the engine keeps them so. They own the memory.
        span: slots that lie the token stride apart: N, or all where blocks follow one another.
        table: int64 [parts, 7], `parts` as numbers: layer, first byte in a record's row, bytes of a row,
            address, and strides of B, H, N in bytes.
    """

    group: LayerGroup
    blocks: int
    tokens: int
    heads: int
    row_bytes: int
    parts: tuple[Part, ...]
    span: int
    table: NDArray[np.int64]

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.parts[0].pages.device

    def layer(self, place: int) -> Pages:
        """The pages of the layer at this place in the group, as if it were a group of its own: a view."""
        rows = self.table[self.table[:, 0] == place].copy()
        rows[:, 0] = 0
        return replace(
            self,
            group=replace(self.group, layers=self.group.layers[place : place + 1]),
            parts=tuple(replace(part, layer=0) for part in self.parts if part.layer == place),
            table=rows,
        )

    @staticmethod
    def of(group: LayerGroup, tensors: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]) -> Pages:
        """Pages of `group` in an engine's own memory; neither copies nor writes it.

        Args:
            tensors: per layer of the group, in its order: [B, H, N, C] with K and V side by side in C, or
                K and V apart as (k [B, H, N, Dk], v [B, H, N, Dv]). Any strides with C innermost. N may
                differ from `group.block_tokens` where only slots will be used (a Hugging Face cache: B = 1,
                N = its capacity). Opaque: any dtype and shape [B, ...] whose blocks are `page_bytes`
                contiguous bytes.

        Raises:
            LaunchError: the tensors do not fit the group or one another, or one overlaps itself.
        """
        if len(tensors) != len(group.layers):
            raise LaunchError(f"tensors: {len(tensors)} given, the group has {len(group.layers)} layers")
        parts: list[Part] = []
        for layer, tensor in enumerate(tensors):
            if group.page_bytes is not None:
                parts.append(Part(layer, 0, _opaque(f"tensors[{layer}]", tensor, group.page_bytes)))
            elif isinstance(tensor, torch.Tensor):
                parts.append(Part(layer, 0, _dense(f"tensors[{layer}]", tensor, group, group.channels)))
            else:
                k, v = tensor
                first = group.k_size * group.item_bytes
                parts.append(Part(layer, 0, _dense(f"tensors[{layer}][0]", k, group, group.k_size)))
                parts.append(Part(layer, first, _dense(f"tensors[{layer}][1]", v, group, group.v_size)))
        blocks, heads, tokens, _ = parts[0].pages.shape
        for part in parts:
            pages = part.pages
            if pages.shape[:3] != (blocks, heads, tokens) or pages.device != parts[0].pages.device:
                raise LaunchError(
                    f"tensors[{part.layer}]: [B, H, N] = {tuple(pages.shape[:3])} on {pages.device}, but "
                    f"tensors[0] has {(blocks, heads, tokens)} on {parts[0].pages.device}"
                )
        table = np.array(
            [
                (p.layer, p.first_byte, p.pages.shape[3], p.pages.data_ptr(), *p.pages.stride()[:3])
                for p in parts
            ],
            np.int64,
        )
        if len(set(table[:, 3])) < len(parts):
            raise LaunchError("tensors: two of them start at the same address")
        follow = bool((table[:, 4] == tokens * table[:, 6]).all())
        return Pages(
            group=group,
            blocks=blocks,
            tokens=tokens,
            heads=heads,
            row_bytes=group.page_bytes or group.channels * group.item_bytes,
            parts=tuple(parts),
            span=blocks * tokens if follow else tokens,
            table=table,
        )


def pack(
    pages: Pages,
    records: Sequence[NDArray[np.uint8]],
    *,
    blocks: NDArray[np.int64] | None = None,
    slots: NDArray[np.int64] | None = None,
    threads: int | None = None,
) -> None:
    """Gather chunks out of an engine's pages. Writes `records`, only reads `pages`.

    Args:
        pages: of one group.
        records: per chunk `group.chunk_bytes(T)` contiguous bytes, of any alignment (a multiple of 64 is
            fastest): the canonical [L, H, T, C], K before V in C; opaque [L, 1, pages, page_bytes].
        blocks: int64 [chunks, T / N], each chunk's blocks in order. A block < 0 is skipped: its bytes in
            the record stay as they were.
        slots: instead of `blocks`, int64 [chunks, T]: each token's block * N + place in the block. A slot
            < 0 is skipped. Not for opaque pages.
        threads: on a CPU, at most so many; None means `torch.get_num_threads()`.

    Raises:
        LaunchError: an argument does not fit; nothing was written.
    """
    _move(pages, records, blocks, slots, threads, to_records=True)


def unpack(
    pages: Pages,
    records: Sequence[NDArray[np.uint8]],
    *,
    blocks: NDArray[np.int64] | None = None,
    slots: NDArray[np.int64] | None = None,
    threads: int | None = None,
) -> None:
    """Scatter chunks into an engine's pages: the inverse of `pack`. Writes `pages`, only reads `records`.

    Arguments and errors are those of `pack`. Pages that no block or slot names stay as they were; one that
    is named twice holds either chunk's bytes or a mix.
    """
    _move(pages, records, blocks, slots, threads, to_records=False)


def blend_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    row_starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some rows of some requests to keys in pages, by absolute position: (o, lse)."""
    return reference.blend_attention(
        q, k_pages, v_pages, tables, positions, row_starts, lengths, scale, window, softcap
    )


def rope_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rope: Rope,
    deviation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate recomputed queries and keys, write K and V into pages; returns the rotated q."""
    return reference.rope_scatter(q, k, v, cos_sin, slots, k_pages, v_pages, rope, deviation)


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Squared distance of each token's [H, D] of new and old [N, H, D]: float32 [N]."""
    return reference.token_deviation(new, old)


def query_scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    length: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """How much attention some rows of a request pay to each key: float32 [length]."""
    return reference.query_scores(q, k_pages, v_pages, table, positions, length, scale, window, softcap)


def _move(
    pages: Pages,
    records: Sequence[NDArray[np.uint8]],
    blocks: NDArray[np.int64] | None,
    slots: NDArray[np.int64] | None,
    threads: int | None,
    to_records: bool,
) -> None:
    slots = _slots(pages, blocks, slots)
    chunks, tokens = slots.shape
    if len(records) != chunks:
        raise LaunchError(f"records: {len(records)} given for {chunks} chunks")
    shape = len(pages.group.layers), pages.heads, tokens, pages.row_bytes
    want = math.prod(shape)
    for i, record in enumerate(records):
        if not isinstance(record, np.ndarray) or record.dtype != np.uint8:
            raise LaunchError(f"records[{i}]: {_kind(record)}, want a numpy array of uint8")
        if record.shape != (want,) or not record.flags.c_contiguous:
            raise LaunchError(
                f"records[{i}]: {record.shape} strides {record.strides}, want ({want},) contiguous bytes"
            )
        if to_records and not record.flags.writeable:
            raise LaunchError(f"records[{i}]: read-only")
    if threads is None:
        threads = torch.get_num_threads()
    elif threads < 1:
        raise LaunchError(f"threads={threads}: want at least 1")
    if not chunks:
        return
    if pages.device.type == "cpu":
        from kvkit.kernels import host

        addresses = np.array([record.ctypes.data for record in records], np.int64)
        host.move(
            pages.table,
            pages.span,
            pages.heads,
            pages.row_bytes,
            addresses,
            slots,
            to_records,
            threads,
            (pages, records),
        )
    else:
        (reference.pack if to_records else reference.unpack)(pages.parts, records, slots, shape)


def _slots(
    pages: Pages, blocks: NDArray[np.int64] | None, slots: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The slots [chunks, T] of the `Pages` (opaque: whole pages) that a call's ids name, checked."""
    if (blocks is None) == (slots is None):
        raise LaunchError("blocks, slots: give one of the two")
    if slots is not None:
        if pages.group.opaque:
            raise LaunchError("slots: opaque pages move whole, give blocks")
        _check_ids("slots", slots, pages.blocks * pages.tokens)
        return np.ascontiguousarray(slots)
    assert blocks is not None
    if not pages.group.opaque and pages.tokens != pages.group.block_tokens:
        raise LaunchError(
            f"blocks: the tensors' N = {pages.tokens} is not block_tokens = {pages.group.block_tokens}: "
            "give slots"
        )
    _check_ids("blocks", blocks, pages.blocks)
    every = blocks[:, :, None] * pages.tokens + np.arange(pages.tokens)
    every[blocks < 0] = -1  # the product may have wrapped around
    return every.reshape(len(blocks), blocks.shape[1] * pages.tokens)


def _check_ids(name: str, ids: NDArray[np.int64], limit: int) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64:
        raise LaunchError(f"{name}: {_kind(ids)}, want a numpy array of int64")
    if ids.ndim != 2 or (len(ids) and not ids.shape[1]):
        raise LaunchError(f"{name}: {ids.shape}, want [chunks, at least 1]")
    if ids.size and ids.max() >= limit:
        raise LaunchError(f"{name}: {ids.max()} is out of range, the pages have {limit} {name}")


def _kind(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def _dense(name: str, tensor: torch.Tensor, group: LayerGroup, channels: int) -> torch.Tensor:
    """The bytes [B, H, N, W] of [B, H, N, channels]; refuses what is not that or overlaps itself."""
    want = f"[B, {group.kv_heads}, N, {channels}] {group.dtype}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.ndim != 4 or dtype != group.dtype:
        raise LaunchError(f"{name}: {tuple(tensor.shape)} {dtype}, want {want}")
    blocks, heads, tokens, c = tensor.shape
    if (heads, c) != (group.kv_heads, channels) or not blocks or not tokens or not c:
        raise LaunchError(f"{name}: {tuple(tensor.shape)}, want {want}, none of them 0")
    if tensor.stride(3) != 1:
        raise LaunchError(f"{name}: stride {tensor.stride()}, want C innermost (stride 1)")
    _check_overlap(name, tensor.shape, tensor.stride())
    return tensor.detach().view(torch.uint8)


def _opaque(name: str, tensor: object, page_bytes: int) -> torch.Tensor:
    """The bytes [B, 1, 1, page_bytes] of a tensor whose blocks are that many contiguous bytes."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or not tensor.numel():
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LaunchError(f"{name}: {shape}, want one tensor [B, ...]")
    item = tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if tensor[0].numel() * item != page_bytes or extent * item != page_bytes:
        raise LaunchError(
            f"{name}: {tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}, "
            f"want blocks of page_bytes={page_bytes} contiguous bytes"
        )
    _check_overlap(name, tensor.shape, tensor.stride())
    # a permuted block is contiguous bytes too, but torch views only what is innermost as bytes
    flat = tensor.detach().as_strided((len(tensor), page_bytes // item), (tensor.stride(0), 1))
    return flat.view(torch.uint8)[:, None, None, :]


def _check_overlap(name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            raise LaunchError(f"{name}: {tuple(shape)} strides {tuple(strides)} overlap or interleave")
        extent += (size - 1) * stride
