"""kvkit's tier under vLLM's own offloading beside vLLM's file tier: jobs of stores and of loads from disk.

Both write with O_DIRECT where the file system permits it, and neither waits for the disk's cache. kvkit's
records are verified; vLLM's files are not.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.batch_speeds import compare_batches
from benchmarks.timing import forget

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkit.adapters.vllm.offloading import TIER_MODULE

JOB_BYTES = 64 << 20
"""Bytes of a job: 512 tokens of Llama-3.1-8B."""
DEADLINE_S = 60


@dataclass(eq=False)
class Tier:
    """A secondary tier, and the jobs that it is given, one at a time."""

    tier: Any
    folder: Path
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    keys: list[Any]

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def run(self, submit: Callable[[TransferJob], None], promotion: bool) -> None:
        """Submit a job of all keys, and wait for its end."""
        rows = np.arange(len(self.keys), dtype=np.int32)
        request = ReqContext(req_id="r")
        self.tier.on_new_request(request)
        submit(TransferJob(next(self._numbers), self.keys, rows, promotion, request))
        deadline = time.monotonic() + DEADLINE_S
        while not (finished := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < deadline
            time.sleep(0.0002)
        assert finished[0].success

    def store(self) -> None:
        """Store chunks that the tier never had."""
        self.keys[:] = [make_offload_key(os.urandom(32), 0) for _ in self.keys]
        self.run(self.tier.submit_store, False)

    def load(self) -> None:
        self.run(self.tier.submit_load, True)

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.name != "zarr.json"]


def make(folder: Path, chunk_bytes: int) -> dict[str, Tier]:
    """Both tiers, each over memory of its own."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": JOB_BYTES},
        engine_id="e",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
        kv_cache_layout="NHD",
    )
    spec = TieringOffloadingSpec(config)
    tiers = {"disk": {"url": str(folder / "kvkit")}}
    settings: dict[str, dict[str, Any]] = {
        "kvkit": {
            "type": "KVKitTier",
            "module_path": TIER_MODULE,
            "identity": "w",
            "kvkit": {"tiers": tiers},
        },
        "vLLM's fs": {"type": "fs", "root_dir": str(folder / "fs")},
    }
    count = JOB_BYTES // chunk_bytes
    found = {}
    for name, values in settings.items():
        memory = np.frombuffer(mmap.mmap(-1, JOB_BYTES), np.uint8).reshape(count, chunk_bytes)
        memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
        tier = SecondaryTierFactory.create_secondary_tier(values, memoryview(memory), spec)
        found[name] = Tier(tier, folder / name.rpartition(" ")[2], memory, [b""] * count)
    return found


@pytest.fixture
def both(tmp_path: Path, chunk_bytes: int) -> Iterator[dict[str, Tier]]:
    found = make(tmp_path, chunk_bytes)
    yield found
    for each in found.values():
        each.tier.shutdown()


SIZES = pytest.mark.parametrize(
    "chunk_bytes", [128 << 10, 2 << 20, 32 << 20], ids=["128KiB", "2MiB", "32MiB"]
)


@SIZES
def test_store(benchmark: Any, both: dict[str, Tier]) -> None:
    """Store new chunks; files of earlier jobs are removed before."""

    def empty() -> None:
        for tier in both.values():
            for file in tier.files():
                file.unlink()

    both["kvkit"].store()
    assert len(both["kvkit"].files()) == len(both["kvkit"].keys)
    empty()
    calls = {name: tier.store for name, tier in both.items()}
    compare_batches(benchmark, calls, empty, JOB_BYTES)


@SIZES
def test_load(benchmark: Any, both: dict[str, Tier]) -> None:
    """From the disk: the page cache has none of it."""
    for tier in both.values():
        tier.store()
        wanted = tier.memory.copy()
        tier.memory[:] = 0
        tier.load()
        assert (tier.memory == wanted).all()

    def cold() -> None:
        for tier in both.values():
            forget(tier.files())

    calls = {name: tier.load for name, tier in both.items()}
    compare_batches(benchmark, calls, cold, JOB_BYTES)
