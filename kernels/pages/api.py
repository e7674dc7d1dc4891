"""Pack and unpack chunks of an engine's pages: checks of all arguments, then the backend of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.rope import Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import checks, device, reference
from kvkit.kernels.pages.device import Record
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.streams import CudaEvents

__all__ = ["Pages", "pack", "unpack"]


def pack(
    pages: Pages,
    records: Sequence[Record],
    *,
    blocks: NDArray[np.int64] | None = None,
    slots: NDArray[np.int64] | None = None,
    threads: int | None = None,
    after: CudaEvents | None = None,
) -> None:
    """Gather chunks out of an engine's pages. Writes `records`, only reads `pages`.

    On a GPU, records that are tensors are complete in the order of the current stream. If a record is an
    array, the move runs on a separate stream beside the engine's, and all records are complete on return: the
    call waits for the events in `after` and for the move, not for work that the engine queues meanwhile.

    Args:
        pages: pages of one group.
        records: per chunk `group.chunk_bytes(T)` contiguous bytes, of any alignment (a multiple of 64 is
            fastest): the canonical [L, H, T, C], K before V in C; opaque [L, 1, pages, page_bytes]. With
            `group.precision`, 8-bit codes and scales (`reference.quantise` has formula and error bound).
            Numpy arrays; where the pages are on a GPU, also uint8 tensors on it. A GPU moves arrays in pinned
            memory directly or through its buffer, whichever was tuned as faster, and other arrays through its
            buffer, in batches (`device.BUFFER_BYTES`).
        blocks: int64 [chunks, T / N], each chunk's blocks in order. A block < 0 is skipped: its bytes in
            the record stay unchanged.
        slots: instead of `blocks`, int64 [chunks, T]: each token's block * N + index in the block. A slot
            < 0 is skipped. Not for opaque pages.
        threads: maximum threads on a CPU; None means `torch.get_num_threads()`.
        after: on a GPU, the events that the move waits for (`streams.marks`); None: the work queued so far on
            this thread's current stream.

    Raises:
        LaunchError: an argument does not fit, or the current stream is capturing a CUDA graph, which could
            not be replayed; nothing was written.
    """
    selection = _select(pages, blocks, slots)
    _move(pages, records, selection, None, threads, after, to_records=True)


def unpack(
    pages: Pages,
    records: Sequence[Record],
    *,
    blocks: NDArray[np.int64] | None = None,
    slots: NDArray[np.int64] | None = None,
    rotate: Rotation | None = None,
    threads: int | None = None,
    after: CudaEvents | None = None,
) -> None:
    """Scatter chunks into an engine's pages: the inverse of `pack`. Writes `pages`, only reads `records`.

    Pages that no block or slot names stay unchanged; a page that is named twice holds either chunk's bytes
    or a mix. On a GPU, pages are complete in the order of the current stream; tensors may be freed, and
    overwritten in that order. If a record is an array, the call waits as `pack` does: on return, pages are
    complete for every stream, and arrays may be reused or freed.

    Args:
        rotate: rotation of K by each token's change of position, in float32, rounded once to the pages'
            dtype (https://arxiv.org/abs/2104.09864). Rotate from the record every time: repeated rotations
            add up errors.

    The other arguments and errors are those of `pack`.
    """
    selection = _select(pages, blocks, slots)
    _move(pages, records, selection, rotate, threads, after, to_records=False)


class _Selection(NamedTuple):
    """Checked blocks or slots that a call moves."""

    ids: NDArray[np.int64]  # [chunks, I]
    are_slots: bool  # False: `ids` are blocks
    block_tokens: int  # slots of a block; opaque: 1, a whole page

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of chunks, and of tokens of a chunk."""
        return len(self.ids), self.ids.shape[1] * (1 if self.are_slots else self.block_tokens)

    def token_slots(self) -> NDArray[np.int64]:
        """Return the slots [chunks, T] of every token (opaque: of whole pages)."""
        if self.are_slots:
            return np.ascontiguousarray(self.ids)
        return checks.token_slots(self.ids, self.block_tokens)


def _move(
    pages: Pages,
    records: Sequence[Record],
    selection: _Selection,
    rotation: Rotation | None,
    threads: int | None,
    after: CudaEvents | None,
    to_records: bool,
) -> None:
    chunks, tokens = selection.shape
    if len(records) != chunks:
        raise LaunchError(f"records: {len(records)} given for {chunks} chunks")
    row_bytes = pages.group.stored.row_bytes
    if to_records and not pages.whole:
        raise LaunchError("pages: they have a part of the heads of a record, and are only unpacked into")
    size = len(pages.group.layers) * pages.shares * pages.heads * tokens * row_bytes
    checks.check_records(records, size, pages.device, to_records)
    if pages.order is not None:
        _move_ordered(pages, records, selection.token_slots(), rotation, threads, to_records)
        return
    resolved = None if rotation is None else checks.resolve_rotation(pages.group, rotation, chunks, tokens)
    if threads is None:
        threads = torch.get_num_threads()
    elif threads < 1:
        raise LaunchError(f"threads={threads}: want at least 1")
    if not chunks:
        return
    if _on_gpu(pages):
        device_move = device.DeviceMove(pages, selection.ids, selection.are_slots, to_records, resolved)
        device.move(device_move, records, after)
        return
    arrays = [record for record in records if isinstance(record, np.ndarray)]
    slots = selection.token_slots()
    if pages.device.type == "cpu":
        from kvkit.kernels.pages import numba

        addresses = np.array([array.ctypes.data for array in arrays], np.int64)
        job = numba.Job.of(pages, addresses, slots, to_records)
        conversion = numba.Conversion.of(pages.group, resolved)
        numba.move(job, conversion, threads, (pages, arrays))
    elif to_records:
        reference.pack(pages.group, pages.parts, arrays, slots)
    else:
        reference.unpack(pages.group, pages.parts, arrays, slots, rotation)


def _move_ordered(
    pages: Pages,
    records: Sequence[Record],
    slots: NDArray[np.int64],
    rotation: Rotation | None,
    threads: int | None,
    to_records: bool,
) -> None:
    """Move pages with an `order` through dense pages, one layer at a time."""
    from kvkit.kernels.pages import ordered

    group, present = replace(pages.group, strides=None), slots >= 0
    dense_slots = np.where(present, np.arange(slots.size).reshape(slots.shape), -1)
    size = group.layer_bytes(slots.shape[1])
    for i, layer in enumerate(group.layers):
        layer_group = replace(group, layers=(layer,), block_tokens=1)
        dense = torch.zeros(1, pages.heads, slots.size, group.channels, dtype=getattr(torch, group.dtype))
        layer_records = [record[i * size : (i + 1) * size] for record in records]
        if to_records:
            dense[0][:, present.ravel()] = ordered.read_block_elements(pages, i, slots[present])
            pack(Pages.of(layer_group, [dense]), layer_records, slots=dense_slots, threads=threads)
        else:
            unpack(
                Pages.of(layer_group, [dense], heads=pages.held),
                layer_records,
                slots=dense_slots,
                rotate=rotation,
                threads=threads,
            )
            ordered.write_block_elements(pages, i, slots[present], dense[0][:, present.ravel()])


def _on_gpu(pages: Pages) -> bool:
    """Return whether kernels of Triton move the pages."""
    return pages.device.type == "cuda"


def _select(pages: Pages, blocks: NDArray[np.int64] | None, slots: NDArray[np.int64] | None) -> _Selection:
    name, ids, limit = checks.check_chunks(
        pages.group, (pages.blocks, pages.tokens), blocks, slots, ("int64",)
    )
    if not isinstance(ids, np.ndarray):
        raise LaunchError(f"{name}: {type(ids).__name__}, want a numpy array")
    checks.check_range(name, ids, limit)
    return _Selection(ids, name == "slots", pages.tokens)
