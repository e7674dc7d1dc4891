"""Hanging puts keep a bounded share of the slots, and a flush waits for earlier puts only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import pytest
from caches import CHUNK, DEADLINE_S, fill, make_engine, new_cache, new_staging, sequence

from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.faulty import Fault, FaultyTier
from kvkit.transfer import write_pipeline as writes
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY
from kvkit.transfer.write_pipeline import Batch, Outstanding, WriteJob, WriteQueue


def hanging(folder: Path, name: str) -> FaultyTier:
    """A tier whose puts hang until it is released."""
    tier = ObjectTier(str(folder / name), name=name)
    return FaultyTier(tier, lambda operation, _: Fault.HANG if operation == "put" else None)


@pytest.mark.parametrize("memory", [0, 7])
@pytest.mark.parametrize("groups", [1, 2])
def test_loads_have_room_while_the_puts_of_tiers_hang(groups: int, memory: int, tmp_path: Path) -> None:
    """Two tiers hang, and stores go on; loads from a third come through, and then all slots are free."""
    engine, tokens = make_engine(groups), sequence(5)
    fill(engine, tmp_path / "disk", tokens)
    staging = new_staging(engine, 16 + memory)
    hung = [hanging(tmp_path, name) for name in ("a", "b")]
    tiers: list[Tier] = [*hung, ObjectTier(str(tmp_path / "disk"))]
    targets: tuple[str, ...] = ("a", "b")
    if memory:
        tiers.append(MemoryTier(staging, memory * staging.slot_bytes))
        targets += ("memory",)
    source = make_engine(groups)
    table = source.table(20 * CHUNK)
    source.compute(sequence(20), table)
    with (
        ThreadPoolExecutor(2) as threads,
        new_cache(engine, staging, tiers, retrieve_from=("disk",), store_to=targets) as cache,
    ):

        def store(seed: int, target: str) -> None:
            for number in range(8):
                cache.store(
                    sequence(20, 100 * seed + number),
                    source.places(table),
                    to=[target, *targets[2:]],
                )

        stores = [threads.submit(store, i + 1, tier.name) for i, tier in enumerate(hung)]
        while not all(tier.hanging for tier in hung):
            wait(stores, 0.001)
        for turn in range(8):
            engine.wipe()
            mine = engine.table(len(tokens))
            assert cache.load(cache.lookup(tokens), engine.places(mine)).tokens == len(tokens), turn
            engine.assert_loaded(tokens, mine, 5)
        for done in stores:
            done.result(DEADLINE_S)
        limit = 16 // 4
        assert [tier.hanging for tier in hung] == [limit, limit]
        assert cache.counts().refused["a"] > 0
        assert cache.counts().refused["b"] > 0
        for tier in hung:
            tier.release()
        cache.flush()
        assert cache.counts().stored_records["a"] == limit
        # the tiers get on again, and take all
        cache.store(sequence(20), source.places(table), to=["a", "b"])
        cache.flush()
        assert cache.tiers["a"].match_prefix(cache.lookup(sequence(20)).chunks.names) == 20 * groups
        assert staging.free >= 16


def test_what_a_tier_that_hangs_does_not_take_is_not_stored(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(12)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    tier = hanging(tmp_path, "hung")
    with new_cache(engine, new_staging(engine, 8), [tier, ObjectTier(str(tmp_path / "disk"))]) as cache:
        first = cache.store(sequence(2, 1), engine.places(table), to=["hung"])
        assert first.new_tokens == 2 * CHUNK, "its limit is a third of 8 slots"
        cache.writes.queues["hung"]._progress_s -= 2 * writes.STUCK_S  # as if so much time had passed
        assert cache.store(tokens, engine.places(table), to=["hung"]).new_tokens == 0
        assert cache.store(tokens, engine.places(table)).new_tokens == len(tokens), "the disk takes all"
        assert cache.counts().refused == {"hung": 2 * len(tokens) // CHUNK}
        names = cache.chunks(tokens).names
        wait_for(lambda: cache.tiers["disk"].match_prefix(names) == len(names))
        with cache.store_layers(tokens[: 4 * CHUNK], engine.places(table)) as layers:
            for layer in range(len(engine.layout.groups[0].layers)):
                layers.layer(layer)
        assert layers.stored.new_tokens == 0
        tier.release()
        cache.flush()
        assert cache.counts().stored_records == {"hung": 2, "disk": 12}


def test_a_tier_that_is_passed_over_takes_no_more(tmp_path: Path) -> None:
    """Its circuit opens between the plan of a store and its puts, and while puts wait for it."""
    engine, tokens = make_engine(), sequence(12)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    tier = hanging(tmp_path, "hung")
    staging = new_staging(engine, 6)
    with new_cache(engine, staging, [tier]) as cache, ThreadPoolExecutor(1) as threads:
        stored = threads.submit(cache.store, tokens, engine.places(table))
        while not staging.waiting:
            wait([stored], 0.001)
        cache.tier_set.failed("hung", TimeoutError())
        assert stored.result(DEADLINE_S).new_tokens == 6 * CHUNK
        assert staging.free == 3, "what waited for it keeps slots"
        tier.release()


def test_a_flush_waits_for_what_was_started_before_it(tmp_path: Path) -> None:
    """Puts follow each other without end: each ends after the next one was started."""
    outstanding = Outstanding()
    outstanding.add("mine", 2)
    ends, fed = threading.Event(), threading.Semaphore(0)

    def feed() -> None:
        last = object()
        outstanding.add(last, 1)
        while not ends.is_set():
            following = object()
            outstanding.add(following, 1)
            outstanding.done(last)
            last = following
            fed.release()
        outstanding.done(last)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    assert fed.acquire(timeout=DEADLINE_S)
    assert outstanding.wait(0.0) >= 2
    with ThreadPoolExecutor(1) as threads:
        flush = threads.submit(outstanding.wait, DEADLINE_S)
        for _ in range(100):
            assert fed.acquire(timeout=DEADLINE_S)
        assert not flush.done()
        outstanding.done("mine")
        outstanding.done("mine")
        assert flush.result(DEADLINE_S) == 0
        assert outstanding.count > 0, "the feeder ended"
    ends.set()
    feeder.join(DEADLINE_S)
    assert outstanding.count == 0


def test_flush_ends_while_another_store_is_under_way(tmp_path: Path) -> None:
    """As far as `flush` itself is concerned: the second store's put hangs, the first one's is complete."""
    engine = make_engine()
    table = engine.table(CHUNK)
    engine.compute(sequence(1), table)
    tiers = [hanging(tmp_path, name) for name in ("first", "second")]
    with new_cache(engine, new_staging(engine, 8), tiers) as cache, ThreadPoolExecutor(1) as threads:
        cache.store(sequence(1, 1), engine.places(table), to=["first"])
        wait_for(lambda: tiers[0].hanging == 1)
        outstanding = cache.writes.outstanding
        waits = threading.Event()
        wait_for_change = outstanding._changed.wait_for

        def noted(*args: object) -> bool:
            waits.set()
            return wait_for_change(*args)  # type: ignore[arg-type]

        outstanding._changed.wait_for = noted  # type: ignore[method-assign, assignment]
        flush = threads.submit(cache.flush)
        assert waits.wait(DEADLINE_S)
        cache.store(sequence(1, 2), engine.places(table), to=["second"])
        wait_for(lambda: cache.pending_writes() == 2)  # a record each: the arrays are described
        tiers[0].release()
        flush.result(DEADLINE_S)
        assert cache.pending_writes() == 1
        tiers[1].release()


class Queued:
    """A queue whose puts end when told to.

    Attributes:
        started, done: names, in their order.
        in_flight: what was started and has not ended.
        at_once: whether puts end as they are started.
    """

    def __init__(self, limit: int) -> None:
        self.queue = WriteQueue(limit, self.write)
        self.started: list[str] = []
        self.done: list[str] = []
        self.in_flight: list[WriteJob] = []
        self.at_once = False

    def write(self, jobs: Sequence[WriteJob]) -> None:
        assert [job.lease.used for job in jobs] == [int(job.name) for job in jobs], "another record's slot"
        self.started.extend(job.name for job in jobs)
        self.in_flight.extend(jobs)
        while self.at_once and self.in_flight:
            self.end()

    def end(self) -> None:
        self.done.append(self.in_flight.pop(0).name)
        self.queue.ended()
        self.queue.start_waiting()


@pytest.fixture
def records() -> Iterator[Callable[[int, int], tuple[list[str], list[Lease]]]]:
    """Makes records with numbers [start, stop); at the end, all slots must be free."""
    staging = Staging(1, 2000)

    def make(start: int, stop: int) -> tuple[list[str], list[Lease]]:
        leases = staging.acquire(stop - start, 0.0, at_least=stop - start)
        for number, lease in zip(range(start, stop), leases, strict=True):
            lease.used = number
        return [str(number) for number in range(start, stop)], leases

    yield make
    assert staging.free == staging.slots
    staging.check_integrity()
    staging.close()


Make = Callable[[int, int], tuple[list[str], list[Lease]]]


def add(queued: Queued, make: Make, start: int, stop: int) -> int:
    names, leases = make(start, stop)
    batch = Batch(cast(Any, None), "tier", ())
    leased = zip(names, leases, strict=True)
    jobs = [WriteJob(batch, name, lease, lease.used, DEFAULT_REQUEST_POLICY) for name, lease in leased]
    accepted = queued.queue.add(jobs)
    release_all(leases)
    return accepted


def test_so_many_are_under_way_and_the_others_follow_in_their_order(records: Make) -> None:
    queued = Queued(3)
    assert add(queued, records, 0, 5) == 5
    assert add(queued, records, 5, 9) == 4
    for ended in range(9):
        assert len(queued.in_flight) == min(3, 9 - ended)
        assert len(queued.started) == min(3 + ended, 9)
        queued.end()
    assert queued.started == queued.done == [str(i) for i in range(9)]


def test_a_tier_that_completes_at_once_gets_everything(records: Make) -> None:
    """More records than Python calls may be nested."""
    queued = Queued(1)
    assert add(queued, records, 0, 1500) == 1500
    queued.at_once = True
    queued.end()
    assert queued.started == queued.done == [str(i) for i in range(1500)]


def test_what_waits_is_given_up_and_a_stuck_tier_takes_no_more(
    records: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = Queued(2)
    queue = queued.queue
    assert add(queued, records, 0, 6) == 6
    assert not queue.stuck
    assert [job.name for job in queue.cancel()] == ["2", "3", "4", "5"]
    monkeypatch.setattr(writes, "STUCK_S", -1.0)
    assert queue.stuck
    assert add(queued, records, 6, 8) == 0
    queued.end()
    assert add(queued, records, 8, 10) == 1, "one more than is under way"
    while queued.in_flight:
        queued.end()
    assert not queue.stuck, "nothing is under way"
    assert queued.done == ["0", "1", "8"]


def test_a_callback_that_fails_keeps_no_flush_waiting(tmp_path: Path) -> None:
    """In the thread of a tier outside this process, and in the caller's, for one in memory."""
    engine, tokens = make_engine(), sequence(3)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    staging = new_staging(engine, 12)
    tiers = [MemoryTier(staging, 4 * staging.slot_bytes), ObjectTier(str(tmp_path))]

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    with new_cache(engine, staging, tiers) as cache:
        cache.store_chunks(cache.chunks(tokens), engine.places(table), on_stored=fail, on_done=fail).result(
            DEADLINE_S
        )
        cache.flush(DEADLINE_S / 4)
        assert cache.pending_writes() == 0
        assert cache.counts().stored_records == {"memory": 3, "disk": 3}
        assert not cache.counts().write_errors
