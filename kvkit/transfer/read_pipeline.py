"""Reads of a load: verified records in slots, read ahead from all tiers of a plan in parallel."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvkit.format import record
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.tiers.base import DamagedObject
from kvkit.transfer.plan import Segment
from kvkit.transfer.sequence import Chunks
from kvkit.transfer.tier_set import TierSet
from kvkit.workers import Stopped

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 32
"""Maximum chunks of one segment that are read ahead at a time, if there are slots."""

THROTTLED_READS = 4
"""Maximum records requested by a throttled load, in multiples of a tier's `reads_at_once`. With less, a
prefetch from two tiers loses the gain of reading them in parallel (benchmarks/bench_engine.py)."""

POLL_S = 0.002
"""Seconds between a load's checks for records that other ranks have read."""
EXCHANGE_WAIT_S = 0.1
"""Minimum seconds, from the start of a read, to wait for another rank before reading the record here."""


class PlanReads:
    """The records of a plan's segments, in order. Used by one thread: `take`, `take`, ..., `close`.

    While the records of one tier are used, those of the next tiers are read. Slots go first to as many reads
    as each tier runs at once, then to reads that queue for its threads. A load never waits for a slot while
    it holds one, so loads cannot deadlock, and any number of chunks passes through any number of slots: if
    the next chunk finds no slot, records read ahead are released.

    Args:
        segments: consecutive segments of `chunks`.
        throttled: request at most `THROTTLED_READS` times a tier's `reads_at_once`, which keeps its threads
            busy but lets other requests through.
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
        """The tier of the records that `take` returns next."""
        return self._reads[0].tier

    @property
    def short(self) -> bool:
        """True if there are chunks to read ahead and no slots for them."""
        return self._tiers.staging.free < self._groups and any(
            reads.next < reads.stop for reads in self._reads
        )

    @property
    def failed(self) -> tuple[str | None, BaseException] | None:
        """The record to blame, if any, and the error that ended the reads early; None if there is none."""
        reads = self._reads[0]
        return None if reads.error is None else (reads.failed, reads.error)

    def take(self) -> list[Lease]:
        """Return verified leases of the next chunks of `tier`, for the caller to release.

        If empty, `failed` has the reason.
        """
        while self._reads[0].first == self._reads[0].stop and len(self._reads) > 1:
            self._reads.popleft()
        first, *later = self._reads
        self._fill()
        if not first.in_flight:  # no slots: all are held
            for reads in later:
                reads.restart()
            first.fill(1, wait=True)
            self._fill()
        return first.take_ready()

    def cancel(self) -> None:
        """End a waiting `take` and all later ones; from any thread."""
        for reads in tuple(self._reads):
            reads.cancel()

    def close(self) -> None:
        """Release records that were not taken; tiers keep their own leases until their reads end."""
        for reads in self._reads:
            reads.restart()

    def _fill(self) -> None:
        """Start reads, in order of need, while there are slots.

        Chunks of a segment:

            [ taken | in flight: being read, or read | not begun )
                    first                            next        stop

        Step 1 advances each `next` until its tier has as many reads as it runs at once. Step 2 advances
        further, until there are no spare slots or MAX_IN_FLIGHT chunks are in flight; a throttled load stops
        at THROTTLED_READS times what the tier runs at once.
        """
        # 1. as many reads as each tier runs at once
        room = {reads.tier: self._tiers.tiers[reads.tier].reads_at_once for reads in self._reads}
        for reads in self._reads:
            room[reads.tier] -= reads.unread
        for reads in self._reads:
            if room[reads.tier] > 0:
                room[reads.tier] -= reads.fill(-(-room[reads.tier] // self._groups))
        # 2. further reads, so that the tier's threads need not wait for this one
        for reads in self._reads:
            ahead = room[reads.tier] + (THROTTLED_READS - 1) * self._tiers.tiers[reads.tier].reads_at_once
            most = -(-ahead // self._groups) if self._throttled else MAX_IN_FLIGHT
            if most > 0 and self._tiers.staging.free >= self._groups:  # others do not release slots for these
                room[reads.tier] -= reads.fill(most)


@dataclass(eq=False, slots=True)
class RecordRead:
    """The read of record `number` of a sequence into a slot.

    Once `ended` or given up, later reports do not change it.

    Attributes:
        lent: the slot is the tier's or a prefetch's and holds the record, not verified yet.
        ended: the read succeeded or failed.
        error: why it failed.
        began: start time, on the monotonic clock.
        awaited: another rank reads the record.
        left: the record was put into the exchange tier, or need not be.
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

    The thread that reads a record also verifies it, so a load has little left to do after its last read.

    If there is a `TierSet.exchange_tier`, ranks with equal KV share the reads: each rank reads every nth
    chunk and puts it there for the others. If they are late, this rank reads their chunks and all later ones
    itself.

    Attributes:
        tier: source tier.
        first, next, stop: chunk positions, see `PlanReads._fill`.
        in_flight: the records of chunks [first, next).
        error: the error that ended the reads early; None if there is none.
        failed: the record to blame for `error`; None if there is none.
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
        self._slowest_s = 0.0  # the slowest read so far
        self._cancelled = False
        self._changed = threading.Condition()

    @property
    def unread(self) -> int:
        """Number of records requested from the tier and not delivered yet."""
        return sum(not (read.ended or read.awaited) for read in self.in_flight)

    def fill(self, at_most: int, wait: bool = False) -> int:
        """Start reads of up to `at_most` chunks while there are slots; `wait` for the first slots.

        Returns the number of records requested; none if the tier lends them.
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
        """Return verified leases of the next chunks, for the caller to release.

        Waits for the first chunk, and also takes the complete chunks after it. If empty, `error` has the
        reason.
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
        """Make waiting and later calls of `fill` and `take_ready` fail; from any thread."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()
        self._tiers.staging.wake()

    def restart(self) -> None:
        """Release records that were not taken; the tier keeps its own leases until its reads end."""
        for read in self.in_flight:
            read.ended = True
            read.lease.release()
        self.in_flight.clear()
        self.next = self.first

    def _borrow(self, names: Sequence[str]) -> bool:
        """Take records that are in slots already; return whether there are any."""
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
        """Request records from the tier; return how many."""
        if not reads:
            return 0
        by_name = {self._chunks.names[read.number]: read for read in reads}
        leases = [read.lease for read in reads]
        self._tiers.get(
            self.tier, list(by_name), leases, lambda name, error: self._on_complete(by_name[name], error)
        )
        return len(reads)

    def _exchange(self) -> None:
        """Share records with other ranks: put those read here, take theirs, and read late ones here."""
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
        patience_s = max(EXCHANGE_WAIT_S, 2 * self._slowest_s)
        if late and not self.unread and time.monotonic() > late[0].began + patience_s:
            self._meeting = None
            damaged += late
        for read in damaged:
            read.awaited = False
        self._start(damaged)

    def _collect(self, meeting: str, awaited: Sequence[RecordRead]) -> list[RecordRead]:
        """Take `awaited` records that other ranks put; return the damaged ones."""
        names, tier, damaged = self._chunks.names, self._tiers.tiers[meeting], list[RecordRead]()
        try:
            left = tier.match_prefix([names[read.number] for read in awaited])
        except OSError:  # the exchange tier fails: the wait for other ranks times out
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
        if read.ended:  # it was given up, and its slot may be reused
            return
        error = error or self._damage(read)
        with self._changed:
            self._slowest_s = max(self._slowest_s, time.monotonic() - read.began)
            read.error, read.ended = error, True
            self._changed.notify()

    def _damage(self, read: RecordRead) -> DamagedObject | None:
        """Verify a record; return what is wrong, or None."""
        chunk, group = divmod(read.number, self._chunks.groups)
        form, identity = self._chunks.formats[group], self._chunks.identity(chunk)
        damage = record.verify(form, read.lease.buffer[: read.lease.used], *identity)
        return (
            None if damage is None else DamagedObject(f"{self._chunks.names[read.number]}: {damage}", damage)
        )

    def _wait(self, chunk: Sequence[RecordRead], deadline: float) -> None:
        """Wait for the records of a chunk; on failure, set `error` and `failed`."""
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
            self.error = (
                Stopped() if self._cancelled else TimeoutError(f"tier {self.tier!r}: {name} timed out")
            )
