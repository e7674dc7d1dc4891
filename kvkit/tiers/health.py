"""A circuit breaker per tier: one that fails is passed over for a while, then tried by one caller.

    ok -- failures in a row, or a timeout --> open -- the pause is over --> half-open -- a trial works --> ok
                                                ^------- a trial fails: a longer pause ---------'

A record that cannot be read says little of its tier: in a row of failures it counts once, however often it is
tried. Others that cannot be read either say more.

A tier that is ok is called slow while it takes several times as long as it used to; that only informs.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from typing import Literal

HealthState = Literal["ok", "slow", "open", "half-open"]

FAILURES_TO_PAUSE = 3
"""Failures in a row that open the circuit. One timeout does: it costs a request its whole deadline."""

PAUSES_S = (5.0, 10.0, 20.0, 40.0, 80.0, 120.0)
"""How long a tier is passed over, in seconds: the first time, after one failed trial, after two, ..."""

TRIAL_S = 30.0
"""A trial of which nothing was heard for so long, in seconds, is lost, and another caller may try."""

SLOW_FACTOR, RECENT, REMEMBERED = 4.0, 8, 64
"""Slow: the median of the RECENT last latencies is SLOW_FACTOR times that of those before."""

CURRENT_S = 60.0
"""For so long, in seconds, a latency says how fast the tier is now."""


class Health:
    """The circuit of one tier. Thread-safe; `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0  # in a row, while it is closed
        self._unreadable: set[str] = set()  # the records among them
        self._pauses = 0  # in a row; 0 while it is closed
        self._until = 0.0  # when the pause, or the trial that is under way, is over
        self._trial = False  # whether one is under way
        self._latencies: deque[float] = deque(maxlen=REMEMBERED)  # seconds a record
        self._measured = 0.0  # when the last of them was

    def usable(self, now: float) -> bool:
        """Whether to use the tier now. In a half-open circuit one caller gets yes, and must report."""
        with self._lock:
            if self._pauses:
                if now < self._until:
                    return False
                self._trial, self._until = True, now + TRIAL_S
            return True

    def worked(self, now: float, seconds: float | None = None) -> None:
        """Records were moved: closed, unless it is open. What was begun before the pause proves nothing.

        `seconds` is the time per record, where it is known.
        """
        with self._lock:
            if not self._may_decide(now):
                return
            self._failures, self._pauses, self._until, self._trial = 0, 0, 0.0, False
            self._unreadable.clear()
            if seconds is not None:
                self._latencies.append(seconds)
                self._measured = now

    def answered(self, now: float) -> None:
        """An answer moved no record, or the caller had nothing to move after all: a trial ends undecided.

        The next caller may try. An index can answer for a disk that is gone, so this does not interrupt a row
        of failures.
        """
        with self._lock:
            if self._trial:
                self._trial, self._until = False, now

    def failed(self, now: float, timed_out: bool = False, unreadable: str | None = None) -> None:
        """The tier reported an error, or (`timed_out`) missed a deadline.

        `unreadable` names a record that may be why: it counts once.
        """
        with self._lock:
            if not self._may_decide(now) or unreadable in self._unreadable:
                return
            self._failures += 1
            if unreadable is not None:
                self._unreadable.add(unreadable)
            if self._pauses or timed_out or self._failures >= FAILURES_TO_PAUSE:
                self._until = now + PAUSES_S[min(self._pauses, len(PAUSES_S) - 1)]
                self._pauses += 1
                self._failures, self._trial = 0, False
                self._unreadable.clear()

    def record_s(self, now: float) -> float | None:
        """Seconds that a record takes of late; None: not known, and only known by reading one."""
        with self._lock:
            if not self._latencies or now - self._measured > CURRENT_S:
                return None
            return median(list(self._latencies)[-RECENT:])

    def state(self, now: float) -> HealthState:
        """For metrics and people. Changes nothing."""
        with self._lock:
            if self._pauses:
                return "half-open" if self._may_decide(now) else "open"
            latencies = list(self._latencies)
        before, recent = latencies[:-RECENT], latencies[-RECENT:]
        slow = len(before) >= RECENT and median(recent) >= SLOW_FACTOR * median(before)
        return "slow" if slow else "ok"

    def _may_decide(self, now: float) -> bool:
        """Whether a result counts: not while the pause lasts."""
        return not self._pauses or self._trial or now >= self._until
