"""Sealed records on their way into tiers: queued, written, counted and reported.

    WritePipeline.put -> WriteQueue.go_on -> Tier.put ... -> WritePipeline._end

`_end` updates counts, pending stores and flushes. A tier that hangs holds a bounded share of the slots. One
record for one tier is a `WriteJob`, which ends once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvkit.format import arrays
from kvkit.format.record import RecordFormat
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import TierFull
from kvkit.transfer import plan as planning
from kvkit.transfer.pending_stores import PendingStore, PendingStores
from kvkit.transfer.plan import RetrievePlan, Segment, StorePlan
from kvkit.transfer.policy import Policy, RequestPolicy
from kvkit.transfer.sequence import Chunks
from kvkit.transfer.tier_set import TierSet
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

STUCK_S = 1.0
"""Seconds without a completed put after which a tier is stuck."""

MAX_DESCRIBED = 4096
"""Maximum number of arrays remembered as described; beyond that, all are forgotten and checked again."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The common data of the puts of one call and one tier; flushes track puts by it.

    Attributes:
        formats: record formats of the layer groups.
        pending: pending store, notified of the end of each put.
        written_back: True if the puts come from a load, not a store.
        asks: True if the tier is asked what it lacks before writing.
        policy: request policy, for the tier's eviction.
    """

    tier: str
    formats: tuple[RecordFormat, ...]
    pending: PendingStore | None
    written_back: bool
    asks: bool
    policy: RequestPolicy


@dataclass(eq=False, slots=True)
class WriteJob:
    """One record on its way into one tier; `lease` is valid until the put has started."""

    batch: Batch
    name: str
    lease: Lease
    size: int


@dataclass(frozen=True, slots=True)
class Unsaved:
    """Records that tiers do not have yet, and their bytes, by tier; false if there are none.

    Attributes:
        uncopied: number of records of stores that no tier was given yet.
    """

    records: Counter[str]
    sizes: Counter[str]
    uncopied: int = 0

    def __bool__(self) -> bool:
        return bool(self.uncopied or self.records.total())

    def __add__(self, other: Unsaved) -> Unsaved:
        sizes, uncopied = self.sizes + other.sizes, self.uncopied + other.uncopied
        return Unsaved(self.records + other.records, sizes, uncopied)

    def __str__(self) -> str:
        told = [
            f"{count} records ({self.sizes[tier] / 2**20:.1f} MiB) for tier {tier!r}"
            for tier, count in self.records.items()
        ]
        if self.uncopied:
            told.append(f"{self.uncopied} records of stores that are not copied yet")
        return ", ".join(told)


class WriteQueue:
    """The puts of one tier, at most `limit` in flight at a time. Thread-safe.

    The others wait and hold their slots until they are cancelled. A stuck tier accepts no puts that would
    have to wait, so it holds at most `limit` slots after that.

    Args:
        start: starts puts of one call; `ended` and then `go_on` are called for each that ends.
    """

    def __init__(self, limit: int, start: Callable[[Sequence[WriteJob]], None]) -> None:
        self.limit = limit
        self._start = start
        self._under_way = 0
        self._progress_s = 0.0  # when one ended, or the first was started
        self._waiting: deque[WriteJob] = deque()
        self._starting = False
        self._lock = threading.Lock()

    def add(self, puts: Sequence[WriteJob]) -> int:
        """Queue puts of one call for `go_on`; return how many, from the first on, were accepted."""
        with self._lock:
            taken = puts[: max(0, self.limit - self._under_way)] if self.stuck else puts
            for put in taken:
                put.lease = put.lease.share()
            self._waiting.extend(taken)
        return len(taken)

    def go_on(self) -> None:
        """Start waiting puts, up to the limit."""
        with self._lock:
            if self._starting:  # an outer call or another thread does this, and checks again before it ends
                return
            self._starting = True
        while True:
            with self._lock:
                room = islice(self._waiting, self.limit - self._under_way)
                puts = list(takewhile(lambda put: put.batch is self._waiting[0].batch, room))
                if not puts:
                    self._starting = False
                    return
                for _ in puts:
                    self._waiting.popleft()
                if not self._under_way:
                    self._progress_s = time.monotonic()
                self._under_way += len(puts)
            leases = [put.lease for put in puts]
            self._start(puts)
            release_all(leases)

    def ended(self) -> None:
        """Note that a started put has ended."""
        with self._lock:
            self._under_way -= 1
            self._progress_s = time.monotonic()

    @property
    def stuck(self) -> bool:
        """True if puts are in flight and none has ended for `STUCK_S`."""
        return self._under_way > 0 and time.monotonic() - self._progress_s > STUCK_S

    def cancel(self) -> list[WriteJob]:
        """Release the slots of waiting puts; return these puts."""
        with self._lock:
            gone = list(self._waiting)
            self._waiting.clear()
        release_all(put.lease for put in gone)
        return gone


class WritePipeline:
    """The path of sealed records into tiers, until their reports. Thread-safe.

    Args:
        tiers: target tiers.
        groups: records per chunk.

    Attributes:
        pending_stores: pending stores.
        outstanding: puts and array descriptions that have not ended.
    """

    def __init__(self, tiers: TierSet, groups: int) -> None:
        self.tiers = tiers
        self.outstanding = Outstanding()
        self.pending_stores = PendingStores()
        self._described: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        near = [name for name, tier in tiers.tiers.items() if tier.near]
        far = [name for name in tiers.tiers if name not in near]
        spare = tiers.staging.slots - sum(tier.slots for tier in tiers.tiers.values())
        limit = planning.put_limit(spare, len(far), groups)
        self._near = near
        self._queues = {name: WriteQueue(limit, self._write) for name in far}
        self._offering = {name: Workers(1, f"kvkit-offer-{name}") for name in far}
        tiers.staging.on_shortage(self._reclaim)

    def put(
        self,
        segments: Sequence[Segment],
        chunks: Chunks,
        numbers: Sequence[int],
        leases: Sequence[Lease],
        pending: PendingStore | None = None,
        *,
        written_back: bool = False,
        asks: bool = False,
    ) -> set[int]:
        """Start putting sealed records into the tiers of `segments`, for the chunks that this rank owns.

        Skips tiers with an open circuit or hanging puts.

        Args:
            numbers: chunk numbers of the records, ascending.
            pending: pending store, notified of the end of each put.
            written_back: the records come from another tier.
            asks: ask tiers outside this process what they lack before writing.

        Returns:
            The chunks that at least one tier accepted.
        """
        groups = chunks.groups
        held = {number: leases[i * groups : (i + 1) * groups] for i, number in enumerate(numbers)}
        taken: set[int] = set()
        for segment in segments:
            given = self.wanted([segment], chunks, numbers)
            if not given or self.tiers.passed_over(segment.tier):
                continue
            batch = Batch(segment.tier, chunks.formats, pending, written_back, asks, chunks.policy)
            self.outstanding.add(batch, len(given) * groups)
            puts = [
                WriteJob(batch, name, lease, lease.used)
                for number in given
                for name, lease in zip(chunks.records(number, number + 1), held[number], strict=True)
            ]
            if pending is not None:
                pending.attempt([put.name for put in puts])
            queue = self._queues.get(segment.tier)
            if queue is None:
                self._write(puts)
            else:
                count = queue.add(puts)
                queue.go_on()
                self._refuse(puts[count:])
                given = given[: count // groups]
            taken.update(given)
        return taken

    def wanted(self, segments: Sequence[Segment], chunks: Chunks, numbers: Sequence[int]) -> list[int]:
        """Return those of `numbers` that this rank puts into the tier of any segment."""
        mine = self.tiers.owned_by_rank
        return [
            number
            for number in numbers
            if any(s.start <= number < s.stop and mine(s.tier, chunks, number) for s in segments)
        ]

    def write_back(
        self, source: str, chunks: Chunks, first: int, leases: Sequence[Lease], targets: Sequence[str]
    ) -> None:
        """Put validated records into those of `targets` that the policy names, sharing their slots.

        All loads, prefetches and single gets write back through this. Callers call it in the order of the
        chunks and stop at the first gap.
        """
        numbers = range(first, first + len(leases) // chunks.groups)
        plan = self._plan_write_back(source, numbers.start, numbers.stop)
        segments = [s for s in plan.segments if s.tier in targets and self.tiers.usable(s.tier)]
        for segment in segments:
            self._describe(segment.tier, chunks.formats)
        self.put(segments, chunks, numbers, leases, written_back=True)

    def is_written_back(self, source: str) -> bool:
        """Return whether any tier gets records that come from `source`."""
        return bool(self._plan_write_back(source, 0, 1).segments)

    def plan(self, chunks: Chunks, targets: Sequence[str]) -> StorePlan:
        """Plan what each of `targets` lacks, except those with an open circuit; describe new arrays there."""
        ask, usable = self.tiers.ask, self.tiers.usable
        resident = {t: ask(t, chunks.names) // chunks.groups for t in targets if usable(t)}
        for tier, run in resident.items():
            self.tiers.retain(tier, chunks.records(0, run), chunks.policy)
        plan = planning.plan_store(len(chunks), Policy((), tuple(resident)), resident)
        for segment in plan.segments:
            self._describe(segment.tier, chunks.formats)
        return plan

    def find_with_pending(
        self, chunks: Chunks, wait_s: float, tiers: Sequence[str] | None = None
    ) -> RetrievePlan:
        """Plan a load of what the tiers hold of `chunks`; if the model has states, up to a snapshot.

        Waits up to `wait_s` seconds for pending stores of the rest.
        """
        until = time.monotonic() + wait_s
        pending = self.pending_stores.among(chunks.names)  # before asking tiers: they have what ends since
        plan = self.tiers.find(chunks, RetrievePlan(len(chunks)), tiers=tiers)
        while not plan.complete and pending:
            gap = pending.intersection(chunks.records(plan.chunks, plan.chunks + 1))
            if not gap or not self.pending_stores.wait(gap, until - time.monotonic()):
                break
            pending -= gap
            plan = self.tiers.find(chunks, plan, tiers=tiers)
        return self.with_states(chunks, plan, until - time.monotonic(), tiers)

    def with_states(
        self, chunks: Chunks, plan: RetrievePlan, wait_s: float, tiers: Sequence[str] | None = None
    ) -> RetrievePlan:
        """Return `plan` up to the last place with a snapshot; all of it if the model has no states.

        Waits up to `wait_s` seconds for pending stores of snapshots.
        """
        if not chunks.states:
            return plan
        until = time.monotonic() + wait_s
        for stop in planning.snapshots_sought(plan.chunks):
            snapshot = chunks.snapshot(stop - 1)
            if self.find_with_pending(snapshot, until - time.monotonic(), tiers).complete:
                return planning.clip(plan, stop)
        return planning.clip(plan, 0)

    def left(self) -> Unsaved:
        """Return what is still to be saved: puts not ended, and records of stores that no tier was given."""
        records, sizes = Counter[str](), Counter[str]()
        for start, count in self.outstanding.starts().items():
            if isinstance(start, Batch):
                records[start.tier] += count
                sizes[start.tier] += count * sum(f.record_bytes for f in start.formats) // len(start.formats)
        return Unsaved(records, sizes, self.pending_stores.uncopied())

    def close(self) -> Unsaved:
        """Cancel the waiting puts; return their records."""
        self.tiers.staging.off_shortage(self._reclaim)
        given_up = [put for queue in self._queues.values() for put in queue.cancel()]
        self._refuse(given_up, "the cache is closing")
        for workers in self._offering.values():
            workers.close(0.0)
        sizes = Counter[str]()
        for put in given_up:
            sizes[put.batch.tier] += put.size
        return Unsaved(Counter(put.batch.tier for put in given_up), sizes)

    def _write(self, puts: Sequence[WriteJob], asked: bool = False) -> None:
        """Start the puts of one call. Each put ends exactly once."""
        batch, by_name = puts[0].batch, {put.name: put for put in puts}
        if batch.asks and not asked:
            self._write_lacking(puts)
            return
        self.tiers.put(
            batch.tier,
            list(by_name),
            [put.lease for put in puts],
            lambda name, error: self._end(by_name[name], error),
        )

    def _write_lacking(self, puts: Sequence[WriteJob]) -> None:
        """Ask the tier in the background which records it has, and put the others."""
        tier, formats = puts[0].batch.tier, puts[0].batch.formats
        held = [put.lease.share() for put in puts]

        def work() -> None:
            run = 0
            try:
                if self.tiers.usable(tier):
                    run = self.tiers.ask(tier, [put.name for put in puts])
                for put in puts[:run]:
                    self._end(put, FileExistsError(f"tier {tier!r} has {put.name}"))
                if self.tiers.passed_over(tier):
                    for put in puts[run:]:
                        self._end(put, TierFull(f"tier {tier!r}: {put.name} is not stored: circuit is open"))
                elif run < len(puts):
                    self._describe(tier, formats)
                    for put, lease in zip(puts, held, strict=True):
                        put.lease = lease
                    self._write(puts[run:], asked=True)
            finally:
                release_all(held)

        try:
            self._offering[tier].start(work)
        except Closed as error:
            release_all(held)
            for put in puts:
                self._end(put, error)

    def _refuse(self, puts: Sequence[WriteJob], why: str = "earlier puts hang") -> None:
        """End puts that were not started."""
        for put in puts:
            tier = put.batch.tier
            self._report(put, TierFull(f"tier {tier!r}: {put.name} is not stored: {why}"))

    def _end(self, put: WriteJob, error: BaseException | None) -> None:
        """End a put that was started."""
        queue = self._queues.get(put.batch.tier)
        if queue is not None:
            queue.ended()
        self._report(put, error)
        if queue is not None:
            queue.go_on()

    def _report(self, put: WriteJob, error: BaseException | None) -> None:
        """Count how a put ended, and notify the pending store and flushes."""
        tier = put.batch.tier
        with self.tiers.counting() as counts:
            if error is None:
                counts.stored_records[tier] += 1
                counts.stored_bytes[tier] += put.size
                counts.snapshot_records[tier] += put.batch.formats[0].group.state is not None
                counts.written_back_records[tier] += put.batch.written_back
            elif isinstance(error, TierFull):
                counts.refused[tier] += 1
            elif not isinstance(error, FileExistsError):
                counts.write_errors[tier] += 1
        if error is None or isinstance(error, FileExistsError):
            self.tiers.retain(tier, [put.name], put.batch.policy, new=error is None)
        if isinstance(error, TierFull | FileExistsError):
            log.debug("%s", error)
        elif error is not None:
            log.warning("tier %r did not take %s: %s", tier, put.name, error)
        self.tiers.health[tier].answered(time.monotonic())  # a full disk can still be read
        if put.batch.pending is not None:
            put.batch.pending.ended(tier, put.name, error)
        self.outstanding.done(put.batch)

    def _describe(self, name: str, formats: Sequence[RecordFormat]) -> None:
        """Write zarr.json for new arrays to a tier outside this process; a flush waits for it.

        Records are read without it, so a failure does not count against the tier; the next store retries it.
        """
        if name in self._near:  # Zarr cannot open these
            return
        with self._lock:
            new = [form for form in formats if (name, form.array) not in self._described]
            if len(self._described) + len(new) > MAX_DESCRIBED:
                self._described.clear()
            self._described.update((name, form.array) for form in new)
        if not new:
            return
        tier, start = self.tiers.tiers[name], object()
        self.outstanding.add(start, 1)

        def describe() -> None:
            for form in new:
                try:
                    tier.describe(form.array, arrays.metadata(form, tier.codec, tier.precision))
                except Exception as error:
                    self._forget(name, [form], error)
            self.outstanding.done(start)

        try:
            self._offering[name].start(describe)
        except Closed as error:
            self._forget(name, new, error)
            self.outstanding.done(start)

    def _forget(self, tier: str, formats: Sequence[RecordFormat], error: Exception) -> None:
        for form in formats:
            log.warning("tier %r: %s has no zarr.json yet: %s", tier, form.array, error)
            with self._lock:
                self._described.discard((tier, form.array))

    def _plan_write_back(self, source: str, start: int, stop: int) -> StorePlan:
        taken = RetrievePlan(stop, (Segment(source, start, stop),), self.tiers.approximate)
        return planning.plan_write_back(taken, stop, self.tiers.policy, self._near)

    def _reclaim(self, _: int) -> None:
        """Cancel the waiting puts of tiers that are stuck or have an open circuit, to free slots."""
        for tier, queue in self._queues.items():
            if queue.stuck or self.tiers.passed_over(tier):
                self._refuse(queue.cancel())


class Outstanding:
    """Counter of what was started and not reported yet. Thread-safe."""

    def __init__(self) -> None:
        self._left: Counter[object] = Counter()  # by start
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Number of unreported items."""
        with self._changed:
            return self._left.total()

    def starts(self) -> dict[object, int]:
        """Return the unreported items per start."""
        with self._changed:
            return dict(self._left)

    def add(self, start: object, count: int) -> None:
        """Note that `count` (>= 1) were started; call `done` with the same `start` for each of them."""
        with self._changed:
            self._left[start] = count

    def done(self, start: object) -> None:
        """Note that one of `start` was reported."""
        with self._changed:
            self._left[start] -= 1
            if not self._left[start]:
                del self._left[start]
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Wait for all started before this call; return how many are unreported at the deadline."""
        with self._changed:
            starts = set(self._left)
            self._changed.wait_for(lambda: starts.isdisjoint(self._left), timeout_s)
            return sum(self._left[start] for start in starts)
