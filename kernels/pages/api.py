"""Chunks out of an engine's pages and into them: checks everything, then picks the backend by device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.rope import Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import checks, reference
from kvkit.kernels.pages.checks import Turns
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.reference import Quantised

__all__ = ["Pages", "pack", "unpack"]

Record = NDArray[np.uint8] | torch.Tensor


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
    kind = checks.records_group(pages.group, quantised)
    row_bytes = kind.page_bytes or kind.channels * kind.item_bytes
    size = len(kind.layers) * pages.heads * tokens * row_bytes
    for i, record in enumerate(records):
        checks.check_record(f"records[{i}]", record, size, pages.device, to_records)
    turns = None if rotation is None else checks.turns_of(pages.group, rotation, chunks, tokens)
    if threads is None:
        threads = torch.get_num_threads()
    elif threads < 1:
        raise LaunchError(f"threads={threads}: want at least 1")
    if not chunks:
        return
    if pages.device.type == "cuda":
        ids = blocks if slots is None else slots
        assert ids is not None
        _on_device(pages, records, ids, to_records, slots is not None, quantised, turns)
        return
    arrays = [record for record in records if isinstance(record, np.ndarray)]
    if pages.device.type == "cpu":
        from kvkit.kernels.pages import numba

        addresses = np.array([array.ctypes.data for array in arrays], np.int64)
        job = numba.Job.of(pages, addresses, every, row_bytes, to_records)
        plain = rotation is None and quantised is None
        conversion = None if plain else numba.Conversion.of(pages.group, quantised, turns)
        numba.move(job, conversion, threads, (pages, arrays))
    elif to_records:
        reference.pack(pages.group, pages.parts, arrays, every, quantised)
    else:
        reference.unpack(pages.group, pages.parts, arrays, every, rotation, quantised)


def _slots(
    pages: Pages, blocks: NDArray[np.int64] | None, slots: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The slots [chunks, T] (opaque: whole pages) that a call's ids name, checked."""
    name, ids, limit = checks.check_chunks(
        pages.group, (pages.blocks, pages.tokens), blocks, slots, ("int64",)
    )
    if not isinstance(ids, np.ndarray):
        raise LaunchError(f"{name}: {type(ids).__name__}, want a numpy array")
    checks.check_range(name, ids, limit)
    if name == "slots":
        return np.ascontiguousarray(ids)
    every: NDArray[np.int64] = ids[:, :, None] * pages.tokens + np.arange(pages.tokens)
    every[ids < 0] = -1  # the product may have wrapped around
    return every.reshape(len(ids), ids.shape[1] * pages.tokens)


def _on_device(
    pages: Pages,
    records: Sequence[Record],
    ids: NDArray[np.int64],
    to_records: bool,
    slots: bool,
    quantised: Quantised | None,
    turns: Turns | None,
) -> None:
    """One Triton launch. Records that the device cannot reach go through a buffer in its memory."""
    from kvkit.kernels.pages import triton as kernels

    device = pages.device
    given = [_tensor(record) for record in records]
    whole_words = 1 if turns is None or quantised else pages.group.item_bytes
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
    addresses = np.array([record.data_ptr() for record in near], np.int64)
    launch = kernels.move(pages, addresses, ids, to_records, slots=slots, quantised=quantised, turns=turns)
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
