"""Sealed records on their way into tiers: queued, written, counted and reported.

    WritePipeline.start -> WriteQueue.add -> Tier.put ... -> WriteJob.done -> WriteQueue.start_waiting

One record for one tier is a `WriteJob`, which is done once: then counts, pending stores and flushes are
updated. A tier that hangs holds a bounded share of the slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvkit.format import arrays
from kvkit.format.record import RecordFormat
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import TierFull
from kvkit.transfer import plan as planning
from kvkit.transfer.pending_stores import PendingStore
from kvkit.transfer.plan import RetrievePlan, Segment, StorePlan
from kvkit.transfer.policy import RequestPolicy
from kvkit.transfer.sequence import Chunks
from kvkit.transfer.tier_set import TierSet
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

STUCK_S = 1.0
"""Seconds without a completed write after which a tier is stuck."""

MAX_DESCRIBED = 4096
"""Maximum number of arrays remembered as described; beyond that, all are forgotten and checked again."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The common data of the writes of one call and one tier; flushes track writes by it.

    Attributes:
        writes: the pipeline of the writes.
        formats: record formats of the layer groups.
        pending: pending store, notified of the end of each write.
        written_back: True if the records come from a load, not a store.
        ask_first: True if the tier is asked what it lacks before writing.
    """

    writes: WritePipeline
    tier: str
    formats: tuple[RecordFormat, ...]
    pending: PendingStore | None = None
    written_back: bool = False
    ask_first: bool = False


@dataclass(eq=False, slots=True)
class WriteJob:
    """One record on its way into one tier; `lease` is valid until the write has started.

    Attributes:
        policy: request policy, for the tier's eviction.
    """

    batch: Batch
    name: str
    lease: Lease
    size: int
    policy: RequestPolicy

    def done(self, error: BaseException | None) -> None:
        """End a job that was started, and start those that wait for it. Called once, from any thread."""
        queue = self.batch.writes.queues.get(self.batch.tier)
        if queue is not None:
            queue.ended()
        self._report(error)
        if queue is not None:
            queue.start_waiting()

    def refuse(self, reason: str = "earlier puts hang") -> None:
        """End a job that was not started."""
        self._report(TierFull(f"tier {self.batch.tier!r}: {self.name} is not stored: {reason}"))

    def _report(self, error: BaseException | None) -> None:
        """Count how the job ended, and notify the pending store and flushes."""
        batch, tier, tiers = self.batch, self.batch.tier, self.batch.writes.tiers
        with tiers.counting() as counts:
            if error is None:
                counts.stored_records[tier] += 1
                counts.stored_bytes[tier] += self.size
                counts.snapshot_records[tier] += batch.formats[0].group.state is not None
                counts.written_back_records[tier] += batch.written_back
            elif isinstance(error, TierFull):
                counts.refused[tier] += 1
            elif not isinstance(error, FileExistsError):
                counts.write_errors[tier] += 1
        if error is None or isinstance(error, FileExistsError):
            tiers.retain(tier, [self.name], self.policy, new=error is None)
        if isinstance(error, TierFull | FileExistsError):
            log.debug("%s", error)
        elif error is not None:
            log.warning("tier %r did not take %s: %s", tier, self.name, error)
        tiers.health[tier].answered(time.monotonic())  # a full disk can still be read
        if batch.pending is not None:
            batch.pending.end_attempt(tier, self.name, error)
        batch.writes.outstanding.done(batch)


class WriteQueue:
    """The writes into one tier, at most `limit` in flight at a time. Thread-safe.

    The others wait and hold their slots until they are cancelled. A stuck tier accepts no writes that would
    have to wait, so it holds at most `limit` slots after that.

    Args:
        write: starts jobs of one batch; each is done once.
    """

    def __init__(self, limit: int, write: Callable[[Sequence[WriteJob]], None]) -> None:
        self.limit = limit
        self._write = write
        self._in_flight = 0
        self._progress_s = 0.0  # when one ended, or the first was started
        self._waiting: deque[WriteJob] = deque()
        self._starting = False
        self._lock = threading.Lock()

    def add(self, jobs: Sequence[WriteJob]) -> int:
        """Queue or start the jobs of one call; return how many, from the first on, were accepted."""
        with self._lock:
            accepted = jobs[: max(0, self.limit - self._in_flight)] if self.stuck else jobs
            for job in accepted:
                job.lease = job.lease.share()
            self._waiting.extend(accepted)
        self.start_waiting()
        return len(accepted)

    def start_waiting(self) -> None:
        """Start waiting jobs, a batch at a time, up to the limit. Releases the queue's shares of slots."""
        with self._lock:
            if self._starting:  # an outer call or another thread does this, and checks again before it ends
                return
            self._starting = True
        while True:
            with self._lock:
                next_jobs = islice(self._waiting, self.limit - self._in_flight)
                jobs = list(takewhile(lambda job: job.batch is self._waiting[0].batch, next_jobs))
                if not jobs:
                    self._starting = False
                    return
                for _ in jobs:
                    self._waiting.popleft()
                if not self._in_flight:
                    self._progress_s = time.monotonic()
                self._in_flight += len(jobs)
            leases = [job.lease for job in jobs]
            self._write(jobs)
            release_all(leases)

    def ended(self) -> None:
        """Note that a started job has ended; call `start_waiting` after its report."""
        with self._lock:
            self._in_flight -= 1
            self._progress_s = time.monotonic()

    @property
    def stuck(self) -> bool:
        """True if writes are in flight and none has ended for `STUCK_S`."""
        return self._in_flight > 0 and time.monotonic() - self._progress_s > STUCK_S

    def cancel(self) -> list[WriteJob]:
        """Release the slots of waiting jobs; return these jobs."""
        with self._lock:
            cancelled = list(self._waiting)
            self._waiting.clear()
        release_all(job.lease for job in cancelled)
        return cancelled


class WritePipeline:
    """The path of sealed records into tiers, until their reports. Thread-safe.

    Args:
        tiers: target tiers.
        groups: records per chunk.

    Attributes:
        outstanding: writes and array descriptions that have not ended.
        queues: queue of each tier outside this process.
    """

    def __init__(self, tiers: TierSet, groups: int) -> None:
        self.tiers = tiers
        self.outstanding = Outstanding()
        self._described: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        in_memory = [name for name, tier in tiers.tiers.items() if tier.in_memory]
        remote = [name for name in tiers.tiers if name not in in_memory]
        spare = tiers.staging.slots - sum(tier.slots for tier in tiers.tiers.values())
        limit = planning.write_limit(spare, len(remote), groups)
        self._in_memory = in_memory
        self.queues = {name: WriteQueue(limit, self._write) for name in remote}
        self._offering = {name: Workers(1, f"kvkit-offer-{name}") for name in remote}
        tiers.staging.on_shortage(self._reclaim)

    def start(
        self,
        segments: Sequence[Segment],
        chunks: Chunks,
        numbers: Sequence[int],
        leases: Sequence[Lease],
        pending: PendingStore | None = None,
        *,
        written_back: bool = False,
        ask_first: Collection[str] = (),
    ) -> set[int]:
        """Start writing sealed records to the tiers of `segments`, for the chunks that this rank owns.

        Skips tiers with an open circuit or hanging writes.

        Args:
            numbers: chunk numbers of the records, ascending.
            pending: pending store, notified of the end of each write.
            written_back: the records come from another tier.
            ask_first: tiers outside this process that are asked what they lack before writing.

        Returns:
            The chunks that at least one tier accepted.
        """
        groups = chunks.groups
        by_chunk = {number: leases[i * groups : (i + 1) * groups] for i, number in enumerate(numbers)}
        accepted: set[int] = set()
        for segment in segments:
            owned = self.owned([segment], chunks, numbers)
            if not owned or self.tiers.circuit_open(segment.tier):
                continue
            tier = segment.tier
            batch = Batch(self, tier, chunks.formats, pending, written_back, tier in ask_first)
            self.outstanding.add(batch, len(owned) * groups)
            jobs = [
                WriteJob(batch, name, lease, lease.used, chunks.policy_at(number))
                for number in owned
                for name, lease in zip(chunks.records(number, number + 1), by_chunk[number], strict=True)
            ]
            if pending is not None:
                pending.begin_attempts([job.name for job in jobs])
            if tier in self._in_memory:
                self._write(jobs)
            else:
                count = self.queues[tier].add(jobs)
                for job in jobs[count:]:
                    job.refuse()
                owned = owned[: count // groups]
            accepted.update(owned)
        return accepted

    def owned(self, segments: Sequence[Segment], chunks: Chunks, numbers: Sequence[int]) -> list[int]:
        """Return those of `numbers` that this rank writes to the tier of any segment."""
        owns = self.tiers.owned_by_rank
        return [
            number
            for number in numbers
            if any(s.start <= number < s.stop and owns(s.tier, chunks, number) for s in segments)
        ]

    def write_back(
        self, source: str, chunks: Chunks, first: int, leases: Sequence[Lease], targets: Sequence[str]
    ) -> None:
        """Write validated records to those of `targets` that the policy names, sharing their slots.

        All loads, prefetches and single gets write back through this. Callers call it in the order of the
        chunks and stop at the first gap.
        """
        numbers = range(first, first + len(leases) // chunks.groups)
        plan = self._plan_write_back(source, numbers.start, numbers.stop)
        segments = [s for s in plan.segments if s.tier in targets and self.tiers.usable(s.tier)]
        for segment in segments:
            self._describe(segment.tier, chunks.formats)
        self.start(segments, chunks, numbers, leases, written_back=True)

    def is_written_back(self, source: str) -> bool:
        """Return whether any tier gets records that come from `source`."""
        return bool(self._plan_write_back(source, 0, 1).segments)

    def plan(self, chunks: Chunks, targets: Sequence[str]) -> StorePlan:
        """Plan what each of `targets` lacks, except those with an open circuit; describe new arrays there."""
        ask, usable = self.tiers.ask, self.tiers.usable
        resident = {t: ask(t, chunks.names) // chunks.groups for t in targets if usable(t)}
        for tier, run in resident.items():
            for part, policy in chunks.retained(run):
                self.tiers.retain(tier, part.names, policy)
        plan = planning.plan_store(len(chunks), resident)
        for segment in plan.segments:
            self._describe(segment.tier, chunks.formats)
        return plan

    def close(self) -> list[WriteJob]:
        """Cancel the waiting jobs; return them."""
        self.tiers.staging.off_shortage(self._reclaim)
        cancelled = [job for queue in self.queues.values() for job in queue.cancel()]
        for job in cancelled:
            job.refuse("the cache is closing")
        for workers in self._offering.values():
            workers.close(0.0)
        return cancelled

    def _write(self, jobs: Sequence[WriteJob]) -> None:
        """Start the jobs of one call. Each is done exactly once."""
        batch = jobs[0].batch
        if batch.ask_first:
            self._write_lacking(jobs)
        else:
            self.tiers.put(batch.tier, jobs)

    def _write_lacking(self, jobs: Sequence[WriteJob]) -> None:
        """Ask the tier in the background which records it has, and write the others."""
        tier, formats = jobs[0].batch.tier, jobs[0].batch.formats
        shares = [job.lease.share() for job in jobs]

        def work() -> None:
            run = 0
            try:
                if self.tiers.usable(tier):
                    run = self.tiers.ask(tier, [job.name for job in jobs])
                for job in jobs[:run]:
                    job.done(FileExistsError(f"tier {tier!r} has {job.name}"))
                if self.tiers.circuit_open(tier):
                    for job in jobs[run:]:
                        job.done(TierFull(f"tier {tier!r}: {job.name} is not stored: circuit is open"))
                elif run < len(jobs):
                    self._describe(tier, formats)
                    for job, share in zip(jobs, shares, strict=True):
                        job.lease = share
                    self.tiers.put(tier, jobs[run:])
            finally:
                release_all(shares)

        try:
            self._offering[tier].start(work)
        except Closed as error:
            release_all(shares)
            for job in jobs:
                job.done(error)

    def _describe(self, name: str, formats: Sequence[RecordFormat]) -> None:
        """Write zarr.json for new arrays to a tier outside this process; a flush waits for it.

        Records are read without it, so a failure does not count against the tier; the next store retries it.
        """
        if name in self._in_memory:  # Zarr cannot open these
            return
        with self._lock:
            new = [f for f in formats if (name, f.array) not in self._described]
            if len(self._described) + len(new) > MAX_DESCRIBED:
                self._described.clear()
            self._described.update((name, record_format.array) for record_format in new)
        if not new:
            return
        tier, start = self.tiers.tiers[name], object()
        self.outstanding.add(start, 1)

        def describe() -> None:
            for record_format in new:
                try:
                    metadata = arrays.metadata(record_format, tier.codec, tier.precision)
                    tier.describe(record_format.array, metadata)
                except Exception as error:
                    self._forget(name, [record_format], error)
            self.outstanding.done(start)

        try:
            self._offering[name].start(describe)
        except Closed as error:
            self._forget(name, new, error)
            self.outstanding.done(start)

    def _forget(self, tier: str, formats: Sequence[RecordFormat], error: Exception) -> None:
        for record_format in formats:
            log.warning("tier %r: %s has no zarr.json yet: %s", tier, record_format.array, error)
            with self._lock:
                self._described.discard((tier, record_format.array))

    def _plan_write_back(self, source: str, start: int, stop: int) -> StorePlan:
        loaded = RetrievePlan(stop, (Segment(source, start, stop),), self.tiers.approximate)
        return planning.plan_write_back(loaded, stop, self.tiers.policy, self._in_memory)

    def _reclaim(self, _: int) -> None:
        """Cancel the waiting jobs of tiers that are stuck or have an open circuit, to free slots."""
        for tier, queue in self.queues.items():
            if queue.stuck or self.tiers.circuit_open(tier):
                for job in queue.cancel():
                    job.refuse()


class Outstanding:
    """Counter of what was started and not reported yet. Thread-safe."""

    def __init__(self) -> None:
        self._unreported: Counter[object] = Counter()  # by start
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Number of unreported items."""
        with self._changed:
            return self._unreported.total()

    def starts(self) -> dict[object, int]:
        """Return the unreported items per start."""
        with self._changed:
            return dict(self._unreported)

    def add(self, start: object, count: int) -> None:
        """Note that `count` (>= 1) were started; call `done` with the same `start` for each of them."""
        with self._changed:
            self._unreported[start] = count

    def done(self, start: object) -> None:
        """Note that one of `start` was reported."""
        with self._changed:
            self._unreported[start] -= 1
            if not self._unreported[start]:
                del self._unreported[start]
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Wait for all started before this call; return how many are unreported at the deadline."""
        with self._changed:
            starts = set(self._unreported)
            self._changed.wait_for(lambda: starts.isdisjoint(self._unreported), timeout_s)
            return sum(self._unreported[start] for start in starts)
