"""The one way to the kernels: checks everything, then picks the backend by device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup, LayoutError
from kvkit.format.rope import Rope, RopeError, Rotation
from kvkit.kernels import reference
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.reference import Part

Record = NDArray[np.uint8] | torch.Tensor
Quantised = Literal["fp8", "int8"]
CONVERTIBLE = ("float32", "float16", "bfloat16")
"""Dtypes of pages that can be rotated or quantised."""


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
        halves: int64 [P, 7], the same with K and V apart, whether or not the engine keeps them so.
    """

    group: LayerGroup
    blocks: int
    tokens: int
    heads: int
    row_bytes: int
    parts: tuple[Part, ...]
    span: int
    table: NDArray[np.int64]
    halves: NDArray[np.int64]

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
            halves=_halves(table, group),
        )


def pack(
    pages: Pages,
    records: Sequence[Record],
    *,
    blocks: NDArray[np.int64] | None = None,
    slots: NDArray[np.int64] | None = None,
    quantised: Quantised | None = None,
    threads: int | None = None,
) -> None:
    """Gather chunks out of an engine's pages. Writes `records`, only reads `pages`.

    Arrays are complete when this returns: on a GPU it waits for the current stream. Tensors are complete in
    the order of that stream.

    Args:
        pages: of one group.
        records: per chunk `group.chunk_bytes(T)` contiguous bytes, of any alignment (a multiple of 64 is
            fastest): the canonical [L, H, T, C], K before V in C; opaque [L, 1, pages, page_bytes]. Numpy
            arrays; where the pages are on a GPU, also uint8 tensors there. A GPU moves arrays in pinned
            memory directly, others through a buffer of its own.
        blocks: int64 [chunks, T / N], each chunk's blocks in order. A block < 0 is skipped: its bytes in
            the record stay as they were.
        slots: instead of `blocks`, int64 [chunks, T]: each token's block * N + place in the block. A slot
            < 0 is skipped. Not for opaque pages.
        quantised: turn K and V into 8-bit codes and scales (`reference.quantise` has formula and error
            bound); records then have `group.quantised().chunk_bytes(T)` bytes. Not for opaque pages.
        threads: on a CPU, at most so many; None means `torch.get_num_threads()`.

    Raises:
        LaunchError: an argument does not fit; nothing was written.
    """
    _move(pages, records, blocks, slots, None, quantised, threads, to_records=True)


def unpack(
    pages: Pages,
    records: Sequence[Record],
    *,
    blocks: NDArray[np.int64] | None = None,
    slots: NDArray[np.int64] | None = None,
    rotate: Rotation | None = None,
    quantised: Quantised | None = None,
    threads: int | None = None,
) -> None:
    """Scatter chunks into an engine's pages: the inverse of `pack`. Writes `pages`, only reads `records`.

    Pages that no block or slot names stay as they were; one that is named twice holds either chunk's bytes
    or a mix. On a GPU, pages are complete in the order of the current stream. Where a record is an array,
    this waits for that stream, so that arrays may be reused or freed at once; tensors may be freed, and
    overwritten in the order of the stream.

    Args:
        rotate: turn K by its token's difference of positions on the way: in float32, rounded once to the
            pages' dtype (https://arxiv.org/abs/2104.09864). Start from the record every time: rotating what
            was rotated before adds up errors.
        quantised: what `pack` was given: records hold codes and scales.

    The other arguments and errors are those of `pack`.
    """
    _move(pages, records, blocks, slots, rotate, quantised, threads, to_records=False)


def blend_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some rows of some requests to keys in pages, by absolute position. Mutates nothing.

    A row at position p of a request of length n attends to key j if j <= p, j < n and j > p - window:
    o = sum_j softmax_j(s_j) v_j, s_j = scale * q . k_j, or softcap * tanh(that / softcap). Query head h
    reads KV head h // (Hq / H). Computed in tiles with a running maximum as in FlashAttention
    (https://arxiv.org/abs/2205.14135), in float32.

    Args:
        q: [M, Hq, D] float32, float16 or bfloat16, rows of all requests one after another.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv] of q's dtype. Pages beyond a request's length may
            hold anything.
        rows: where the M rows are, and the pages of their requests; on q's device.
        scale: of the scores, such as D ** -0.5.
        window: of a sliding window, in tokens, itself included.
        softcap: of the scores, as in Gemma 2.

    Every tensor: any strides, but the last axis is contiguous.

    Returns:
        o [M, Hq, Dv] in q's dtype, and lse [M, Hq] float32: log sum_j exp(s_j). A row that sees no key is 0
        with lse -inf.

    Raises:
        LaunchError: an argument does not fit.
    """
    _check_attention(q, k_pages, v_pages, rows, scale, window, softcap)
    if q.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.attention(q, k_pages, v_pages, rows, scale, window, softcap)
    from kvkit.kernels.attention import triton

    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    with torch.cuda.device(q.device):
        for launch in triton.attention(q, k_pages, v_pages, rows, scale, window, softcap, out, lse):
            launch.run()
    return out, lse


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
    """Rotate recomputed queries and keys to their positions and write K and V into the pages.

    float32 in the middle, rounded once. Writes `k_pages` and `v_pages` at `slots` and nowhere else, and
    `deviation`.

    Args:
        q, k, v: [M, Hq, D], [M, H, D], [M, H, Dv], not yet rotated, float32, float16 or bfloat16; parts of
            a fused projection will do.
        cos_sin: float32 [M, R], `Rope.table` of the rows' positions.
        slots: int64 [M] such as `Rows.slots`: block * N + token, each at most once. A row whose slot is < 0
            is skipped; on a GPU, where looking would wait for it, so is one beyond the pages.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv] of q's dtype.
        rope: the model's.
        deviation: float32 [M]; receives the sum over heads and channels of the squared difference between
            what a slot's K held before and holds now; 0 where skipped.

    Every tensor: any strides, but the last axis is contiguous.

    Returns:
        the rotated q, [M, Hq, D].

    Raises:
        LaunchError: an argument does not fit; nothing was written.
    """
    _check_scatter(q, k, v, cos_sin, slots, k_pages, v_pages, rope, deviation)
    if q.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.scatter(q, k, v, cos_sin, slots, k_pages, v_pages, rope, deviation)
    from kvkit.kernels.attention import triton

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device(q.device):
        for launch in triton.scatter(q, k, v, cos_sin, slots, k_pages, v_pages, rope, deviation, out):
            launch.run()
    return out


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """How far each token's keys or values moved: float32 [T], the squared distance over heads and channels.

    Mutates nothing; sums in float32, in an order that is always the same.

    Args:
        new, old: [T, H, D] float32, float16 or bfloat16; any strides, but the last axis is contiguous.

    Raises:
        LaunchError: an argument does not fit.
    """
    _check_floats("new", new, 3, None)
    _check_floats("old", old, 3, new)
    if old.shape != new.shape:
        raise LaunchError(f"old: {tuple(old.shape)}, but new is {tuple(new.shape)}")
    if new.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.token_deviation(new, old)
    from kvkit.kernels.attention import triton

    out = new.new_empty(len(new), dtype=torch.float32)
    with torch.cuda.device(new.device):
        for launch in triton.deviation(new, old, out):
            launch.run()
    return out


def query_scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much attention the rows of a request pay to each of its keys: float32 [Hq, length].

    score_hj = sum over rows of query head h's softmax_j, masked as in `blend_attention`; with `v_pages` times
    the norm of the v_j that it reads. Mutates nothing; sums in float32, in an order that is
    always the same.

    Args:
        q: [S, Hq, D].
        k_pages, v_pages: as in `blend_attention`; `v_pages` None for the plain attention.
        rows: of one request.
        scale, window, softcap: as in `blend_attention`.
        lse: float32 [S, Hq] that `blend_attention` gave for these rows; None: computed here first.

    Raises:
        LaunchError: an argument does not fit.
    """
    _check_attention(q, k_pages, k_pages if v_pages is None else v_pages, rows, scale, window, softcap)
    if len(rows.lengths) != 1:
        raise LaunchError(f"rows: of {len(rows.lengths)} requests, want one")
    if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device):
        found = f"{tuple(lse.shape)} {lse.dtype} on {lse.device}"
        raise LaunchError(f"lse: {found}, want {tuple(q.shape[:2])} float32 on {q.device}")
    if q.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.scores(q, k_pages, v_pages, rows, scale, window, softcap, lse)
    from kvkit.kernels.attention import triton

    out = q.new_empty(q.shape[1], int(rows.lengths[0]), dtype=torch.float32)
    with torch.cuda.device(q.device):
        for launch in triton.scores(q, k_pages, v_pages, rows, scale, window, softcap, lse, out):
            launch.run()
    return out


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _check_floats(name: str, tensor: torch.Tensor, ndim: int, like: torch.Tensor | None) -> None:
    """Axes, dtype, device and strides of what the blend kernels read or write."""
    found = f"{name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    if tensor.ndim != ndim or 0 in tensor.shape[1:]:
        raise LaunchError(f"{found}, want {ndim} axes, none but the first empty")
    if like is None:
        if tensor.dtype not in FLOATS:
            raise LaunchError(f"{found}, want float32, float16 or bfloat16")
    elif (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise LaunchError(f"{found}, want {like.dtype} on {like.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise LaunchError(f"{name}: strides {tensor.stride()}, want the last axis contiguous (stride 1)")


def _check_pages(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    _check_floats("k_pages", k_pages, 4, q)
    _check_floats("v_pages", v_pages, 4, q)
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise LaunchError(
            f"v_pages: [B, H, N] = {tuple(v_pages.shape[:3])}, but k_pages has {tuple(k_pages.shape[:3])}"
        )
    heads, size = k_pages.shape[1], k_pages.shape[3]
    if q.shape[1] % heads or q.shape[2] != size:
        raise LaunchError(f"q: {tuple(q.shape)}, want a multiple of {heads} heads, of {size} channels")


def _check_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    _check_floats("q", q, 3, None)
    _check_pages(q, k_pages, v_pages)
    if rows.count != len(q) or rows.device != q.device:
        raise LaunchError(f"rows: {rows.count} on {rows.device}, but q has {len(q)} on {q.device}")
    if rows.block_tokens != k_pages.shape[2]:
        raise LaunchError(f"rows: block_tokens={rows.block_tokens}, but the pages have {k_pages.shape[2]}")
    if rows.last_block >= len(k_pages):
        raise LaunchError(f"rows: block {rows.last_block} is out of range, the pages have {len(k_pages)}")
    if not math.isfinite(scale):
        raise LaunchError(f"scale={scale}: want a finite number")
    if window is not None and window < 1:
        raise LaunchError(f"window={window}: want at least 1, or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise LaunchError(f"softcap={softcap}: want a finite number above 0, or None")


def _check_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rope: Rope,
    deviation: torch.Tensor | None,
) -> None:
    _check_floats("q", q, 3, None)
    _check_pages(q, k_pages, v_pages)
    count, heads, size = len(q), k_pages.shape[1], k_pages.shape[3]
    for name, tensor, channels in (("k", k, size), ("v", v, v_pages.shape[3])):
        _check_floats(name, tensor, 3, q)
        if tensor.shape != (count, heads, channels):
            raise LaunchError(f"{name}: {tuple(tensor.shape)}, want {(count, heads, channels)}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_overlap(name, pages.shape, pages.stride())
    if rope.first + rope.channels > size:
        raise LaunchError(f"rope: channels {rope.first} to {rope.first + rope.channels}, but D is {size}")
    wanted = [
        ("cos_sin", cos_sin, (count, rope.channels), torch.float32),
        ("slots", slots, (count,), torch.int64),
    ]
    if deviation is not None:
        wanted.append(("deviation", deviation, (count,), torch.float32))
    for name, tensor, shape, dtype in wanted:
        found = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != q.device:
            raise LaunchError(f"{name}: {found}, want {shape} {dtype} on {q.device}")
        if not tensor.is_contiguous():
            raise LaunchError(f"{name}: strides {tensor.stride()}, want it contiguous")
    if slots.device.type == "cpu" and count and int(slots.max()) >= len(k_pages) * k_pages.shape[2]:
        limit = len(k_pages) * k_pages.shape[2]
        raise LaunchError(f"slots: {int(slots.max())} is out of range, the pages have {limit} slots")


def _move(
    pages: Pages,
    records: Sequence[Record],
    blocks: NDArray[np.int64] | None,
    slots: NDArray[np.int64] | None,
    rotation: Rotation | None,
    quantised: Quantised | None,
    threads: int | None,
    to_records: bool,
) -> None:
    every = _slots(pages, blocks, slots)
    chunks, tokens = every.shape
    if len(records) != chunks:
        raise LaunchError(f"records: {len(records)} given for {chunks} chunks")
    row_bytes = _record_row_bytes(pages, quantised)
    shape = len(pages.group.layers), pages.heads, tokens, row_bytes
    for i, record in enumerate(records):
        _check_record(f"records[{i}]", record, math.prod(shape), pages.device, to_records)
    turns = None if rotation is None else _turns(pages.group, rotation, chunks, tokens)
    if threads is None:
        threads = torch.get_num_threads()
    elif threads < 1:
        raise LaunchError(f"threads={threads}: want at least 1")
    if not chunks:
        return
    if pages.device.type == "cuda":
        _on_device(pages, records, blocks, slots, rotation, turns, quantised, to_records)
        return
    arrays = [record for record in records if isinstance(record, np.ndarray)]
    plain = rotation is None and quantised is None
    if pages.device.type == "cpu":
        from kvkit.kernels.pages import numba

        addresses = np.array([array.ctypes.data for array in arrays], np.int64)
        job = pages.span, pages.heads, row_bytes, addresses, every, to_records, threads, (pages, arrays)
        if plain:
            numba.move(pages.table, *job)
        else:
            rope = None if rotation is None else rotation.rope
            group = pages.group
            k_bytes = group.k_size * group.item_bytes
            numba.convert(pages.table, *job, group.channels, k_bytes, group.dtype, quantised, turns, rope)
    elif plain:
        (reference.pack if to_records else reference.unpack)(pages.parts, arrays, every, shape)
    elif quantised is not None and to_records:
        reference.encode(pages.group, pages.parts, arrays, every, quantised)
    else:
        reference.decode(pages.group, pages.parts, arrays, every, rotation, quantised)


def _on_device(
    pages: Pages,
    records: Sequence[Record],
    blocks: NDArray[np.int64] | None,
    slots: NDArray[np.int64] | None,
    rotation: Rotation | None,
    turns: tuple[NDArray[np.float32], NDArray[np.int32]] | None,
    quantised: Quantised | None,
    to_records: bool,
) -> None:
    """One Triton launch. Records that the device cannot reach go through a buffer in its memory."""
    from kvkit.kernels.pages import triton as kernels

    device, ids = pages.device, blocks if slots is None else slots
    assert ids is not None
    given = [_tensor(record) for record in records]
    whole_words = 1 if rotation is None or quantised else pages.group.item_bytes
    far = [
        i
        for i, record in enumerate(given)
        if not (record.device == device or record.is_pinned()) or record.data_ptr() % whole_words
    ]
    size = len(given[0])
    buffer = torch.empty(len(far), -(-size // 64) * 64, dtype=torch.uint8, device=device)[:, :size]
    near = list(given)
    for row, i in zip(buffer, far, strict=True):
        near[i] = row
        if not to_records or (ids < 0).any():  # what is skipped stays as it was
            row.copy_(given[i])
    launch = kernels.move(
        pages,
        np.array([record.data_ptr() for record in near], np.int64),
        ids,
        to_records,
        slots=slots is not None,
        quantised=quantised,
        rope=None if rotation is None else rotation.rope,
        turns=turns,
    )
    if device.type == "cpu":  # interpreted
        launch.run()
    else:
        with torch.cuda.device(device):
            launch.run()
    if to_records:
        for i in far:
            given[i].copy_(near[i])
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for record in given:
            if record.device == device:
                record.record_stream(stream)
        if any(record.device != device for record in given):
            stream.synchronize()


def _tensor(record: Record) -> torch.Tensor:
    """A record's memory as a tensor, which torch makes of a read-only array with a warning only."""
    if isinstance(record, torch.Tensor):
        return record
    return torch.from_numpy(
        np.ctypeslib.as_array((ctypes.c_uint8 * len(record)).from_address(record.ctypes.data))
    )


def _check_record(name: str, record: object, want: int, device: torch.device, to_records: bool) -> None:
    if isinstance(record, torch.Tensor) and device.type == "cuda":
        if record.dtype != torch.uint8 or record.device != device:
            raise LaunchError(f"{name}: {record.dtype} on {record.device}, want torch.uint8 on {device}")
        if record.shape != (want,) or not record.is_contiguous():
            raise LaunchError(
                f"{name}: {tuple(record.shape)} strides {record.stride()}, want ({want},) contiguous bytes"
            )
        return
    if not isinstance(record, np.ndarray) or record.dtype != np.uint8:
        raise LaunchError(f"{name}: {_kind(record)}, want a numpy array of uint8")
    if record.shape != (want,) or not record.flags.c_contiguous:
        raise LaunchError(f"{name}: {record.shape} strides {record.strides}, want ({want},) contiguous bytes")
    if to_records and not record.flags.writeable:
        raise LaunchError(f"{name}: read-only")


def _record_row_bytes(pages: Pages, quantised: str | None) -> int:
    """Bytes of one head and token in a record."""
    if quantised is None:
        return pages.row_bytes
    if quantised not in reference.LARGEST:
        raise LaunchError(f"quantised={quantised!r}: want None or one of {', '.join(reference.LARGEST)}")
    try:
        return pages.group.quantised().channels
    except LayoutError as error:
        raise LaunchError(f"quantised={quantised!r}: {error}") from error


def _turns(
    group: LayerGroup, rotation: Rotation, chunks: int, tokens: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """cos and sin [U, R] and each token's row [chunks, T] of a rotation that fits the group."""
    if group.opaque or group.dtype not in CONVERTIBLE:
        kind = "opaque" if group.opaque else group.dtype
        raise LaunchError(f"rotate: the pages are {kind}, want {', '.join(CONVERTIBLE)}")
    rope = rotation.rope
    if rope.first + rope.channels > group.k_size:
        raise LaunchError(
            f"rotate: rotary channels {rope.first} to {rope.first + rope.channels}, K has {group.k_size}"
        )
    try:
        return rotation.resolve(chunks, tokens)
    except RopeError as error:
        raise LaunchError(f"rotate: {error}") from error


def _halves(table: NDArray[np.int64], group: LayerGroup) -> NDArray[np.int64]:
    """`Pages.halves`: each row that holds K and V, [layer, 0, K's and V's bytes, address, ...], as two."""
    k_bytes = group.k_size * group.item_bytes
    joined = (table[:, 1] == 0) & (table[:, 2] > k_bytes)
    if group.opaque or not joined.any():
        return table
    k, v = table[joined].copy(), table[joined].copy()
    k[:, 2] = v[:, 1] = k_bytes
    v[:, 2:4] += -k_bytes, k_bytes
    return np.concatenate([k, v])


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
