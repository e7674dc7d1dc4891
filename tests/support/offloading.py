"""vLLM's own offloading with kvkit's tier below it, without a GPU, and the KV that stands for a model's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
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
from kvkit.adapters.vllm_tier.tier import KVKitTier
from kvkit.tiers.testing.contract import DEADLINE_S

BYTES, ROWS = 65536, 24
CHUNK_TOKENS = 16
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
    groups=(
        OffloadingGroupConfig(CHUNK_TOKENS, ("a", "b"), 0),
        OffloadingGroupConfig(CHUNK_TOKENS, ("c",), 1),
    ),
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
    def request(self, **fields: Any) -> Iterator[ReqContext]:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}", **fields)
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

    def compute(self, keys: Sequence[OffloadKey], **fields: Any) -> None:
        """Store the chunks of these keys: rows of `kv`. `fields`: those of the request."""
        with self.request(**fields) as context:
            for i, key in enumerate(keys):
                context.set_offload_key_position(key, (i // 2 + 1) * CHUNK_TOKENS)
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
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33
            self.manager.on_reset_flushed()
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


def attacked(folder: Path, **disk: Any) -> Offloading:
    """One whose tier is a folder."""
    tiers = {"disk": {"url": str(folder)} | disk}
    return Offloading(folder, kvkit={"staging": "2MiB", "timeout_s": DEADLINE_S, "tiers": tiers})


def kv(key: OffloadKey) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The KV of a chunk: bytes that its key decides."""
    return np.random.default_rng(list(key)).integers(0, 256, BYTES, np.uint8)


def keys(count: int, seed: int = 0) -> list[OffloadKey]:
    """Keys of chunks of two groups in turn."""
    rng = np.random.default_rng(seed)
    return [make_offload_key(rng.bytes(32), i % 2) for i in range(count)]
