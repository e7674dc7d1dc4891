"""What the cache adds to the bytes: a memory hit per chunk, and a load from disk against a raw read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.timing import interleaved, ratio
from kvkit.cache import Cache, SequencePages
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import Pages
from kvkit.staging import Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig

CHUNK_TOKENS = 256
SMOLLM2 = LayerGroup(tuple(range(30)), kv_heads=3, k_size=64, v_size=64, dtype="float32", block_tokens=128)
THIN = LayerGroup(tuple(range(30)), kv_heads=1, k_size=1, v_size=1, dtype="uint8", block_tokens=128)
"""As many layers, next to no bytes: what is left is the overhead."""


class Case:
    """A cache with `chunks` chunks of one sequence stored in it."""

    def __init__(self, group: LayerGroup, chunks: int, folder: Path | None) -> None:
        layout = KVLayout((group,))
        space = Namespace("bench", layout.fingerprint(), "float32", chunk_tokens=CHUNK_TOKENS)
        form = RecordFormat.of(layout, 0, space)
        staging = Staging(form.record_bytes, 2 * chunks + 1)
        tier = (
            MemoryTier(staging, chunks * staging.slot_bytes)
            if folder is None
            else ObjectTier(TierConfig(url=str(folder), threads=4))
        )
        self.cache = Cache(layout, space, [tier], staging=staging)
        blocks = np.arange(chunks * CHUNK_TOKENS // group.block_tokens, dtype=np.int64)
        self.place = SequencePages(Pages.of(group, group.pages(len(blocks), fill_byte=1)), blocks=blocks)
        self.tokens = np.random.default_rng(0).integers(0, 50_000, chunks * CHUNK_TOKENS, np.int32)
        self.bytes = chunks * group.chunk_bytes(CHUNK_TOKENS)
        self.cache.store(self.tokens, self.place)
        self.cache.flush()
        staging.ready.wait()

    def hit(self) -> None:
        loaded = self.cache.load(self.cache.lookup(self.tokens), self.place)
        assert loaded.tokens == len(self.tokens)


@pytest.fixture
def memory(benchmark: Any) -> Iterator[Case]:
    case = Case(THIN, 128 if benchmark.enabled else 4, None)
    yield case
    case.cache.close()


def test_overhead_of_a_memory_hit(benchmark: Any, memory: Case) -> None:
    """Lookup, plan, verify and unpack, less a copy of the bytes."""
    benchmark(memory.hit)
    source = np.ones(memory.bytes, np.uint8)
    target = np.zeros_like(source)
    rounds = 100 if benchmark.enabled else 1
    times = interleaved({"hit": memory.hit, "copy": lambda: np.copyto(target, source)}, rounds)
    chunks = len(memory.tokens) // CHUNK_TOKENS
    overhead = [(hit - copy) / chunks * 1e6 for hit, copy in zip(times["hit"], times["copy"], strict=True)]
    benchmark.extra_info["us_per_chunk"] = {"min": min(overhead), "median": float(np.median(overhead))}
    benchmark.extra_info["against"] = "20 µs per chunk, the design's bound"


def test_load_from_disk(benchmark: Any, tmp_path: Path) -> None:
    """SmolLM2's chunks from disk into pages, against reading the same files into prefaulted memory."""
    case = Case(SMOLLM2, 16 if benchmark.enabled else 2, tmp_path)
    names = case.cache.lookup(case.tokens).chunks.names
    slots = [np.ones(case.cache.staging.slot_bytes, np.uint8) for _ in names]

    def read(i: int) -> None:
        file = os.open(tmp_path / names[i], os.O_RDONLY)
        os.preadv(file, [slots[i].data], 0)
        os.close(file)

    with ThreadPoolExecutor(4) as pool:
        benchmark(case.hit)
        raw = {"raw": lambda: list(pool.map(read, range(len(names))))}
        times = interleaved({"hit": case.hit, **raw}, 20 if benchmark.enabled else 1)
    found = ratio(times, "hit", "raw")
    benchmark.extra_info.update(ratio_min=found["min"], ratio_median=found["median"], bytes=case.bytes)
    benchmark.extra_info["against"] = "os.preadv of the same files, no checks and no unpacking"
    case.cache.close()
