"""A hit of a model with states ends at a snapshot of them, and loads nothing without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_replay import Real

from kvkit.cache import Cache, CacheError, SequencePages
from kvkit.format.layout import KVLayout, LayoutError
from kvkit.handoff.ranks import divided
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import Simulator
from kvkit.lab.simulate.traces import mixed
from kvkit.lab.testbed.engine_stub import HybridEngine, hybrid_layout, small_namespace
from kvkit.staging import Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.transfer.plan import SOUGHT, is_snapshot_kept, snapshots_sought
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import Chunks, largest_record_bytes

CHUNK, MOST = 8, 6
LAYOUT = hybrid_layout(CHUNK)
SPACE = small_namespace(LAYOUT, CHUNK)
TOKENS = np.random.default_rng(0).integers(0, 50_000, CHUNK * MOST, np.int32)
PLACES = st.frozensets(st.integers(0, MOST - 1))


def open_cache(folder: Path | None = None, policy: Policy | None = None) -> Cache:
    staging = Staging(largest_record_bytes(LAYOUT, SPACE), 80)
    memory = MemoryTier(staging, 40 * staging.slot_bytes)
    tiers = [memory] if folder is None else [memory, ObjectTier(f"file://{folder}", name="disk")]
    return Cache(LAYOUT, SPACE, tiers, staging=staging, policy=policy)


def stored(cache: Cache, snapshots: Collection[int]) -> Chunks:
    """All chunks, and the states at the ends of some."""
    cache.store(TOKENS, HybridEngine(LAYOUT, SPACE).computed(TOKENS, snapshots))
    cache.flush()
    return cache.chunks(TOKENS)


@given(held=PLACES, lost=PLACES, gone=PLACES)
def test_a_hit_ends_at_the_last_snapshot(
    held: frozenset[int], lost: frozenset[int], gone: frozenset[int]
) -> None:
    """Whatever tiers have lost of tokens and of states: the model is those that are left."""
    with open_cache() as cache:
        chunks, tier = stored(cache, held), cache.tiers["memory"]
        tier.delete([name for i in lost for name in chunks.records(i, i + 1)])
        tier.delete([chunks.snapshot(i).names[i % 2] for i in gone])
        run = min(lost, default=MOST)
        end = max((i + 1 for i in held - gone if i < run), default=0)
        hit = cache.lookup(TOKENS)
        assert (hit.tokens, cache.query(TOKENS).tokens) == (end * CHUNK, end * CHUNK)
        engine = HybridEngine(LAYOUT, SPACE)
        table = engine.table(len(TOKENS))
        pages = engine.where(table, end, {end - 1})
        assert cache.load(hit, pages).tokens == end * CHUNK
        assert engine.snapshots(TOKENS) == ([end - 1] if end else [])
        assert engine.read_tokens(table, end) == [engine.kv(key, 0).tobytes() for key in chunks.keys[:end]]


@given(held=PLACES, lost=PLACES, gone=PLACES, room=PLACES)
def test_what_is_lost_after_the_lookup(
    held: frozenset[int], lost: frozenset[int], gone: frozenset[int], room: frozenset[int]
) -> None:
    """The load ends at an earlier snapshot for which there are pages, or loads nothing."""
    with open_cache() as cache:
        chunks, tier = stored(cache, held), cache.tiers["memory"]
        hit = cache.lookup(TOKENS)
        tier.delete([name for i in lost for name in chunks.records(i, i + 1)])
        tier.delete([chunks.snapshot(i).names[i % 2] for i in gone])
        engine = HybridEngine(LAYOUT, SPACE)
        table, count = engine.table(len(TOKENS)), hit.plan.chunks
        run = min(min(lost, default=MOST), count)
        end = max((i + 1 for i in (held - gone) & room if i < run), default=0)
        found = cache.load(hit, engine.where(table, count, room))
        assert (found.tokens, sum(found.by_tier.values())) == (end * CHUNK, end * CHUNK)
        assert engine.snapshots(TOKENS) == ([end - 1] if end else [])
        assert engine.read_tokens(table, end) == [engine.kv(key, 0).tobytes() for key in chunks.keys[:end]]


def test_a_damaged_snapshot_is_dropped_and_an_earlier_one_taken(tmp_path: Path) -> None:
    with open_cache(tmp_path, Policy(("disk",), ("disk",))) as cache:
        chunks = stored(cache, {1, 4})
        path = tmp_path / chunks.snapshot(4).names[1]
        data = bytearray(path.read_bytes())
        data[4096] ^= 1
        path.write_bytes(data)
        engine = HybridEngine(LAYOUT, SPACE)
        table = engine.table(len(TOKENS))
        hit = cache.lookup(TOKENS)
        assert hit.tokens == 5 * CHUNK
        assert cache.load(hit, engine.where(table, 5, range(5))).tokens == 2 * CHUNK
        assert cache.lookup(TOKENS).tokens == 2 * CHUNK
        assert cache.counts().damaged.total() == 1
        assert cache.counts().loaded_tokens.total() == 2 * CHUNK
        assert cache.counts().stored_records["disk"] == MOST + 4
        assert cache.counts().snapshot_records["disk"] == 4
        cache.check_integrity()


def test_a_snapshot_is_not_of_another_place() -> None:
    """Off by one chunk, or of another layer group: what is sealed at one place proves nothing at another."""
    with open_cache() as cache:
        chunks = stored(cache, {1, 2})
        memory = cache.tiers["memory"]
        (wrong, right), names = (chunks.snapshot(i) for i in (1, 2)), chunks.snapshot(2).names
        leases = [memory.borrow(name) for name in wrong.names]
        memory.delete(right.names)
        done: list[BaseException | None] = []
        memory.put(names, [lease for lease in leases if lease], lambda name, error: done.append(error))
        for lease in leases:
            assert lease is not None
            lease.release()
        assert done == [None, None]
        hit = cache.lookup(TOKENS)
        assert hit.tokens == 3 * CHUNK
        engine = HybridEngine(LAYOUT, SPACE)
        found = cache.load(hit, engine.where(engine.table(len(TOKENS)), 3, {2}))
        assert (found.tokens, engine.snapshots(TOKENS)) == (0, [])
        assert cache.lookup(TOKENS).tokens == 2 * CHUNK


def test_prefetches_and_write_backs_bring_the_snapshot_too(tmp_path: Path) -> None:
    with open_cache(tmp_path, Policy(("disk",), ("disk",))) as cache:
        stored(cache, {1, 4})
    with open_cache(tmp_path, Policy(("memory", "disk"), ("disk",), ("memory",))) as cache:
        assert cache.prefetch(TOKENS).result(10.0).by_tier == {"memory": 5 * CHUNK}
        chunks, memory = cache.chunks(TOKENS), cache.tiers["memory"]
        assert memory.match_prefix(chunks.snapshot(4).names) == 2
        memory.delete([*chunks.names, *chunks.snapshots])
        engine = HybridEngine(LAYOUT, SPACE)
        hit = cache.lookup(TOKENS)
        assert hit.by_tier == {"disk": 5 * CHUNK}
        assert cache.load(hit, engine.where(engine.table(len(TOKENS)), 5, {4})).tokens == 5 * CHUNK
        cache.flush()
        assert memory.match_prefix(chunks.snapshot(4).names) == 2


def test_part_of_a_hit_ends_with_the_same_snapshot() -> None:
    """For an engine that has the first chunks."""
    with open_cache() as cache:
        stored(cache, {0, 3})
        engine = HybridEngine(LAYOUT, SPACE)
        part = cache.lookup(TOKENS).part(2, 6)
        table, places = engine.table(2 * CHUNK), np.array([-1, 3], np.int64)
        states = [SequencePages(pages, blocks=places) for pages in engine.pages[1:]]
        found = cache.load(part, [SequencePages(engine.pages[0], np.array(table)), *states])
        assert (found.tokens, engine.snapshots(TOKENS)) == (2 * CHUNK, [3])


def test_snapshots_are_evicted_alone() -> None:
    """What is left of them is of use, and the last ones are of most."""
    with open_cache() as cache:
        chunks, memory = stored(cache, range(MOST)), cache.tiers["memory"]
        for place in (4, 5):
            cache.lookup(TOKENS[: (place + 1) * CHUNK])
        other = TOKENS + 1  # 18 records of 40 are there
        cache.store(other, HybridEngine(LAYOUT, SPACE).computed(other, range(MOST)))
        cache.store(other + 1, HybridEngine(LAYOUT, SPACE).computed(other + 1, [0]))
        held = [i for i in range(MOST) if memory.match_prefix(chunks.snapshot(i).names) == 2]
        assert held == [2, 3, 4, 5]
        assert cache.lookup(TOKENS).tokens == MOST * CHUNK


@pytest.mark.parametrize("every", [1, 3, 0])
def test_the_simulator_counts_what_the_cache_does(tmp_path: Path, every: int) -> None:
    """Hits, and records stored and evicted, by which snapshots are kept."""
    layout, size, room = KVLayout(LAYOUT.groups[:2]), 2048, 16
    space = small_namespace(layout, CHUNK)
    staging = Staging(largest_record_bytes(layout, space), 80)
    memory, disk = (
        MemoryTier(staging, room * staging.slot_bytes),
        ObjectTier(f"file://{tmp_path}", name="disk"),
    )
    both, found = ("memory", "disk"), Counter[str]()
    model = {"kv_bytes_per_token": 1, "state_bytes": size, "snapshot_every": every}
    tiers = {"memory": {"capacity": room * size, "in_memory": True}, "disk": {}}
    simulator = Simulator(SimulationConfig.model_validate({"model": model, "tiers": tiers}), size)
    engine = HybridEngine(layout, space, 256)
    with Cache(
        layout, space, [memory, disk], staging=staging, policy=Policy(both, both, ("memory",))
    ) as cache:
        for request in mixed(40, seed=3, block_tokens=size).requests:
            asked, whole = (request.input_tokens - 1) // size, Real.tokens(request.chunks)
            hit, table = cache.lookup(whole[: asked * CHUNK]), engine.table(len(whole))
            count = hit.plan.chunks
            loaded = cache.load(hit, engine.where(table, count, {count - 1}))
            assert loaded.by_tier == hit.by_tier
            hits = {tier: tokens // CHUNK for tier, tokens in loaded.by_tier.items()}
            assert simulator.serve(request).by_tier() == hits
            found.update(hits)
            cache.flush()
            kept = [i for i in range(count, len(request.chunks)) if is_snapshot_kept(i + 1, every, asked)]
            cache.store(whole, engine.computed(whole, kept))
            cache.flush()
        report, counts = simulator.finish(), cache.counts()
        assert memory.evicted == report.evicted_chunks["memory"] > 0
        assert counts.stored_records["disk"] * size == report.written_bytes["disk"]
    assert found["memory"]
    assert found["disk"]


@given(st.integers(0, 200))
def test_where_snapshots_are_sought(chunks: int) -> None:
    sought = list(snapshots_sought(chunks))
    assert sought == list(range(chunks, 0, -1))[:SOUGHT]


@pytest.mark.parametrize(
    ("every", "prompt", "kept"),
    [(1, 5, {1, 2, 3, 4, 5, 6, 7}), (3, 5, {3, 5, 6}), (0, 5, {5}), (2, 0, {2, 4, 6})],
)
def test_which_snapshots_are_kept(every: int, prompt: int, kept: set[int]) -> None:
    assert {stop for stop in range(1, 8) if is_snapshot_kept(stop, every, prompt)} == kept


def test_layouts_of_states() -> None:
    tokens, state, other = LAYOUT.groups
    assert divided(SPACE, KVLayout((tokens,)))
    assert not divided(SPACE, LAYOUT), "ranks of other numbers cannot use them"
    fingerprints = {LAYOUT.fingerprint()}
    fingerprints.add(KVLayout((tokens, state, replace(other, state="of other shapes"))).fingerprint())
    fingerprints.add(KVLayout((tokens, replace(state, state=None), other)).fingerprint())
    assert len(fingerprints) == 3
    for groups in ((state, other), (state, tokens, other)):
        with pytest.raises(LayoutError, match="states"):
            KVLayout(groups)
    with pytest.raises(LayoutError, match="state=''"):
        replace(state, state="")
    with pytest.raises(LayoutError, match="chunk_tokens=16: want block_tokens=8"):
        state.record_shape(16)


def test_what_is_refused() -> None:
    with open_cache() as cache:
        engine = HybridEngine(LAYOUT, SPACE)
        pages = engine.computed(TOKENS, {0})
        with pytest.raises(CacheError, match="states"):
            cache.store_layers(TOKENS, pages)
        slots = SequencePages(engine.pages[1], slots=np.zeros(len(TOKENS), np.int64))
        with pytest.raises(CacheError, match="states"):
            cache.store(TOKENS, [pages[0], slots, pages[2]])
