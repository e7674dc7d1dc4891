"""Layerwise loads and stores move the same records, one layer at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from caches import CHUNK, DEADLINE_S, fill, make_engine, new_cache, new_staging, sequence

from kvkit.cache import READING_THREADS, Cache
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.format.record import layer_range, verify
from kvkit.kernels.pages.api import Pages
from kvkit.lab.testbed.engine_stub import POISON, Engine, small_namespace
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import OnComplete, Ranges, Tier
from kvkit.tiers.health import FAILURES_TO_PAUSE
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier, Wrapper
from kvkit.transfer.layer_store import LayerStore
from kvkit.transfer.policy import Policy
from kvkit.workers import Closed


def untouched(engine: Engine, layer: int) -> bool:
    """Whether no byte of a layer was written."""
    group, place = next(
        (g, group.layers.index(layer))
        for g, group in enumerate(engine.layout.groups)
        if layer in group.layers
    )
    raw = engine.pools[group][place].contiguous().numpy().view(np.uint8)
    return bool((raw == POISON).all())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [2, 16])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_layers_arrive_in_the_order_of_the_model(groups: int, slots: int, codec: str, tmp_path: Path) -> None:
    engine, tokens = make_engine(groups), sequence(4)
    fill(engine, tmp_path, tokens)
    with new_cache(
        engine, new_staging(engine, slots), [ObjectTier(TierConfig(url=str(tmp_path), codec=codec))]
    ) as cache:
        table = engine.table(len(tokens))
        load = cache.load_layers(cache.lookup(tokens), engine.places(table))
        seen = []
        for layer in load:
            seen.append(layer)
            assert not untouched(engine, layer)
            assert all(untouched(engine, later) for later in range(layer + 1, 2 * groups))
        assert seen == list(range(2 * groups))
        assert load.loaded.by_tier == {"disk": len(tokens)}
        engine.assert_loaded(tokens, table, 4)
        assert cache.staging.free == cache.staging.slots


def test_layers_come_from_memory_and_disk(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(6)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 16)
    tiers = [MemoryTier(staging, 3 * staging.slot_bytes), ObjectTier(str(tmp_path))]
    with new_cache(engine, staging, tiers, write_back_to=("memory",)) as cache:
        cache.prefetch(tokens).result(DEADLINE_S)
        hit = cache.lookup(tokens)
        assert hit.by_tier == {"memory": 3 * CHUNK, "disk": 3 * CHUNK}
        table = engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1]
        assert load.loaded.by_tier == hit.by_tier
        engine.assert_loaded(tokens, table, 6)


def test_a_tier_that_cannot_read_parts_reads_each_record_once(tmp_path: Path) -> None:
    """As far as there are slots to spare: the others' layers are parts that it reads one by one."""
    engine, tokens = make_engine(2), sequence(6)
    fill(engine, tmp_path, tokens)
    whole: list[str] = []
    parts: list[str] = []

    class Counting(Wrapper):
        def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
            whole.extend(names)
            self.inner.get(names, leases, on_complete)

        def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
            parts.append(name)
            self.inner.get_ranges(name, ranges, buffers)

    for slots, at_once in ((24, 12), (12, 6)):
        tier = Counting(ObjectTier(TierConfig(url=str(tmp_path), codec="zstd")))
        with new_cache(engine, new_staging(engine, slots), [tier]) as cache:
            table = engine.table(len(tokens))
            hit = cache.lookup(tokens)
            load = cache.load_layers(hit, engine.places(table))
            assert list(load) == [0, 1, 2, 3]
            assert load.loaded.by_tier == {"disk": len(tokens)}
            engine.assert_loaded(tokens, table, 6)
            assert whole == hit.chunks.names[:at_once]
            assert sorted(parts) == sorted(hit.chunks.names[at_once:] * 2), "once for each of its layers"
            assert cache.staging.free == cache.staging.slots
        whole.clear()
        parts.clear()


@pytest.mark.parametrize(
    "where", ["header", "first layer", "last layer", "behind the layers", "index", "gone", "cut"]
)
def test_a_damaged_record_ends_the_run(where: str, tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(5)
    fill(engine, tmp_path, tokens)
    with new_cache(engine, new_staging(engine, 8), [ObjectTier(str(tmp_path))]) as cache:
        hit = cache.lookup(tokens)
        form = hit.chunks.formats[0]
        path = tmp_path / hit.chunks.names[2]
        content = bytearray(path.read_bytes())
        at = {
            "header": 130,
            "first layer": form.header_bytes + 3,
            "last layer": form.layers_end - 1,
            "behind the layers": form.layers_end,
            "index": form.record_bytes - 1,
        }
        if where == "gone":
            path.unlink()
        elif where == "cut":
            os.truncate(path, form.layers_end - 8)
        else:
            content[at[where]] ^= 4
            path.write_bytes(content)
        table = engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1]
        assert load.loaded.tokens == 2 * CHUNK
        assert engine.read(tokens, table, 2)[0] == [
            engine.kv(key, 0).tobytes() for key in engine.keys(tokens)[:2]
        ]
        assert cache.lookup(tokens).tokens == 2 * CHUNK, "the damaged record is still there"


def test_a_load_may_be_left_early(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(4)
    fill(engine, tmp_path, tokens)
    with new_cache(engine, new_staging(engine, 8), [ObjectTier(str(tmp_path))]) as cache:
        load = cache.load_layers(cache.lookup(tokens), engine.places(engine.table(len(tokens))))
        assert next(load) == 0
        load.close()
        assert list(load) == []
    assert cache.staging.free == cache.staging.slots


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_hung_read_ends_the_run_at_its_deadline_and_keeps_its_slot(codec: str, tmp_path: Path) -> None:
    """Whether it reads parts or, with a codec, whole records."""
    engine, tokens = make_engine(), sequence(3)
    fill(engine, tmp_path, tokens)
    hung: set[str] = set()
    disk = FaultyTier(
        ObjectTier(TierConfig(url=str(tmp_path), codec=codec)),
        lambda op, name: Fault.HANG if op == "get" and name in hung else None,
    )
    staging = new_staging(engine, 8)
    cache = Cache(
        engine.layout,
        engine.namespace,
        [disk],
        staging=staging,
        policy=Policy(("disk",), ("disk",)),
        timeout_s=0.5,
    )
    with cache:
        hit = cache.lookup(tokens)
        hung.update(hit.chunks.records(1, 2))
        table = engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1]
        assert load.loaded.tokens == CHUNK
        assert staging.free < staging.slots, "a slot that is still read into is free"
        disk.release()
    staging.check_integrity()
    assert staging.free == staging.slots


def test_stored_layers_are_the_same_records(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(4)
    fill(engine, tmp_path / "whole", tokens)
    staging = new_staging(engine, 12)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path / "layers"))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        with cache.store_layers(tokens, engine.places(table)) as store:
            for layer in range(4):
                store.layer(layer)
                group, place = divmod(layer, 2)
                engine.pools[group][place].view(dtype=engine.pools[group][place].dtype).fill_(7)
            with pytest.raises(KeyError):
                store.layer(4)
        assert store.stored.new_tokens == len(tokens)
        cache.flush()
        for name in cache.lookup(tokens).chunks.names:
            assert (tmp_path / "layers" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def compute_and_fail(store: LayerStore) -> None:
    with store:
        store.layer(0)
        store.layer(1)
        raise RuntimeError("the engine failed")


def test_a_store_that_lacks_a_layer_or_fails_stores_nothing(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    with new_cache(engine, new_staging(engine, 4), [ObjectTier(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        with cache.store_layers(tokens, engine.places(table)) as store:
            store.layer(0)
        assert store.stored.new_tokens == 0
        with pytest.raises(RuntimeError, match="engine"):
            compute_and_fail(cache.store_layers(tokens, engine.places(table)))
        cache.flush()
        assert cache.lookup(tokens).tokens == 0
        assert cache.staging.free == cache.staging.slots


def test_chunks_without_room_are_left_out_from_the_end(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(6)
    with new_cache(engine, new_staging(engine, 7), [ObjectTier(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        with cache.store_layers(tokens, engine.places(table)) as store:
            for layer in range(4):
                store.layer(layer)
        assert store.stored.new_tokens == 3 * CHUNK
        cache.flush()
        assert cache.lookup(tokens).tokens == 3 * CHUNK


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
def test_one_layer_of_pages_is_a_view(order: str) -> None:
    group = LayerGroup((3, 5, 8), 2, 8, 4, "bfloat16", block_tokens=4, order=order)
    tensors = group.pages(5)
    pages = Pages.of(group, tensors)
    for place, tensor in enumerate(tensors):
        alone = pages.layer(place)
        expected = Pages.of(
            LayerGroup(group.layers[place : place + 1], 2, 8, 4, "bfloat16", 4, order), [tensor]
        )
        assert alone.group.layers == (group.layers[place],)
        assert np.array_equal(alone.table, expected.table)
        assert np.array_equal(alone.halves(), expected.halves())
    assert KVLayout((pages.layer(1).group,)).layers == 1


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_layer_without_room_ends_the_run_and_all_layers_are_returned(spare: int, tmp_path: Path) -> None:
    """Two chunks are in memory, the others on disk. Their pieces pass through `spare` free slots, if any."""
    engine, tokens = make_engine(), sequence(16)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 8)
    tiers = [MemoryTier(staging, 2 * staging.slot_bytes), ObjectTier(str(tmp_path))]
    with Cache(
        engine.layout,
        engine.namespace,
        tiers,
        staging=staging,
        policy=Policy(("memory", "disk"), ("memory", "disk"), ("memory",)),
        timeout_s=0.5,
    ) as cache:
        cache.prefetch(tokens[: 2 * CHUNK]).result(DEADLINE_S)
        hit = cache.lookup(tokens)
        assert hit.by_tier == {"memory": 2 * CHUNK, "disk": 14 * CHUNK}
        pieces = staging.slot_bytes // hit.chunks.formats[0].layer_bytes
        taken = staging.acquire(6 - spare, 0.0, at_least=6 - spare)
        table = engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1]
        assert pieces < 14, "one slot has room for all"
        assert load.loaded.tokens == (16 if spare else 2) * CHUNK
        engine.assert_loaded(tokens, table, load.loaded.tokens // CHUNK)
        release_all(taken)
        assert cache.tier_states() == {"memory": "ok", "disk": "ok"}


def test_a_load_whose_readers_end_gives_its_slots_back(tmp_path: Path) -> None:
    engine, tokens = make_engine(4), sequence(4)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 16)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        load = cache.load_layers(cache.lookup(tokens), engine.places(engine.table(len(tokens))))
        assert next(load) == 0
        assert cache._threads.reading["disk"].close(DEADLINE_S)
        with pytest.raises(Closed):
            list(load)
        assert staging.free == staging.slots


def test_a_store_that_is_never_entered_takes_no_slot(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    staging = new_staging(engine, 4)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        store = cache.store_layers(tokens, engine.places(engine.table(len(tokens))))
        assert staging.free == staging.slots
        assert store.stored.new_tokens == 0


def test_a_header_is_verified_by_each_read_that_uses_it(tmp_path: Path) -> None:
    """The second layer's read begins before the first's ends, and is given a record of other tokens."""
    engine, tokens, others = make_engine(), sequence(1), sequence(1, 1)
    for each in (tokens, others):
        fill(engine, tmp_path, each)

    class Changing(Wrapper):
        """`inner`, whose layer 1 is another record's, and comes when layer 0 was returned."""

        def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
            if second in ranges:
                assert returned.wait(DEADLINE_S)
                name = foreign
            self.inner.get_ranges(name, ranges, buffers)

    with new_cache(engine, new_staging(engine, 4), [Changing(ObjectTier(str(tmp_path)))]) as cache:
        hit = cache.lookup(tokens)
        foreign = cache.lookup(others).chunks.names[0]
        second = layer_range(hit.chunks.formats[0], 1)
        returned = threading.Event()
        load = cache.load_layers(hit, engine.places(engine.table(len(tokens))))
        assert next(load) == 0
        returned.set()
        assert next(load) == 1
        assert untouched(engine, 1), "a record of other tokens reached the engine"
        assert load.loaded.tokens == 0


def test_a_tier_that_hangs_does_not_keep_others_layers_from_being_read(tmp_path: Path) -> None:
    engine, tokens, more = make_engine(), sequence(2), sequence(READING_THREADS, 1)
    fill(engine, tmp_path / "disk", tokens)
    fill(engine, tmp_path / "hung", more)
    hung = FaultyTier(
        ObjectTier(str(tmp_path / "hung"), name="hung"), lambda op, _: Fault.HANG if op == "get" else None
    )
    disk = ObjectTier(str(tmp_path / "disk"))
    with new_cache(engine, new_staging(engine, 16), [hung, disk]) as cache:
        stuck = cache.load_layers(cache.lookup(more), engine.places(engine.table(len(more))))
        waiter = threading.Thread(target=list, args=(stuck,))
        waiter.start()
        reading = cache._threads.reading["hung"]
        while reading.waiting < READING_THREADS:  # the second layer waits for the first
            waiter.join(0.001)
        other = make_engine()
        table = other.table(len(tokens))
        load = cache.load_layers(cache.lookup(tokens), other.places(table))
        assert list(load) == [0, 1]
        assert load.loaded.by_tier == {"disk": len(tokens)}
        other.assert_loaded(tokens, table, 2)
        assert waiter.is_alive()
        hung.release()
        waiter.join(DEADLINE_S)
        assert not waiter.is_alive()
        assert stuck.loaded.tokens == len(more)


def test_layers_that_are_read_end_a_row_of_failures(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    fill(engine, tmp_path, tokens)
    broken: set[str] = set()
    disk = FaultyTier(
        ObjectTier(str(tmp_path)), lambda op, name: Fault.FAIL if op == "get" and name in broken else None
    )
    with new_cache(engine, new_staging(engine, 8), [disk]) as cache:
        hit = cache.lookup(tokens)
        broken.update(hit.chunks.records(1, 2))
        for _ in range(2 * FAILURES_TO_PAUSE):
            load = cache.load_layers(hit, engine.places(engine.table(len(tokens))))
            assert list(load) == [0, 1]
            assert load.loaded.tokens == CHUNK
        assert cache.tier_states() == {"disk": "ok"}
        assert cache.counts().loaded_tokens == {"disk": 2 * FAILURES_TO_PAUSE * CHUNK}


def test_layers_are_not_read_from_a_tier_that_failed_since_the_lookup(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path / "a", tokens[: 3 * CHUNK])
    fill(engine, tmp_path / "b", tokens, first=3)
    asked: list[str] = []

    def plan(operation: str, name: str) -> None:
        asked.append(operation)

    tiers = [
        ObjectTier(str(tmp_path / "a"), name="a"),
        FaultyTier(ObjectTier(str(tmp_path / "b"), name="b"), plan),
    ]
    with new_cache(engine, new_staging(engine, 8), tiers) as cache:
        hit = cache.lookup(tokens)
        assert hit.tokens == len(tokens)
        asked.clear()
        cache.tier_set.failed("b", TimeoutError())
        table = engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1]
        assert load.loaded.by_tier == {"a": 3 * CHUNK}
        engine.assert_loaded(tokens, table, 3)
        assert not asked


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("target", ["memory", "near"])
def test_what_was_loaded_by_layers_is_written_back(
    target: str, groups: int, codec: str, tmp_path: Path
) -> None:
    """After the last layer, as the same records, whether they are read in parts or, with a codec, whole."""
    engine, tokens = make_engine(groups), sequence(4)
    fill(engine, tmp_path / "whole", tokens)
    engine.compute(tokens, engine.table(len(tokens)))
    stored = ObjectTier(TierConfig(url=str(tmp_path / "far"), codec=codec))
    with new_cache(engine, new_staging(engine, 8), [stored]) as cache:
        cache.store(tokens, engine.places(engine.table(len(tokens))))
    engine.wipe()
    staging = new_staging(engine, 32)
    near: Tier = ObjectTier(str(tmp_path / "near"), name="near")
    if target == "memory":
        near = MemoryTier(staging, 8 * staging.slot_bytes)
    far = ObjectTier(TierConfig(url=str(tmp_path / "far"), codec=codec), name="far")
    with new_cache(engine, staging, [near, far], write_back_to=(target,)) as cache:
        hit, table = cache.lookup(tokens), engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        for layer in range(2 * groups):
            assert next(load) == layer
            cache.flush()
            assert near.match_prefix(hit.chunks.names) == 0, "a record whose layers are not all verified"
        assert list(load) == []
        cache.flush()
        engine.assert_loaded(tokens, table, 4)
        assert cache.lookup(tokens).by_tier == {target: len(tokens)}
        held = 4 * groups if target == "memory" else 0
        assert staging.free == staging.slots - held
        for name in hit.chunks.names:
            lease = near.borrow(name)
            found = (tmp_path / "near" / name).read_bytes() if lease is None else lease.record.tobytes()
            assert found == (tmp_path / "whole" / name).read_bytes()
            if lease is not None:
                lease.release()
        engine.wipe()
        assert cache.load(cache.lookup(tokens), engine.places(table)).by_tier == {target: len(tokens)}
        engine.assert_loaded(tokens, table, 4)


@pytest.mark.parametrize("where", ["header", "last layer", "trailer"])
def test_only_what_was_verified_is_written_back(where: str, tmp_path: Path) -> None:
    """Layers that are in their pages when the last one of a record fails do not make it one to keep."""
    engine, tokens = make_engine(), sequence(5)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 24)
    memory = MemoryTier(staging, 8 * staging.slot_bytes)
    with new_cache(engine, staging, [memory, ObjectTier(str(tmp_path))], write_back_to=("memory",)) as cache:
        hit = cache.lookup(tokens)
        form = hit.chunks.formats[0]
        path = tmp_path / hit.chunks.names[2]
        content = bytearray(path.read_bytes())
        at = {"header": 130, "last layer": form.layers_end - 1, "trailer": form.record_bytes - 2}
        content[at[where]] ^= 4
        path.write_bytes(content)
        load = cache.load_layers(hit, engine.places(engine.table(len(tokens))))
        assert list(load) == [0, 1]
        assert load.loaded.tokens == 2 * CHUNK
        for number, name in enumerate(hit.chunks.names):
            lease = memory.borrow(name)
            assert (lease is not None) == (number < 2)
            if lease is not None:
                with lease:
                    assert verify(form, lease.buffer[: lease.used], *hit.chunks.identity(number)) is None
    staging.check_integrity()


def test_a_load_by_layers_that_is_left_early_writes_nothing_back(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(3)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 24)
    memory = MemoryTier(staging, 8 * staging.slot_bytes)
    with new_cache(engine, staging, [memory, ObjectTier(str(tmp_path))], write_back_to=("memory",)) as cache:
        load = cache.load_layers(cache.lookup(tokens), engine.places(engine.table(len(tokens))))
        assert next(load) == 0
        load.close()
        wait_for(lambda: staging.free == staging.slots)  # what was being read then comes back when it is
        assert list(memory.scan()) == []


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 12])
def test_a_load_by_layers_writes_back_as_much_as_there_are_slots_for(slots: int, tmp_path: Path) -> None:
    """A leading run, and never at the cost of what is loaded."""
    engine, tokens = make_engine(), sequence(12)
    fill(engine, tmp_path / "far", tokens)
    near = ObjectTier(str(tmp_path / "near"), name="near")
    far = ObjectTier(str(tmp_path / "far"), name="far")
    with new_cache(engine, new_staging(engine, slots), [near, far], write_back_to=("near",)) as cache:
        hit, table = cache.lookup(tokens), engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1]
        assert load.loaded.tokens == len(tokens)
        engine.assert_loaded(tokens, table, 12)
        cache.flush()
        written = near.match_prefix(hit.chunks.names)
        assert len(list(near.scan())) == written <= slots
        assert written >= slots // 2 - 1
        assert cache.staging.free == slots


def test_who_waits_for_slots_gets_those_that_layers_keep(tmp_path: Path) -> None:
    """Between two layers; what is loaded is the same, and its last chunk is not written back."""
    engine, tokens = make_engine(4), sequence(3)
    fill(engine, tmp_path / "far", tokens)
    near = ObjectTier(str(tmp_path / "near"), name="near")
    far = ObjectTier(str(tmp_path / "far"), name="far")
    staging = new_staging(engine, 24)
    with new_cache(engine, staging, [near, far], write_back_to=("near",)) as cache:
        hit, table = cache.lookup(tokens), engine.table(len(tokens))
        load = cache.load_layers(hit, engine.places(table))
        assert next(load) == 0
        kept = staging.slots - staging.free
        others = staging.acquire(staging.free, 0.0, at_least=staging.free)
        waiting = threading.Thread(target=lambda: others.extend(staging.acquire(3, DEADLINE_S, at_least=3)))
        waiting.start()
        while waiting.is_alive():
            assert next(load, None) is not None, "all layers came first"
            waiting.join(0.05)
        assert kept >= 3
        assert len(list(load)) > 0
        release_all(others)
        assert load.loaded.tokens == len(tokens)
        engine.assert_loaded(tokens, table, 3)
        cache.flush()  # the first chunks are written back
        assert staging.free == staging.slots


def test_layers_come_from_where_a_prefetch_brought_them(tmp_path: Path) -> None:
    """Since the lookup; `load` does so, too."""
    engine, tokens = make_engine(2), sequence(4)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, 24)
    tiers = [MemoryTier(staging, 12 * staging.slot_bytes), ObjectTier(str(tmp_path))]
    with new_cache(engine, staging, tiers, write_back_to=("memory",)) as cache:
        hit, table = cache.lookup(tokens), engine.table(len(tokens))
        assert hit.by_tier == {"disk": 4 * CHUNK}
        cache.prefetch(tokens[: 3 * CHUNK]).result(DEADLINE_S)
        load = cache.load_layers(hit, engine.places(table))
        assert list(load) == [0, 1, 2, 3]
        assert load.loaded.by_tier == {"memory": 3 * CHUNK, "disk": CHUNK}
        engine.assert_loaded(tokens, table, 4)
        engine.wipe()
        assert cache.load(hit, engine.places(table)).by_tier == {"memory": 4 * CHUNK}
        engine.assert_loaded(tokens, table, 4)


def test_layers_of_records_from_when_their_tier_had_a_codec(tmp_path: Path) -> None:
    """Compressed, they end before the place where their later layers are sought."""
    layout = KVLayout((LayerGroup((0, 1), 2, 64, 64, "float32", 4),))
    engine, tokens = Engine(layout, small_namespace(layout, CHUNK)), sequence(3)
    places = engine.places(engine.table(len(tokens)))
    for pool in engine.pools[0]:
        pool.zero_()
    packed = ObjectTier(TierConfig(url=str(tmp_path), codec="zstd"))
    with new_cache(engine, new_staging(engine, 8), [packed]) as cache:
        cache.store(tokens, places)
        cache.flush()
        form = cache.lookup(tokens).chunks.formats[0]
        assert all(size < layer_range(form, 1)[0] for _, size in packed.scan())
    with new_cache(engine, new_staging(engine, 8), [ObjectTier(str(tmp_path))]) as cache:
        load = cache.load_layers(cache.lookup(tokens), places)
        assert list(load) == [0, 1]
        assert load.loaded.tokens == len(tokens)
        assert not cache.counts().damaged


def test_a_compressed_record_that_is_gone_is_a_hit_no_more(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    fill(engine, tmp_path, tokens)
    tier = ObjectTier(TierConfig(url=str(tmp_path), codec="zstd"))
    with new_cache(engine, new_staging(engine, 1), [tier]) as cache:
        hit = cache.lookup(tokens)
        (tmp_path / hit.chunks.names[0]).unlink()
        load = cache.load_layers(hit, engine.places(engine.table(len(tokens))))
        assert list(load) == [0, 1]
        assert load.loaded.tokens == 0
        assert cache.lookup(tokens).tokens == 0
