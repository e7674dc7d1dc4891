"""The index of a store: the records that it holds, as far as this process knows, and their eviction."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kvkit.tiers.base import HeldListener, ObjectStore, TierFull, owner_of
from kvkit.tiers.eviction import state as eviction


class StoreIndex(eviction.EvictionState):
    """The records that a store holds, as far as this process knows. Its own methods are thread-safe.

    Args:
        tier: name of the tier, for error messages.
        store: the store.
        capacity_bytes, policy, quota_bytes: as for `EvictionState`.

    Attributes:
        compressed: records found compressed in a tier without a codec.
        evicted: number of records evicted so far.
    """

    def __init__(
        self, tier: str, store: ObjectStore, capacity_bytes: int | None, policy: str, quota_bytes: int | None
    ) -> None:
        super().__init__(capacity_bytes, policy, quota_bytes)
        self.compressed: set[str] = set()
        self.evicted = 0
        self._tier = tier
        self._store = store
        self._held_listener: HeldListener = lambda names, held: None
        self._lock = threading.Lock()
        self._writing: Counter[str] = Counter()
        self._written: set[str] = set()  # names in `_writing` that another writer has completed
        self._deleting: set[str] = set()  # evicted, not put again, and not deleted yet
        self._tracked: list[set[str]] = []  # per `missing_of` block, the names not found since it began

    def subscribe(self, held_listener: HeldListener) -> None:
        """Report records put, found, evicted and deleted from now on. Mutates."""
        self._held_listener = held_listener

    def report_all(self) -> None:
        """Report every record of the index to the listener."""
        with self._lock:
            self._held_listener(list(self.entries), True)

    def names(self) -> tuple[str, ...]:
        """Return the names of all records."""
        with self._lock:
            return tuple(self.entries)

    def extend_run(self, names: Sequence[str], count: int) -> int:
        """Return the number of leading `names` in the index, given that the store holds the first `count`."""
        with self._lock:
            known, writing = self.entries, self._writing
            while count < len(names) and names[count] in known and names[count] not in writing:
                count += 1
        return count

    def use_run(self, names: Sequence[str]) -> int:
        """Return the length of the leading run of `names` (a chain) held, and mark it as used. Mutates."""
        with self._lock:
            run = eviction.use_run(self, names, time.monotonic())
            self._held_listener(names[:run], True)
            return run

    def pin(self, names: Sequence[str], seconds: float) -> int:
        """Protect `names` from eviction for `seconds`; return how many of them are held. Mutates."""
        with self._lock:
            return eviction.pin(self, names, time.monotonic() + seconds)

    def prioritise(self, names: Sequence[str], priority: int) -> None:
        """Set the eviction priority of those of `names` that are held. Mutates."""
        with self._lock:
            eviction.prioritise(self, names, priority)

    def note_request(self, names: Sequence[str]) -> None:
        """Tell the policy that a request's prompt is `names`, a chain. Mutates."""
        with self._lock:
            eviction.note_request(self, names, time.monotonic())

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:
        """Tell the policy that the request with these records was answered. Mutates."""
        with self._lock:
            eviction.note_answer(self, names, tool_call)

    def note(self, records: Iterable[tuple[str, int]]) -> None:
        """Add records, (name, bytes), even beyond the capacity: the next put makes room. Mutates."""
        with self._lock:
            for name, size in records:
                self._note(name, size)

    @contextmanager
    def reserved(self, name: str, size: int, parent: str | None, largest: int) -> Iterator[None]:
        """Make room for a record while the block writes it; until then lookups do not count it as held.

        Args:
            largest: bytes counted for a victim that can neither be deleted nor inspected.

        Raises:
            TierFull: the record does not fit.
            OSError: a victim could not be deleted.
        """
        with self._lock:
            added, victims = eviction.add_run(
                self,
                (name,),
                size,
                parent=parent,
                owner=owner_of(name),
                now=time.monotonic(),
                may_evict=lambda victim: victim not in self._writing,
            )
            if not added:
                raise TierFull(
                    f"tier {self._tier!r}: {name}, {size} bytes, does not fit "
                    f"capacity_bytes={self.capacity_bytes}"
                )
            self._deleting.update(victims)
            self._deleting.discard(name)
            self._held_listener(victims, False)
            self._writing[name] += 1
        written = False
        try:
            with ExitStack() as evictions:
                for victim in reversed(victims):
                    evictions.callback(self._evict, victim, largest)
            yield
            written = True
        finally:
            with self._lock:
                self._writing[name] -= 1
                if written:
                    self._written.add(name)
                    self._report_held(name)
                if not self._writing[name]:
                    del self._writing[name]
                    if name not in self._written:
                        eviction.remove(self, name)
                    self._written.discard(name)

    def _evict(self, victim: str, largest: int) -> None:
        """Delete a record that the index evicted; if that fails, put it back into the index."""
        try:
            self._store.delete(victim)
        except OSError:
            size: int | None = largest  # unless the store reports its size
            with suppress(OSError):
                size = self._store.size(victim)
            with self._lock:
                self._deleting.discard(victim)
                if size is not None:
                    self._note(victim, size)
            raise
        with self._lock:
            self.evicted += 1
            if victim in self._deleting:  # the index has it only if a lookup found it before the deletion
                self._deleting.remove(victim)
                eviction.remove(self, victim)
                self._held_listener((victim,), False)

    def _note(self, name: str, size: int) -> None:
        """Add a record of the store. The caller holds the lock."""
        eviction.note(self, name, size, owner=owner_of(name))
        self._report_held(name)

    def _report_held(self, name: str) -> None:
        """Report that the store holds a record. The caller holds the lock."""
        for missing in self._tracked:
            missing.discard(name)
        self._held_listener((name,), True)

    @contextmanager
    def missing_of(self, names: Iterable[str]) -> Iterator[set[str]]:
        """Yield a set that keeps those of `names` that nobody has put or found since the block began."""
        missing = set(names)
        with self._lock:
            self._tracked.append(missing)
        try:
            yield missing
        finally:
            with self._lock:
                self._tracked = [tracked for tracked in self._tracked if tracked is not missing]

    @contextmanager
    def forget_if_missing(self, name: str) -> Iterator[None]:
        """Forget a record if the block finds it missing, unless it was put meanwhile."""
        with self.missing_of((name,)) as missing:
            try:
                yield
            except FileNotFoundError:
                self.forget(missing)
                raise

    def forget(self, missing: set[str]) -> None:
        """Forget names from `missing_of`; those that are being written keep their room. Mutates."""
        with self._lock:
            self.compressed -= missing
            for name in missing:
                if name in self._writing:
                    self._written.discard(name)
                else:
                    eviction.remove(self, name)
            self._held_listener(list(missing), False)
