"""Reads of consecutive records from one tier into slots, running ahead of their use."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from kvkit.plan import Segment
from kvkit.staging import Lease, Staging, StagingTimeout, release_all
from kvkit.tiers.base import Tier

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 32
"""Chunks that one load has under way at a time: enough to keep every thread of a tier busy."""


class SegmentReads:
    """The records of one segment, in order. Used by one thread: `fill`, `take_ready`, ..., `abandon`.

    It never waits for a slot while it holds one, so loads cannot deadlock with each other.

    Args:
        names: object names of the whole sequence, `groups` per chunk.
        timeout_s: the longest that one wait for a slot or a record may take.

    Attributes:
        error: what ended the reads early, None while all is well.
        failed: the record that did so, None where no record is to blame.
    """

    def __init__(
        self,
        tier: Tier,
        names: Sequence[str],
        groups: int,
        segment: Segment,
        staging: Staging,
        timeout_s: float,
    ) -> None:
        self._tier = tier
        self._names = names
        self._groups = groups
        self._next = segment.start
        self._stop = segment.stop
        self._staging = staging
        self._timeout_s = timeout_s
        self._in_flight: deque[tuple[str, Lease]] = deque()
        self._results: dict[str, BaseException | None] = {}
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.failed: str | None = None

    def fill(self) -> None:
        """Start reads while there are chunks and slots; waits for slots only while nothing is under way."""
        wanted = min(self._stop - self._next, MAX_IN_FLIGHT - len(self._in_flight) // self._groups)
        if wanted < 1 or self.error is not None:
            return
        start = self._next * self._groups
        names = self._names[start : start + wanted * self._groups]
        if self._borrow(names):
            return
        try:
            timeout_s = 0.0 if self._in_flight else self._timeout_s
            leases = self._staging.acquire(len(names), timeout_s, at_least=self._groups)
        except StagingTimeout as error:
            if not self._in_flight:
                log.warning("load stopped early: %s", error)
                self.error = error
            return
        self._next += keep_whole(leases, self._groups)
        names = names[: len(leases)]
        self._in_flight.extend(zip(names, leases, strict=True))
        try:
            self._tier.get(names, leases, self._on_complete)
        except Exception as error:
            log.exception("tier %r: get failed", self._tier.name)
            for name in names:
                self._on_complete(name, error)

    def take_ready(self) -> list[Lease]:
        """The leases of the next chunks that were read, for the caller to release.

        Waits for the first chunk; takes those behind it that are complete as well. Fewer than one chunk means
        that `error` is set.
        """
        deadline = time.monotonic() + self._timeout_s
        ready: list[Lease] = []
        while self._in_flight:
            chunk = list(islice(self._in_flight, self._groups))
            late, self.failed, self.error = self._wait(chunk, 0.0 if ready else deadline)
            if late and ready:
                break
            if late:
                self.error = TimeoutError(f"tier {self._tier.name!r}: {chunk[0][0]} is late")
            if self.error is not None:
                break
            for _ in chunk:
                self._in_flight.popleft()
            ready.extend(lease for _, lease in chunk)
        return ready

    def abandon(self) -> None:
        """Give back what was not taken; the tier keeps its own shares until its reads are done."""
        while self._in_flight:
            self._in_flight.popleft()[1].release()

    def _borrow(self, names: Sequence[str]) -> bool:
        """Take records that already lie in slots; whether the tier lends any."""
        leases: list[Lease] = []
        for name in names:
            lease = self._tier.borrow(name)
            if lease is None:
                break
            leases.append(lease)
        self._next += keep_whole(leases, self._groups)
        with self._changed:
            for name, lease in zip(names, leases, strict=False):
                self._results[name] = None
                self._in_flight.append((name, lease))
        return bool(leases)

    def _on_complete(self, name: str, error: BaseException | None) -> None:
        with self._changed:
            self._results[name] = error
            self._changed.notify()

    def _wait(
        self, chunk: Sequence[tuple[str, Lease]], deadline: float
    ) -> tuple[bool, str | None, BaseException | None]:
        """Whether the deadline came before all of `chunk` completed; else the first that failed, and why."""
        with self._changed:
            for name, _ in chunk:
                while name not in self._results:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return True, None, None
                    self._changed.wait(left)
                error = self._results[name]
                if error is not None:
                    return False, name, error
        return False, None, None


def keep_whole(leases: list[Lease], groups: int) -> int:
    """Release the leases behind the last whole chunk; the number of whole chunks. Mutates `leases`."""
    whole = len(leases) // groups
    release_all(leases[whole * groups :])
    del leases[whole * groups :]
    return whole
