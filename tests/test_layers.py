"""Layerwise loads and stores: the same records, one layer at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from engine import POISON, Engine
from test_loads import CHUNK, DEADLINE_S, fill, make_engine, new_cache, new_staging, sequence

from kvkit.cache import Cache
from kvkit.kernels.launch import Pages
from kvkit.layers import LayerStore
from kvkit.layout import KVLayout, LayerGroup
from kvkit.policy import Policy
from kvkit.testing import Fault, FaultyTier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier


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
    with new_cache(engine, new_staging(engine, slots), [ObjectTier(str(tmp_path), codec=codec)]) as cache:
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


@pytest.mark.parametrize("where", ["header", "first layer", "last layer", "gone", "cut"])
def test_a_damaged_record_ends_the_run(where: str, tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(5)
    fill(engine, tmp_path, tokens)
    with new_cache(engine, new_staging(engine, 8), [ObjectTier(str(tmp_path))]) as cache:
        hit = cache.lookup(tokens)
        form = hit.chunks.formats[0]
        path = tmp_path / hit.chunks.names[2]
        content = bytearray(path.read_bytes())
        at = {"header": 130, "first layer": form.header_bytes + 3, "last layer": form.layers_end - 1}
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


def test_a_hung_read_ends_the_run_at_its_deadline_and_keeps_its_slot(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(3)
    fill(engine, tmp_path, tokens)
    hung: set[str] = set()
    disk = FaultyTier(
        ObjectTier(str(tmp_path)), lambda op, name: Fault.HANG if op == "get" and name in hung else None
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
    assert KVLayout((pages.layer(1).group,)).layers == 1
