"""The circuit breaker of a tier: a failing tier is skipped for a while, then tried by one caller.

    ok -- failures in a row, or a timeout --> open -- the backoff ends --> half-open -- a trial works --> ok
                                                ^------- a trial fails: a longer backoff -------'

One unreadable record is weak evidence against its tier: in a row of failures it counts once, however often it
is tried. Several unreadable records count separately.

A tier that is ok is reported as slow while its latency is several times the earlier one; nothing else depends
on that.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from typing import Literal

HealthState = Literal["ok", "slow", "open", "half-open"]

FAILURES_TO_PAUSE = 3
"""Failures in a row that open the circuit. One timeout suffices: it costs a request its whole deadline."""

PAUSES_S = (5.0, 10.0, 20.0, 40.0, 80.0, 120.0)
"""Backoff, in seconds: the first time, after one failed trial, after two, ..."""

TRIAL_S = 30.0
"""Time in seconds after which a trial that has reported no result is over, and another caller may try."""

SLOW_FACTOR, RECENT, REMEMBERED = 4.0, 8, 64
"""A tier is slow if the median of its RECENT last latencies is SLOW_FACTOR times that of earlier ones."""

CURRENT_S = 60.0
"""Age in seconds up to which a latency describes the tier's current speed."""


class Health:
    """The circuit breaker of one tier. Thread-safe; `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0  # in a row, while the circuit is closed
        self._unreadable: set[str] = set()  # unreadable records among these failures
        self._pauses = 0  # backoffs in a row; 0 while the circuit is closed
        self._paused_until = 0.0  # end of the backoff or of the pending trial
        self._trial_pending = False
        self._latencies: deque[float] = deque(maxlen=REMEMBERED)  # seconds per record
        self._measured_at = 0.0  # time of the last latency

    def usable(self, now: float) -> bool:
        """Return whether to use the tier now. If half-open, one caller gets True and must report a result."""
        with self._lock:
            if self._pauses:
                if now < self._paused_until:
                    return False
                self._trial_pending, self._paused_until = True, now + TRIAL_S
            return True

    def worked(self, now: float, seconds: float | None = None) -> None:
        """Record a success and close the circuit, unless it is open.

        While it is open, results come from operations started before the backoff and prove nothing.

        Args:
            seconds: time per record, if known.
        """
        with self._lock:
            if not self._may_decide(now):
                return
            self._failures, self._pauses, self._paused_until, self._trial_pending = 0, 0, 0.0, False
            self._unreadable.clear()
            if seconds is not None:
                self._latencies.append(seconds)
                self._measured_at = now

    def answered(self, now: float) -> None:
        """Record that no record was moved: the tier only answered, or was not used after all.

        A trial ends undecided, and the next caller may try. An index can answer for a disk that is gone, so
        this does not interrupt a row of failures.
        """
        with self._lock:
            if self._trial_pending:
                self._trial_pending, self._paused_until = False, now

    def failed(self, now: float, timed_out: bool = False, unreadable: str | None = None) -> None:
        """Record that the tier reported an error.

        Args:
            timed_out: True if the tier missed a deadline.
            unreadable: name of a record that may be the cause; it counts once in a row of failures.
        """
        with self._lock:
            if not self._may_decide(now) or unreadable in self._unreadable:
                return
            self._failures += 1
            if unreadable is not None:
                self._unreadable.add(unreadable)
            if self._pauses or timed_out or self._failures >= FAILURES_TO_PAUSE:
                self._paused_until = now + PAUSES_S[min(self._pauses, len(PAUSES_S) - 1)]
                self._pauses += 1
                self._failures, self._trial_pending = 0, False
                self._unreadable.clear()

    def record_s(self, now: float) -> float | None:
        """Return the recent seconds per record; None if unknown until another record is read."""
        with self._lock:
            if not self._latencies or now - self._measured_at > CURRENT_S:
                return None
            return median(list(self._latencies)[-RECENT:])

    def state(self, now: float) -> HealthState:
        """Return the state for metrics and reports. Does not mutate."""
        with self._lock:
            if self._pauses:
                return "half-open" if self._may_decide(now) else "open"
            latencies = list(self._latencies)
        before, recent = latencies[:-RECENT], latencies[-RECENT:]
        slow = len(before) >= RECENT and median(recent) >= SLOW_FACTOR * median(before)
        return "slow" if slow else "ok"

    def _may_decide(self, now: float) -> bool:
        """Return whether a result counts: not during the backoff."""
        return not self._pauses or self._trial_pending or now >= self._paused_until
