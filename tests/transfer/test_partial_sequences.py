"""Loads and stores of parts of a sequence move the right blocks, and skip missing ones."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_tier_caches import make_engine, open_cache, sequence, store

from kvkit.cache import CacheError, Stored
from kvkit.staging import release_all
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.faulty import Fault, FaultyTier
from kvkit.transfer.plan import RetrievePlan, Segment, cut
from kvkit.transfer.sequence import Chunks
from kvkit.workers import Transfer

CHUNKS, CHUNK, PER_CHUNK = 5, 8, 2
"""Chunks of a sequence, tokens of a chunk, blocks of a chunk."""
TOKENS = sequence(CHUNKS * CHUNK)


@given(st.lists(st.sampled_from("abc"), max_size=8), st.integers(0, 9), st.integers(0, 9))
def test_a_cut_plan_has_the_same_tiers(tiers: list[str], start: int, length: int) -> None:
    plan = RetrievePlan(10, tuple(Segment(tier, i, i + 1) for i, tier in enumerate(tiers)))
    part = cut(plan, start, start + length)
    assert [s.tier for s in part.segments for _ in range(s.start, s.stop)] == tiers[start : start + length]
    assert part.wanted == length
    assert not part.segments or part.segments[0].start == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_a_part_has_the_names_of_the_whole(groups: int) -> None:
    engine = make_engine(groups)
    whole = Chunks.of(TOKENS, engine.layout, engine.namespace)
    part = whole.part(2, 4)
    assert part.names == whole.names[2 * groups : 4 * groups]
    for chunk in range(2):
        for mine, theirs in zip(part.identity(chunk), whole.identity(chunk + 2), strict=True):
            assert np.array_equal(mine, theirs)
    with pytest.raises(CacheError, match=r"start=3, stop=6: there are 5"):
        whole.part(3, 6)


@pytest.mark.parametrize("way", ["load", "layers"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_part_of_a_hit_is_loaded_alone(groups: int, way: str, tmp_path: Path) -> None:
    engine = make_engine(groups)
    with open_cache(engine, tmp_path, slots=24) as cache:
        store(cache, engine, TOKENS)
        engine.wipe()
        table = engine.table(len(TOKENS))
        hit = cache.lookup(TOKENS).part(2, 4)
        places = engine.places(table[2 * PER_CHUNK :])
        if way == "load":
            assert cache.load(hit, places).tokens == 2 * CHUNK
        else:
            load = cache.load_layers(hit, places)
            assert sum(1 for _ in load) == engine.layout.layers
            assert load.loaded.tokens == 2 * CHUNK
        in_place = engine.read(TOKENS, table, CHUNKS)
        engine.wipe()
        blank = engine.read(TOKENS, table, CHUNKS)
        engine.compute(TOKENS, table)
        computed = engine.read(TOKENS, table, CHUNKS)
        for g in range(groups):
            assert in_place[g] == blank[g][:2] + computed[g][2:4] + blank[g][4:]


def test_a_store_begins_at_a_later_chunk(tmp_path: Path) -> None:
    engine = make_engine()
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    with open_cache(engine, tmp_path) as cache:
        late = cache.store(TOKENS, engine.places(table[2 * PER_CHUNK :]), first=2)
        assert (late.tokens, late.new_tokens) == (3 * CHUNK, 3 * CHUNK)
        assert cache.lookup(TOKENS).tokens == 0  # a leading run begins at the first chunk
        cache.store(TOKENS[: 2 * CHUNK], engine.places(table))
        cache.flush()
        engine.wipe()
        assert cache.load(cache.lookup(TOKENS), engine.places(table)).tokens == len(TOKENS)
        engine.assert_loaded(TOKENS, table, CHUNKS)
        with pytest.raises(CacheError, match="start=6"):
            cache.store(TOKENS, engine.places(table), first=6)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_chunk_is_stored_when_all_its_records_are(groups: int, tmp_path: Path) -> None:
    engine = make_engine(groups)
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    told: list[tuple[str, int]] = []
    with open_cache(engine, tmp_path, slots=24, memory_slots=10) as cache:
        cache.store(TOKENS[:CHUNK], engine.places(table))
        cache.flush()
        transfer = cache.store_chunks(
            cache.chunks(TOKENS).part(1, CHUNKS),
            engine.places(table[PER_CHUNK:]),
            on_stored=lambda tier, chunk: told.append((tier, chunk)),
        )
        transfer.result(30.0)
        cache.flush()
    assert sorted(told) == [(tier, chunk) for tier in ("disk", "memory") for chunk in range(CHUNKS - 1)]


@pytest.mark.parametrize("way", ["store", "layers"])
def test_blocks_that_are_not_there_are_zeros_in_the_record(way: str, tmp_path: Path) -> None:
    engine = make_engine()
    table = engine.table(2 * CHUNK)
    with open_cache(engine, None, memory_slots=4, slots=6) as cache:
        for seed in range(8):  # every slot holds what another sequence left in it
            store(cache, engine, sequence(CHUNK, seed=100 + seed))
        cache.clear("memory")
        engine.compute(TOKENS[: 2 * CHUNK], table)
        holes = engine.places([-1, *table[1:]])
        if way == "store":
            cache.store(TOKENS[: 2 * CHUNK], holes)
        else:
            with cache.store_layers(TOKENS[: 2 * CHUNK], holes) as layers:
                for number in range(engine.layout.layers):
                    layers.layer(number)
        cache.flush()
        whole = engine.read(TOKENS, table, 2)[0]
        engine.wipe()
        assert cache.load(cache.lookup(TOKENS), engine.places(table)).tokens == 2 * CHUNK
        got = engine.read(TOKENS, table, 2)[0]
    shape = 2, 2, PER_CHUNK, 4 * 12 * 4  # [L, H, blocks, bytes of a block of a head]
    first, second = (np.frombuffer(chunk, np.uint8).reshape(shape) for chunk in got)
    assert not first[:, :, 0].any()
    assert np.array_equal(first[:, :, 1], np.frombuffer(whole[0], np.uint8).reshape(shape)[:, :, 1])
    assert second.tobytes() == whole[1]


@pytest.mark.parametrize("waits_for", ["tier", "slot"])
def test_pages_taken_back_are_not_read(waits_for: str, tmp_path: Path) -> None:
    """A store that waits: `release_pages` returns at once, and nothing is stored later."""
    engine = make_engine()
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    waiting = threading.Event()

    def plan(operation: str, name: str) -> Fault | None:
        if operation != "count" or waits_for != "tier":
            return None
        waiting.set()
        return Fault.HANG

    tier = FaultyTier(ObjectTier(str(tmp_path), name="slow"), plan)
    with open_cache(engine, None, memory_slots=0, extra=[tier], timeout_s=30.0) as cache:
        taken = []
        if waits_for == "slot":
            taken = cache.staging.acquire(cache.staging.slots, 1.0, at_least=cache.staging.slots)
            cache.staging.on_shortage(lambda _: waiting.set())
        transfer = cache.store_async(TOKENS, engine.places(table))
        assert waiting.wait(30.0)
        transfer.release_pages()
        engine.wipe()
        tier.release()
        release_all(taken)
        assert transfer.result(30.0).new_tokens == 0
    assert not list(ObjectTier(str(tmp_path)).scan())


def test_taking_pages_back_waits_for_a_copy_that_is_under_way() -> None:
    transfer: Transfer[Stored] = Transfer()
    stopped, returned = threading.Event(), threading.Event()
    transfer.when_stopped(stopped.set)

    def release() -> None:
        transfer.release_pages()
        returned.set()

    with transfer.pages:
        thread = threading.Thread(target=release)
        thread.start()
        assert stopped.wait(30.0)
        assert not returned.is_set()
    assert returned.wait(30.0)
    thread.join()
