"""Calls of `Tier.get` and `Tier.put`: each record is reported to its job, once, after it was counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kvkit.staging import Lease
from kvkit.tiers.base import TierError
from kvkit.transfer.counters import Direction
from kvkit.transfer.tier_set import TierSet

log = logging.getLogger(__name__)


class TierJob(Protocol):
    """One record on its way from or into a tier, and its slot."""

    @property
    def name(self) -> str: ...

    @property
    def lease(self) -> Lease: ...

    def done(self, error: BaseException | None) -> None:
        """Take the report that the tier has moved the record, or failed. Called once, from any thread."""


def get(tiers: TierSet, tier: str, jobs: Sequence[TierJob]) -> None:
    """Start reading records into their slots; each job is done once."""
    call = _Call(tiers, tier, "get", jobs)
    with tiers.counting():
        tiers.reads_began[tier][call] = call.began
    call.start(jobs)


def put(tiers: TierSet, tier: str, jobs: Sequence[TierJob]) -> None:
    """Start writing records, except those in quarantine; each job is done once."""
    now, accepted, quarantined = time.monotonic(), jobs, list[TierJob]()
    if tiers.quarantine.before(tier, [job.name for job in jobs], now) < len(jobs):
        quarantined = [job for job in jobs if not tiers.quarantine.before(tier, [job.name], now)]
        accepted = [job for job in jobs if job not in quarantined]
    for job in quarantined:  # the tier would take the bad object for the record
        job.done(TierError(f"tier {tier!r}: {job.name} is in quarantine and cannot be replaced"))
    if accepted:
        _Call(tiers, tier, "put", accepted).start(accepted)


class _Call:
    """One call of a tier, until its last report. Thread-safe."""

    def __init__(self, tiers: TierSet, tier: str, direction: Direction, jobs: Sequence[TierJob]) -> None:
        self._tiers = tiers
        self._tier = tier
        self._direction = direction
        # shares: when the tier reports, it has released its own, and another record may lie in the slot
        self._unreported = {job.name: (job, job.lease.share()) for job in jobs}
        self._records, self._bytes = len(jobs), 0
        self._lock = threading.Lock()
        self.began = time.monotonic()

    def start(self, jobs: Sequence[TierJob]) -> None:
        """Call the tier for `jobs`, all of this call."""
        try:
            tier = self._tiers.tiers[self._tier]
            move = tier.get if self._direction == "get" else tier.put
            move([job.name for job in jobs], [job.lease for job in jobs], self._report)
        except Exception as error:
            log.exception("tier %r: %s failed", self._tier, self._direction)
            for name in list(self._unreported):
                self._report(name, error)

    def _report(self, name: str, error: BaseException | None) -> None:
        """Report a record to its job; count the call before its last report."""
        with self._lock:
            unreported = self._unreported.pop(name, None)
            if unreported is None:  # reported before
                return
            job, share = unreported
            self._bytes += 0 if error is not None else share.used
            last = not self._unreported
        share.release()
        if (error is None and self._direction == "put") or isinstance(error, FileNotFoundError):
            self._tiers.notify(self._tier, (name,), error is None)
        if last:
            self._end()
        job.done(error)

    def _end(self) -> None:
        """Count the call and its speed."""
        now = time.monotonic()
        with self._tiers.counting() as counts:
            self._tiers.reads_began[self._tier].pop(self, None)
            if self._bytes:
                counts.moved(self._tier, self._direction, self._bytes, now - self.began)
        if self._bytes and self._direction == "get":
            self._tiers.health[self._tier].worked(now, (now - self.began) / self._records)
