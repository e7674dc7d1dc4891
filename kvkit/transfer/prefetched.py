"""Prefetched records, kept in slots until a load takes them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvkit.staging import Lease, Staging, release_all


class Prefetched:
    """Verified records in at most half of the slots of `staging`. Thread-safe.

    The oldest are released when a caller waits for a slot. A prefetch displaces records of earlier ones,
    oldest first, but never its own: a sequence's first chunks are needed first.
    """

    def __init__(self, staging: Staging) -> None:
        self.slots = staging.slots // 2
        staging.on_shortage(self.release)
        self._leases: OrderedDict[str, tuple[object, Lease]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, name: str, lease: Lease, prefetch: object) -> None:
        """Keep a share of a record, if there is room."""
        with self._lock:
            removed = [self._leases.pop(name)] if name in self._leases else []
            if len(self._leases) >= self.slots:
                displaced = next((n for n, (owner, _) in self._leases.items() if owner is not prefetch), None)
                removed += [] if displaced is None else [self._leases.pop(displaced)]
            if len(self._leases) < self.slots:
                self._leases[name] = prefetch, lease.share()
        release_all(old for _, old in removed)

    def take(self, name: str) -> Lease | None:
        """Remove and return the lease of a record; None if it is not here."""
        with self._lock:
            return self._leases.pop(name, (None, None))[1]

    def release(self, count: int) -> None:
        """Release the `count` oldest records."""
        with self._lock:
            removed = [self._leases.popitem(last=False)[1][1] for _ in range(min(count, len(self._leases)))]
        release_all(removed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if more slots are kept than allowed, which is a defect in kvkit."""
        with self._lock:
            assert len(self._leases) <= self.slots, f"{len(self._leases)} of {self.slots} slots are kept"

    def close(self) -> None:
        """Release all records and keep no more: a prefetch that outlasts its cache finds no room."""
        with self._lock:
            removed = [lease for _, lease in self._leases.values()]
            self._leases.clear()
            self.slots = 0
        release_all(removed)
