"""A queue of changes to what tiers hold: an engine's step takes them to its scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

Change = tuple[str, str, bool]
"""(tier, name of a record, True if the tier holds the record from now on)."""

MAX_QUEUED = 1 << 16
"""Maximum number of queued changes."""
MAX_TAKEN = 4096
"""Maximum number of changes that one step takes."""


class Changes:
    """The last change of each record and tier, oldest first. Thread-safe; nothing blocks.

    Args:
        max_queued: maximum number of queued changes; with more, all are forgotten.
    """

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued
        self._queued: dict[tuple[str, str], bool] = {}
        self._lost = False
        self._lock = threading.Lock()

    def note(self, tier: str, names: Sequence[str], held: bool) -> None:
        """Note that a tier holds records from now on (`held`), or no longer."""
        with self._lock:
            for name in names:
                self._queued[tier, name] = held
            if len(self._queued) > self._max_queued:
                self._queued.clear()
                self._lost = True

    @property
    def records(self) -> list[tuple[str, str]]:
        """(tier, record) pairs with a queued change."""
        with self._lock:
            return list(self._queued)

    def take(self) -> tuple[list[Change], bool]:
        """Take up to `MAX_TAKEN` changes. Return them, and whether earlier changes were forgotten."""
        with self._lock:
            keys = list(islice(self._queued, MAX_TAKEN))
            lost, self._lost = self._lost, False
            return [(*key, self._queued.pop(key)) for key in keys], lost
