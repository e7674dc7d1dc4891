"""Verified records in slots, read ahead of their use from all the tiers of a plan at the same time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from kvkit.format import record
from kvkit.moving.plan import Segment
from kvkit.moving.prefetched import Prefetched
from kvkit.moving.sequence import Chunks
from kvkit.moving.tier_set import TierSet
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.tiers.base import DamagedObject
from kvkit.workers import Stopped

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 32
"""Chunks of one segment that are read ahead at a time, where there are slots for them."""

MODEST = 4
"""Times what a tier reads at once: with less, a prefetch from two tiers loses what reading them side by side
gains (benchmarks/bench_engine.py)."""


class PlanReads:
    """The records of a plan's segments, in order. Used by one thread: `take`, `take`, ..., `abandon`.

    While the records of one tier are used, those of the next are on their way: slots go to what each tier can
    read at once before any goes to reads that would wait for one of its threads. A load never waits for a
    slot while it holds one, so loads cannot deadlock with each other, and any number of chunks passes through
    any number of slots: what was read ahead for later is given up when what comes first finds no room.

    Args:
        segments: of `chunks`, consecutive.
        prefetched: where a prefetch may have left records.
        modest: whether a tier is asked for no more than `MODEST` times what it reads at once, so that its
            threads have something to go on with: what others want of it meanwhile does not wait behind more.
    """

    def __init__(
        self,
        tiers: TierSet,
        chunks: Chunks,
        segments: Sequence[Segment],
        prefetched: Prefetched,
        modest: bool = False,
    ) -> None:
        self._tiers = tiers
        self._modest = modest
        self._groups = chunks.groups
        self._reads = deque(SegmentReads(tiers, chunks, segment, prefetched) for segment in segments)

    @property
    def tier(self) -> str:
        """The tier whose records `take` returns next."""
        return self._reads[0].tier

    @property
    def short(self) -> bool:
        """Whether there are chunks to read ahead and no slots for them."""
        return self._tiers.staging.free < self._groups and not all(reads.begun for reads in self._reads)

    @property
    def failed(self) -> tuple[str | None, BaseException] | None:
        """What ended the reads early: the record to blame, if any, and the error."""
        reads = self._reads[0]
        return None if reads.error is None else (reads.failed, reads.error)

    def take(self) -> list[Lease]:
        """The leases of the next chunks of `tier`, verified, for the caller to release.

        If there are none, `failed` says why.
        """
        while self._reads[0].done and len(self._reads) > 1:
            self._reads.popleft()
        first, *later = self._reads
        self._fill()
        if first.idle:  # others hold the slots
            for reads in later:
                reads.restart()
            first.fill(1, wait=True)
            self._fill()
        return first.take_ready()

    def interrupt(self) -> None:
        """End a `take` that waits, and all that follow; from any thread."""
        for reads in tuple(self._reads):
            reads.interrupt()

    def abandon(self) -> None:
        """Give back what was not taken; tiers keep their own shares until their reads are done."""
        for reads in self._reads:
            reads.restart()

    def _fill(self) -> None:
        """Start reads, in the order of need, while there are slots. Of each segment, in chunks:

            [ taken | in flight: read, or being read | not begun )
            start   first                            next        stop

        1. moves every `next` on until its tier has as much to read as it reads at once, 2. further, until
        there are no slots to spare or MAX_IN_FLIGHT chunks are in flight, or, if modest, until the tier has
        MODEST times what it reads at once.
        """
        # 1. what each tier works on at once
        room = {reads.tier: self._tiers.tiers[reads.tier].reads_at_once for reads in self._reads}
        for reads in self._reads:
            room[reads.tier] -= reads.unread
        for reads in self._reads:
            if room[reads.tier] > 0:
                room[reads.tier] -= reads.fill(-(-room[reads.tier] // self._groups))
        # 2. what its threads go on with, so that they need not wait for this one
        for reads in self._reads:
            ahead = room[reads.tier] + (MODEST - 1) * self._tiers.tiers[reads.tier].reads_at_once
            most = -(-ahead // self._groups) if self._modest else MAX_IN_FLIGHT
            if most > 0 and self._tiers.staging.free >= self._groups:  # for these nobody gives up a slot
                room[reads.tier] -= reads.fill(most)


class SegmentReads:
    """The records of one segment, in order. Used by one thread.

    The thread that reads a record verifies it, so that a load has little left to do when its last read is in.

    Attributes:
        tier: that they come from.
        error: what ended the reads early, None while all is well.
        failed: the record that did so, None where no record is to blame.
    """

    def __init__(self, tiers: TierSet, chunks: Chunks, segment: Segment, prefetched: Prefetched) -> None:
        self.tier = segment.tier
        self._tiers = tiers
        self._chunks = chunks
        self._names = chunks.names
        self._groups = chunks.groups
        self._prefetched = prefetched
        self._first = segment.start
        self._next = segment.start
        self._stop = segment.stop
        self._in_flight: deque[tuple[str, Lease]] = deque()
        self._lent: set[str] = set()  # those in flight that lay in slots already, and are not verified yet
        self._results: dict[str, BaseException | None] = {}
        self._round = 0
        self._interrupted = False
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.failed: str | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._in_flight

    @property
    def unread(self) -> int:
        """Records that the tier was asked for and has not delivered."""
        with self._changed:
            return len(self._in_flight) - sum(name in self._results for name, _ in self._in_flight)

    @property
    def begun(self) -> bool:
        """Whether every chunk is under way, or was taken."""
        return self._next == self._stop

    @property
    def done(self) -> bool:
        """Whether every chunk was taken."""
        return self._first == self._stop

    def fill(self, at_most: int, wait: bool = False) -> int:
        """Start reads of `at_most` chunks while there are slots; `wait` for the first slots.

        Returns how many records the tier was asked for; none where it lends them.
        """
        ahead = MAX_IN_FLIGHT - len(self._in_flight) // self._groups
        wanted = min(at_most, self._stop - self._next, ahead)
        if wanted < 1 or self.error is not None:
            return 0
        start = self._next * self._groups
        names = self._names[start : start + wanted * self._groups]
        if self._borrow(names):
            return 0
        try:
            leases = self._tiers.staging.acquire(
                len(names),
                self._tiers.timeout_s if wait else 0.0,
                at_least=self._groups,
                stopped=lambda: self._interrupted,
            )
        except (StagingTimeout, Stopped) as error:
            if wait:
                log.warning("load stopped early: %s", error or type(error).__name__)
                self.error = error
            return 0
        self._next += keep_whole(leases, self._groups)
        names = names[: len(leases)]
        self._in_flight.extend(zip(names, leases, strict=True))
        records = {
            name: (start + i, lease) for i, (name, lease) in enumerate(zip(names, leases, strict=True))
        }
        on_complete = partial(self._on_complete, self._round, records)
        self._tiers.get(self.tier, names, leases, on_complete)
        return len(names)

    def take_ready(self) -> list[Lease]:
        """The leases of the next chunks that were read, verified, for the caller to release.

        Waits for the first chunk; takes those after it that are complete as well. If there are none, `error`
        says why.
        """
        deadline = time.monotonic() + self._tiers.timeout_s
        ready: list[Lease] = []
        while self._in_flight:
            chunk = list(islice(self._in_flight, self._groups))
            late, self.failed, self.error = self._wait(chunk, 0.0 if ready else deadline)
            if late and ready:
                break
            if late:
                self.error = TimeoutError(f"tier {self.tier!r}: {chunk[0][0]} is late")
            if self.error is None:
                self.failed, self.error = self._verify_lent(chunk)
            if self.error is not None:
                break
            for _ in chunk:
                self._in_flight.popleft()
            ready.extend(lease for _, lease in chunk)
            self._first += 1
        return ready

    def interrupt(self) -> None:
        """Have `fill` and `take_ready` wait no more, but fail; from any thread."""
        with self._changed:
            self._interrupted = True
            self._changed.notify()
        self._tiers.staging.wake()

    def restart(self) -> None:
        """Give back what was not taken; the tier keeps its own shares until its reads are done."""
        while self._in_flight:
            self._in_flight.popleft()[1].release()
        with self._changed:
            self._round += 1  # what completes from now on was given up
            self._results.clear()
        self._lent.clear()
        self._next = self._first

    def _borrow(self, names: Sequence[str]) -> bool:
        """Take records that already lie in slots; whether the tier lends any."""
        leases: list[Lease] = []
        for name in names:
            lease = self._prefetched.take(name) or self._tiers.tiers[self.tier].borrow(name)
            if lease is None:
                break
            leases.append(lease)
        self._next += keep_whole(leases, self._groups)
        self._lent.update(names[: len(leases)])
        with self._changed:
            for name, lease in zip(names, leases, strict=False):
                self._results[name] = None
                self._in_flight.append((name, lease))
        return bool(leases)

    def _on_complete(
        self, round_: int, records: Mapping[str, tuple[int, Lease]], name: str, error: BaseException | None
    ) -> None:
        if round_ == self._round and error is None:
            error = self._damage(*records[name])
        with self._changed:
            if round_ == self._round:  # else it was given up, and others have its slot
                self._results[name] = error
                self._changed.notify()

    def _verify_lent(self, chunk: Sequence[tuple[str, Lease]]) -> tuple[str | None, DamagedObject | None]:
        """The first of a chunk's lent records that is not what it should be, and why."""
        for i, (name, lease) in enumerate(chunk):
            if name in self._lent:
                self._lent.remove(name)
                damaged = self._damage(self._first * self._groups + i, lease)
                if damaged is not None:
                    return name, damaged
        return None, None

    def _damage(self, number: int, lease: Lease) -> DamagedObject | None:
        """What is wrong with record `number` of the sequence."""
        chunk, group = divmod(number, self._groups)
        form, identity = self._chunks.formats[group], self._chunks.identity(chunk)
        damage = record.verify(form, lease.buffer[: lease.used], *identity)
        return None if damage is None else DamagedObject(f"{self._names[number]}: {damage}", damage)

    def _wait(
        self, chunk: Sequence[tuple[str, Lease]], deadline: float
    ) -> tuple[bool, str | None, BaseException | None]:
        """Whether the deadline came before all of `chunk` completed; else the first that failed, and why."""
        with self._changed:
            for name, _ in chunk:
                while name not in self._results:
                    if self._interrupted:
                        return False, None, Stopped()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return True, None, None
                    self._changed.wait(left)
                error = self._results[name]
                if error is not None:
                    return False, name, error
        return False, None, None


def keep_whole(leases: list[Lease], groups: int) -> int:
    """Release the leases after the last whole chunk; the number of whole chunks. Mutates `leases`."""
    whole = len(leases) // groups
    release_all(leases[whole * groups :])
    del leases[whole * groups :]
    return whole
