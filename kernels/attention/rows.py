"""Rows of a batch and the keys that they attend to: checked and planned once, used by every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.kernels.once import once
from kvkit.kernels.uploads import upload

LARGEST_INT32 = 2**31 - 1
MASK_BYTES = 256 << 20
"""Maximum bytes of masks that the layers of a batch share; each layer makes any further masks itself."""
T = TypeVar("T")


class RowsError(ValueError):
    """Rows do not fit their requests, or keys their blocks. The message names the argument and its value."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Work items of an attention: rows taken together and keys that they see; on the rows' device.

    Args:
        items: int32 [W, 8], the costliest first: request, first row, row after the last, first key, first key
            that every row of the item sees, key after the last of these, key after the last, and part. Part
            is -1 if the item covers all keys that its rows see.
        merges: int32 [T, 4], for tiles with keys split over several items: first row, row after the last,
            first part, number of parts.
        parts: number of items with results to merge.
        keys: number of keys over all items.
    """

    items: torch.Tensor
    merges: torch.Tensor
    parts: int
    keys: int


class TileRanges(NamedTuple):
    """Rows and keys of whole tiles: int64 [tiles] each, see `Tiles.items`."""

    request: NDArray[np.int64]
    first_row: NDArray[np.int64]
    after_row: NDArray[np.int64]
    begin: NDArray[np.int64]
    full_begin: NDArray[np.int64]
    full_end: NDArray[np.int64]
    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of some requests, at their positions, and the blocks that hold the requests' keys.

    Make it with `of`, once per batch, from data on the host, so that no layer waits for a device.

    Args:
        positions: int64 [M], position of each row.
        row_starts: int64 [requests + 1], first row of each request, then M.
        lengths: int64 [requests], number of keys of each request.
        tables: int64 [requests, blocks]; -1 beyond a request's length.
        block_tokens: N, tokens of a block.
        slots: int64 [M] on the device: block * N + token of each row's position, -1 where the position is
            not within the request's length.
        device_positions: int32 [M], `positions` on the device.
        device_tables: int32 [requests, blocks], `tables` on the device.
    """

    positions: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: NDArray[np.int64]
    block_tokens: int
    slots: torch.Tensor
    device_positions: torch.Tensor
    device_tables: torch.Tensor
    _masks: dict[tuple[int, int, int, int, int | None, int], torch.Tensor] = field(default_factory=dict)
    _cached: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """M, number of rows over all requests."""
        return len(self.positions)

    @property
    def device(self) -> torch.device:
        """Device of the attention."""
        return self.slots.device

    @property
    def last_block(self) -> int:
        """Largest block id, -1 if there is none."""
        return int(self.tables.max(initial=-1))

    @staticmethod
    def of(
        positions: NDArray[Any],
        row_starts: NDArray[Any],
        lengths: NDArray[Any],
        tables: NDArray[Any],
        block_tokens: int,
        device: torch.device | str = "cpu",
    ) -> Rows:
        """Check the rows of a batch, and copy what kernels read of them to `device`.

        On a GPU, the copy is queued on the current stream, and the host does not wait: layers run on this
        stream, or on one that is ordered after it.

        Args:
            positions: integers [M], ascending within a request. A row at a negative position sees no key.
            row_starts: integers [requests + 1], from 0 to M, ascending: a request may have no rows.
            lengths: integers [requests], at least 0.
            tables: integers [requests, blocks]: key j of request r is token j % N of block tables[r, j // N].
                Entries beyond a request's length are ignored.
            block_tokens: N of the pages.
            device: device of the queries and pages.

        Raises:
            RowsError: an argument does not fit.
        """
        positions = _integers("positions", positions, 1)
        row_starts = _integers("row_starts", row_starts, 1)
        lengths = _integers("lengths", lengths, 1)
        tables = _integers("tables", tables, 2)
        if block_tokens < 1:
            raise RowsError(f"block_tokens={block_tokens}: want at least 1")
        request = _requests(positions, row_starts, lengths, tables)
        blocks = -(-lengths // block_tokens)  # [requests]
        if blocks.size and blocks.max() > tables.shape[1]:
            raise RowsError(
                f"tables: {tables.shape[1]} blocks of {block_tokens} tokens, but lengths has {lengths.max()}"
            )
        used = np.arange(tables.shape[1]) < blocks[:, None]
        tables = np.where(used, tables, -1)
        if tables[used].min(initial=0) < 0:
            raise RowsError(f"tables: block {tables[used].min()} within a request's length, want at least 0")
        within = (positions >= 0) & (positions < lengths[request])
        slots = np.full(len(positions), -1, np.int64)
        block, offset = np.divmod(positions[within], block_tokens)
        slots[within] = tables[request[within], block] * block_tokens + offset
        on_device = upload((slots, positions.astype(np.int32), tables.astype(np.int32)), torch.device(device))
        device_slots, device_positions, device_tables = on_device
        return Rows(
            positions=positions,
            row_starts=row_starts,
            lengths=lengths,
            tables=tables,
            block_tokens=block_tokens,
            slots=device_slots,
            device_positions=device_positions,
            device_tables=device_tables,
        )

    def tiles(self, rows_per_tile: int, split_keys: int | None = None, window: int | None = None) -> Tiles:
        """Plan the work items of an attention over these rows; layers share the plan.

        Args:
            rows_per_tile: maximum rows of one request in a tile.
            split_keys: multiple at which keys of an item end; None: a tile is one item.
            window: tokens of a sliding window: a row at position p sees only keys above p - window.
        """
        key = "tiles", rows_per_tile, split_keys, window
        return self.once(key, lambda: self._plan(rows_per_tile, split_keys, window))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once per `key` and shared by all layers."""
        return once(self._cached, key, make)

    def mask(
        self, first: int, after: int, begin: int, end: int, window: int | None, times: int = 1
    ) -> torch.Tensor:
        """Return the mask of an attention on a CPU: float32 [times * rows, keys], 0 or -inf.

        Args:
            first, after: first row and row after the last, of one request.
            begin, end: first key and key after the last.
            times: number of times that all rows are repeated.
        """
        key = first, after, begin, end, window, times
        mask = self._masks.get(key)
        if mask is None:
            j, p = np.arange(begin, end), self.positions[first:after, None]
            seen = j <= p if window is None else (j <= p) & (j > p - window)
            mask = torch.zeros(seen.shape).masked_fill_(~torch.from_numpy(seen), -math.inf).repeat(times, 1)
            if sum(other.nbytes for other in self._masks.values()) + mask.nbytes <= MASK_BYTES:
                self._masks[key] = mask
        return mask

    def tile_ranges(self, rows_per_tile: int, window: int | None = None) -> TileRanges:
        """Return the rows and keys of whole tiles, on the host; arguments are those of `tiles`."""
        return self.once(("ranges", rows_per_tile, window), lambda: self._ranges(rows_per_tile, window))

    def _ranges(self, rows_per_tile: int, window: int | None) -> TileRanges:
        counts = -(-np.diff(self.row_starts) // rows_per_tile)  # tiles of each request
        request, nth = _each(counts)
        first_row = self.row_starts[request] + nth * rows_per_tile
        after_row = np.minimum(first_row + rows_per_tile, self.row_starts[request + 1])
        first_position, last_position = self.positions[first_row], self.positions[after_row - 1]
        length = self.lengths[request]
        end = np.clip(last_position + 1, 0, length)
        begin = np.zeros_like(end) if window is None else np.clip(first_position - window + 1, 0, end)
        full_end = np.clip(first_position + 1, begin, end)
        full_begin = begin if window is None else np.clip(last_position - window + 1, begin, full_end)
        return TileRanges(request, first_row, after_row, begin, full_begin, full_end, end)

    def _plan(self, rows_per_tile: int, split_keys: int | None, window: int | None) -> Tiles:
        request, first_row, after_row, begin, full_begin, full_end, end = self.tile_ranges(
            rows_per_tile, window
        )
        tile, item_begin, item_end = split_ranges(begin, end, split_keys or LARGEST_INT32)
        parts = np.bincount(tile, minlength=len(begin))  # of each tile
        split = parts > 1
        part = np.where(split[tile], np.cumsum(split[tile]) - 1, -1)
        columns = (
            request[tile],
            first_row[tile],
            after_row[tile],
            item_begin,
            np.clip(full_begin[tile], item_begin, item_end),
            np.clip(full_end[tile], item_begin, item_end),
            item_end,
            part,
        )
        order = np.argsort(item_begin - item_end, kind="stable")
        merges = np.stack([first_row, after_row, np.cumsum(parts * split) - parts, parts], 1)[split]
        work = np.stack(columns, 1)[order].astype(np.int32), merges.astype(np.int32)
        items, on_device_merges = upload(work, self.device)
        return Tiles(
            items=items,
            merges=on_device_merges,
            parts=int(parts[split].sum()),
            keys=int((item_end - item_begin).sum()),
        )


def split_ranges(
    begin: NDArray[np.int64], end: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Split ranges of keys at multiples of `size`. An empty range has one part.

    Returns:
        of each part its range, first key, and key after the last; int64 [parts].
    """
    owner, nth = _each(np.maximum(1, -(-end // size) - begin // size))
    first = (begin[owner] // size + nth) * size
    return owner, np.maximum(begin[owner], first), np.minimum(end[owner], first + size)


def _requests(
    positions: NDArray[np.int64],
    row_starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tables: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Check the arguments of `Rows.of` against each other; return the request of each row, [M]."""
    if len(row_starts) != len(lengths) + 1 or len(tables) != len(lengths):
        raise RowsError(
            f"row_starts {row_starts.shape}, tables {tables.shape}: want [{len(lengths) + 1}] and "
            f"[{len(lengths)}, blocks] for {len(lengths)} lengths"
        )
    if row_starts[0] != 0 or row_starts[-1] != len(positions) or (np.diff(row_starts) < 0).any():
        raise RowsError(f"row_starts: {row_starts}, want ascending numbers from 0 to {len(positions)}")
    if lengths.size and lengths.min() < 0:
        raise RowsError(f"lengths: {lengths.min()}, want at least 0")
    request = np.repeat(np.arange(len(lengths)), np.diff(row_starts))
    descends = (np.diff(positions) < 0) & (np.diff(request) == 0)
    if descends.any():
        i = int(descends.argmax())
        raise RowsError(
            f"positions: row {i} at {positions[i]}, then {positions[i + 1]}: want them ascending "
            "within a request"
        )
    return request


def _each(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number `counts[i]` items of each owner i: return each item's owner, and its number within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _integers(name: str, values: object, ndim: int) -> NDArray[np.int64]:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != ndim:
        kind = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise RowsError(f"{name}: {kind}, want a numpy array of integers with {ndim} axes")
    if values.size and (values.max() >= LARGEST_INT32 or values.min() < -LARGEST_INT32):
        raise RowsError(f"{name}: from {values.min()} to {values.max()}, want numbers of 32 bits")
    return values.astype(np.int64)
