"""The index of a pool's records, which each process derives from the pool's file by itself.

It follows `log`, which names a slot before its `held` changes. The file's columns may be damaged: values are
bounded when they are read.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkit.tiers.shm.file import PoolFile

PRIORITY_SHIFT = 56
"""Bits of the time of use in a rank: enough for 2**36 uses."""
LONGEST_PIN_S = 10 * 365 * 86400.0
_MOST_CHANGES = 1 << 62
_PARTS = 64
"""An eviction order has 1/_PARTS of all records: making one takes a pass over every record."""


class PoolIndex:
    """The index of the records in `slots` slots. Callers hold the pool's mutex, except to make one.

    Attributes:
        slot_of: slot of each record, by name.
    """

    def __init__(self, file: PoolFile, slots: int) -> None:
        self.slot_of: dict[str, int] = {}
        self._file = file
        self._slots = slots
        self._named: list[str | None] = []
        self._seen = 0  # number of changes that the index includes
        self._order: list[tuple[int, int]] = []  # negated ranks and slots: the last one is evicted first
        self._ordered = 0  # the order has every evictable record up to this rank
        self._read_all()  # without the mutex: changes of other processes meanwhile are logged
        self._seen = max(0, self._seen - 1)  # the last change logged may not have been made yet

    def catch_up(self) -> None:
        """Learn what changed since the last call. Mutates."""
        changes = int(self._file.changes[0])
        if changes > _MOST_CHANGES:  # damaged
            changes = self._file.changes[0] = 0
        if not 0 <= changes - self._seen <= self._slots:
            self._read_all()
            return
        for change in range(self._seen, changes):
            slot = int(self._file.log[change % self._slots])
            if slot >= self._slots:  # damaged
                self._read_all()
                return
            self.learn(slot)
        self._seen = changes

    def _read_all(self) -> None:
        """Rebuild the index from all rows."""
        self._seen = int(self._file.changes[0])
        slots = np.flatnonzero(self._file.held.copy())  # NumPy fails if an array changes while it counts
        names = [decoded(name) for name in self._file.names[slots].tolist()]
        self.slot_of = dict(zip(names, slots.tolist(), strict=True))
        self._named = [None] * self._slots
        for name, slot in self.slot_of.items():
            self._named[slot] = name
        slots = np.fromiter(self.slot_of.values(), np.int64, len(self.slot_of))
        self._parents = np.zeros(self._slots, np.uint32)
        self._parents[slots] = self._file.parents[slots]
        self._parents[self._parents > self._slots] = 0  # damaged
        self._parents[_endless(self._parents)] = 0
        self._followers = np.bincount(self._parents[slots], minlength=self._slots + 1).astype(np.int32)
        self._order, self._ordered = [], 0

    def learn(self, slot: int) -> None:
        """Update the index from the row of a slot."""
        old_name, self._named[slot] = self._named[slot], None
        if old_name is not None:
            if self.slot_of.get(old_name) == slot:
                del self.slot_of[old_name]
            parent = int(self._parents[slot])
            self._followers[parent] -= 1
            if parent:
                self._may_go(parent - 1)
        if self._file.held[slot]:
            name = decoded(self._file.names[slot])
            self.slot_of[name], self._named[slot] = slot, name
            parent = int(self._file.parents[slot])
            self._parents[slot] = parent = parent if parent <= self._slots and parent != slot + 1 else 0
            self._followers[parent] += 1
            self._may_go(slot)

    def _may_go(self, slot: int) -> None:
        """Add a slot to the eviction order if its rank belongs there; `evict` checks if it may be evicted."""
        rank = self._rank(slot)
        if self._file.held[slot] and rank <= self._ordered:
            insort(self._order, (-rank, slot))

    def _rank(self, slot: int) -> int:
        """Return the rank of a slot's record; the lowest rank is evicted first."""
        return (int(self._file.held[slot]) << PRIORITY_SHIFT) + int(self._file.last[slot])

    def hold(self, slot: int, held: int) -> None:
        """Log that a slot changes, then change `held`: after a death in between, others only read its row."""
        self._file.log[self._seen % self._slots] = slot
        self._file.changes[0] = self._seen + 1
        self._file.held[slot] = held
        self.catch_up()

    def orphan(self, slot: int) -> None:
        """Clear the parent of each record that followed this slot's old one: the new one may follow it."""
        if self._followers[slot + 1]:
            for child in np.flatnonzero((self._parents == slot + 1) & (self._file.held != 0)).tolist():
                self._file.parents[child] = 0
                self.hold(child, int(self._file.held[child]))

    def evict(self, stamp: int, reserve: Callable[[int], bool]) -> int | None:
        """Evict the first record used before `stamp` whose slot can be reserved; return the slot or None."""
        row, now = self._file, time.monotonic()
        for limit in (0, self._slots // _PARTS, self._slots):  # an order lacks slots that were in use
            if limit and not self._put_in_order(limit, stamp, now):
                return None
            found, later = None, []
            while self._order and found is None:
                negated, slot = entry = self._order.pop()
                if -negated != self._rank(slot) or self._followers[slot + 1] or pinned(row.pins[slot], now):
                    continue
                if row.last[slot] >= stamp:
                    later.append(entry)
                elif reserve(slot):
                    found = slot
            self._order += reversed(later)
            if found is not None:
                self.hold(found, 0)
                return found
        return None

    def _put_in_order(self, limit: int, stamp: int, now: float) -> bool:
        """Order at most `limit` records; return whether any evictable one was used before `stamp`."""
        row = self._file
        row.last[row.last > row.clock[0]] = 0  # damaged
        slots = np.flatnonzero((row.held != 0) & ~pinned(row.pins, now) & (self._followers[1:] == 0))
        ranks = (row.held[slots].astype(np.uint64) << np.uint64(PRIORITY_SHIFT)) + row.last[slots]
        if not (row.last[slots] < stamp).any():
            return False
        if limit < len(slots):
            lowest = np.argpartition(ranks, limit)[:limit]
            slots, ranks = slots[lowest], ranks[lowest]
        order = np.argsort(ranks)[::-1]
        ordered = zip(ranks[order].tolist(), slots[order].tolist(), strict=True)
        self._order = [(-rank, slot) for rank, slot in ordered]
        self._ordered = -self._order[0][0]
        return True


def decoded(name: bytes) -> str:
    """Return the name in a row; latin-1, as a damaged name may have any bytes."""
    return name.decode("latin-1")


def pinned(until: Any, now: float) -> Any:
    """Return whether a pin is in force, for one number or each in an array."""
    return (until > now) & (until <= now + LONGEST_PIN_S)  # otherwise it is over or damaged


def _endless(parents: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Return bool [slots]: whether a slot's ancestors end in a cycle, so that none could be evicted."""
    ancestors = np.concatenate([np.zeros(1, np.uint32), parents])
    for _ in range(len(parents).bit_length()):  # each pass goes twice as far up
        if not ancestors.any():
            break
        ancestors = ancestors[ancestors]
    endless: npt.NDArray[np.bool_] = ancestors[1:] != 0
    return endless
