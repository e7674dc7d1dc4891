"""A full pool evicts what memory would, in few looks, and a thousand requests at once get what is stored."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from caches import CHUNK, DEADLINE_S, new_cache, new_staging, sequence
from call_counts import calls

from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import PAGE_BYTES
from kvkit.tiers.base import TierFull
from kvkit.tiers.eviction.policies import NORMAL
from kvkit.tiers.eviction.state import EvictionState, add_run, pin, prioritise, use_run
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.shm.file import pool_path
from kvkit.tiers.shm.pool import Pool
from kvkit.tiers.testing.contract import record_names


@pytest.fixture
def path() -> Iterator[str]:
    path = pool_path(f"shm://test-{uuid.uuid4().hex}")
    yield path
    with suppress(FileNotFoundError):
        Path(path).unlink()


def store(pool: Pool, name: str, parent: str | None = None) -> None:
    slot = pool.take(name, PAGE_BYTES, parent)
    assert slot is not None
    pool.publish(name, slot)


@pytest.mark.parametrize(("slots", "chained"), [(128, False), (1024, False), (1024, True)])
def test_a_pool_that_is_full_looks_at_all_of_it_now_and_then(path: str, slots: int, chained: bool) -> None:
    """Also where it holds one chain, whose end alone may go."""
    names = record_names(2 * slots)
    pool = Pool(path, PAGE_BYTES, slots * PAGE_BYTES)
    try:
        for number, name in enumerate(names[:slots]):
            store(pool, name, names[number - 1] if chained and number else None)
        found = calls(lambda: [store(pool, name) for name in names[slots:]])
        assert pool.evicted == slots
        assert found["flatnonzero"] <= 66, "a 64th of the pool is evicted after each look"
    finally:
        pool.close()


@pytest.mark.parametrize("slots", [20, 200])
def test_what_a_pool_evicts_is_what_memory_would(path: str, slots: int) -> None:
    """With chains, uses, pins and priorities, and more records than one look at the pool finds."""
    chance, room = random.Random(slots), slots * PAGE_BYTES
    state, pools = EvictionState(room), [Pool(path, PAGE_BYTES, room) for _ in range(2)]
    chains = [[f"ab/0/c.{i}.0.0.0.0.0"] for i in range(2 * slots)]
    evicted = 0
    try:
        for _ in range(8 * slots):
            pool, number = chance.choice(pools), int(chance.triangular(0, len(chains), 0))
            chain = chains[number]
            run = use_run(state, chain)
            assert pool.use_run(chain) == run
            if run == len(chain):
                chain.append(f"ab/0/c.{number}.{run}.0.0.0.0")
            name, parent = chain[run], chain[run - 1] if run else None
            added, victims = add_run(state, [name], PAGE_BYTES, parent=parent, now=1.0)
            try:
                store(pool, name, parent)
            except TierFull:
                assert not added
            assert not any(pool.size(victim) for victim in victims)
            evicted += len(victims)
            if (wish := chance.random()) < 0.2:
                priority = chance.choice([0, 20, NORMAL, 80])
                prioritise(state, chain, priority)
                chance.choice(pools).prioritise(chain, priority)
            elif wish < 0.21:
                pin(state, chain[:2], 1e9)
                pool.pin(chain[:2], 1e6)
            assert {name for name, _ in chance.choice(pools).listed()} == set(state.entries)
        assert evicted > 4 * slots
    finally:
        for pool in pools:
            pool.close()


REQUESTS, SLOTS, CHUNKS = 1_000, 48, 3
"""Requests at the same time, of so many chunks each, over so few slots."""


def test_a_thousand_requests_at_once(tmp_path: Path) -> None:
    """Ten documents looked up, prefetched, loaded, stored and given up, all before any is awaited."""
    layout = small_layout()
    engine = Engine(layout, small_namespace(layout), 2 * CHUNKS * (REQUESTS + 10))
    staging = new_staging(engine, SLOTS)
    tiers = [MemoryTier(staging, 8 * staging.slot_bytes), ObjectTier(str(tmp_path))]
    documents = [sequence(CHUNKS, seed) for seed in range(10)]
    stored = [[engine.kv(key, 0).tobytes() for key in engine.keys(tokens)] for tokens in documents]
    blocks = len(documents[0]) // layout.groups[0].block_tokens

    def table(number: int) -> list[int]:
        return list(range(number * blocks, number * blocks + blocks))

    with new_cache(engine, staging, tiers, write_back_to=("memory",)) as cache:
        for number, tokens in enumerate(documents[:8]):
            engine.compute(tokens, table(REQUESTS + number))
            cache.store(tokens, engine.places(table(REQUESTS + number)))
        cache.flush()
        engine.wipe()
        in_flight: list[tuple[int, Any]] = []
        for number in range(REQUESTS):
            tokens, places = documents[number % 10], engine.places(table(number))
            if number % 10 >= 8:
                engine.compute(tokens, table(number))
                in_flight.append((number, cache.store_async(tokens, places)))
                continue
            if number % 3 == 0:
                cache.prefetch(tokens)
            in_flight.append((number, cache.load_async(cache.lookup(tokens), places)))
            if number % 7 == 0:
                in_flight[-1][1].cancel()
        for number, move in in_flight:
            with suppress(CancelledError):
                loaded = move.result(DEADLINE_S)
                if number % 10 < 8:
                    assert loaded.tokens == len(documents[0]) or number % 7 == 0
                    chunks = loaded.tokens // CHUNK
                    found = engine.read(documents[number % 10], table(number), chunks)
                    assert found == [stored[number % 10][:chunks]]
        cache.flush(DEADLINE_S)
        for tokens in documents:
            assert cache.lookup(tokens).tokens == len(tokens)
        cache.check_integrity()
