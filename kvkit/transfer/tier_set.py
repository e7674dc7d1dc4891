"""The tier set: every call to a tier, with timeouts, circuit breakers, quarantine and counters."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from kvkit.format.names import quantised_name
from kvkit.format.record import Damage
from kvkit.staging import Lease, Staging, StagingTimeout
from kvkit.tiers.base import DamagedObject, HeldListener, OnComplete, Tier, TierError, UnreadableObject
from kvkit.tiers.eviction.policies import NORMAL
from kvkit.tiers.health import Health, HealthState
from kvkit.transfer.counters import Counts, Direction
from kvkit.transfer.pending_stores import PendingStores
from kvkit.transfer.policy import Policy, RequestPolicy
from kvkit.transfer.prefetched import Prefetched
from kvkit.transfer.sequence import Chunks, Loaded
from kvkit.workers import Closed, Stopped, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

TierHeldListener = Callable[[str, Sequence[str], bool], None]
"""Called with a tier and the arguments of `kvkit.tiers.base.HeldListener`."""

ASKING_THREADS = 4
"""Threads for calls to a tier outside this process, so that callers can time out. Each tier has its own,
because a hanging tier blocks them all."""

QUARANTINE_S = 600.0
"""Seconds in quarantine. After that, reads and removal are tried again."""

MAX_QUARANTINED = 4096
"""Maximum records over all tiers. Beyond it, the oldest are forgotten, and a load of one ends early."""


class TierJob(Protocol):
    """One record on its way from or into a tier, and its slot."""

    @property
    def name(self) -> str: ...

    @property
    def lease(self) -> Lease: ...

    def done(self, error: BaseException | None) -> None:
        """Handle the tier's report that it moved the record or failed. Called once, from any thread."""


class TierSet:
    """The tiers of a cache, with their health and counters. Thread-safe.

    Args:
        tiers: tiers by name; `policy` names no others.
        policy: tiers to retrieve from, store to and write back to.
        staging: slots that records pass through.
        timeout_s: timeout of any single wait, in seconds.
        copy, copies: see `KVLayout`.

    Attributes:
        approximate: names of the tiers with fewer bits.
        health: health by tier.
        quarantine: records that could not be deleted.
        prefetched: records that prefetches left in slots.
        pending_stores: records that are being stored.
        reads_began: start time of each call of `Tier.get` in flight, by tier; guarded by `counting`.
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
        self.quarantine = Quarantine()
        self.prefetched = Prefetched(staging)
        self.pending_stores = PendingStores()
        self.reads_began: dict[str, dict[object, float]] = {n: {} for n in tiers}
        self._lock = threading.Lock()
        self._listeners: dict[str, HeldListener] = {}
        self._counts = Counts()
        remote = [name for name, tier in tiers.items() if not tier.in_memory]
        self._asking = {name: Workers(ASKING_THREADS, f"kvkit-ask-{name}") for name in remote}

    def subscribe(self, tiers: Sequence[str], held_listener: TierHeldListener) -> bool:
        """Report what `tiers` hold: now, and as records are put, found, evicted, dropped and deleted.

        If a tier does not report by itself, its answers to lookups and reads are reported.

        Returns:
            True if the reports cover all records held: no other host uses these tiers. Otherwise existing
                records may be left out, and a server's evictions are reported when a lookup or a read misses.
        """
        self._listeners = {name: partial(held_listener, name) for name in tiers}
        return all([self.tiers[name].subscribe(listener) for name, listener in self._listeners.items()])  # noqa: C419

    def owned_by_rank(self, tier: str, chunks: Chunks, number: int) -> bool:
        """Return whether this rank moves chunk `number` of `chunks` to and from a tier.

        If n ranks with equal KV share the tier, each of them moves every nth chunk.
        """
        return not self.tiers[tier].shared_by_ranks or (chunks.first + number) % self.copies == self.copy

    def storage_name(self, tier: str, name: str) -> str:
        """Return a record's name among records of all tiers, which includes the tier's precision."""
        precision = self.tiers[tier].precision
        return name if precision is None else quantised_name(name, precision)

    def borrow(self, tier: str, name: str) -> Lease | None:
        """Take a prefetched record, or borrow it from its tier; None if it is in no slot."""
        return self.prefetched.take(self.storage_name(tier, name)) or self.tiers[tier].borrow(name)

    def get(self, tier: str, jobs: Sequence[TierJob]) -> None:
        """Start reading records into their slots; each job's `done` is called once."""
        call = _Call(self, tier, "get", jobs)
        with self._lock:
            self.reads_began[tier][call] = call.began
        call.start(jobs, self.tiers[tier].get)

    def put(self, tier: str, jobs: Sequence[TierJob]) -> None:
        """Start writing records, except those in quarantine; each job's `done` is called once."""
        now, accepted = time.monotonic(), list[TierJob]()
        for job in jobs:
            if self.quarantine.before(tier, [job.name], now):
                accepted.append(job)
            else:  # the tier would take the bad object for the record
                job.done(TierError(f"tier {tier!r}: {job.name} is in quarantine and cannot be replaced"))
        if accepted:
            _Call(self, tier, "put", accepted).start(accepted, self.tiers[tier].put)

    def ask(self, tier: str, names: Sequence[str]) -> int:
        """Count the leading `names` that the tier holds; 0 if it fails.

        Records in quarantine count as missing.
        """
        allowed = names[: self.quarantine.before(tier, names, time.monotonic())]
        if not allowed:
            self.health[tier].answered(time.monotonic())
            return 0
        run = self._number(tier, lambda target: target.match_prefix(allowed))
        self.notify(tier, allowed[:run], True)
        self.notify(tier, allowed[run : run + 1], False)
        return run

    def bounded(self, name: str, call: Callable[[Tier], T], timeout_s: float | None = None) -> T:
        """Return the result of `call`, within `timeout_s` (None: the cache's) for tiers outside this process.

        Raises:
            TimeoutError: such a tier did not answer in time.
        """
        tier = self.tiers[name]
        if tier.in_memory:
            return call(tier)
        future = self._asking[name].submit(partial(call, tier), urgent=True)
        try:
            return future.result(self.timeout_s if timeout_s is None else max(0.0, timeout_s))
        finally:
            future.cancel()  # after a timeout: a call that has not begun need not run

    def drop(self, tier: str, name: str, damage: Damage) -> None:
        """Delete a damaged record, so that it can be stored again.

        If that fails, the record is put in quarantine.
        """
        log.warning("tier %r: %s is damaged (%s) and will be deleted", tier, name, damage)
        with self.counting() as counts:
            counts.damaged[tier, damage] += 1
        try:
            self.bounded(tier, lambda target: target.delete([name]))
            self.notify(tier, (name,), False)
        except Exception as error:
            log.warning("tier %r: %s could not be deleted, and counts as a miss: %s", tier, name, error)
            self.quarantine.add(tier, name, time.monotonic())
            if tier in self._listeners:
                self._listeners[tier]((name,), False)

    def pin(self, tier: str, chunks: Chunks, seconds: float) -> int:
        """Pin chunks and their snapshots in a tier; return the number of pinned tokens, 0 if it fails."""
        if self.circuit_open(tier):
            return 0
        held = self._number(tier, lambda target: target.pin(chunks.names, seconds))
        if chunks.states:
            self._number(tier, lambda target: target.pin(chunks.snapshots, seconds))
        return held // chunks.groups * chunks.chunk_tokens

    def note_request(self, names: Sequence[str]) -> None:
        """Tell tiers whose eviction learns from requests that one has the prompt `names`, a chain."""
        self._tell_learning(lambda tier: tier.note_request(names))

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:
        """Tell the same tiers that the request with the records `names`, a chain, was answered."""
        self._tell_learning(lambda tier: tier.note_answer(names, tool_call))

    def _tell_learning(self, tell: Callable[[Tier], None]) -> None:
        for name, tier in self.tiers.items():
            try:
                if tier.learns:
                    tell(tier)
            except Exception as error:
                log.warning("tier %r: a request is not noted: %s", name, str(error) or type(error).__name__)

    def retain(self, tier: str, names: Sequence[str], policy: RequestPolicy, *, new: bool = False) -> None:
        """Apply a request's retention to those of `names` that a tier holds; `new`: the request stored them.

        Records held before keep at least their priority.
        """
        target = self.tiers[tier]
        try:
            if policy.priority > NORMAL or (new and policy.priority != NORMAL):
                target.prioritise(names, policy.priority)
            if policy.keep_s:
                target.pin(names, policy.keep_s)
        except Exception as error:
            log.warning("tier %r could not retain records, which are evicted as usual: %s", tier, error)

    def ended(self, tier: str, name: str | None, error: BaseException) -> None:
        """Handle a failed read of a tier: record the failure, and drop record `name` if it is to blame.

        An unreadable record is dropped and counts once against the tier, because other reads show which of
        the two is to blame. Once the tier's circuit is open, unreadable records stay.
        """
        unreadable = isinstance(error, UnreadableObject)
        stays = unreadable and self.health[tier].state(time.monotonic()) == "open"
        if unreadable or not isinstance(error, DamagedObject) or name is None:
            self.failed(tier, error)
        if name is not None and isinstance(error, DamagedObject) and not stays:
            self.drop(tier, name, error.damage)

    def close(self, timeout_s: float) -> None:
        """Close the tiers in parallel and end their threads, within `timeout_s` seconds in all."""
        until = time.monotonic() + timeout_s
        self.prefetched.close()
        closing = Workers(len(self.tiers), "kvkit-close")  # a tier's threads have to end even if late
        closes: dict[str, Future[None]] = {}
        for name, tier in self.tiers.items():
            try:
                closes[name] = closing.submit(tier.close)
            except Closed as error:
                log.warning("tier %r did not close: %s", name, error)
        for name, end in closes.items():
            if not wait([end], max(0.0, until - time.monotonic())).done:
                log.warning("tier %r did not close in time", name)
            elif (failure := end.exception()) is not None:
                log.warning("tier %r did not close: %s", name, failure)
        closing.close(max(0.0, until - time.monotonic()))
        for workers in self._asking.values():
            workers.close(0.0)

    def notify(self, tier: str, names: Sequence[str], held: bool) -> None:
        """Report a tier's answer to the listener of `subscribe`, unless the tier reports by itself."""
        if tier in self._listeners and not self.tiers[tier].reports_evictions:
            self._listeners[tier](names, held)

    def usable(self, tier: str) -> bool:
        """Return whether to ask a tier. After a pause of the circuit, one caller gets True and must ask."""
        return not self.circuit_open(tier) and self.health[tier].usable(time.monotonic())

    def circuit_open(self, tier: str) -> bool:
        """Return whether a tier's circuit is open, for callers that have a plan already. Changes nothing.

        The circuit stays open while late reads hold slots: each trial would take as many more.
        """
        now = time.monotonic()
        state = self.health[tier].state(now)
        if state != "half-open":
            return state == "open"
        with self._lock:
            oldest = min(self.reads_began[tier].values(), default=now)
        return now - oldest > self.timeout_s

    def failed(self, tier: str, error: BaseException) -> None:
        """Record a tier's failure to deliver or answer."""
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
        """Count what was loaded into the engine. A snapshot's tokens were counted with its chunks."""
        chunk_bytes = sum(record_format.record_bytes for record_format in chunks.formats)
        with self.counting() as counts:
            for tier, tokens in loaded.by_tier.items():
                counts.loaded_tokens[tier] += 0 if chunks.of_states else tokens
                counts.loaded_bytes[tier] += tokens // chunks.chunk_tokens * chunk_bytes

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Yield the counters, under the lock."""
        with self._lock:
            yield self._counts

    def counts(self) -> Counts:
        """Return a copy of the counters."""
        with self._lock:
            counts = self._counts.copy()
        counts.evicted_records.update({n: tier.evicted for n, tier in self.tiers.items() if tier.evicted})
        return counts

    def states(self) -> dict[str, HealthState]:
        """Return the health of every tier."""
        now = time.monotonic()
        return {name: health.state(now) for name, health in self.health.items()}

    def _number(self, tier: str, call: Callable[[Tier], int]) -> int:
        """Return a tier's answer; 0 if it fails."""
        try:
            number = self.bounded(tier, call)
        except Exception as error:
            log.warning("tier %r failed, and counts as empty: %s", tier, str(error) or type(error).__name__)
            self.failed(tier, error)
            return 0
        self.health[tier].answered(time.monotonic())
        return number


class Quarantine:
    """Names of quarantined records by tier. Thread-safe; `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, tier: str, name: str, now: float) -> None:
        """Quarantine a record. Mutates."""
        with self._lock:
            self._until[tier, name] = now + QUARANTINE_S
            self._until.move_to_end((tier, name))
            if len(self._until) > MAX_QUARANTINED:
                self._until.popitem(last=False)

    def forget(self, tier: str, but: Collection[str] = ()) -> None:
        """End the quarantine of a tier's records, except those in `but`. Mutates."""
        with self._lock:
            for forgotten in [key for key in self._until if key[0] == tier and key[1] not in but]:
                del self._until[forgotten]

    def before(self, tier: str, names: Sequence[str], now: float) -> int:
        """Count the `names` before the first one in quarantine."""
        with self._lock:
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if not self._until:
                return len(names)
            return next((i for i, name in enumerate(names) if (tier, name) in self._until), len(names))


class _Call:
    """One call of `Tier.get` or `Tier.put`, until its last report. Thread-safe."""

    def __init__(self, tiers: TierSet, tier: str, direction: Direction, jobs: Sequence[TierJob]) -> None:
        self._tiers = tiers
        self._tier = tier
        self._direction = direction
        # shares keep each slot: the tier releases its own share before it reports
        self._unreported = {job.name: (job, job.lease.share()) for job in jobs}
        self._records, self._bytes = len(jobs), 0
        self._lock = threading.Lock()
        self.began = time.monotonic()

    def start(
        self, jobs: Sequence[TierJob], move: Callable[[list[str], list[Lease], OnComplete], None]
    ) -> None:
        """Call `move`, the tier's `get` or `put`, for `jobs`, all of this call."""
        try:
            move([job.name for job in jobs], [job.lease for job in jobs], self._report)
        except Exception as error:
            log.exception("tier %r: %s failed", self._tier, self._direction)
            for name in list(self._unreported):
                self._report(name, error)

    def _report(self, name: str, error: BaseException | None) -> None:
        """Report a record to its job; count the call and its speed before its last report."""
        with self._lock:
            unreported = self._unreported.pop(name, None)
            if unreported is None:  # reported before
                return
            job, share = unreported
            self._bytes += 0 if error is not None else share.used
            last = not self._unreported
        share.release()
        if (error is None and self._direction == "put") or isinstance(error, FileNotFoundError):
            self._tiers.notify(self._tier, (name,), error is None)
        if last:
            now = time.monotonic()
            with self._tiers.counting() as counts:
                self._tiers.reads_began[self._tier].pop(self, None)
                if self._bytes:
                    counts.moved(self._tier, self._direction, self._bytes, now - self.began)
            if self._bytes and self._direction == "get":
                self._tiers.health[self._tier].worked(now, (now - self.began) / self._records)
        job.done(error)
