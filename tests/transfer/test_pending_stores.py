"""A lookup right after a store waits for its puts, and never for records that will not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from caches import CHUNK, DEADLINE_S, make_engine, new_cache, new_staging, sequence
from hypothesis import given
from hypothesis import strategies as st
from test_partial_sequences import open_cache

from kvkit.cache import Cache
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.faulty import Fault, FaultyTier
from kvkit.transfer.pending_stores import PendingStore, PendingStores

NAMES = "abc"


@given(st.lists(st.tuples(st.sampled_from(["attempt", "kept", "failed"]), st.sampled_from(NAMES))))
def test_a_record_is_promised_until_a_tier_has_it_or_the_last_attempt_failed(
    moves: list[tuple[str, str]],
) -> None:
    pending_stores = PendingStores()
    done: list[None] = []
    pending = PendingStore(pending_stores, NAMES, on_done=lambda: done.append(None))
    other = PendingStore(pending_stores, "c")
    in_flight, kept = dict.fromkeys(NAMES, 0), set[str]()
    for move, name in moves:
        if move == "attempt":
            pending.begin_attempts([name])
            in_flight[name] += 1
        elif in_flight[name]:
            pending.end_attempt("tier", name, None if move == "kept" else OSError())
            in_flight[name] -= 1
            kept |= {name} if move == "kept" else set()
        assert pending_stores.among(NAMES) == {*NAMES} - kept | {"c"}
        assert done == []
    pending.close()
    for name in NAMES:
        for _ in range(in_flight[name]):
            assert pending_stores.among(name) == ({name} - kept or {*name} & {"c"})
            assert done == []
            pending.end_attempt("tier", name, OSError())
    assert pending_stores.among(NAMES) == {"c"}
    assert done == [None]
    assert pending_stores.wait("ab", 0.0)
    assert not pending_stores.wait("bc", 0.0)
    other.close()
    assert pending_stores.wait(NAMES, 0.0)


def test_what_other_ranks_store_is_promised_until_the_last_attempt_here_ends() -> None:
    pending_stores = PendingStores()
    pending = PendingStore(pending_stores, NAMES, by_other_ranks="bc")
    pending.begin_attempts("ab")  # b: in a tier of its own
    pending.close()
    assert pending_stores.among(NAMES) == {*NAMES}
    pending.end_attempt("tier", "b", None)
    assert pending_stores.among(NAMES) == {*"ac"}
    pending.end_attempt("tier", "a", OSError())
    assert pending_stores.wait(NAMES, 0.0)


class Held:
    """A cache over a folder whose puts and first lookup are in the hands of the test."""

    def __init__(self, engine: Engine, folder: Path, put: Fault) -> None:
        self.asked = threading.Event()
        self.stored = threading.Event()
        self.engine = engine

        def plan(operation: str, name: str) -> Fault | None:
            if operation == "count" and self.stored.is_set():
                self.asked.set()
            return put if operation == "put" else None

        self.tier = FaultyTier(ObjectTier(str(folder)), plan)
        self.cache: Cache = new_cache(engine, new_staging(engine, 16), [self.tier])

    def store(self, tokens: npt.NDArray[np.int32]) -> None:
        table = self.engine.table(len(tokens))
        self.engine.compute(tokens, table)
        self.cache.store(tokens, self.engine.places(table))
        self.stored.set()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_lookup_waits_for_puts(groups: int, tmp_path: Path) -> None:
    held, tokens = Held(make_engine(groups), tmp_path, Fault.HANG), sequence(4)
    with held.cache as cache:
        held.store(tokens)
        assert cache.lookup(tokens).tokens == 0
        held.asked.clear()
        longer = np.concatenate([tokens, sequence(1, seed=9)])
        lookup = cache.lookup_async(longer, wait_s=DEADLINE_S)
        assert held.asked.wait(DEADLINE_S)  # and found that the folder has nothing
        held.tier.release()
        assert lookup.result(DEADLINE_S).tokens == 4 * CHUNK


def test_a_lookup_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    held, tokens = Held(make_engine(), tmp_path, Fault.HANG), sequence(2)
    with held.cache as cache:
        held.store(tokens)
        assert cache.lookup(tokens, wait_s=0.01).tokens == 0
        held.tier.release()


def pending(cache: Cache, tokens: npt.NDArray[np.int32]) -> set[str]:
    return cache.tier_set.pending_stores.among(cache.lookup(tokens).chunks.names)


def test_what_a_tier_does_not_take_is_not_waited_for(tmp_path: Path) -> None:
    held, tokens = Held(make_engine(), tmp_path, Fault.FAIL), sequence(2)
    with held.cache as cache:
        held.store(tokens)
        cache.flush()
        assert pending(cache, tokens) == set()


@pytest.mark.parametrize("put", [Fault.HANG, Fault.FAIL, Fault.DROP])
def test_a_store_tells_once_when_no_put_of_it_is_under_way(put: Fault, tmp_path: Path) -> None:
    held, tokens = Held(make_engine(2), tmp_path, put), sequence(4)
    over: list[int] = []
    with held.cache as cache:
        places = held.engine.places(held.engine.table(len(tokens)))
        transfer = cache.store_chunks(
            cache.chunks(tokens), places, on_done=lambda: over.append(cache.pending_writes())
        )
        assert transfer.result(DEADLINE_S).new_tokens == len(tokens)
        if put is Fault.HANG:
            assert over == []
            held.tier.release()
        cache.flush()
    assert len(over) == 1
    assert over[0] <= 2, "but the last record, and zarr.json"


def failing() -> None:
    raise RuntimeError("the forward failed, on purpose")


@pytest.mark.parametrize("ready", [None, failing], ids=["cancelled", "failed"])
def test_a_store_that_never_began_promises_nothing(ready: Callable[[], None] | None, tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    gate = threading.Event()
    with new_cache(engine, new_staging(engine, 16), [ObjectTier(str(tmp_path))]) as cache:
        places = engine.places(engine.table(len(tokens)))
        others = [
            cache.store_async(sequence(2, seed=seed), places, ready=lambda: gate.wait(DEADLINE_S))
            for seed in (7, 8)
        ]
        store = cache.store_async(tokens, places, ready=ready or (lambda: None))
        assert pending(cache, tokens)
        assert store.cancel() or ready is not None
        gate.set()
        for other in others:
            other.result(DEADLINE_S)
        assert store.cancelled() or isinstance(store.exception(DEADLINE_S), RuntimeError)
        assert cache.lookup(tokens, wait_s=DEADLINE_S).tokens == 0
        assert pending(cache, tokens) == set()


def test_copies_come_before_questions(tmp_path: Path) -> None:
    """With `copy_first`, a tier is asked when the pages are free: it gets what it lacks, and no more."""
    engine, tokens = make_engine(), sequence(4)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)

    def plan(operation: str, name: str) -> Fault | None:
        return Fault.HANG if operation == "count" and hangs.is_set() else None

    hangs = threading.Event()
    tier = FaultyTier(ObjectTier(str(tmp_path)), plan)
    with new_cache(engine, new_staging(engine, 16), [tier]) as cache:
        cache.store(tokens[: 2 * CHUNK], engine.places(table))
        cache.flush()
        hangs.set()
        told: list[tuple[str, int]] = []
        transfer = cache.store_chunks(
            cache.chunks(tokens),
            engine.places(table),
            copy_first=True,
            on_stored=lambda tier, chunk: told.append((tier, chunk)),
        )
        assert transfer.result(DEADLINE_S).new_tokens == 4 * CHUNK
        engine.wipe()
        tier.release()
        cache.flush()
        assert cache.counts().stored_records == {"disk": 4}
        assert sorted(told) == [("disk", 2), ("disk", 3)]
        assert pending(cache, tokens) == set()
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 4 * CHUNK
        engine.assert_loaded(tokens, table, 4)


def test_a_tier_that_never_answers_keeps_no_slots(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    tier = FaultyTier(ObjectTier(str(tmp_path)), lambda operation, _: Fault.HANG)
    with open_cache(engine, None, memory_slots=0, extra=[tier], timeout_s=0.2) as cache:
        for _ in range(2):
            cache.store_chunks(cache.chunks(tokens), engine.places(table), copy_first=True).result(DEADLINE_S)
        cache.flush(DEADLINE_S)
        assert cache.staging.free == cache.staging.slots
        assert cache.counts().stored_records == {}
        tier.release()
