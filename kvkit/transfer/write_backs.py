"""Write-backs of a load, delayed until its last read: they would compete for processor and disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvkit.staging import Lease, release_all
from kvkit.transfer.sequence import Chunks
from kvkit.transfer.write_pipeline import WritePipeline


class WriteBacks:
    """Records that one load writes back. Thread-safe.

    A context manager that starts all writes on exit. Held records occupy slots, so the writes start earlier
    if a caller waits for slots.
    """

    def __init__(self, writes: WritePipeline, chunks: Chunks, targets: Sequence[str]) -> None:
        self._staging = writes.tiers.staging
        self._writes = writes
        self._chunks = chunks
        self._targets = targets
        self._held: deque[tuple[str, int, list[Lease]]] = deque()
        # reentrant: a tier may lease a slot for a record, which calls `_reclaim` again
        self._lock = threading.RLock()

    def hold(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        """Hold a share of validated records of `tier`, from chunk `first` on, if they are written back."""
        if not self._writes.is_written_back(tier):
            return
        with self._lock:
            self._held.append((tier, first, [lease.share() for lease in leases]))
        if self._staging.waiting:
            self.start()

    def start(self) -> None:
        """Start writing the held records."""
        with self._lock:
            while self._held:
                tier, first, leases = self._held.popleft()
                try:
                    self._writes.write_back(tier, self._chunks, first, leases, self._targets)
                finally:
                    release_all(leases)

    def __enter__(self) -> WriteBacks:
        self._staging.on_shortage(self._reclaim)
        return self

    def __exit__(self, *_: object) -> None:
        self._staging.off_shortage(self._reclaim)
        self.start()

    def _reclaim(self, _: int) -> None:
        # the lock's holder starts them itself, or is in `hold` and will see the waiting caller
        if self._lock.acquire(blocking=False):
            try:
                self.start()
            finally:
                self._lock.release()
