"""The tiers as loads and stores ask them: with a deadline, passed over while they fail, counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from kvkit.format.names import narrowed_name
from kvkit.format.record import Damage
from kvkit.moving import plan as planning
from kvkit.moving.counts import Counts, Direction
from kvkit.moving.plan import RetrievePlan
from kvkit.moving.policy import Policy, RequestPolicy, for_request
from kvkit.moving.prefetched import Prefetched
from kvkit.moving.quarantine import Quarantine
from kvkit.moving.sequence import Chunks, Loaded
from kvkit.staging import Lease, Staging, StagingTimeout
from kvkit.tiers.base import DamagedObject, HeldListener, OnComplete, Tier, TierError, UnreadableObject
from kvkit.tiers.eviction.policies import NORMAL
from kvkit.tiers.health import Health, HealthState
from kvkit.workers import Closed, Stopped, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

TierHeldListener = Callable[[str, Sequence[str], bool], None]
"""Called with a tier and what `kvkit.tiers.base.HeldListener` is called with."""

ASKING_THREADS = 4
"""Threads that ask a tier outside this process, so that a caller can stop waiting. Each tier has its own: one
that hangs keeps them all."""

CLEARED_AT_ONCE = 256
"""Records that a tier which is emptied deletes in one go: past the deadline, no others."""


class TierSet:
    """What is asked of tiers, and what is known of them: answers, health, counts. Thread-safe.

    Args:
        tiers: by name; `policy` names no others.
        staging: slots that records pass through.
        timeout_s: the longest that any single wait may take, in seconds.
        copy, copies: as `KVLayout` has them.

    Attributes:
        approximate: names of the tiers with fewer bits.
        health: by tier.
        prefetched: records that prefetches left in slots.
    """

    def __init__(
        self,
        tiers: dict[str, Tier],
        policy: Policy,
        staging: Staging,
        timeout_s: float,
        copy: int = 0,
        copies: int = 1,
    ) -> None:
        self.tiers = tiers
        self.copy, self.copies = copy, copies
        for tier in tiers.values():
            tier.limit(staging.slot_bytes)
        self.policy = policy
        self.staging = staging
        self.timeout_s = timeout_s
        self.approximate = frozenset(n for n, tier in tiers.items() if tier.precision is not None)
        self.health = {name: Health() for name in tiers}
        self.prefetched = Prefetched(staging)
        self._lock = threading.Lock()
        self._watched: dict[str, HeldListener] = {}
        self._counts = Counts()
        self._quarantine = Quarantine()
        self._gets: dict[str, dict[object, float]] = {n: {} for n in tiers}  # when those under way began
        far = [name for name, tier in tiers.items() if not tier.near]
        self._asking = {name: Workers(ASKING_THREADS, f"kvkit-ask-{name}") for name in far}

    def watch(self, tiers: Sequence[str], held_listener: TierHeldListener) -> bool:
        """`Tier.watch` of `tiers`. Of one that does not tell by itself, what its answers say is told."""
        self._watched = {name: partial(held_listener, name) for name in tiers}
        return all([self.tiers[name].watch(told) for name, told in self._watched.items()])  # noqa: C419

    def owned_by_rank(self, tier: str, chunks: Chunks, number: int) -> bool:
        """Whether it is this rank that puts chunk `number` of `chunks` into a tier, or reads it from there.

        Of a tier that is common to ranks with equal KV each does every nth.
        """
        return not self.tiers[tier].common or (chunks.first + number) % self.copies == self.copy

    def exchange_tier(self, tier: str, chunks: Chunks) -> str | None:
        """Where ranks with equal KV leave each other what they read from a tier; None: each reads all of it.

        That is a tier in this host's memory, common to them, to which what is loaded is written back anyway:
        nothing approximate.
        """
        far = self.tiers[tier]
        if self.copies == 1 or far.near or not far.common or tier in self.approximate:
            return None
        targets = for_request(self.policy, chunks.policy).write_back_to
        exact = [t for t in targets if t not in self.approximate]
        common = (t for t in exact if self.tiers[t].near and self.tiers[t].common)
        return next((t for t in common if not self.passed_over(t)), None)

    def find(
        self,
        chunks: Chunks,
        plan: RetrievePlan,
        bad: Collection[tuple[str, int]] = (),
        tiers: Sequence[str] | None = None,
        exact: int = 0,
    ) -> RetrievePlan:
        """`plan` gone on with what `tiers` (None: the policy's) hold, but for (tier, chunk) in `bad`.

        The first `exact` chunks are sought in no tier with fewer bits.
        """
        known, sought = -1, for_request(self.policy, chunks.policy).retrieve_from if tiers is None else tiers
        plan = replace(plan, approximate=self.approximate)
        while known < plan.chunks < plan.wanted:
            known = plan.chunks
            for tier in planning.exact_first(sought, self.approximate):
                start = plan.chunks
                stop = min((c for t, c in bad if t == tier and c >= start), default=plan.wanted)
                if start < exact and tier in self.approximate:
                    break
                if start < stop and self.usable(tier):
                    run = self.ask(tier, chunks.records(start, stop)) // chunks.groups
                    plan = planning.extend(plan, tier, run)
        return plan

    def nearest(self, chunks: Chunks, plan: RetrievePlan) -> RetrievePlan:
        """`plan` with what lies in this host's memory by now taken from there. Asks no other tier."""
        sought = for_request(self.policy, chunks.policy).retrieve_from
        kept = [name for name in sought if self.tiers[name].near and not self.tiers[name].transient]
        near = [name for name in kept if not self.passed_over(name)]
        found = RetrievePlan(plan.chunks, approximate=self.approximate)
        for segment in plan.segments:
            if not near or self.tiers[segment.tier].near:
                found = planning.extend(found, segment.tier, segment.stop - segment.start)
                continue
            for chunk in range(segment.start, segment.stop):
                names = chunks.records(chunk, chunk + 1)
                tier = next((name for name in near if self.ask(name, names) == len(names)), segment.tier)
                found = planning.extend(found, tier, 1)
        return found

    def storage_name(self, tier: str, name: str) -> str:
        """What a record of a tier is called where records of all tiers are kept."""
        precision = self.tiers[tier].precision
        return name if precision is None else narrowed_name(name, precision)

    def trim_by_cost(self, plan: RetrievePlan, groups: int, first: int, compute_s: float) -> RetrievePlan:
        """What of `plan` is had sooner by loading it than by computing it, as fast as tiers are of late.

        The engine has `first` chunks, and takes `compute_s` seconds for one, of `groups` records. A tier of
        which nothing was read for a while is taken at no cost, so that it is tried again.
        """
        now = time.monotonic()
        known = {tier: self.health[tier].record_s(now) for tier in plan.by_tier()}
        load_s = {tier: seconds * groups for tier, seconds in known.items() if seconds is not None}
        kept = planning.cheapest(planning.cut(plan, first, plan.chunks), load_s, compute_s).chunks
        return plan if first >= plan.chunks else planning.clip(plan, first + kept)

    def ask(self, tier: str, names: Sequence[str], *, to_put: bool = False) -> int:
        """How many of `names`, from the first on, the tier holds, or need not be put; none if it fails.

        What lies in quarantine it does not hold.
        """
        sound = names[: self._quarantine.before(tier, names, time.monotonic())]
        if not sound:
            self.health[tier].answered(time.monotonic())
            return 0
        run = self._number(
            tier, lambda asked: asked.count_unneeded(sound) if to_put else asked.match_prefix(sound)
        )
        self._answered(tier, sound[:run], True)
        self._answered(tier, sound[run : run + 1], False)
        return run

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

    def get(self, tier: str, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Have a tier read records: `on_complete` takes one report per name, whatever the tier does."""
        self._move("get", tier, names, leases, on_complete)

    def put(self, tier: str, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Have a tier write records: `on_complete` takes one report per name, whatever the tier does."""
        now, sound = time.monotonic(), list(zip(names, leases, strict=True))
        if self._quarantine.before(tier, names, now) < len(names):
            sound = [(n, lease) for n, lease in sound if self._quarantine.before(tier, [n], now)]
            for name in {*names} - dict(sound).keys():  # a tier would take what lies there for the record
                on_complete(name, TierError(f"tier {tier!r}: what lies in place of {name} cannot be removed"))
        if sound:
            self._move("put", tier, [n for n, _ in sound], [lease for _, lease in sound], on_complete)

    def drop(self, tier: str, name: str, damage: Damage) -> None:
        """Delete a record that is not what it should be, so that it is stored anew.

        Where that fails it is no hit all the same, for a while.
        """
        log.warning("tier %r: %s is damaged (%s) and will be deleted", tier, name, damage)
        with self.counting() as counts:
            counts.damaged[tier, damage] += 1
        try:
            self.bounded(tier, lambda asked: asked.delete([name]))
            self._answered(tier, (name,), False)
        except Exception as error:
            log.warning("tier %r: %s could not be deleted, and is passed over: %s", tier, name, error)
            self._quarantine.add(tier, name, time.monotonic())
            if tier in self._watched:
                self._watched[tier]((name,), False)

    def pin(self, tier: str, chunks: Chunks, seconds: float) -> int:
        """How many tokens the tier holds on to, and with them snapshots; none if it fails."""
        if self.passed_over(tier):
            return 0
        held = self._number(tier, lambda asked: asked.pin(chunks.names, seconds))
        if chunks.states:
            self._number(tier, lambda asked: asked.pin(chunks.snapshots, seconds))
        return held // chunks.groups * chunks.chunk_tokens

    def retain(self, tier: str, names: Sequence[str], policy: RequestPolicy, *, new: bool = False) -> None:
        """Have a tier evict those of `names` that it holds as a request wants; `new`: it has stored them.

        What was there before keeps at least the priority that it has.
        """
        asked = self.tiers[tier]
        try:
            if policy.priority > NORMAL or (new and policy.priority != NORMAL):
                asked.prioritise(names, policy.priority)
            if policy.keep_s:
                asked.pin(names, policy.keep_s)
        except Exception as error:
            log.warning("tier %r: what it keeps is evicted like any other: %s", tier, error)

    def clear(self, tier: str, timeout_s: float) -> int:
        """Delete every record of a tier that can be deleted; how many there were. None is shunned any longer.

        Raises:
            TimeoutError: some are left after `timeout_s` seconds.
            OSError: some could not be deleted; all others are.
        """
        until = time.monotonic() + timeout_s
        removed, kept = 0, dict[str, OSError]()

        def step(call: Callable[[Tier], T]) -> T:
            return self.bounded(tier, call, until - time.monotonic())

        def delete(names: Sequence[str]) -> int:
            try:
                step(lambda asked: asked.delete(names))
                self._answered(tier, names, False)
            except TimeoutError:
                raise
            except OSError as error:
                if len(names) > 1:
                    return sum(delete([name]) for name in names)
                kept[names[0]] = error
                return 0
            return len(names)

        try:
            records = step(lambda asked: asked.scan())
            while names := step(lambda _: [name for name, _ in islice(records, CLEARED_AT_ONCE)]):
                removed += delete(names)
        except TimeoutError as error:
            raise TimeoutError(
                f"tier {tier!r}: not empty after {timeout_s} s; {removed} records are deleted"
            ) from error
        self._quarantine.forget(tier, kept)
        if kept:
            name, cause = next(iter(kept.items()))
            raise OSError(
                f"tier {tier!r}: {removed} records are deleted, {len(kept)} cannot be: {name}: {cause}"
            ) from cause
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

    def close(self, timeout_s: float) -> None:
        """Close the tiers, at the same time, and end the asking threads; wait `timeout_s` seconds for all."""
        until = time.monotonic() + timeout_s
        self.prefetched.close()
        closing = Workers(len(self.tiers), "kvkit-close")  # late or not: a tier's threads have to end
        ends: dict[str, Future[None]] = {}
        for name, tier in self.tiers.items():
            try:
                ends[name] = closing.submit(tier.close)
            except Closed as error:
                log.warning("tier %r did not close: %s", name, error)
        for name, end in ends.items():
            if not wait([end], max(0.0, until - time.monotonic())).done:
                log.warning("tier %r did not close in time", name)
            elif (failure := end.exception()) is not None:
                log.warning("tier %r did not close: %s", name, failure)
        closing.close(max(0.0, until - time.monotonic()))
        for workers in self._asking.values():
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

    def failed(self, tier: str, error: BaseException) -> None:
        """Note that a tier did not deliver, or answer."""
        if isinstance(error, FileNotFoundError | StagingTimeout | Stopped):  # not the tier's fault
            return
        if isinstance(error, UnreadableObject):
            self.health[tier].failed(time.monotonic(), unreadable=error.name)
            return
        late = isinstance(error, TimeoutError)
        self.health[tier].failed(time.monotonic(), late)
        with self.counting() as counts:
            (counts.timeouts if late else counts.read_errors)[tier] += 1

    def count_loaded(self, chunks: Chunks, loaded: Loaded) -> None:
        """Count what a load put into the engine. A snapshot is of no tokens but those that were counted."""
        chunk_bytes = sum(form.record_bytes for form in chunks.formats)
        with self.counting() as counts:
            for tier, tokens in loaded.by_tier.items():
                counts.loaded_tokens[tier] += 0 if chunks.of_states else tokens
                counts.loaded_bytes[tier] += tokens // chunks.chunk_tokens * chunk_bytes

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """The counts, to be added to by nobody else meanwhile."""
        with self._lock:
            yield self._counts

    def counts(self) -> Counts:
        """A copy of what was counted so far."""
        with self._lock:
            counts = self._counts.copy()
        counts.evicted_records.update({n: tier.evicted for n, tier in self.tiers.items() if tier.evicted})
        return counts

    def states(self) -> dict[str, HealthState]:
        """The health of every tier."""
        now = time.monotonic()
        return {name: health.state(now) for name, health in self.health.items()}

    def _answered(self, tier: str, names: Sequence[str], held: bool) -> None:
        """Tell what an answer says of a tier that does not tell by itself."""
        if tier in self._watched and not self.tiers[tier].tells:
            self._watched[tier](names, held)

    def _number(self, tier: str, call: Callable[[Tier], int]) -> int:
        """What a tier answers; 0 if it fails."""
        try:
            number = self.bounded(tier, call)
        except Exception as error:
            log.warning("tier %r could not be asked: %s", tier, str(error) or type(error).__name__)
            self.failed(tier, error)
            return 0
        self.health[tier].answered(time.monotonic())
        return number

    def _move(
        self,
        direction: Direction,
        tier: str,
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        """One call of a tier's get or put, counted before the last report of it is passed on."""
        # shares: when the tier reports, it has released its own, and another record may lie in the slot
        shares = {name: lease.share() for name, lease in zip(names, leases, strict=True)}
        began, size, call, reporting = time.monotonic(), 0, object(), threading.Lock()
        if direction == "get":
            with self._lock:
                self._gets[tier][call] = began

        def report(name: str, error: BaseException | None) -> None:
            nonlocal size
            with reporting:
                share = shares.pop(name, None)
                if share is None:  # reported before
                    return
                size += 0 if error is not None else share.used
                last = not shares
            share.release()
            if (error is None and direction == "put") or isinstance(error, FileNotFoundError):
                self._answered(tier, (name,), error is None)
            if last:
                now = time.monotonic()
                with self.counting() as counts:
                    self._gets[tier].pop(call, None)
                    if size:
                        counts.moved(tier, direction, size, now - began)
                if size and direction == "get":
                    self.health[tier].worked(now, (now - began) / len(names))
            on_complete(name, error)

        try:
            asked = self.tiers[tier]
            (asked.get if direction == "get" else asked.put)(names, leases, report)
        except Exception as error:
            log.exception("tier %r: %s failed", tier, direction)
            for name in list(shares):
                report(name, error)
