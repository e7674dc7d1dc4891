"""What tiers began to hold, and let go of, until an engine's step takes it to its scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

Change = tuple[str, str, bool]
"""A tier, a record's name, and whether the tier holds it from now on."""

KEPT = 1 << 16
"""Records whose changes may wait."""
AT_ONCE = 4096
"""Changes that one step takes along."""


class Changes:
    """The last change of each record and tier, oldest first. Thread-safe; nothing waits.

    Args:
        kept: where more records wait, all changes are forgotten.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._waiting: dict[tuple[str, str], bool] = {}
        self._lost = False
        self._lock = threading.Lock()

    def note(self, tier: str, names: Sequence[str], held: bool) -> None:
        """Note that a tier holds records from now on, or does not."""
        with self._lock:
            for name in names:
                self._waiting[tier, name] = held
            if len(self._waiting) > self._kept:
                self._waiting.clear()
                self._lost = True

    @property
    def records(self) -> list[tuple[str, str]]:
        """Tiers and records whose changes wait."""
        with self._lock:
            return list(self._waiting)

    def take(self) -> tuple[list[Change], bool]:
        """The next changes, and whether some before them were forgotten."""
        with self._lock:
            taken = list(islice(self._waiting, AT_ONCE))
            lost, self._lost = self._lost, False
            return [(*key, self._waiting.pop(key)) for key in taken], lost
