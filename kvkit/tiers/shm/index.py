"""The index of a pool's records, which each process derives from the pool's file by itself.

It follows `log`, to which a process appends a slot before it changes the slot's `held`. The file's columns
may be damaged, so values are bounded when they are read: damage costs records, not slots.
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
_ORDERED_SHARE = 64
"""An eviction order has 1/_ORDERED_SHARE of all records, because making one takes a pass over them all."""


class PoolIndex:
    """The index of the records in `slots` slots. Callers hold the pool's mutex, except for the constructor.

    Attributes:
        slot_of: slot of each record, by name.
    """

    def __init__(self, file: PoolFile, slots: int) -> None:
        self.slot_of: dict[str, int] = {}
        self._file = file
        self._slots = slots
        self._name_of: list[str | None] = []
        self._seen = 0  # number of changes that the index includes
        self._order: list[tuple[int, int]] = []  # negated ranks and slots: the last one is evicted first
        self._ordered = 0  # the order has every evictable record up to this rank
        self._read_all()  # without the mutex: changes of other processes meanwhile are logged
        self._seen = max(0, self._seen - 1)  # the last change logged may not have been made yet

    def catch_up(self) -> None:
        """Update the index by the changes logged since the last call. Mutates."""
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
            self.update_slot(slot)
        self._seen = changes

    def _read_all(self) -> None:
        """Rebuild the index from all rows."""
        self._seen = int(self._file.changes[0])
        slots = np.flatnonzero(self._file.held.copy())  # NumPy fails if an array changes while it counts
        names = [decoded(name) for name in self._file.names[slots].tolist()]
        self.slot_of = dict(zip(names, slots.tolist(), strict=True))
        self._name_of = [None] * self._slots
        for name, slot in self.slot_of.items():
            self._name_of[slot] = name
        slots = np.fromiter(self.slot_of.values(), np.int64, len(self.slot_of))
        self._parents = np.zeros(self._slots, np.uint32)
        self._parents[slots] = self._file.parents[slots]
        self._parents[self._parents > self._slots] = 0  # damaged
        self._parents[_in_cycles(self._parents)] = 0
        self._followers = np.bincount(self._parents[slots], minlength=self._slots + 1).astype(np.int32)
        self._order, self._ordered = [], 0

    def update_slot(self, slot: int) -> None:
        """Update the index from the row of a slot."""
        old_name, self._name_of[slot] = self._name_of[slot], None
        if old_name is not None:
            if self.slot_of.get(old_name) == slot:
                del self.slot_of[old_name]
            parent = int(self._parents[slot])
            self._followers[parent] -= 1
            if parent:
                self._add_to_order(parent - 1)
        if self._file.held[slot]:
            name = decoded(self._file.names[slot])
            self.slot_of[name], self._name_of[slot] = slot, name
            parent = int(self._file.parents[slot])
            self._parents[slot] = parent = parent if parent <= self._slots and parent != slot + 1 else 0
            self._followers[parent] += 1
            self._add_to_order(slot)

    def _add_to_order(self, slot: int) -> None:
        """Add a slot to the eviction order if that covers its rank. `evict` checks the other conditions."""
        rank = self._rank(slot)
        if self._file.held[slot] and rank <= self._ordered:
            insort(self._order, (-rank, slot))

    def _rank(self, slot: int) -> int:
        """Return the rank of a slot's record; the lowest rank is evicted first."""
        return (int(self._file.held[slot]) << PRIORITY_SHIFT) + int(self._file.last[slot])

    def set_held(self, slot: int, held: int) -> None:
        """Log that a slot changes, then set `held`: if this process dies in between, nothing has changed."""
        self._file.log[self._seen % self._slots] = slot
        self._file.changes[0] = self._seen + 1
        self._file.held[slot] = held
        self.catch_up()

    def clear_children(self, slot: int) -> None:
        """Clear the parent of each record that followed a slot's old record: the slot gets a new one."""
        if self._followers[slot + 1]:
            for child in np.flatnonzero((self._parents == slot + 1) & (self._file.held != 0)).tolist():
                self._file.parents[child] = 0
                self.set_held(child, int(self._file.held[child]))

    def evict(self, stamp: int, reserve: Callable[[int], bool]) -> int | None:
        """Evict the first record used before `stamp` whose slot can be reserved; return the slot or None."""
        columns, now = self._file, time.monotonic()
        for limit in (0, self._slots // _ORDERED_SHARE, self._slots):  # an order lacks slots that were in use
            if limit and not self._make_order(limit, stamp, now):
                return None
            victim, later = None, []
            while self._order and victim is None:
                negated, slot = entry = self._order.pop()
                if -negated != self._rank(slot) or self._followers[slot + 1]:
                    continue
                if pinned(columns.pins[slot], now):
                    continue
                if columns.last[slot] >= stamp:
                    later.append(entry)
                elif reserve(slot):
                    victim = slot
            self._order += reversed(later)
            if victim is not None:
                self.set_held(victim, 0)
                return victim
        return None

    def _make_order(self, limit: int, stamp: int, now: float) -> bool:
        """Order at most `limit` records; return whether any evictable one was used before `stamp`."""
        held, last = self._file.held, self._file.last
        last[last > self._file.clock[0]] = 0  # damaged
        slots = np.flatnonzero((held != 0) & ~pinned(self._file.pins, now) & (self._followers[1:] == 0))
        ranks = (held[slots].astype(np.uint64) << np.uint64(PRIORITY_SHIFT)) + last[slots]
        if not (last[slots] < stamp).any():
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


def _in_cycles(parents: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Return bool [slots], true if a slot's ancestors end in a cycle, so that none could be evicted."""
    ancestors = np.concatenate([np.zeros(1, np.uint32), parents])
    for _ in range(len(parents).bit_length()):  # each pass doubles the number of generations
        if not ancestors.any():
            break
        ancestors = ancestors[ancestors]
    in_cycles: npt.NDArray[np.bool_] = ancestors[1:] != 0
    return in_cycles
