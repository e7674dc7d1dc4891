"""Reads of a load: verified records, or parts of them, in slots, read ahead in order of need."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt

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
prefetch from two tiers loses the gain of reading them in parallel (benchmarks/micro/bench_engine.py)."""


class PlanReads:
    """Reads of segments, in order of need. Used by one thread: `take`, `take`, ..., `close`.

    While the records of one tier are used, those of the next tiers are read. Slots go first to as many reads
    as each tier runs at once, then to reads that queue for its threads. A load never waits for a slot while
    it holds one, so loads cannot deadlock, and any number of chunks passes through any number of slots: if
    the next chunk finds no slot, records read ahead are released.

    Args:
        throttled: request at most `THROTTLED_READS` times a tier's `reads_at_once`, which keeps its threads
            busy but lets other requests through.
    """

    def __init__(self, tiers: TierSet, reads: Iterable[SegmentReads], throttled: bool = False) -> None:
        self._tiers = tiers
        self._throttled = throttled
        self._reads = deque(reads)

    @property
    def tier(self) -> str:
        """The tier of the records that `take` returns next."""
        return self._reads[0].tier

    @property
    def short(self) -> bool:
        """True if there are chunks to read ahead and no slots for them."""
        free = self._tiers.staging.free
        return any(reads.next < reads.stop and free < reads.per_chunk for reads in self._reads)

    @property
    def failed(self) -> tuple[str | None, BaseException] | None:
        """The record to blame, if any, and the error that ended the reads early; None if there is none."""
        reads = self._reads[0]
        return None if reads.error is None else (reads.failed, reads.error)

    def take(self) -> list[RecordRead]:
        """Return verified reads of the next chunks of `tier`, whose leases the caller releases.

        If empty, `failed` has the reason.
        """
        while self._reads[0].first == self._reads[0].stop and len(self._reads) > 1:
            self._reads.popleft()
        first, *later = self._reads
        self._fill()
        if not first.in_flight:  # no slots: all are held
            for reads in later:
                reads.drop_from(reads.first)
            first.fill(1, wait=True)
            self._fill()
        return first.take_ready()

    def clip(self, stop: int) -> None:
        """Leave out all chunks from `stop` on, and release what was read ahead of them."""
        for reads in self._reads:
            reads.stop = max(reads.first, min(reads.stop, stop))
            reads.drop_from(reads.stop)

    def cancel(self) -> None:
        """End a waiting `take` and all later ones; from any thread."""
        for reads in tuple(self._reads):
            reads.cancel()

    def close(self) -> None:
        """Release records that were not taken; tiers keep their own leases until their reads end."""
        for reads in self._reads:
            reads.drop_from(reads.first)

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
        free_reads = {reads.tier: self._tiers.tiers[reads.tier].reads_at_once for reads in self._reads}
        for reads in self._reads:
            free_reads[reads.tier] -= reads.unread
        for reads in self._reads:
            if free_reads[reads.tier] > 0:
                free_reads[reads.tier] -= reads.fill(-(-free_reads[reads.tier] // reads.per_chunk))
        # 2. further reads, so that the tier's threads need not wait for this one
        for reads in self._reads:
            at_once = self._tiers.tiers[reads.tier].reads_at_once
            ahead = free_reads[reads.tier] + (THROTTLED_READS - 1) * at_once
            limit = -(-ahead // reads.per_chunk) if self._throttled else MAX_IN_FLIGHT
            if limit > 0 and self._tiers.staging.free >= reads.per_chunk:  # others release none for these
                free_reads[reads.tier] -= reads.fill(limit)


@dataclass(eq=False, slots=True)
class RecordRead:
    """The read of record `number` of a sequence into bytes [start, stop) of a slot.

    Once `ended` or given up, later reports do not change it.

    Attributes:
        reads: the reads of its segment.
        lent: the slot is the tier's or a prefetch's and holds the record, not verified yet.
        ended: the read succeeded or failed.
        error: why it failed.
        began: start time, on the monotonic clock.
        awaited: another rank reads the record (`kvkit.transfer.shared_reads`).
    """

    reads: SegmentReads
    number: int
    name: str
    lease: Lease
    start: int = 0
    stop: int | None = None
    lent: bool = False
    ended: bool = False
    error: BaseException | None = None
    began: float = 0.0
    awaited: bool = False

    def done(self, error: BaseException | None) -> None:
        """Note the end of the read, after verifying the record, and wake the load; from any thread."""
        if self.ended:  # it was given up, and its slot may be reused
            return
        error = error or self.reads.find_damage(self)
        with self.reads.changed:
            self.reads.slowest_s = max(self.reads.slowest_s, time.monotonic() - self.began)
            self.error, self.ended = error, True
            self.reads.changed.notify()

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes read, uint8; valid until the slot's release."""
        return self.lease.array[self.start : self.stop]


class SegmentReads:
    """The records of one segment, in order. Used by one thread.

    The thread that reads a record also verifies it, so a load has little left to do after its last read.

    Attributes:
        tier: source tier.
        per_chunk: reads per chunk.
        first, next, stop: chunk positions, see `PlanReads._fill`.
        in_flight: the records of chunks [first, next).
        error: the error that ended the reads early; None if there is none.
        failed: the record to blame for `error`; None if there is none.
        slowest_s: seconds of the slowest read so far.
        changed: notified when a read ends or `cancel` is called.
    """

    together: ClassVar[bool] = False
    """True to read and to take all chunks at once, False to do so as they come."""

    def __init__(self, tiers: TierSet, chunks: Chunks, segment: Segment) -> None:
        self.tier = segment.tier
        self.per_chunk = chunks.groups
        self.first = self.next = segment.start
        self.stop = segment.stop
        self.in_flight: deque[RecordRead] = deque()
        self.error: BaseException | None = None
        self.failed: str | None = None
        self.slowest_s = 0.0
        self.changed = threading.Condition()
        self._tiers = tiers
        self._chunks = chunks
        self._cancelled = False

    @property
    def unread(self) -> int:
        """Number of records requested from the tier and not delivered yet."""
        return sum(not (read.ended or read.awaited) for read in self.in_flight)

    def fill(self, at_most: int, wait: bool = False) -> int:
        """Start reads of up to `at_most` chunks while there are slots; `wait` for the first slots.

        Returns the number of records requested; none if the tier lends them.
        """
        ahead = self.stop if self.together else MAX_IN_FLIGHT - len(self.in_flight) // self.per_chunk
        count = min(at_most, self.stop - self.next, ahead)
        if count < 1 or self.error is not None:
            return 0
        try:
            reads = self._lease(count, wait)
        except (StagingTimeout, Stopped) as error:
            if wait:
                log.warning("load stopped early: %s", str(error) or type(error).__name__)
                self.error = error
            return 0
        self.in_flight.extend(reads)
        self.next += len(reads) // self.per_chunk
        missing = [read for read in reads if not (read.ended or read.awaited)]
        if missing:
            self._start(missing)
        return len(missing)

    def take_ready(self) -> list[RecordRead]:
        """Return verified reads of the next chunks, whose leases the caller releases.

        Waits for the first chunk, and also takes the complete chunks after it. If empty, `error` has the
        reason.
        """
        ready: list[RecordRead] = []
        while self.in_flight:
            chunk = list(islice(self.in_flight, self.per_chunk))
            if ready and not (self.together or all(read.ended for read in chunk)):
                break
            self._wait(chunk, time.monotonic() + self._tiers.timeout_s)
            if self.error is not None:
                break
            for _ in chunk:
                self.in_flight.popleft()
            ready.extend(chunk)
            self.first += 1
        return ready

    def find_damage(self, read: RecordRead) -> DamagedObject | None:
        """Verify a record; return what is wrong, or None."""
        chunk, group = divmod(read.number, self._chunks.groups)
        record_format, identity = self._chunks.formats[group], self._chunks.identity(chunk)
        damage = record.verify(record_format, read.lease.buffer[: read.lease.used], *identity)
        return None if damage is None else DamagedObject(f"{read.name}: {damage}", damage)

    def cancel(self) -> None:
        """Make waiting and later calls of `fill` and `take_ready` fail; from any thread."""
        with self.changed:
            self._cancelled = True
            self.changed.notify()
        self._tiers.staging.wake()

    def drop_from(self, start: int) -> None:
        """Release records not taken, from chunk `start` on; readers keep their own leases until they end."""
        while self.in_flight and self.in_flight[-1].number // self._chunks.groups >= start:
            read = self.in_flight.pop()
            read.ended = True
            read.lease.release()
        self.next = min(self.next, start)

    def _lease(self, count: int, wait: bool) -> Sequence[RecordRead]:
        """Return new reads, with their slots, of up to `count` chunks from `next` on.

        Raises:
            StagingTimeout, Stopped: there are no slots.
        """
        names = self._chunks.records(self.next, self.next + count)
        numbers = range(self.next * self.per_chunk, self.stop * self.per_chunk)
        if lent := self._borrow(names):
            records = zip(numbers, names, lent, strict=False)
            return [RecordRead(self, *entry, lent=True, ended=True) for entry in records]
        timeout_s, staging = self._tiers.timeout_s if wait else 0.0, self._tiers.staging
        leases = staging.acquire(len(names), timeout_s, self.per_chunk, stopped=lambda: self._cancelled)
        now = time.monotonic()
        return [RecordRead(self, *entry, began=now) for entry in zip(numbers, names, leases, strict=False)]

    def _borrow(self, names: Sequence[str]) -> list[Lease]:
        """Take the leading chunks' records that are in slots already."""
        leases: list[Lease] = []
        for name in names:
            if (lease := self._tiers.borrow(self.tier, name)) is None:
                break
            leases.append(lease)
        complete = len(leases) // self.per_chunk * self.per_chunk
        release_all(leases[complete:])
        return leases[:complete]

    def _start(self, reads: Sequence[RecordRead]) -> None:
        """Request records, at least one, from the tier."""
        self._tiers.get(self.tier, reads)

    def _wait(self, chunk: Sequence[RecordRead], deadline: float) -> None:
        """Wait for the records of a chunk; on failure, set `error` and `failed`."""
        for read in chunk:
            if read.lent:
                read.lent, read.error = False, self.find_damage(read)

        def finished() -> bool:
            return self._cancelled or any(r.error for r in chunk) or all(r.ended for r in chunk)

        self._wait_until(finished, deadline)
        late = None
        for read in chunk:
            if read.error is not None:
                self.failed, self.error = read.name, read.error
                return
            late = late or (None if read.ended else read)
        if late is not None:
            timeout = TimeoutError(f"tier {self.tier!r}: {late.name} timed out")
            self.error = Stopped() if self._cancelled else timeout

    def _wait_until(self, finished: Callable[[], bool], deadline: float) -> None:
        """Wait until `finished` returns True, or the deadline."""
        with self.changed:
            self.changed.wait_for(finished, deadline - time.monotonic())
