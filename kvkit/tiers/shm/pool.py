"""A pool of records in shared memory, for all processes of one user that open its file.

There is no daemon, and a process may die at any instruction. A slot holds a record if its byte in `held` is
not 0; that byte is written last, so it is always valid. Any process that can lock an empty slot's byte may
take the slot: when a process dies, the kernel releases its locks on slots that it read or wrote. Each process
derives all other state by itself (`kvkit.tiers.shm.index`).

Only records that no other record follows are evicted: those of the lowest priority first, among them the
least recently used. The first record of a run counts as used last, and a new one as used before its parent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from kvkit.staging import Arena, Lease
from kvkit.tiers.base import TierError, TierFull, too_large
from kvkit.tiers.eviction.policies import NORMAL, prevails
from kvkit.tiers.folder import check_name
from kvkit.tiers.shm.file import PoolFile
from kvkit.tiers.shm.index import LONGEST_PIN_S, PRIORITY_SHIFT, PoolIndex, decoded, pinned

_MUTEX_TIMEOUT_S = 2.0
"""Timeout, in seconds, for locking the mutex, which a stopped process may hold."""
_CLOCK_STEP = 1 << 20
"""Step of the clock, and the maximum number of records in a run."""
_MOST_REFUSED = 1024  # names


class Pool(Arena):
    """The pool in the file at `path`. Thread-safe and process-safe.

    Every method but `close` and `close_when_unused` raises `TierError` if the pool is closed or locked by a
    stopped process, and its subclass `PoolRemoved` if its file was removed.

    Args, Raises: as for `PoolFile`.

    Attributes:
        evicted: number of records that this process evicted.
    """

    def __init__(self, path: str, slot_bytes: int, capacity_bytes: int) -> None:
        self._file = PoolFile(path, slot_bytes, capacity_bytes)
        super().__init__(self._file.records, self._file.slot_bytes, f"the pool {path}")
        self.evicted = 0
        self._lock = threading.Lock()
        self._next_empty = 0  # slot at which the next search for an empty one starts
        self._unpublished: dict[str, int] = {}  # slots that this process has taken and not yet published
        self._refused: dict[str, None] = {}  # names that found no room, oldest first
        self._closing = False
        self._index = PoolIndex(self._file, self.slots)

    def use_run(self, names: Sequence[str]) -> int:
        """Return the length of the leading run of `names` (a chain) held, and mark it as used. Mutates."""
        with self._locked():
            run: list[int] = []
            for name in names[:_CLOCK_STEP]:
                slot = self._index.slot_of.get(name)
                if slot is None:
                    break
                run.append(slot)
            if run:
                self._file.last[run] = np.uint64(self._tick()) - np.arange(len(run), dtype=np.uint64)
            return len(run)

    def lend(self, name: str) -> Lease | None:
        """Lease the slot of a record, or return None if it is not held. Nobody writes to a leased slot."""
        self._fork_guard.check()
        with self._lock:  # no mutex: once the slot is locked, its row shows whether it still has the record
            lease = self._lend(name)
        if lease is not None:
            return lease
        with self._locked():
            lease = self._lend(name)
            if lease is None and name in self._index.slot_of:
                self._index.update_slot(self._index.slot_of[name])  # a damaged log lacks the change
            return lease

    def _lend(self, name: str) -> Lease | None:
        """Lease the slot that the index has for a record; None if it has none, or the slot another record."""
        slot = self._index.slot_of.get(name)
        if slot is None or self._closed or not self._reserve(slot, shared=True):
            return None
        lease = Lease(self, slot)
        if not self._file.held[slot] or decoded(self._file.names[slot]) != name:
            lease.release()
            return None
        self.used[slot] = self._record_bytes(slot)
        return lease

    def take(self, name: str, size: int, parent: str | None) -> Lease | None:
        """Lease a slot for a record of `size` bytes, to fill and `publish`; None if the record is held.

        Until it is published, the slot belongs to this process. It is free again if its lease is released or
        its process dies.

        Raises:
            TierFull: there is no room, and no record may be evicted for this one.
            DamagedObject: the record is larger than a slot.
            TierError: the name is invalid.
        """
        check_name(name)
        if size > self.slot_bytes:
            raise too_large(name, size, self.slot_bytes)
        with self._locked():
            if name in self._index.slot_of:
                return None
            parent_slot = self._index.slot_of.get(parent or "", self._unpublished.get(parent or ""))
            stamp = self._tick() if parent_slot is None else self._time_before(parent_slot)
            slot = None if parent_slot is None and parent in self._refused else self._reserve_slot(stamp)
            if slot is None:
                self._refused[name] = None  # records that follow it are useless until it is held
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
                raise TierFull(f"{self._file.path}: {name} does not fit")
            self._refused.pop(name, None)
            self._unpublished[name] = slot
            self._index.clear_children(slot)
            columns = self._file
            columns.names[slot], columns.used[slot] = name.encode(), size
            columns.last[slot], columns.pins[slot] = stamp, 0
            columns.parents[slot] = 0 if parent_slot is None else parent_slot + 1
            self.used[slot] = size
            return Lease(self, slot)

    def publish(self, name: str, lease: Lease) -> None:
        """Make the record in a slot from `take` visible to all processes, and release the lease."""
        try:
            with self._locked():
                if name not in self._index.slot_of:
                    self._index.set_held(lease.slot, 1 + NORMAL)
                lease.release()
        finally:
            self._unpublished.pop(name, None)

    def remove(self, names: Sequence[str]) -> None:
        """Remove records; the slots of leased ones become free when the leases are released."""
        with self._locked():
            for name in names:
                if name in self._index.slot_of:
                    self._index.set_held(self._index.slot_of[name], 0)

    def pin(self, names: Sequence[str], seconds: float) -> int:
        """Protect `names` from eviction for `seconds`; return how many of them are held."""
        with self._locked():
            slots = [self._index.slot_of[name] for name in names if name in self._index.slot_of]
            now, pins = time.monotonic(), self._file.pins[slots]
            until = now + min(seconds, LONGEST_PIN_S)
            self._file.pins[slots] = np.where(pinned(pins, now), np.maximum(pins, until), until)
            return len(slots)

    def prioritise(self, names: Sequence[str], priority: int) -> None:
        """Set the eviction priority of those of `names` that are held, as in `Tier`, for all processes."""
        with self._locked():
            for name in names:
                slot = self._index.slot_of.get(name)
                if slot is not None and prevails(priority, int(self._file.held[slot]) - 1):
                    self._index.set_held(slot, 1 + priority)

    def size(self, name: str) -> int | None:
        """Return the bytes of a record, None if it is not held."""
        with self._locked():
            slot = self._index.slot_of.get(name)
            return None if slot is None else self._record_bytes(slot)

    def listed(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every record."""
        with self._locked():
            sizes = np.minimum(self._file.used[list(self._index.slot_of.values())], self.slot_bytes)
            return list(zip(self._index.slot_of, sizes.tolist(), strict=True))

    def close(self) -> None:
        super().close()
        with self._lock, self._changed:
            self._closing = True
            self._close_if_unused()

    def close_when_unused(self) -> None:
        """Refuse new leases, wait until all are released (a GPU may still read the slots), then close."""
        with self._lock, self._changed:
            self._closed = True
        with self._changed:
            self._changed.wait_for(lambda: not any(self._references))
        self.close()

    def _close_if_unused(self) -> None:
        """Close the file if the pool is closed and the last lease is released."""
        if self._closing and not any(self._references):
            self._file.close()

    def _release(self, lease: Lease) -> None:
        self._fork_guard.check()
        with self._changed:
            if self._drop_reference(lease):
                if not self._file.held[lease.slot]:  # nobody published it
                    self._unpublished.pop(decoded(self._file.names[lease.slot]), None)
                self._file.unlock(lease.slot)
                self._close_if_unused()
                self._changed.notify_all()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the mutex during the block, with the index up to date."""
        self._fork_guard.check()
        with self._lock:
            if self._closed:
                raise TierError(f"{self._file.path} is closed")
            self._file.check()
            self._file.lock_mutex(_MUTEX_TIMEOUT_S)
            try:
                self._index.catch_up()
                yield
            finally:
                self._file.unlock_mutex()

    def _tick(self) -> int:
        """Advance the clock; return a time later than all others."""
        clock = int(self._file.clock[0]) + _CLOCK_STEP
        if clock >> PRIORITY_SHIFT:  # damaged
            clock = _CLOCK_STEP
        self._file.clock[0] = clock
        return clock

    def _time_before(self, slot: int) -> int:
        """Return the time of use for a new record that follows the one in a slot."""
        return max(0, min(int(self._file.last[slot]), int(self._file.clock[0])) - 1)

    def _record_bytes(self, slot: int) -> int:
        """Return the bytes of the record in a slot."""
        return min(int(self._file.used[slot]), self.slot_bytes)

    def _reserve_slot(self, stamp: int) -> int | None:
        """Reserve an empty slot, or evict a record used before `stamp`; return the slot or None."""
        held = self._file.held
        for first, stop in (self._next_empty, self.slots), (0, self._next_empty):
            while first < stop and len(self._index.slot_of) + len(self._unpublished) < self.slots:
                slot = first + int(held[first:stop].argmin())
                if held[slot]:
                    break
                first = slot + 1
                if self._reserve(slot, shared=False):
                    self._next_empty = first
                    return slot
                # another process fills it, or its old record is still read
        victim = self._index.evict(stamp, partial(self._reserve, shared=False))
        if victim is not None:
            self.evicted += 1
        return victim

    def _reserve(self, slot: int, *, shared: bool) -> bool:
        """Lock a slot to read (`shared`) or write and count a reference; return False if it is in use."""
        with self._changed:
            if not self._references[slot]:
                if not self._file.lock(slot, shared=shared):
                    return False
            elif not shared:
                return False
            self._references[slot] += 1
            return True
