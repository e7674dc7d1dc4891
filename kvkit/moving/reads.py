"""Verified records in slots, read ahead of their use from all the tiers of a plan at the same time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvkit.format import record
from kvkit.moving.plan import Segment
from kvkit.moving.sequence import Chunks
from kvkit.moving.tier_set import TierSet
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.tiers.base import DamagedObject
from kvkit.workers import Stopped

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 32
"""Chunks of one segment that are read ahead at a time, where there are slots for them."""

THROTTLED_READS = 4
"""Times what a tier reads at once: with less, a prefetch from two tiers loses what reading them side by side
gains (benchmarks/bench_engine.py)."""

POLL_S = 0.002
"""How often a load looks for what other ranks read."""
PATIENCE_S = 0.1
"""How long it does at least, from the start of a read on: then it reads that itself."""


class PlanReads:
    """The records of a plan's segments, in order. Used by one thread: `take`, `take`, ..., `close`.

    While the records of one tier are used, those of the next are on their way: slots go to what each tier can
    read at once before any goes to reads that would wait for one of its threads. A load never waits for a
    slot while it holds one, so loads cannot deadlock with each other, and any number of chunks passes through
    any number of slots: what was read ahead for later is given up when what comes first finds no room.

    Args:
        segments: of `chunks`, consecutive.
        throttled: whether a tier is asked for at most `THROTTLED_READS` times what it reads at once: threads
            have work, and what others want of it meanwhile does not wait for more.
    """

    def __init__(
        self, tiers: TierSet, chunks: Chunks, segments: Sequence[Segment], throttled: bool = False
    ) -> None:
        self._tiers = tiers
        self._throttled = throttled
        self._groups = chunks.groups
        self._reads = deque(SegmentReads(tiers, chunks, segment) for segment in segments)

    @property
    def tier(self) -> str:
        """The tier whose records `take` returns next."""
        return self._reads[0].tier

    @property
    def short(self) -> bool:
        """Whether there are chunks to read ahead and no slots for them."""
        return self._tiers.staging.free < self._groups and any(
            reads.next < reads.stop for reads in self._reads
        )

    @property
    def failed(self) -> tuple[str | None, BaseException] | None:
        """What ended the reads early: the record to blame, if any, and the error."""
        reads = self._reads[0]
        return None if reads.error is None else (reads.failed, reads.error)

    def take(self) -> list[Lease]:
        """The leases of the next chunks of `tier`, verified, for the caller to release.

        If there are none, `failed` says why.
        """
        while self._reads[0].first == self._reads[0].stop and len(self._reads) > 1:
            self._reads.popleft()
        first, *later = self._reads
        self._fill()
        if not first.in_flight:  # others hold the slots
            for reads in later:
                reads.restart()
            first.fill(1, wait=True)
            self._fill()
        return first.take_ready()

    def cancel(self) -> None:
        """End a `take` that waits, and all that follow; from any thread."""
        for reads in tuple(self._reads):
            reads.cancel()

    def close(self) -> None:
        """Give back what was not taken; tiers keep their own shares until their reads are done."""
        for reads in self._reads:
            reads.restart()

    def _fill(self) -> None:
        """Start reads, in the order of need, while there are slots. Of each segment, in chunks:

            [ taken | in flight: read, or being read | not begun )
                    first                            next        stop

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
            ahead = room[reads.tier] + (THROTTLED_READS - 1) * self._tiers.tiers[reads.tier].reads_at_once
            most = -(-ahead // self._groups) if self._throttled else MAX_IN_FLIGHT
            if most > 0 and self._tiers.staging.free >= self._groups:  # for these nobody gives up a slot
                room[reads.tier] -= reads.fill(most)


@dataclass(eq=False, slots=True)
class RecordRead:
    """Record `number` of a sequence on its way into a slot, or there: `lent`, and not verified yet.

    Once it `ended`, or was given up, a report changes it no more.

    Attributes:
        began: on the monotonic clock.
        awaited: another rank reads it.
        left: other ranks need not be left it, or were.
    """

    number: int
    lease: Lease
    lent: bool = False
    ended: bool = False
    error: BaseException | None = None
    began: float = 0.0
    awaited: bool = False
    left: bool = False


class SegmentReads:
    """The records of one segment, in order. Used by one thread.

    The thread that reads a record verifies it, so that a load has little left to do when its last read is in.

    Ranks with equal KV share the reads, where they have a `TierSet.exchange_tier`: each reads every nth chunk
    and leaves it there for the others. What they do not bring in time this rank reads itself, as all that
    follows.

    Attributes:
        tier: that they come from.
        first, next, stop: chunks, see `PlanReads._fill`.
        in_flight: the records of chunks [first, next).
        error: what ended the reads early, None while all is well.
        failed: the record that did so, None where no record is to blame.
    """

    def __init__(self, tiers: TierSet, chunks: Chunks, segment: Segment) -> None:
        self.tier = segment.tier
        self.first = self.next = segment.start
        self.stop = segment.stop
        self.in_flight: deque[RecordRead] = deque()
        self.error: BaseException | None = None
        self.failed: str | None = None
        self._tiers = tiers
        self._chunks = chunks
        self._meeting = tiers.exchange_tier(segment.tier, chunks)
        self._slowest_s = 0.0  # of the reads
        self._cancelled = False
        self._changed = threading.Condition()

    @property
    def unread(self) -> int:
        """Records that the tier was asked for and has not delivered."""
        return sum(not (read.ended or read.awaited) for read in self.in_flight)

    def fill(self, at_most: int, wait: bool = False) -> int:
        """Start reads of `at_most` chunks while there are slots; `wait` for the first slots.

        Returns how many records the tier was asked for; none where it lends them.
        """
        groups = self._chunks.groups
        ahead = MAX_IN_FLIGHT - len(self.in_flight) // groups
        wanted = min(at_most, self.stop - self.next, ahead)
        if wanted < 1 or self.error is not None:
            return 0
        names = self._chunks.records(self.next, self.next + wanted)
        if self._borrow(names):
            return 0
        try:
            leases = self._tiers.staging.acquire(
                len(names),
                self._tiers.timeout_s if wait else 0.0,
                at_least=groups,
                stopped=lambda: self._cancelled,
            )
        except (StagingTimeout, Stopped) as error:
            if wait:
                log.warning("load stopped early: %s", str(error) or type(error).__name__)
                self.error = error
            return 0
        now = time.monotonic()
        reads = [RecordRead(self.next * groups + i, lease, began=now) for i, lease in enumerate(leases)]
        self.in_flight.extend(reads)
        self.next += len(leases) // groups
        for read in reads:
            mine = self._tiers.owned_by_rank(self.tier, self._chunks, read.number // groups)
            read.awaited = self._meeting is not None and not mine
        return self._start([read for read in reads if not read.awaited])

    def take_ready(self) -> list[Lease]:
        """The leases of the next chunks that were read, verified, for the caller to release.

        Waits for the first chunk; takes those after it that are complete as well. If there are none, `error`
        says why.
        """
        deadline = time.monotonic() + self._tiers.timeout_s
        ready: list[Lease] = []
        while self.in_flight:
            chunk = list(islice(self.in_flight, self._chunks.groups))
            if ready and not all(read.ended for read in chunk):
                break
            self._wait(chunk, deadline)
            if self.error is not None:
                break
            for _ in chunk:
                self.in_flight.popleft()
            ready.extend(read.lease for read in chunk)
            self.first += 1
        return ready

    def cancel(self) -> None:
        """Have `fill` and `take_ready` wait no more, but fail; from any thread."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()
        self._tiers.staging.wake()

    def restart(self) -> None:
        """Give back what was not taken; the tier keeps its own shares until its reads are done."""
        for read in self.in_flight:
            read.ended = True
            read.lease.release()
        self.in_flight.clear()
        self.next = self.first

    def _borrow(self, names: Sequence[str]) -> bool:
        """Take records that already lie in slots; whether there are any."""
        groups, tier = self._chunks.groups, self._tiers.tiers[self.tier]
        leases: list[Lease] = []
        for name in names:
            storage_name = self._tiers.storage_name(self.tier, name)
            lease = self._tiers.prefetched.take(storage_name) or tier.borrow(name)
            if lease is None:
                break
            leases.append(lease)
        whole = len(leases) // groups * groups
        release_all(leases[whole:])
        start = self.next * groups
        self.in_flight.extend(RecordRead(start + i, leases[i], lent=True, ended=True) for i in range(whole))
        self.next += whole // groups
        return whole > 0

    def _start(self, reads: Sequence[RecordRead]) -> int:
        """Ask the tier for records; how many."""
        if not reads:
            return 0
        by_name = {self._chunks.names[read.number]: read for read in reads}
        leases = [read.lease for read in reads]
        self._tiers.get(
            self.tier, list(by_name), leases, lambda name, error: self._on_complete(by_name[name], error)
        )
        return len(reads)

    def _exchange(self) -> None:
        """Leave other ranks what was read here, and take what they left; read it here if that takes long."""
        if self._meeting is None:
            return
        names = self._chunks.names
        done = [read for read in self.in_flight if read.ended and not (read.error or read.left or read.lent)]
        for read in done:
            read.left = True
        if done:
            leases = [read.lease for read in done]
            self._tiers.put(self._meeting, [names[r.number] for r in done], leases, lambda name, error: None)
        awaited = [read for read in self.in_flight if read.awaited]
        damaged = self._collect(self._meeting, awaited)
        late = [read for read in awaited if read.awaited and read not in damaged]
        patience_s = max(PATIENCE_S, 2 * self._slowest_s)
        if late and not self.unread and time.monotonic() > late[0].began + patience_s:
            self._meeting = None
            damaged += late
        for read in damaged:
            read.awaited = False
        self._start(damaged)

    def _collect(self, meeting: str, awaited: Sequence[RecordRead]) -> list[RecordRead]:
        """Take what other ranks left of `awaited`; those that were damaged there."""
        names, tier, damaged = self._chunks.names, self._tiers.tiers[meeting], list[RecordRead]()
        try:
            left = tier.match_prefix([names[read.number] for read in awaited])
        except OSError:  # nobody leaves anything there: patience ends
            return []
        for read in awaited[:left]:
            lease = tier.borrow(names[read.number])
            if lease is None:
                break
            own, read.lease = read.lease, lease
            if (damage := self._damage(read)) is None:
                read.awaited, read.ended, read.left = False, True, True
                own.release()
            else:
                read.lease = own
                lease.release()
                self._tiers.drop(meeting, names[read.number], damage.damage)
                damaged.append(read)
        return damaged

    def _on_complete(self, read: RecordRead, error: BaseException | None) -> None:
        if read.ended:  # it was given up, and others have its slot
            return
        error = error or self._damage(read)
        with self._changed:
            self._slowest_s = max(self._slowest_s, time.monotonic() - read.began)
            read.error, read.ended = error, True
            self._changed.notify()

    def _damage(self, read: RecordRead) -> DamagedObject | None:
        """What is wrong with a record."""
        chunk, group = divmod(read.number, self._chunks.groups)
        form, identity = self._chunks.formats[group], self._chunks.identity(chunk)
        damage = record.verify(form, read.lease.buffer[: read.lease.used], *identity)
        return (
            None if damage is None else DamagedObject(f"{self._chunks.names[read.number]}: {damage}", damage)
        )

    def _wait(self, chunk: Sequence[RecordRead], deadline: float) -> None:
        """Wait for the records of a chunk; `error` says why they are not all there, and sound."""
        for read in chunk:
            if read.lent:
                read.lent, read.error = False, self._damage(read)

        def over() -> bool:
            return self._cancelled or any(r.error for r in chunk) or all(r.ended for r in chunk)

        while True:
            self._exchange()
            left_s = deadline - time.monotonic()
            with self._changed:
                if self._changed.wait_for(over, left_s if self._meeting is None else min(left_s, POLL_S)):
                    break
            if time.monotonic() >= deadline:
                break
        late = None
        for read in chunk:
            if read.error is not None:
                self.failed, self.error = self._chunks.names[read.number], read.error
                return
            late = late or (None if read.ended else read)
        if late is not None:
            name = self._chunks.names[late.number]
            self.error = Stopped() if self._cancelled else TimeoutError(f"tier {self.tier!r}: {name} is late")
