"""Changes of what tiers hold, queued until an engine's step takes them to its scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

Change = tuple[str, str, bool]
"""(tier, name of a record, True if the tier holds the record from now on)."""

KEPT = 1 << 16
"""Maximum number of queued changes."""
AT_ONCE = 4096
"""Maximum number of changes that one step takes."""


class Changes:
    """The last change of each record and tier, oldest first. Thread-safe; nothing blocks.

    Args:
        kept: maximum number of queued changes; with more, all are forgotten.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._waiting: dict[tuple[str, str], bool] = {}
        self._lost = False
        self._lock = threading.Lock()

    def note(self, tier: str, names: Sequence[str], held: bool) -> None:
        """Note that a tier holds records from now on (`held`), or no longer."""
        with self._lock:
            for name in names:
                self._waiting[tier, name] = held
            if len(self._waiting) > self._kept:
                self._waiting.clear()
                self._lost = True

    @property
    def records(self) -> list[tuple[str, str]]:
        """(tier, record) pairs with a queued change."""
        with self._lock:
            return list(self._waiting)

    def take(self) -> tuple[list[Change], bool]:
        """Take the next changes; return them, and whether earlier changes were forgotten."""
        with self._lock:
            keys = list(islice(self._waiting, AT_ONCE))
            lost, self._lost = self._lost, False
            return [(*key, self._waiting.pop(key)) for key in keys], lost
