"""kvkit's L2 for LMCache's server beside LMCache's own files: batches of objects stored, and loaded cold.

    PYTHONPATH=~/.cache/kvkit/lmcache-0.5.6 python -m benchmarks.report.run benchmarks/micro/bench_lmcache.py

(`make test-lmcache` fetches these files.) kvkit's records are verified; LMCache's files are not, and it
leaves them in the page cache: a store ends when the disk has them.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.batch_speeds import compare_batches
from benchmarks.timing import forget, settle

pytest.importorskip("lmcache", reason="needs LMCache's files; `make test-lmcache` fetches them")

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvkit.adapters.lmcache.l2 import KVKitL2Adapter

BATCH_BYTES = 64 << 20
"""Bytes of a batch: 512 tokens of Llama-3.1-8B."""


class L2:
    """An L2 of LMCache's, and batches of all objects in an arena as LMCache's."""

    def __init__(self, adapter: Any, folder: Path, object_bytes: int) -> None:
        self.adapter, self.folder = adapter, folder
        self.arena = torch.randint(0, 256, (BATCH_BYTES // object_bytes, object_bytes), dtype=torch.uint8)
        self.objects = [_object(row) for row in self.arena]
        self.keys: list[ObjectKey] = []

    def store(self) -> None:
        """Store objects that the L2 never had, until they are on the disk."""
        self.keys = [ObjectKey(os.urandom(32), "model", 0) for _ in self.objects]
        task = self.adapter.submit_store_task(self.keys, self.objects)
        self._wait(self.adapter.get_store_event_fd())
        assert self.adapter.pop_completed_store_tasks()[task].is_successful()
        settle(self.files())

    def load(self) -> None:
        task = self.adapter.submit_load_task(self.keys, self.objects)
        self._wait(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(task)
        assert all(found.test(i) for i in range(len(self.keys)))

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.name != "zarr.json"]

    @staticmethod
    def _wait(descriptor: int) -> None:
        select.select([descriptor], [], [])
        os.read(descriptor, 8)


def _object(row: torch.Tensor) -> TensorMemoryObj:
    shape = torch.Size([row.numel()])
    about = MemoryObjMetadata(shape, torch.uint8, row.data_ptr(), row.numel(), 1, fmt=MemoryFormat.BINARY)
    about.shapes, about.dtypes = [shape], [torch.uint8]
    return TensorMemoryObj(row, about, None)


@pytest.fixture
def both(tmp_path: Path, object_bytes: int) -> Iterator[dict[str, L2]]:
    kvkit = {"identity": "w", "kvkit": {"tiers": {"disk": {"url": str(tmp_path / "kvkit")}}}}
    adapters = {
        "kvkit": (KVKitL2Adapter(kvkit), tmp_path / "kvkit"),
        "LMCache's files": (FSL2Adapter(FSL2AdapterConfig(str(tmp_path / "files"))), tmp_path / "files"),
    }
    yield {name: L2(adapter, folder, object_bytes) for name, (adapter, folder) in adapters.items()}
    for adapter, _ in adapters.values():
        adapter.close()


SIZES = pytest.mark.parametrize("object_bytes", [2 << 20, 8 << 20, 32 << 20], ids=["2MiB", "8MiB", "32MiB"])


@SIZES
def test_store(benchmark: Any, both: dict[str, L2]) -> None:
    """Store new objects; files of earlier batches are removed before."""

    def empty() -> None:
        for l2 in both.values():
            for file in l2.files():
                file.unlink()

    calls = {name: l2.store for name, l2 in both.items()}
    compare_batches(benchmark, calls, empty, BATCH_BYTES)


@SIZES
def test_load(benchmark: Any, both: dict[str, L2]) -> None:
    """From the disk: the page cache has none of it."""
    for l2 in both.values():
        l2.store()
        wanted = l2.arena.clone()
        l2.arena.zero_()
        l2.load()
        assert torch.equal(l2.arena, wanted)

    def cold() -> None:
        for l2 in both.values():
            forget(l2.files())

    calls = {name: l2.load for name, l2 in both.items()}
    compare_batches(benchmark, calls, cold, BATCH_BYTES)
