"""A prefetch brings the leading run of a hit, or a single chunk, into memory."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path

import pytest
from caches import CHUNK, DEADLINE_S, Recorder, fill, make_engine, new_cache, new_staging, sequence

from kvkit.cache import LOADING_THREADS, PREFETCHING_THREADS, CacheError
from kvkit.format.record import RecordFormat
from kvkit.staging import release_all
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier


def test_a_prefetch_brings_the_leading_run_into_memory(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(6)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 16)
    tiers = [MemoryTier(staging, 8 * staging.slot_bytes), ObjectTier(str(tmp_path))]
    with new_cache(engine, staging, tiers, write_back_to=("memory",)) as cache:
        names = cache.lookup(tokens).chunks.names
        damaged = tmp_path / names[4]
        content = bytearray(damaged.read_bytes())
        content[5000] ^= 1
        damaged.write_bytes(content)
        hit = cache.prefetch(tokens).result(DEADLINE_S)
        assert hit.by_tier == {"memory": 4 * CHUNK}
        assert [tiers[0].size(name) is not None for name in names] == [True] * 4 + [False] * 2, (
            "what lies past the gap was written back"
        )
        table = engine.table(len(tokens))
        assert cache.load(hit, engine.places(table)).by_tier == {"memory": 4 * CHUNK}
        engine.assert_loaded(tokens, table, 4)


def test_what_a_prefetch_left_makes_room_for_others(tmp_path: Path) -> None:
    engine, tokens, other = make_engine(), sequence(4), sequence(4, 1)
    fill(engine, tmp_path, tokens)
    fill(engine, tmp_path, other)
    staging = new_staging(engine, 4)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        cache.prefetch(tokens).result(DEADLINE_S)
        assert staging.free == 2
        leases = staging.acquire(4, 0.0, at_least=4)
        release_all(leases)
        table = engine.table(len(tokens))
        assert cache.load(cache.lookup(other), engine.places(table)).tokens == len(other)
        engine.assert_loaded(other, table, 4)


def test_one_chunk_is_got_alone(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(4)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 16)
    memory = MemoryTier(staging, 12 * staging.slot_bytes)
    with new_cache(engine, staging, [memory, ObjectTier(str(tmp_path))], write_back_to=("memory",)) as cache:
        names = cache.lookup(tokens).chunks.names
        for chunk, expected in ((2, []), (0, names[:2]), (1, names[:4]), (3, names[:4])):
            leases = cache.get_non_blocking(tokens, chunk).result(DEADLINE_S)
            key = engine.keys(tokens)[chunk]
            for group, lease in enumerate(leases):
                form = RecordFormat.of(engine.layout, group, engine.namespace)
                assert (
                    lease.array[form.header_bytes : form.layers_end].tobytes()
                    == engine.kv(key, group).tobytes()
                )
            release_all(leases)
            held = [name for name, _ in memory.scan()]
            assert sorted(held) == sorted(expected), "a chunk without the one before it was written back"
        assert cache.get_non_blocking(sequence(2, 9), 1).result(DEADLINE_S) == []
        with pytest.raises(CacheError, match="chunk=4"):
            cache.get_non_blocking(tokens, 4)


def test_loads_do_not_wait_for_prefetches(tmp_path: Path) -> None:
    """More prefetches hang than there are threads of either kind."""
    engine = make_engine()
    *slow, wanted = sequences = [sequence(1, seed) for seed in range(2 * LOADING_THREADS + 1)]
    for tokens in sequences:
        fill(engine, tmp_path, tokens)
    hung: set[str] = set()
    disk = FaultyTier(
        ObjectTier(str(tmp_path)), lambda op, name: Fault.HANG if op == "get" and name in hung else None
    )
    with new_cache(engine, new_staging(engine, 32), [disk]) as cache:
        for tokens in slow:
            hung.update(cache.lookup(tokens).chunks.names)
        futures = [cache.prefetch(tokens) for tokens in slow]
        while disk.hanging < PREFETCHING_THREADS:
            wait(futures, 0.001)
        load = cache.load_async(cache.lookup(wanted), engine.places(engine.table(CHUNK)))
        assert load.result(DEADLINE_S).tokens == CHUNK
        assert not any(future.done() for future in futures)
        disk.release()
        assert [future.result(DEADLINE_S).tokens for future in futures] == [CHUNK] * len(slow)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_prefetch_asks_a_tier_for_few_times_what_it_reads_at_once(groups: int, tmp_path: Path) -> None:
    """So that a load's reads do not wait behind the rest. A load asks for more."""
    engine, tokens = make_engine(groups), sequence(24)
    fill(engine, tmp_path, tokens)
    disk = Recorder(ObjectTier(TierConfig(url=str(tmp_path), threads=2)))
    disk.gate.clear()
    with new_cache(engine, new_staging(engine, 64), [disk]) as cache:
        prefetch = cache.prefetch(tokens)
        assert disk.asked.wait(DEADLINE_S)
        wait([prefetch], 0.05)
        assert len(disk.got) == 8
        disk.gate.set()
        assert prefetch.result(DEADLINE_S).tokens == len(tokens)


def test_a_prefetch_brings_what_lies_behind_the_engines_own(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(6)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 16)
    memory = MemoryTier(staging, 8 * staging.slot_bytes)
    disk = Recorder(ObjectTier(str(tmp_path)))
    with new_cache(engine, staging, [memory, disk], write_back_to=("memory",)) as cache:
        assert cache.prefetch_chunks == 4
        names = cache.lookup(tokens).chunks.names
        hit = cache.prefetch(tokens, first=2).result(DEADLINE_S)
        assert (hit.chunks.names, hit.by_tier) == (names[2:], {"memory": 4 * CHUNK})
        assert sorted(disk.got) == sorted(names[2:])
        disk.got.clear()
        assert cache.prefetch(tokens, first=2).result(DEADLINE_S).by_tier == {"memory": 4 * CHUNK}
        assert not disk.got, "what is near is not read again"
        with pytest.raises(CacheError, match="start=7"):
            cache.prefetch(tokens, first=7)


def test_a_get_that_is_called_off_ends_before_its_deadline(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    fill(engine, tmp_path, tokens)
    disk = FaultyTier(ObjectTier(str(tmp_path)), lambda op, _: Fault.HANG if op == "get" else None)
    with new_cache(engine, new_staging(engine, 4), [disk]) as cache:
        future = cache.get_non_blocking(tokens, 1)
        while not disk.hanging:
            wait([future], 0.001)
        assert not future.cancel()
        assert future.result(DEADLINE_S / 2) == []
        assert cache.tier_states() == {"disk": "ok"}
        disk.release()


def test_a_get_asks_no_tier_that_is_passed_over(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    fill(engine, tmp_path / "disk", tokens)
    asked: list[str] = []

    def plan(operation: str, name: str) -> None:
        asked.append(operation)

    broken = FaultyTier(ObjectTier(str(tmp_path / "broken"), name="broken"), plan)
    disk = ObjectTier(str(tmp_path / "disk"))
    with new_cache(engine, new_staging(engine, 4), [broken, disk], write_back_to=("broken",)) as cache:
        cache.tier_set.failed("broken", TimeoutError())
        leases = cache.get_non_blocking(tokens, 1).result(DEADLINE_S)
        assert len(leases) == 1
        release_all(leases)
        assert cache.pin(tokens, 1) == len(tokens), "of the other tier"
        assert not asked


def test_a_prefetch_that_outlasts_its_cache_keeps_no_slot(tmp_path: Path) -> None:
    """What the simulation found (docs/evidence/verification.md)."""
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 8)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        prefetched = cache.tier_set.prefetched
        (lease,) = staging.acquire(1, DEADLINE_S)
        cache.close()
        prefetched.keep("late", lease, object())
        lease.release()
        assert staging.free == staging.slots
