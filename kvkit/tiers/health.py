"""Whether a tier is worth asking: one that keeps failing is passed over for a while."""

from __future__ import annotations

FAILURES_TO_PAUSE, PAUSE_S = 3, 10.0
"""A tier that failed this often in a row is passed over for this long, in seconds."""


class Health:
    """Failures of one tier. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def usable(self, now: float) -> bool:
        return now >= self._until

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= FAILURES_TO_PAUSE:
            self._until = now + PAUSE_S

    def worked(self) -> None:
        self._failures = 0
