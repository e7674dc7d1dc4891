"""Sealed records on their way into tiers: queued, written, counted, and told of to whoever waits for them.

    Puts.put -> PutQueue.go_on -> Tier.put ... -> Puts._end: counts, promises, a flush

A tier that hangs keeps a bounded part of the slots. A record and a tier are one `Put`, which ends once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.format import arrays
from kvkit.format.record import RecordFormat
from kvkit.moving import plan as planning
from kvkit.moving.counts import Counts
from kvkit.moving.plan import RetrievePlan, Segment, StorePlan
from kvkit.moving.policy import Policy
from kvkit.moving.promises import Promise, Promises, when_whole
from kvkit.moving.sequence import Chunks
from kvkit.moving.tier_set import Reports, TierSet
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import TierError, TierFull
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""A tier that completed none of its puts for so long, in seconds, is stuck."""

MAX_DESCRIBED = 4096
"""Arrays that are remembered as described; beyond that all are forgotten, which costs a look at each."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the puts of one call and one tier have in common.

    Attributes:
        formats: of the records' layer groups.
        promise: hears how each put ends.
        written_back: whether a load gives them, and not a store.
        asks: whether the tier is asked what it lacks when it is their turn.
        number: by which a flush knows them.
    """

    tier: str
    formats: tuple[RecordFormat, ...]
    promise: Promise | None
    written_back: bool
    asks: bool
    number: int


@dataclass(eq=False, slots=True)
class Put:
    """One record on its way into one tier; `lease` is good until the put was started."""

    batch: Batch
    name: str
    lease: Lease
    size: int


class PutQueue:
    """The puts of one tier, of which so many are under way at a time. Thread-safe.

    The others wait, and keep their slots, until they are given up. A tier that is stuck takes none that would
    have to wait: then no more than the `limit` slots of what it may be writing are kept from others.

    Args:
        limit: puts under way at a time.
        start: starts some of one call; of each that ends `ended` and then `go_on` is called.
    """

    def __init__(self, limit: int, start: Callable[[Sequence[Put]], None]) -> None:
        self.limit = limit
        self._start = start
        self._under_way = 0
        self._progress_s = 0.0  # when one ended, or the first was started
        self._waiting: deque[deque[Put]] = deque()
        self._starting = False
        self._lock = threading.Lock()

    def add(self, puts: Sequence[Put]) -> int:
        """Have puts of one call wait for `go_on`; how many, from the first on, were taken."""
        with self._lock:
            taken = max(0, self.limit - self._under_way) if self._stuck() else len(puts)
            if taken:
                for put in puts[:taken]:
                    put.lease = put.lease.share()
                self._waiting.append(deque(puts[:taken]))
        return min(taken, len(puts))

    def go_on(self) -> None:
        """Start what waits, as far as the limit allows."""
        with self._lock:
            if self._starting:  # by a call further up, or another thread, which looks again before it ends
                return
            self._starting = True
        while True:
            with self._lock:
                count = min(self.limit - self._under_way, len(self._waiting[0]) if self._waiting else 0)
                if not count:
                    self._starting = False
                    return
                puts = [self._waiting[0].popleft() for _ in range(count)]
                if not self._waiting[0]:
                    self._waiting.popleft()
                if not self._under_way:
                    self._progress_s = time.monotonic()
                self._under_way += count
            leases = [put.lease for put in puts]
            self._start(puts)
            release_all(leases)

    def ended(self) -> None:
        """One of those that were started has ended."""
        with self._lock:
            self._under_way -= 1
            self._progress_s = time.monotonic()

    @property
    def stuck(self) -> bool:
        """Whether puts are under way, and none has ended for a while."""
        with self._lock:
            return self._stuck()

    def give_up(self) -> list[Put]:
        """Release the slots of what waits; the puts that were not started."""
        with self._lock:
            gone = [put for puts in self._waiting for put in puts]
            self._waiting.clear()
        release_all(put.lease for put in gone)
        return gone

    def _stuck(self) -> bool:
        return self._under_way > 0 and time.monotonic() - self._progress_s > PATIENCE_S


class Puts:
    """Everything between a sealed record and the report that tiers have it. Thread-safe.

    Args:
        tiers: to put into.
        groups: records of a chunk.
    """

    def __init__(self, tiers: TierSet, groups: int) -> None:
        self._tiers = tiers
        self._outstanding = Outstanding()
        self._promises = Promises()
        self._described: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        near = [name for name, tier in tiers.tiers.items() if tier.near]
        far = [name for name in tiers.tiers if name not in near]
        spare = tiers.staging.slots - sum(tier.slots for tier in tiers.tiers.values())
        limit = planning.put_limit(spare, len(far), groups)
        self._near = near
        self._queues = {name: PutQueue(limit, self._write) for name in far}
        self._offering = {name: Workers(1, f"kvkit-offer-{name}") for name in far}
        tiers.staging.on_shortage(self._reclaim)

    def put(
        self,
        segments: Sequence[Segment],
        chunks: Chunks,
        first: int,
        leases: Sequence[Lease],
        promise: Promise | None = None,
        *,
        written_back: bool = False,
        asks: bool = False,
    ) -> set[int]:
        """Start putting sealed records, chunk `first` on, into the tiers whose segment has them.

        A tier that is passed over, or whose puts hang, is left out.

        Args:
            promise: hears how each put ends.
            written_back: whether they come from another tier.
            asks: whether tiers outside this process are asked what they lack when it is their turn.

        Returns:
            Those of the chunks that at least one tier took.
        """
        last = first + len(leases) // chunks.groups
        taken: set[int] = set()
        for segment in segments:
            start, stop = max(first, segment.start), min(last, segment.stop)
            if start >= stop or self._tiers.passed_over(segment.tier):
                continue
            names = chunks.records(start, stop)
            number = self._outstanding.add(len(names))
            batch = Batch(segment.tier, chunks.formats, promise, written_back, asks, number)
            held = leases[(start - first) * chunks.groups : (stop - first) * chunks.groups]
            puts = [Put(batch, name, lease, lease.used) for name, lease in zip(names, held, strict=True)]
            if promise is not None:
                promise.attempt(names)
            queue = self._queues.get(segment.tier)
            if queue is None:
                self._write(puts)
            else:
                count = queue.add(puts)
                queue.go_on()
                self._refuse(puts[count:])
                stop = start + count // chunks.groups
            taken.update(range(start, stop))
        return taken

    def write_back(
        self,
        source: str,
        chunks: Chunks,
        first: int,
        leases: Sequence[Lease],
        targets: Sequence[str] | None = None,
    ) -> None:
        """Give validated records to the tiers that the policy names; the slots are shared, not copied.

        The one way back for blocking and background loads, prefetches and single gets. Callers come here in
        the order of the chunks, and stop at the first gap. `targets` narrows the policy's.
        """
        plan = self._plan_write_back(source, first, first + len(leases) // chunks.groups)
        wanted = self._tiers.policy.write_back_to if targets is None else targets
        segments = [s for s in plan.segments if s.tier in wanted and self._tiers.usable(s.tier)]
        for segment in segments:
            self._describe(segment.tier, chunks.formats)
        self.put(segments, chunks, first, leases, written_back=True)

    def is_written_back(self, source: str) -> bool:
        """Whether a tier is to get what comes from `source`."""
        return bool(self._plan_write_back(source, 0, 1).segments)

    def plan(self, chunks: Chunks, targets: Sequence[str]) -> StorePlan:
        """What each of `targets` lacks, but for those that are passed over; has them describe its arrays."""
        ask, usable = self._tiers.ask, self._tiers.usable
        resident = {t: ask(t, chunks.names, to_put=True) // chunks.groups for t in targets if usable(t)}
        plan = planning.plan_store(len(chunks), Policy((), tuple(resident)), resident)
        for segment in plan.segments:
            self._describe(segment.tier, chunks.formats)
        return plan

    def promise(
        self,
        chunks: Chunks,
        on_stored: Callable[[str, int], object] | None = None,
        on_done: Callable[[], object] = lambda: None,
    ) -> Promise:
        """Promise all records of `chunks`: see `Promises.make`, and `when_whole` for `on_stored`."""
        if on_stored is None:
            return self._promises.make(chunks.names, on_done=on_done)
        on_put = when_whole(chunks.names, chunks.groups, on_stored)
        return self._promises.make(chunks.names, on_put, on_done)

    def find_promised(
        self, chunks: Chunks, wait_s: float, tiers: Sequence[str] | None = None
    ) -> RetrievePlan:
        """What the tiers hold of `chunks`; waits up to `wait_s` seconds for what stores are making of it."""
        until = time.monotonic() + wait_s
        promised = self._promises.among(chunks.names)  # asked before the tiers: what ended since, they have
        plan = self._tiers.find(chunks, RetrievePlan(len(chunks)), frozenset(), tiers)
        while not plan.complete and promised:
            gap = promised.intersection(chunks.records(plan.chunks, plan.chunks + 1))
            if not gap or not self._promises.wait(gap, until - time.monotonic()):
                break
            promised -= gap
            plan = self._tiers.find(chunks, plan, frozenset(), tiers)
        return plan

    @property
    def under_way(self) -> int:
        """Puts that have not ended, and descriptions of arrays."""
        return self._outstanding.count

    def flush(self, timeout_s: float) -> int:
        """Wait until all that was started before this call has ended; how many have not by the deadline."""
        return self._outstanding.wait(timeout_s)

    def close(self) -> None:
        """Give up the puts that wait."""
        self._tiers.staging.off_shortage(self._reclaim)
        for queue in self._queues.values():
            self._refuse(queue.give_up())
        for workers in self._offering.values():
            workers.close(0.0)

    def _write(self, puts: Sequence[Put], asked: bool = False) -> None:
        """Have a tier write records of one call. Each put ends once, whatever the tier does."""
        batch, began = puts[0].batch, time.monotonic()
        if batch.asks and not asked:
            self._write_lacking(puts)
            return
        by_name = {put.name: put for put in puts}
        names, leases = list(by_name), [put.lease for put in puts]

        def count(size: int) -> None:
            if size:
                self._tiers.moved(batch.tier, "put", size, time.monotonic() - began)

        reports = Reports(
            names,
            [lease.share() for lease in leases],
            lambda name, error: self._end(by_name[name], error),
            count,
        )
        try:
            shunned = self._tiers.shunned(batch.tier, names)
            for name in shunned:  # a tier would take what lies there for the record
                reports(
                    name, TierError(f"tier {batch.tier!r}: what lies in place of {name} cannot be removed")
                )
            if shunned:
                puts = [put for put in puts if put.name not in shunned]
                names, leases = [put.name for put in puts], [put.lease for put in puts]
            if names:
                self._tiers.tiers[batch.tier].put(names, leases, reports)
        except Exception as error:
            log.exception("tier %r: put failed", batch.tier)
            reports.fail(error)

    def _write_lacking(self, puts: Sequence[Put]) -> None:
        """Ask the tier in the background which records it has, and have it write the others."""
        tier, formats = puts[0].batch.tier, puts[0].batch.formats
        held = [put.lease.share() for put in puts]

        def work() -> None:
            run = 0
            try:
                if self._tiers.usable(tier):
                    run = self._tiers.ask(tier, [put.name for put in puts], to_put=True)
                for put in puts[:run]:
                    self._end(put, FileExistsError(f"tier {tier!r} has {put.name}"))
                if self._tiers.passed_over(tier):
                    for put in puts[run:]:
                        self._end(put, TierFull(f"tier {tier!r}: {put.name} is left out, for the tier fails"))
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

    def _refuse(self, puts: Sequence[Put]) -> None:
        """End puts that were not started."""
        for put in puts:
            tier = put.batch.tier
            self._report(put, TierFull(f"tier {tier!r}: {put.name} is left out, for earlier puts hang"))

    def _end(self, put: Put, error: BaseException | None) -> None:
        """The one end of a put that was started."""
        queue = self._queues.get(put.batch.tier)
        if queue is None:
            self._report(put, error)
            return
        queue.ended()
        self._report(put, error)
        queue.go_on()

    def _report(self, put: Put, error: BaseException | None) -> None:
        """Count how a put ended, and tell who waits for it."""
        tier, written_back = put.batch.tier, put.batch.written_back

        def note(counts: Counts) -> None:
            if error is None:
                counts.stored_records[tier] += 1
                counts.stored_bytes[tier] += put.size
                counts.written_back_records[tier] += written_back
            elif isinstance(error, TierFull):
                counts.refused[tier] += 1
            elif not isinstance(error, FileExistsError):
                counts.write_errors[tier] += 1

        self._tiers.count(note)
        if isinstance(error, TierFull | FileExistsError):
            log.debug("%s", error)
        elif error is not None:
            log.warning("tier %r did not take %s: %s", tier, put.name, error)
        self._tiers.health[tier].answered(time.monotonic())  # a full disk can still be read
        if put.batch.promise is not None:
            put.batch.promise.ended(tier, put.name, error)
        self._outstanding.done(put.batch.number)

    def _describe(self, name: str, formats: Sequence[RecordFormat]) -> None:
        """Have a tier outside this process keep zarr.json for these arrays, once: a flush waits for it.

        Records are read without it, so a failure is no failure of the tier; the next store tries again.
        """
        if name in self._near:  # no store that Zarr could open
            return
        with self._lock:
            new = [form for form in formats if (name, form.array) not in self._described]
            if len(self._described) + len(new) > MAX_DESCRIBED:
                self._described.clear()
            self._described.update((name, form.array) for form in new)
        if not new:
            return
        tier, number = self._tiers.tiers[name], self._outstanding.add(1)

        def forget(form: RecordFormat, error: Exception) -> None:
            log.warning("tier %r: %s has no zarr.json yet: %s", name, form.array, error)
            with self._lock:
                self._described.discard((name, form.array))

        def work() -> None:
            for form in new:
                try:
                    tier.describe(form.array, arrays.metadata(form, tier.codec))
                except Exception as error:
                    forget(form, error)
            self._outstanding.done(number)

        try:
            self._tiers.in_background(name, work)
        except Closed as error:
            for form in new:
                forget(form, error)
            self._outstanding.done(number)

    def _plan_write_back(self, source: str, start: int, stop: int) -> StorePlan:
        taken = RetrievePlan(stop, (Segment(source, start, stop),))
        return planning.plan_write_back(taken, stop, self._tiers.policy, self._near)

    def _reclaim(self, _: int) -> None:
        """Somebody lacks slots: those of what waits for a tier that does not get on."""
        for tier, queue in self._queues.items():
            if queue.stuck or self._tiers.passed_over(tier):
                self._refuse(queue.give_up())


class Outstanding:
    """Counts what was started and not yet reported. Thread-safe."""

    def __init__(self) -> None:
        self._started = 0
        self._left: dict[int, int] = {}  # by the number of their start, in its order
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """How many are left."""
        with self._changed:
            return sum(self._left.values())

    def add(self, count: int) -> int:
        """Note that `count` were started; the number that `done` takes for each of them."""
        with self._changed:
            self._started += 1
            if count:
                self._left[self._started] = count
            return self._started

    def done(self, start: int) -> None:
        """Note that one of those was reported."""
        with self._changed:
            self._left[start] -= 1
            if not self._left[start]:
                del self._left[start]
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Wait for all that were started before this call; how many are left at the deadline."""
        with self._changed:
            last = self._started
            self._changed.wait_for(lambda: next(iter(self._left), last + 1) > last, timeout_s)
            return sum(left for start, left in self._left.items() if start <= last)
