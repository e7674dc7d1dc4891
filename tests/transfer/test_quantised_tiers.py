"""Tiers of quantised records serve approximate hits, and never pass them for exact ones."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import CHUNK, DEADLINE_S, new_cache, new_staging, sequence
from float_engine import FloatEngine, narrow_tier
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkit.adapters.engine.loads import PromptHit, PromptLoad
from kvkit.cache import Cache
from kvkit.config import load_config, open_cache
from kvkit.format.record import payload
from kvkit.settings import ConfigError
from kvkit.staging import release_all
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.plan import RetrievePlan, clip, cut, extend

BOTH = pytest.mark.parametrize("precision", ["fp8", "int8"])


def opened(
    engine: FloatEngine, folder: Path, precision: str, exact: Path | None = None, **narrow: Any
) -> Cache:
    """Memory in front, the tier `narrow` behind, and an exact folder last where one is given."""
    staging = new_staging(engine, 40)
    tiers: list[Any] = [MemoryTier(staging, 20 * staging.slot_bytes)]
    tiers.append(narrow_tier(folder, precision, **narrow))
    if exact is not None:
        tiers.append(ObjectTier(str(exact), name="exact"))
    return new_cache(engine, staging, tiers, write_back_to=("memory",))


def stored(cache: Cache, engine: FloatEngine, tokens: Any, **where: Any) -> list[int]:
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    cache.store(tokens, engine.places(table), **where)
    cache.flush()
    engine.wipe()
    return table


@BOTH
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("groups", [1, 2])
def test_memory_serves_what_was_computed_and_the_tier_what_is_left_of_it(
    precision: str, codec: str, groups: int, tmp_path: Path
) -> None:
    engine, tokens = FloatEngine(groups), sequence(4)
    with opened(engine, tmp_path, precision, codec=codec) as cache:
        table = stored(cache, engine, tokens)
        hit = cache.lookup(tokens)
        loaded = cache.load(hit, engine.places(table))
        assert (hit.exact, loaded.approximate, loaded.approximate_from) == (32, 0, None)
        assert engine.loaded_as(tokens, table, 4, precision) == "eeee"
        cache.clear("memory")
        for _ in range(2):  # nothing was written back by the first
            hit = cache.lookup(tokens)
            loaded = cache.load(hit, engine.places(table))
            assert (loaded.by_tier, loaded.approximate, loaded.approximate_from) == ({"narrow": 32}, 32, 0)
            assert (hit.tokens, hit.exact) == (32, 0)
            assert engine.loaded_as(tokens, table, 4, precision) == "aaaa"
            engine.wipe()
            cache.flush()
        assert cache.lookup(tokens, retrieve_from=["memory"]).tokens == 0
        counts = cache.counts()
        assert counts.hit_tokens == {"memory": 32, "narrow": 64}
        assert counts.approximate_tokens == {"narrow": 64}
        assert not counts.written_back_records.total()
        assert not counts.damaged


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layer_by_layer_it_is_the_same(precision: str, dtype: str, tmp_path: Path) -> None:
    engine, tokens = FloatEngine(2, dtype), sequence(3)
    with opened(engine, tmp_path, precision, codec="zstd") as cache:
        table = stored(cache, engine, tokens)
        cache.clear("memory")
        load = cache.load_layers(cache.lookup(tokens), engine.places(table))
        assert list(load) == [0, 1, 2, 3]
        assert (load.loaded.tokens, load.loaded.approximate_from) == (24, 0)
        assert engine.loaded_as(tokens, table, 3, precision) == "aaa"
        cache.flush()
        assert cache.lookup(tokens, retrieve_from=["memory"]).tokens == 0


def test_an_exact_record_is_preferred_however_far_it_is(tmp_path: Path) -> None:
    engine, tokens = FloatEngine(), sequence(4)
    with opened(engine, tmp_path / "narrow", "fp8", tmp_path / "exact") as cache:
        table = stored(cache, engine, tokens)
        names = cache.lookup(tokens).chunks.names
        cache.tiers["memory"].delete(names[:3])
        cache.tiers["exact"].delete(names[2:])
        hit = cache.lookup(tokens)
        assert (hit.by_tier, hit.exact) == ({"exact": 16, "narrow": 16}, 16)
        loaded = cache.load(hit, engine.places(table))
        assert (loaded.approximate, loaded.approximate_from) == (8, 16)
        assert loaded.by_tier == {"exact": 16, "narrow": 8, "memory": 8}
        assert engine.loaded_as(tokens, table, 4, "fp8") == "eeae"
        cache.flush()
        assert set(dict(cache.tiers["memory"].scan())) == {names[i] for i in (0, 1, 3)}


@pytest.mark.parametrize("begun", [0, 1])
def test_a_hit_that_was_called_exact_stays_so(begun: int, tmp_path: Path) -> None:
    """What an exact tier loses after the lookup is not had from one with fewer bits."""
    engine, tokens = FloatEngine(), sequence(4)
    with opened(engine, tmp_path / "narrow", "fp8", tmp_path / "exact") as cache:
        table = stored(cache, engine, tokens)
        cache.clear("memory")
        hit = cache.lookup(tokens)
        assert hit.exact == 32
        cache.tiers["exact"].delete([hit.chunks.names[begun]])
        loaded = cache.load(hit, engine.places(table))
        assert (loaded.tokens, loaded.approximate) == (8 * begun, 0)
        assert engine.loaded_as(tokens, table, begun, "fp8") == "e" * begun
        assert cache.load(cache.lookup(tokens), engine.places(table)).approximate_from == 8 * begun


@pytest.mark.parametrize("near", [True, False])
def test_what_is_prefetched_with_fewer_bits_is_no_exact_record(near: bool, tmp_path: Path) -> None:
    engine, tokens = FloatEngine(), sequence(4)
    staging = new_staging(engine, 40)
    tiers: list[Any] = [MemoryTier(staging, 10 * staging.slot_bytes)] if near else []
    tiers += [narrow_tier(tmp_path / "narrow", "int8"), ObjectTier(str(tmp_path / "exact"), name="exact")]
    with new_cache(engine, staging, tiers, write_back_to=("memory",) if near else ()) as cache:
        table = stored(cache, engine, tokens, to=["narrow"])
        assert cache.prefetch(tokens).result(DEADLINE_S).tokens == 32
        cache.flush()
        near_records = sum(1 for _ in cache.tiers["memory"].scan()) if near else 0
        assert staging.slots - staging.free - near_records == 4
        stored(cache, engine, tokens, to=["exact"])
        assert cache.load(cache.lookup(tokens), engine.places(table)).by_tier == {"exact": 32}
        assert engine.loaded_as(tokens, table, 4, "int8") == "eeee"
        engine.wipe()
        hit = cache.lookup(tokens, retrieve_from=["narrow"])
        cache.tiers["narrow"].delete(hit.chunks.names)  # it has them in slots
        cache.clear("memory") if near else None
        assert cache.load(hit, engine.places(table)).approximate == 32
        assert engine.loaded_as(tokens, table, 4, "int8") == "aaaa"
        leases = cache.get_non_blocking(tokens, 0).result(DEADLINE_S)  # of the exact tier
        assert len(leases) == 1
        release_all(leases)
        cache.clear("exact")
        cache.clear("memory") if near else None
        assert cache.get_non_blocking(tokens, 0).result(DEADLINE_S) == []


def test_a_damaged_record_is_a_miss_and_is_deleted(tmp_path: Path) -> None:
    engine, tokens = FloatEngine(), sequence(3)
    for codec in ("none", "zstd"):
        with opened(engine, tmp_path / codec, "fp8", codec=codec) as cache:
            table = stored(cache, engine, tokens)
            cache.clear("memory")
            (folder,) = (tmp_path / codec).glob("*-fp8/0")
            file = folder / cache.lookup(tokens).chunks.names[1].rpartition("/")[2]
            data = bytearray(file.read_bytes())
            data[4096] ^= 1
            file.write_bytes(data)
            assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == CHUNK
            assert cache.counts().damaged == {("narrow", "layer"): 1}
            assert not file.exists()


def test_a_tier_with_another_setting_misses_and_makes_room(tmp_path: Path) -> None:
    """Of a store that was kept with fp8, int8 and exact readers find nothing, and evict it for room."""
    engine, tokens, others = FloatEngine(), sequence(3), sequence(3, seed=1)
    with opened(engine, tmp_path, "fp8") as cache:
        table = stored(cache, engine, tokens)
    size = next(tmp_path.glob("*-fp8/0/c.*")).stat().st_size
    for precision in ("int8", None):
        settings = {} if precision is None else {"precision": precision}
        config = TierConfig(url=str(tmp_path), capacity=5 * size + 1000, **settings)
        with new_cache(engine, new_staging(engine, 8), [ObjectTier(config)]) as cache:
            assert cache.lookup(tokens).tokens == 0
            assert len(list(tmp_path.glob("*/0/c.*"))) == 3
            stored(cache, engine, others)
            assert cache.load(cache.lookup(others), engine.places(table)).tokens == 24
            assert sum(f.stat().st_size for f in tmp_path.glob("*/0/c.*")) <= 5 * size + 1000
            assert cache.clear("disk") > 0
        with opened(engine, tmp_path, "fp8") as cache:
            stored(cache, engine, tokens)


def test_a_model_without_bits_to_spare_is_refused(tmp_path: Path) -> None:
    engine = FloatEngine()
    opaque = engine.layout.groups[0].__class__((0,), 1, 4, 4, "int8", block_tokens=4)
    layout = type(engine.layout)((opaque,))
    config = load_config(chunk_tokens=8, tiers={"far": {"url": str(tmp_path), "precision": "fp8"}})
    space = config.namespace(layout, model="m", dtype="int8")
    with pytest.raises(ConfigError, match="tier 'far': precision='fp8': layers 0-0 hold int8"):
        open_cache(config, layout, space)
    with pytest.raises(ConfigError, match="precision = 'int8': no tier in memory has one"):
        load_config(tiers={"near": {"capacity": "1MiB", "precision": "int8"}})
    with pytest.raises(ConfigError, match=r"tiers\.far\.precision = 'fp4'.*fp8"):
        load_config(tiers={"far": {"url": str(tmp_path), "precision": "fp4"}})


def test_a_model_is_asked_about_for_each_precision_of_its_tiers() -> None:
    tiers = {name: {"url": f"/{name}", "precision": form} for name, form in (("a", "int8"), ("b", "fp8"))}
    asked: list[str] = []
    for unchecked in (False, True):
        config = load_config(tiers=tiers | {"c": {"url": "/c"}}, unchecked_precision=unchecked)
        config.check_model(lambda precision, unless: asked.append(precision))
        assert asked == ["int8", "fp8"]


def test_a_plan_keeps_what_is_approximate_through_its_parts() -> None:
    plan = RetrievePlan(9, approximate=frozenset({"few"}))
    for tier, run in (("all", 2), ("few", 3), ("all", 1)):
        plan = extend(plan, tier, run)
    assert (plan.exact, clip(plan, 2).exact, clip(plan, 1).exact) == (2, 2, 1)
    assert (cut(plan, 1, 6).exact, cut(plan, 3, 6).exact, cut(plan, 5, 6).exact) == (1, 0, 1)
    assert clip(plan, 4).approximate == cut(plan, 1, 4).approximate == {"few"}


class ApproximateMachine(RuleBasedStateMachine):
    """Memory, a bucket, and a folder with fewer bits: the first two only ever have what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.bucket = f"memory://{uuid.uuid4().hex}"
        self.cache: Cache | None = None

    @initialize(
        precision=st.sampled_from(["fp8", "int8"]),
        codec=st.sampled_from(["none", "zstd"]),
        order=st.permutations(["memory", "narrow", "exact"]),
        back=st.lists(st.sampled_from(["memory", "narrow", "exact"]), unique=True),
    )
    def open(self, precision: str, codec: str, order: list[str], back: list[str]) -> None:
        self.precision, self.codec, self.order, self.back = precision, codec, order, back
        self.engine = FloatEngine()
        self._open()

    def _open(self) -> None:
        staging = new_staging(self.engine, 9)
        tiers = [
            MemoryTier(staging, 4 * staging.slot_bytes),
            narrow_tier(self.folder, self.precision, codec=self.codec, threads=1),
            ObjectTier(TierConfig(url=self.bucket, threads=1), name="exact"),
        ]
        self.cache = new_cache(
            self.engine, staging, tiers, retrieve_from=tuple(self.order), write_back_to=tuple(self.back)
        )

    @rule()
    def restart(self) -> None:
        assert self.cache is not None
        self.cache.close()
        self._open()

    @rule(
        chunks=st.lists(st.integers(0, 1), max_size=5),
        layerwise=st.booleans(),
        prefetched=st.booleans(),
        lost=st.sampled_from([None, "memory", "narrow", "exact"]),
        to=st.lists(st.sampled_from(["memory", "narrow", "exact"]), unique=True),
    )
    def turn(
        self, chunks: list[int], layerwise: bool, prefetched: bool, lost: str | None, to: list[str]
    ) -> None:
        """What an engine does: load what is there, compute the rest, store what is exact."""
        assert self.cache is not None
        tokens = np.repeat(np.array(chunks, np.int32), CHUNK)
        table = self.engine.table(len(tokens))
        places = self.engine.places(table)
        if prefetched:
            self.cache.prefetch(tokens).result(DEADLINE_S)
        hit = self.cache.lookup(tokens)
        if lost is not None:
            self.cache.tiers[lost].delete(hit.chunks.names[1:2])
        self.engine.wipe()
        if layerwise:
            load = self.cache.load_layers(hit, places)
            assert list(load)
            loaded = load.loaded
        else:
            loaded = self.cache.load(hit, places)
        kinds = self.engine.loaded_as(tokens, table, loaded.tokens // CHUNK, self.precision)
        first = kinds.find("a")
        assert "?" not in kinds
        assert loaded.approximate == kinds.count("a") * CHUNK == loaded.by_tier.get("narrow", 0)
        assert loaded.approximate_from == (None if first < 0 else first * CHUNK)
        assert first < 0 or first * CHUNK >= hit.exact
        exact = tokens if first < 0 else tokens[: first * CHUNK]
        self.engine.compute(exact, table)
        self.cache.store(exact, places, to=to)
        self.cache.flush()

    @invariant()
    def exact_tiers_hold_what_was_computed(self) -> None:
        if self.cache is None:
            return
        self.cache.check_integrity()
        form = self.cache.chunks(np.zeros(0, np.int32)).formats[0]
        for tier in ("memory", "exact"):
            for name, size in self.cache.tiers[tier].scan():
                record = bytearray(size)
                self.cache.tiers[tier].get_ranges(name, [(0, size)], [memoryview(record)])
                key = bytes(record[144:160])
                assert form.name(key) == name
                held = payload(form, np.frombuffer(record, np.uint8))
                assert held.tobytes() == self.engine.kv(key, 0).tobytes(), (
                    f"{tier} has {name} with fewer bits"
                )

    def teardown(self) -> None:
        if self.cache is not None:
            self.cache.close()
            self.cache.check_integrity()
        shutil.rmtree(self.folder)


TestApproximateMachine = ApproximateMachine.TestCase
TestApproximateMachine.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


def test_a_prompt_s_load_says_what_of_it_is_approximate(tmp_path: Path) -> None:
    engine, tokens = FloatEngine(1), sequence(4)
    with opened(engine, tmp_path, "int8") as cache:
        table = stored(cache, engine, tokens, to=("narrow",))
        stored(cache, engine, tokens[: 2 * CHUNK], to=("memory",))
        block = engine.layout.groups[0].block_tokens
        load = PromptLoad(
            *(cache, PromptHit(cache.lookup(tokens)), 0, len(tokens)),
            *(lambda start, stop: engine.places(table[start // block : stop // block]), "async", id),
        )
        end, loaded = load.finish()
        assert (end, loaded.approximate, loaded.approximate_from) == (32, 16, 16)
