"""A circuit breaker per tier: one that fails is passed over for a while, then tried by one caller.

    ok -- failures in a row, or a timeout --> open -- the pause is over --> half-open -- a trial works --> ok
                                                ^------- a trial fails: a longer pause ---------'

A record that cannot be read says little of its tier: in a row of failures it counts once, however often it is
tried. Others that cannot be read either say more.

A tier that is ok is called slow while it takes several times as long as it used to; that only informs.
`Circuit` and the functions on it are pure; `Health` keeps one for a tier.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Circuit:
    """What is known of a tier. Times are the caller's clock, in seconds.

    Attributes:
        failures: in a row, while it is closed.
        unreadable: the records among them, each of which counts once.
        pauses: in a row; 0 while it is closed.
        until: when the pause, or the trial that is under way, is over.
        trial: whether a trial is under way.
        latencies: the last REMEMBERED ones, in seconds a record.
        measured: when the last of them was.
    """

    failures: int = 0
    unreadable: frozenset[str] = frozenset()
    pauses: int = 0
    until: float = 0.0
    trial: bool = False
    latencies: tuple[float, ...] = ()
    measured: float = 0.0


def state(circuit: Circuit, now: float) -> HealthState:
    """What to show of it."""
    if circuit.pauses:
        return "half-open" if _may_decide(circuit, now) else "open"
    before, recent = circuit.latencies[:-RECENT], circuit.latencies[-RECENT:]
    slow = len(before) >= RECENT and median(recent) >= SLOW_FACTOR * median(before)
    return "slow" if slow else "ok"


def ask(circuit: Circuit, now: float) -> tuple[Circuit, bool]:
    """Whether the tier may be used now. In a half-open circuit yes is said once per trial."""
    if not circuit.pauses:
        return circuit, True
    if now < circuit.until:
        return circuit, False
    return replace(circuit, trial=True, until=now + TRIAL_S), True


def worked(circuit: Circuit, now: float, seconds: float | None = None) -> Circuit:
    """After records were moved: closed, unless it is open. What was begun before the pause proves nothing.

    `seconds` is the time per record, where it is known.
    """
    if not _may_decide(circuit, now):
        return circuit
    if seconds is not None:
        kept = circuit.latencies[1 - REMEMBERED :]
        return Circuit(latencies=(*kept, seconds), measured=now)
    if not circuit.failures and not circuit.pauses:
        return circuit
    return Circuit(latencies=circuit.latencies, measured=circuit.measured)


def answered(circuit: Circuit, now: float) -> Circuit:
    """After an answer that moved no record: a trial ends undecided, and the next caller may try.

    An index can answer for a disk that is gone, so this does not interrupt a row of failures.
    """
    return replace(circuit, trial=False, until=now) if circuit.trial else circuit


def failed(circuit: Circuit, now: float, timed_out: bool = False, unreadable: str | None = None) -> Circuit:
    """After an error, or an answer that did not come in time; `unreadable` names a record that may be why."""
    if not _may_decide(circuit, now) or unreadable in circuit.unreadable:
        return circuit
    failures = circuit.failures + 1
    records = circuit.unreadable if unreadable is None else circuit.unreadable | {unreadable}
    if not circuit.pauses and not timed_out and failures < FAILURES_TO_PAUSE:
        return replace(circuit, failures=failures, unreadable=records)
    pause_s = PAUSES_S[min(circuit.pauses, len(PAUSES_S) - 1)]
    return replace(
        circuit,
        failures=0,
        unreadable=frozenset(),
        pauses=circuit.pauses + 1,
        until=now + pause_s,
        trial=False,
    )


def record_s(circuit: Circuit, now: float) -> float | None:
    """Seconds that a record takes of late; None: not known, and only known by reading one."""
    if not circuit.latencies or now - circuit.measured > CURRENT_S:
        return None
    return median(circuit.latencies[-RECENT:])


def _may_decide(circuit: Circuit, now: float) -> bool:
    """Whether a result counts: not while the pause lasts."""
    return not circuit.pauses or circuit.trial or now >= circuit.until


class Health:
    """The circuit of one tier. Thread-safe; `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._circuit = Circuit()
        self._lock = threading.Lock()

    def usable(self, now: float) -> bool:
        """Whether to use the tier now. In a half-open circuit one caller gets yes, and must report."""
        with self._lock:
            self._circuit, allowed = ask(self._circuit, now)
            return allowed

    def worked(self, now: float, seconds: float | None = None) -> None:
        """Records were moved; `seconds` is the time per record."""
        with self._lock:
            self._circuit = worked(self._circuit, now, seconds)

    def answered(self, now: float) -> None:
        """The tier said what it holds, or the caller had nothing to move after all."""
        with self._lock:
            self._circuit = answered(self._circuit, now)

    def failed(self, now: float, timed_out: bool = False, unreadable: str | None = None) -> None:
        """The tier reported an error, or (`timed_out`) missed a deadline; `unreadable`: of this record."""
        with self._lock:
            self._circuit = failed(self._circuit, now, timed_out, unreadable)

    def record_s(self, now: float) -> float | None:
        """Seconds that a record takes of late; None: not known, and only known by reading one."""
        with self._lock:
            return record_s(self._circuit, now)

    def state(self, now: float) -> HealthState:
        """For metrics and people. Changes nothing."""
        with self._lock:
            return state(self._circuit, now)
