"""A batch of records in slots, and its way through a tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.testing.contract import record_names


class Batch:
    """Slots that were touched and filled, and names for what is in them."""

    def __init__(self, records: int, record_bytes: int) -> None:
        self.names = record_names(records)
        self.staging = Staging(record_bytes, records)
        assert self.staging.ready.wait(300)
        self.leases = self.staging.acquire(records, 0, at_least=records)
        rng = np.random.default_rng(0)
        for lease in self.leases:
            lease.array[:] = rng.integers(0, 256, len(lease.array), np.uint8)
            lease.used = record_bytes

    def move(self, start: Callable[[Sequence[str], Sequence[Lease], Any], None]) -> None:
        """The batch through a tier's get or put, until the last record completes."""
        left = len(self.names)
        lock, finished = threading.Lock(), threading.Event()

        def on_complete(name: str, error: BaseException | None) -> None:
            nonlocal left
            assert error is None, error
            with lock:
                left -= 1
                if left == 0:
                    finished.set()

        start(self.names, self.leases, on_complete)
        assert finished.wait(300)

    def release(self) -> None:
        """Give the slots back."""
        release_all(self.leases)
        self.staging.close()
