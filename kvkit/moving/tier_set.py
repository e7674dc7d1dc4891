"""The tiers as loads and stores use them: asked with a deadline, passed over while they fail, counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from operator import methodcaller
from typing import TypeVar

from kvkit.format import arrays
from kvkit.format.record import Damage, RecordFormat
from kvkit.moving import plan as planning
from kvkit.moving.counts import Counts, Direction
from kvkit.moving.plan import RetrievePlan, Segment, StorePlan
from kvkit.moving.policy import Policy
from kvkit.moving.promises import Promise, Promises
from kvkit.moving.puts import Outstanding, PutQueue
from kvkit.moving.quarantine import Quarantine
from kvkit.moving.sequence import Chunks
from kvkit.staging import Lease, Staging, StagingTimeout, release_all
from kvkit.tiers.base import DamagedObject, OnComplete, Tier, TierError, TierFull, UnreadableObject
from kvkit.tiers.health import Health, HealthState
from kvkit.workers import Closed, Stopped, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")
OnPut = Callable[[str, str], None]

ASKING_THREADS = 4
"""Threads that ask a tier outside this process, so that a caller can stop waiting. Each tier has its own: one
that hangs keeps them all."""

CLEARED_AT_ONCE = 256
"""Records that a tier which is emptied deletes in one go: past the deadline, no others."""

MAX_DESCRIBED = 4096
"""Arrays that are remembered as described; beyond that all are forgotten, which costs a look at each."""


class TierSet:
    """What loads and stores share. Thread-safe.

    Args:
        tiers: by name.
        policy: what goes where; names these tiers only.
        staging: slots that records pass through.
        groups: records of a chunk.
        timeout_s: the longest that any single wait may take, in seconds.
    """

    def __init__(
        self, tiers: dict[str, Tier], policy: Policy, staging: Staging, groups: int, timeout_s: float
    ) -> None:
        self.tiers = tiers
        for tier in tiers.values():
            tier.limit(staging.slot_bytes)
        self.policy = policy
        self.staging = staging
        self.timeout_s = timeout_s
        self.puts = Outstanding()
        self.promises = Promises()
        self.health = {name: Health() for name in tiers}
        self._lock = threading.Lock()
        self._counts = Counts()
        self._quarantine = Quarantine()
        self._described: set[tuple[str, str]] = set()
        self._gets: dict[str, dict[object, float]] = {
            name: {} for name in tiers
        }  # when those under way began
        self._asking = {
            name: Workers(ASKING_THREADS, f"kvkit-ask-{name}")
            for name, tier in tiers.items()
            if not tier.near
        }
        self._offering = {name: Workers(1, f"kvkit-offer-{name}") for name in self._asking}
        spare = staging.slots - sum(tier.slots for tier in tiers.values())
        limit = planning.put_limit(spare, len(self._asking), groups)
        self._queues = {
            name: PutQueue(name, limit, partial(self.start, "put", name)) for name in self._asking
        }
        staging.on_shortage(self._reclaim)

    def find(
        self,
        chunks: Chunks,
        plan: RetrievePlan,
        bad: Collection[tuple[str, int]],
        tiers: Sequence[str] | None = None,
    ) -> RetrievePlan:
        """`plan` gone on with what the tiers hold from its end, but for (tier, chunk) pairs in `bad`.

        Sought are `tiers`, or those that the policy retrieves from.
        """
        grew = True
        while grew and not plan.complete:
            grew = False
            for tier in self.policy.retrieve_from if tiers is None else tiers:
                start = plan.chunks
                stop = min((c for t, c in bad if t == tier and c >= start), default=plan.wanted)
                if start == stop or not self.usable(tier):
                    continue
                run = self.ask(tier, chunks.records(start, stop)) // chunks.groups
                plan = planning.extend(plan, tier, run)
                grew = grew or run > 0
        return plan

    def nearest(self, chunks: Chunks, plan: RetrievePlan) -> RetrievePlan:
        """`plan` with what lies in this host's memory by now taken from there. Asks no other tier."""
        near = [
            name
            for name in self.policy.retrieve_from
            if self.tiers[name].near and not self.tiers[name].transient and not self.passed_over(name)
        ]
        found = RetrievePlan(plan.wanted)
        for segment in plan.segments:
            if not near or self.tiers[segment.tier].near:
                found = planning.extend(found, segment.tier, segment.stop - segment.start)
                continue
            for chunk in range(segment.start, segment.stop):
                names = chunks.records(chunk, chunk + 1)
                tier = next((name for name in near if self.ask(name, names) == len(names)), segment.tier)
                found = planning.extend(found, tier, 1)
        return found

    def worth_loading(self, plan: RetrievePlan, groups: int, first: int, compute_s: float) -> RetrievePlan:
        """What of `plan` is had sooner by loading it than by computing it, as fast as tiers are of late.

        A tier of which nothing was read for a while is taken at no cost, so that it is tried again.

        Args:
            groups: records of a chunk.
            first: chunks that the engine has.
            compute_s: seconds that it takes to compute one.
        """
        now = time.monotonic()
        known = {tier: self.health[tier].record_s(now) for tier in plan.by_tier()}
        load_s = {tier: seconds * groups for tier, seconds in known.items() if seconds is not None}
        kept = planning.cheapest(planning.cut(plan, first, plan.chunks), load_s, compute_s).chunks
        return plan if first >= plan.chunks else planning.clip(plan, first + kept)

    def find_promised(
        self, chunks: Chunks, wait_s: float, tiers: Sequence[str] | None = None
    ) -> RetrievePlan:
        """What the tiers hold of `chunks`; waits up to `wait_s` seconds for what stores are making of it."""
        until = time.monotonic() + wait_s
        promised = self.promises.among(chunks.names)  # asked before the tiers: what is kept since, they have
        plan = self.find(chunks, RetrievePlan(len(chunks)), frozenset(), tiers)
        while not plan.complete and promised:
            gap = promised.intersection(chunks.records(plan.chunks, plan.chunks + 1))
            if not gap or not self.promises.wait(gap, until - time.monotonic()):
                break
            promised -= gap
            plan = self.find(chunks, plan, frozenset(), tiers)
        return plan

    def ask(self, tier: str, names: Sequence[str], *, to_put: bool = False) -> int:
        """How many of `names`, from the first on, the tier holds, or need not be put; none if it fails.

        What lies in quarantine it does not hold.
        """
        sound = names[: self._quarantine.before(tier, names, time.monotonic())]
        held = 0
        try:
            if sound:
                held = self.bounded(
                    tier, lambda asked: asked.count_unneeded(sound) if to_put else asked.count_leading(sound)
                )
            self.health[tier].answered(time.monotonic())
            return held
        except Exception as error:
            log.warning("tier %r could not be asked: %s", tier, error or type(error).__name__)
            self.failed(tier, error)
            return 0

    def bounded(self, name: str, call: Callable[[Tier], T], timeout_s: float | None = None) -> T:
        """What `call` returns; a tier outside this process gets `timeout_s` (default: the cache's) for it."""
        tier = self.tiers[name]
        if tier.near:
            return call(tier)
        future = self._asking[name].submit(lambda: call(tier), urgent=True)
        try:
            return future.result(self.timeout_s if timeout_s is None else max(0.0, timeout_s))
        finally:
            future.cancel()  # nobody waits for it any more: what has not begun need not

    def put(
        self,
        segments: Sequence[Segment],
        chunks: Chunks,
        first: int,
        leases: Sequence[Lease],
        written_back: bool = False,
        on_put: OnPut | None = None,
        promise: Promise | None = None,
    ) -> set[int]:
        """Start putting sealed records, chunk `first` on, into the tiers whose segment has them.

        A tier that is passed over, or whose puts hang, is left out. `on_put` is called with a tier and a name
        when it has that record, from any thread. `promise` hears how it ends.

        Returns:
            Those of the chunks that at least one tier took.
        """
        last = first + len(leases) // chunks.groups
        taken: set[int] = set()
        for segment in segments:
            start, stop = max(first, segment.start), min(last, segment.stop)
            if start >= stop or self.passed_over(segment.tier):
                continue
            names = chunks.records(start, stop)
            held = leases[(start - first) * chunks.groups : (stop - first) * chunks.groups]
            expected = self._expect(segment.tier, names, held, written_back, on_put, promise)
            queue = self._queues.get(segment.tier)
            if queue is None:
                self.start("put", segment.tier, names, held, expected)
            else:
                stop = start + queue.put(names, held, expected) // chunks.groups
            taken.update(range(start, stop))
        return taken

    def offer(
        self,
        tier: str,
        chunks: Chunks,
        first: int,
        leases: Sequence[Lease],
        on_put: OnPut | None,
        promise: Promise,
    ) -> set[int]:
        """As `put`, for a tier outside this process, which is asked what it lacks when its turn has come."""
        last = first + len(leases) // chunks.groups
        names = chunks.records(first, last)
        expected = self._expect(tier, names, leases, False, on_put, promise)
        taken = self._queues[tier].put(names, leases, expected, partial(self._start_lacking, tier, chunks))
        return set(range(first, first + taken // chunks.groups))

    def start(
        self,
        direction: Direction,
        tier: str,
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        """Have a tier get or put records; when the last has completed, what it took is counted.

        `on_complete` takes one report per name, whatever the tier does: raise half-way, or report twice.
        """
        size, began = 0, time.monotonic()
        lock = threading.Lock()
        call = object()
        if direction == "get":
            with self._lock:
                self._gets[tier][call] = began
        # shares: when the tier reports, it has released its own, and another record may lie in the slot
        held = {name: lease.share() for name, lease in zip(names, leases, strict=True)}

        def completed(name: str, error: BaseException | None) -> None:
            nonlocal size
            with lock:
                lease = held.pop(name, None)
                if lease is None:
                    return
                size += 0 if error is not None else lease.used
                last = not held
            lease.release()
            if last and direction == "get":
                with self._lock:
                    del self._gets[tier][call]
            if last and size:
                now = time.monotonic()
                self.count(lambda counts: counts.moved(tier, direction, size, now - began))
                if direction == "get":
                    self.health[tier].worked(now, (now - began) / len(names))
            on_complete(name, error)

        move = self.tiers[tier].get if direction == "get" else self.tiers[tier].put
        try:
            if direction == "put":
                names, leases = self._leave_out(tier, names, leases, completed)
            if names:
                move(names, leases, completed)
        except Exception as error:
            log.exception("tier %r: %s failed", tier, direction)
            for name in names:
                completed(name, error)

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
        wanted = self.policy.write_back_to if targets is None else targets
        segments = [s for s in plan.segments if s.tier in wanted and self.usable(s.tier)]
        for segment in segments:
            self.describe(segment.tier, chunks.formats)
        self.put(segments, chunks, first, leases, written_back=True)

    def is_written_back(self, source: str) -> bool:
        """Whether a tier is to get what comes from `source`."""
        return bool(self._plan_write_back(source, 0, 1).segments)

    def drop(self, tier: str, name: str, damage: Damage) -> None:
        """Delete a record that is not what it should be, so that it is stored anew.

        Where that fails it is no hit all the same, for a while.
        """
        log.warning("tier %r: %s is damaged (%s) and will be deleted", tier, name, damage)
        with self._lock:
            self._counts.damaged[tier, damage] += 1
        try:
            self.bounded(tier, lambda asked: asked.delete([name]))
        except Exception as error:
            log.warning("tier %r: %s could not be deleted, and is passed over: %s", tier, name, error)
            self._quarantine.add(tier, name, time.monotonic())

    def pin(self, tier: str, names: Sequence[str], seconds: float) -> int:
        """How many of `names` the tier holds on to; none if it fails."""
        if self.passed_over(tier):
            return 0
        try:
            return self.bounded(tier, lambda asked: asked.pin(names, seconds))
        except Exception as error:
            log.warning("tier %r does not pin: %s", tier, error or type(error).__name__)
            self.failed(tier, error)
            return 0

    def clear(self, tier: str, timeout_s: float) -> int:
        """Delete every record of a tier; how many there were.

        Raises:
            TimeoutError: some are left after `timeout_s` seconds.
            OSError: one could not be deleted.
        """
        until = time.monotonic() + timeout_s
        removed = 0

        def step(call: Callable[[Tier], T]) -> T:
            try:
                return self.bounded(tier, call, until - time.monotonic())
            except TimeoutError as error:
                raise TimeoutError(
                    f"tier {tier!r}: not empty after {timeout_s} s; {removed} records are deleted"
                ) from error

        records = step(lambda asked: asked.scan())
        while names := step(lambda _: [name for name, _ in islice(records, CLEARED_AT_ONCE)]):
            step(methodcaller("delete", names))
            removed += len(names)
        return removed

    def ended(self, tier: str, name: str | None, error: BaseException) -> None:
        """Reads of a tier ended early: by `name`, if a record is to blame.

        One that cannot be read is dropped, and counts against the tier once: whether it or the tier was to
        blame shows in whether others can be read. In a tier that is passed over already, all stay.
        """
        suspect = isinstance(error, UnreadableObject)
        given_up = suspect and self.health[tier].state(time.monotonic()) == "open"
        if suspect or not isinstance(error, DamagedObject) or name is None:
            self.failed(tier, error)
        if name is not None and isinstance(error, DamagedObject) and not given_up:
            self.drop(tier, name, error.damage)

    def describe(self, name: str, formats: Sequence[RecordFormat]) -> None:
        """Have a tier outside this process keep zarr.json for these arrays, once: `puts` waits for it.

        Records are read without it, so a failure is no failure of the tier; the next store tries again.
        """
        tier = self.tiers[name]
        if tier.near:  # no store that Zarr could open
            return
        with self._lock:
            new = [form for form in formats if (name, form.array) not in self._described]
            if len(self._described) + len(new) > MAX_DESCRIBED:
                self._described.clear()
            self._described.update((name, form.array) for form in new)
        if not new:
            return
        start = self.puts.add(1)

        def work() -> None:
            for form in new:
                try:
                    tier.describe(form.array, arrays.metadata(form, tier.codec))
                except Exception as error:
                    log.warning("tier %r: %s has no zarr.json yet: %s", name, form.array, error)
                    with self._lock:
                        self._described.discard((name, form.array))
            self.puts.done(start)

        self._asking[name].start(work)

    def close(self) -> None:
        """Give up puts that wait, close the tiers, each within the deadline, and end the asking threads."""
        self.staging.off_shortage(self._reclaim)
        for queue in self._queues.values():
            queue.give_up()
        for name in self.tiers:
            try:
                self.bounded(name, lambda tier: tier.close())
            except Exception as error:
                log.warning("tier %r did not close: %s", name, error or type(error).__name__)
        for workers in (*self._offering.values(), *self._asking.values()):
            workers.close(0.0)

    def usable(self, tier: str) -> bool:
        """Whether to ask it: not while it keeps failing. After a pause one caller gets yes, and must ask."""
        return not self.passed_over(tier) and self.health[tier].usable(time.monotonic())

    def passed_over(self, tier: str) -> bool:
        """Whether it failed and its pause lasts, for who was told of its records before. Changes nothing.

        The pause lasts while reads that are late keep slots: each trial would cost as many more.
        """
        now = time.monotonic()
        state = self.health[tier].state(now)
        if state != "half-open":
            return state == "open"
        with self._lock:
            oldest = min(self._gets[tier].values(), default=now)
        return now - oldest > self.timeout_s

    def worked(self, tier: str) -> None:
        """Note that a tier delivered."""
        self.health[tier].worked(time.monotonic())

    def failed(self, tier: str, error: BaseException) -> None:
        """Note that a tier did not deliver, or answer."""
        if isinstance(error, FileNotFoundError | StagingTimeout | Stopped):  # not the tier's fault
            return
        if isinstance(error, UnreadableObject):
            self.health[tier].failed(time.monotonic(), unreadable=error.name)
            return
        self.health[tier].failed(time.monotonic(), isinstance(error, TimeoutError))
        with self._lock:
            if isinstance(error, TimeoutError):
                self._counts.timeouts[tier] += 1
            else:
                self._counts.read_errors[tier] += 1

    def count(self, change: Callable[[Counts], None]) -> None:
        """Have `change` count something, alone."""
        with self._lock:
            change(self._counts)

    def counts(self) -> Counts:
        """A copy of what was counted so far."""
        with self._lock:
            counts = self._counts.copy()
        counts.evicted_records.update(
            {name: tier.evicted for name, tier in self.tiers.items() if tier.evicted}
        )
        return counts

    def states(self) -> dict[str, HealthState]:
        """The health of every tier."""
        now = time.monotonic()
        return {name: health.state(now) for name, health in self.health.items()}

    def _leave_out(
        self, tier: str, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete
    ) -> tuple[Sequence[str], Sequence[Lease]]:
        """`names` and `leases` without what lies in quarantine, which a tier would take for the record."""
        now = time.monotonic()
        if self._quarantine.before(tier, names, now) == len(names):
            return names, leases
        shunned = [not self._quarantine.before(tier, [name], now) for name in names]
        for name, left_out in zip(names, shunned, strict=True):
            if left_out:
                on_complete(name, TierError(f"tier {tier!r}: what lies in place of {name} cannot be removed"))
        kept = [pair for pair, out in zip(zip(names, leases, strict=True), shunned, strict=True) if not out]
        return [name for name, _ in kept], [lease for _, lease in kept]

    def _start_lacking(
        self,
        tier: str,
        chunks: Chunks,
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        """Ask the tier in the background which of `names` it has, and put the others."""
        held = [lease.share() for lease in leases]

        def work() -> None:
            run = 0
            try:
                if self.usable(tier):
                    run = self.ask(tier, names, to_put=True)
                for name in names[:run]:
                    on_complete(name, FileExistsError(f"tier {tier!r} has {name}"))
                if self.passed_over(tier):
                    for name in names[run:]:
                        on_complete(name, TierFull(f"tier {tier!r}: {name} is left out, for the tier fails"))
                elif run < len(names):
                    self.describe(tier, chunks.formats)
                    self.start("put", tier, names[run:], held[run:], on_complete)
            finally:
                release_all(held)

        try:
            self._offering[tier].start(work)
        except Closed as error:
            release_all(held)
            for name in names:
                on_complete(name, error)

    def _plan_write_back(self, source: str, start: int, stop: int) -> StorePlan:
        near = [name for name, tier in self.tiers.items() if tier.near]
        taken = RetrievePlan(stop, (Segment(source, start, stop),))
        return planning.plan_write_back(taken, stop, self.policy, near)

    def _reclaim(self, _: int) -> None:
        """Somebody lacks slots: those of what waits for a tier that does not get on."""
        for tier, queue in self._queues.items():
            if queue.stuck or self.passed_over(tier):
                queue.give_up()

    def _expect(
        self,
        tier: str,
        names: Sequence[str],
        leases: Sequence[Lease],
        written_back: bool,
        on_put: OnPut | None,
        promise: Promise | None,
    ) -> OnComplete:
        """A callback that counts what was put; `puts` waits for it, once per name."""
        sizes = {name: lease.used for name, lease in zip(names, leases, strict=True)}
        start = self.puts.add(len(sizes))
        if promise is not None:
            promise.attempt(sizes)

        def on_complete(name: str, error: BaseException | None) -> None:
            held = isinstance(error, FileExistsError)
            with self._lock:
                if held:
                    pass
                elif error is None:
                    self._counts.stored_records[tier] += 1
                    self._counts.stored_bytes[tier] += sizes[name]
                    self._counts.written_back_records[tier] += written_back
                elif isinstance(error, TierFull):
                    self._counts.refused[tier] += 1
                else:
                    self._counts.write_errors[tier] += 1
            if isinstance(error, TierFull | FileExistsError):
                log.debug("%s", error)
            elif error is not None:
                log.warning("tier %r did not take %s: %s", tier, name, error)
            self.health[tier].answered(time.monotonic())  # a full disk can still be read
            if error is None and on_put is not None:
                try:
                    on_put(tier, name)
                except Exception:  # the caller's: the tier did its part, and a flush must not wait for more
                    log.exception("the callback after the put of %s failed", name)
            if promise is not None:
                (promise.kept if error is None or held else promise.give_up)([name])
            self.puts.done(start)

        return on_complete
