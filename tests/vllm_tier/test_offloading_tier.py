"""Under vLLM's own offloading, chunks come back from kvkit's tiers as they were, or not at all."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkit.adapters.vllm.offloading import TIER_MODULE
from kvkit.adapters.vllm_tier.tier import KVKitTier, page_layout
from kvkit.settings import ConfigError
from kvkit.tiers.testing.contract import DEADLINE_S

BYTES, ROWS = 65536, 24
KEYS = [make_offload_key(os.urandom(32), i % 2) for i in range(20)]
PARALLEL = OffloadingParallelConfig(
    rank=0,
    world_size=1,
    tp_size=1,
    pp_size=1,
    pcp_size=1,
    dcp_size=1,
    data_parallel_index=0,
    data_parallel_size=1,
    data_parallel_rank_local=None,
    is_parallelism_agnostic=False,
)
CONFIG = OffloadingConfig(
    groups=(OffloadingGroupConfig(16, ("a", "b"), 0), OffloadingGroupConfig(16, ("c",), 1)),
    worker_kv_bytes_per_block=BYTES,
    enable_kv_cache_events=True,
    extra_config={},
    engine_id="",
    model=OffloadingModelConfig("org/model", "bfloat16"),
    cache=OffloadingCacheConfig(16, 1),
    parallel=PARALLEL,
    kv_cache_layout="NHD",
)


class Offloading:
    """vLLM's manager of offloading with a region of host memory, whose GPU is this class."""

    def __init__(self, folder: Path, config: OffloadingConfig = CONFIG, **settings: Any) -> None:
        kvkit = {"staging": "4MiB", "timeout_s": 5, "tiers": {"disk": {"url": str(folder)}}}
        own = {"identity": "w", "kvkit": kvkit} | settings
        extra = {
            "cpu_bytes_to_use": BYTES * ROWS,
            "secondary_tiers": [{"type": "KVKitTier", "module_path": TIER_MODULE, **own}],
        }
        spec = TieringOffloadingSpec(replace(config, extra_config=extra, engine_id=uuid.uuid4().hex))
        self.manager = spec.get_manager()
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, KVKitTier)
        self.tier: Any = tier
        self.events: list[Any] = []
        self._requests = 0

    @property
    def memory(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    @contextmanager
    def request(self) -> Iterator[ReqContext]:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        self.manager.on_new_request(context)
        yield context
        self.manager.on_request_finished(context)

    def step(self, *begun: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(begun, ()))
        self.events += [(key, event) for event in self.manager.take_events() for key in event.keys]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.001)

    def compute(self, keys: Sequence[OffloadKey]) -> None:
        """Store the chunks of these keys: rows of `kv`."""
        with self.request() as context:
            self.begin_store(keys, context)
            self.until(lambda: not self.manager._jobs)

    def begin_store(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(keys, context)
        for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.memory[row] = kv(key)
        self.manager.complete_store(output.keys_to_store, context)

    def forget(self) -> None:
        """Empty vLLM's own host memory."""
        self.manager.reset_cache()
        self.memory[:] = 7

    def found(self, keys: Sequence[OffloadKey]) -> int:
        """Leading chunks that vLLM takes from somewhere; they are checked."""
        with self.request() as context:
            answers: list[LookupResult] = []

            def settled() -> bool:
                answers[:] = [self.manager.lookup(key, context) for key in keys]
                return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers)

            self.until(settled)
            hits = [answer is LookupResult.HIT for answer in answers]
            count = hits.index(False) if False in hits else len(hits)
            if count:
                rows = self.manager.prepare_load(keys[:count], context).chunk_ids
                for key, row in zip(keys, rows, strict=False):
                    assert (self.memory[row] == kv(key)).all()
                self.manager.complete_load(keys[:count], context)
            return count

    def shutdown(self) -> None:
        self.manager.shutdown()


def kv(key: OffloadKey) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The KV of a chunk: bytes that its key decides."""
    return np.random.default_rng(list(key)).integers(0, 256, BYTES, np.uint8)


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("c.*") if file.is_file())


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[Offloading]:
    found = Offloading(tmp_path)
    yield found
    found.tier._pages.cache.check_integrity()
    found.shutdown()


def test_chunks_come_back_after_a_restart(offloading: Offloading, tmp_path: Path) -> None:
    assert offloading.found(KEYS) == 0
    offloading.compute(KEYS)
    assert len(files(tmp_path)) == len(KEYS)
    offloading.forget()
    assert offloading.found(KEYS) == len(KEYS)
    later = Offloading(tmp_path)
    assert later.found(KEYS) == len(KEYS)
    later.shutdown()


def test_what_is_not_there_is_a_miss(offloading: Offloading) -> None:
    offloading.compute(KEYS[:6])
    offloading.forget()
    assert offloading.found([*KEYS[:6], KEYS[10], KEYS[3]]) == 6


def test_a_damaged_chunk_ends_what_is_found(offloading: Offloading, tmp_path: Path) -> None:
    """Chunks before it are taken, and the next request computes it again; vLLM does not ask for ever."""
    offloading.compute(KEYS)
    offloading.forget()
    file = tmp_path / offloading.tier._pages._chunks([KEYS[4]]).names[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert offloading.found(KEYS) == 4
    assert not file.exists()
    offloading.compute(KEYS[4:5])
    offloading.forget()
    assert offloading.found(KEYS) == len(KEYS)


@pytest.mark.parametrize(
    "change",
    [
        {"model": OffloadingModelConfig("org/other", "bfloat16")},
        {"model": OffloadingModelConfig("org/model", "fp8")},
        {"kv_cache_layout": "HND"},
        {"cache": OffloadingCacheConfig(8, 1)},
        {"groups": (CONFIG.groups[0], OffloadingGroupConfig(32, ("c",), 1))},
        {"groups": (CONFIG.groups[0], OffloadingGroupConfig(16, ("d",), 1))},
        {"parallel": replace(PARALLEL, world_size=2, pp_size=2)},
        {"canonical_layout": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_engine_finds_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    assert page_layout(CONFIG) != page_layout(replace(CONFIG, **change)) or "model" in change
    with_pages = Offloading(tmp_path)
    with_pages.compute(KEYS[:4])
    with_pages.shutdown()
    other = Offloading(tmp_path, replace(CONFIG, **change))
    assert other.found(KEYS[:4]) == 0
    other.shutdown()


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    """An engine whose weights are not identified keeps its chunks to itself."""
    for identity in ("w", "v", "", ""):
        engine = Offloading(tmp_path, identity=identity)
        assert engine.found(KEYS[:4]) == 0
        engine.compute(KEYS[:4])
        engine.forget()
        assert engine.found(KEYS[:4]) == 4
        engine.shutdown()


def test_ranks_share_chunks_that_are_the_same_for_any_number_of_them() -> None:
    agnostic = replace(PARALLEL, is_parallelism_agnostic=True)
    two = replace(agnostic, tp_size=2, world_size=2)
    assert page_layout(replace(CONFIG, parallel=agnostic)) == page_layout(replace(CONFIG, parallel=two))


def test_events_name_what_is_stored(offloading: Offloading, tmp_path: Path) -> None:
    offloading.compute(KEYS)
    ours = [(key, event) for key, event in offloading.events if event.medium is KVKitTier.medium]
    assert [key for key, _ in ours] == KEYS
    assert {(event.removed, event.locality) for _, event in ours} == {(False, Locality.LOCAL)}
    assert {get_offload_group_idx(key) for key, _ in ours} == {0, 1}


def test_new_weights_begin_an_epoch(offloading: Offloading, tmp_path: Path) -> None:
    """Chunks of earlier weights are not found, those of a request that began with them are not stored, and
    engines with one version of weights share."""
    offloading.compute(KEYS[:4])
    with offloading.request() as old:
        offloading.tier.weights_changed()
        offloading.forget()
        offloading.begin_store(KEYS[4:6], old)
        offloading.until(lambda: not offloading.manager._jobs)
        offloading.forget()
        assert offloading.found(KEYS[:1]) == offloading.found(KEYS[4:6]) == 0
    offloading.tier.set_weight_version("7")
    offloading.tier.connector_reset()
    offloading.compute(KEYS[6:8])
    offloading.forget()
    assert offloading.found(KEYS[6:8]) == 2
    other = Offloading(tmp_path)
    assert other.found(KEYS[6:8]) == 0
    other.tier.set_weight_version("7")
    assert other.found(KEYS[6:8]) == 2
    other.shutdown()
    offloading.tier.connector_reset()
    offloading.forget()
    assert offloading.found(KEYS[6:8]) == 0


def test_a_reset_waits_for_moves_under_way(offloading: Offloading) -> None:
    """vLLM reuses its memory afterwards: nothing of the tier's touches it."""
    with offloading.request() as context:
        offloading.begin_store(KEYS, context)
        offloading.forget()
        assert all(job._ended.is_set() for job in offloading.tier._under_way.values())
    offloading.until(lambda: not offloading.manager._jobs)
    assert offloading.found(KEYS) == len(KEYS)


def test_a_shutdown_amid_moves(tmp_path: Path) -> None:
    engine = Offloading(tmp_path)
    engine.compute(KEYS)
    engine.forget()
    with engine.request() as context:
        for key in KEYS:
            engine.manager.lookup(key, context)
        engine.step(context.req_id)
        engine.until(lambda: engine.manager.lookup(KEYS[0], context) is not LookupResult.RETRY)
        engine.step()
    engine.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvkit": {}}, "secondary_tiers: no tiers; give kvkit_config, or kvkit with tiers in it"),
        ({"url": "/x"}, "secondary_tiers: url: unknown"),
        ({"locality": "HERE"}, "locality.*'LOCAL' or 'REMOTE'"),
        ({"kvkit": {"tiers": {"ram": {}}}}, "tiers.ram: .* needs a capacity"),
        ({"kvkit": {"precision": "fp8", "tiers": {"disk": {"url": "/tmp/kvkit"}}}}, "precision='fp8'"),
        ({"kvkit": {"staging": 1, "tiers": {"disk": {"url": "/tmp/kvkit"}}}}, "staging"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Offloading(tmp_path, **settings)
