"""Choose where an attention splits the keys of its tiles, by a simulated schedule on multiprocessors.

With whole tiles, the last programs of a launch may leave most multiprocessors idle. Split tiles end together,
but their parts are written and merged (https://pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkit.kernels.attention.rows import split_ranges

BALANCED = 0.96
"""Tiles stay whole if the multiprocessors are busy for at least this share of the simulated time."""
GAIN = 0.03
"""Tiles stay whole if no split saves more than this share of the simulated time."""
FLOPS_PER_S = 3.6e12
"""Flops per second of a multiprocessor in the products of `attend`: fitted to times of an H100."""
WAIT_S = 0.33e-6
"""Seconds of an iteration that do not depend on the tile, hidden by another program's; fitted, too."""
BYTES_PER_S = 3e12
"""Bytes per second of an H100's memory, rounded."""
MERGE_S = 4e-6
"""Seconds between the end of `attend` and that of a `merge` without parts."""
PROGRAM_LOOPS = 1
"""Time of a program outside of its loop, for its queries and results, in iterations of the loop."""
LEAST_LOOPS = 4
"""Minimum iterations of a part, unless its tile ends."""


class TileCost(NamedTuple):
    """Sizes of an attention that decide the time of its tiles.

    Args:
        rows, keys: sides of a tile of scores.
        units: programs per item of `Tiles.items`.
        channels: channels that a tile's products take: of K, and of V unless only the logsumexp is computed.
        v_size: channels of a row of the results; 0: only the logsumexp.
        resident: programs at a time on a multiprocessor, which are not faster alone.
    """

    rows: int
    keys: int
    units: int
    channels: int
    v_size: int
    resident: int

    def loops(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the time of programs for so many keys each, in iterations."""
        return -(-keys // self.keys) + PROGRAM_LOOPS

    def seconds(self, makespan: int, parts: int) -> float:
        """Return the time of a launch, in seconds.

        Args:
            makespan: iterations until the last program ends.
            parts: items whose results are merged.
        """
        products_s = 2 * self.rows * self.keys * self.channels / FLOPS_PER_S
        loop_s = max(WAIT_S + products_s, self.resident * products_s)
        part_bytes = 4 * parts * self.units * self.rows * (self.v_size + 1)
        return makespan * loop_s + (MERGE_S + 2 * part_bytes / BYTES_PER_S if parts else 0)


def makespan(loops: NDArray[Any], units: int, slots: int) -> int:
    """Return the iterations until the last program ends, if a slot takes the next program once it is free.

    Args:
        loops: int [W], iterations of an item's programs, in the order in which they start.
        units: programs per item, of equal length.
        slots: number of programs at a time.
    """
    alike = math.gcd(units, slots)  # so many slots always do the same
    busy_until = [0] * (slots // alike)
    for n in loops.tolist():
        for _ in range(units // alike):
            heapq.heapreplace(busy_until, busy_until[0] + n)
    return max(busy_until)


def best_split(
    begin: NDArray[np.int64], end: NDArray[np.int64], cost: TileCost, processors: int
) -> int | None:
    """Return the number of keys at whose multiples to split tiles: that with the least simulated time.

    Args:
        begin, end: int64 [tiles], first key of each tile, and key after its last.
        cost: sizes of the attention.
        processors: number of multiprocessors.

    Returns:
        `split_keys` of `Rows.tiles`.
    """
    slots = processors * cost.resident
    loops = np.sort(cost.loops(end - begin))[::-1]
    share, whole = int(loops.sum()) * cost.units / slots, makespan(loops, cost.units, slots)
    if share >= BALANCED * whole:
        return None
    best, best_s = None, (1 - GAIN) * cost.seconds(whole, 0)
    for step in _steps(max(LEAST_LOOPS, share / 4), int(loops[0])):
        tile, item_begin, item_end = split_ranges(begin, end, step * cost.keys)
        loops = np.sort(cost.loops(item_end - item_begin))[::-1]
        parts = int((np.bincount(tile)[tile] > 1).sum())
        least = max(-(-int(loops.sum()) * cost.units // slots), int(loops[0]))
        if cost.seconds(least, parts) >= best_s:  # whatever the schedule
            continue
        seconds = cost.seconds(makespan(loops, cost.units, slots), parts)
        if seconds < best_s:
            best, best_s = step * cost.keys, seconds
    return best


def _steps(least: float, after: int) -> Iterator[int]:
    """Yield the powers of two and their 1.5-folds that are at least `least` and below `after`."""
    power = 1
    while power < after:
        yield from (step for step in (power, power * 3 // 2) if least <= step < after)
        power *= 2
