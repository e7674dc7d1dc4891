"""kvkit's storage for SGLang's HiCache beside SGLang's own files: batches of pages stored, and loaded cold.

    PYTHONPATH=~/.cache/kvkit/sglang-0.5.23 python -m benchmarks.report.run benchmarks/micro/bench_hicache.py

(`make test-sglang` fetches these files.) kvkit's records are verified; SGLang's files are not, and it
leaves them in the page cache: a store ends when the disk has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.batch_speeds import compare_batches
from benchmarks.timing import forget, settle

pytest.importorskip("sglang", reason="needs SGLang's Python files; `make test-sglang` fetches them")

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)

from kvkit.adapters.sglang.hicache import KVKitHiCache

BATCH_BYTES = 64 << 20
"""Bytes of a batch: 512 tokens of Llama-3.1-8B."""


class Host:
    """A host pool of SGLang's that is page first."""

    page_size, layer_num, layout, dtype, storage_format_tag = 1, 1, "page_first", torch.uint8, None

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.buffer = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.buffer[index]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.buffer.shape[1], dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.buffer[index] = page


class Storage:
    """A storage of HiCache's, and batches of all pages of its pool."""

    def __init__(self, backend: Any, folder: Path, host: Host) -> None:
        self.backend, self.folder, self.host = backend, folder, host
        backend.register_mem_pool_host(host)
        backend.register_mem_host_pool_v2(host, PoolName.KV)
        self.keys: list[str] = []

    def store(self) -> None:
        """Store pages that the storage never had, until they are on the disk."""
        self.keys = [os.urandom(32).hex() for _ in range(len(self.host.buffer))]
        assert all(self._move(self.backend.batch_set_v2))
        settle(self.files())

    def load(self) -> None:
        assert all(self._move(self.backend.batch_get_v2))

    def _move(self, call: Any) -> list[bool]:
        indices = torch.arange(len(self.keys))
        found: list[bool] = call([PoolTransfer(PoolName.KV, indices, keys=self.keys)])[PoolName.KV]
        return found

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.name != "zarr.json"]


def make(folder: Path, page_bytes: int) -> dict[str, Storage]:
    fields = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    fields |= dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    extra = {"identity": "w", "kvkit": {"tiers": {"disk": {"url": str(folder / "kvkit")}}}}
    config = HiCacheStorageConfig(
        **fields,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="model",
        extra_config=extra,
    )
    found = {}
    for name, backend in (
        ("kvkit", KVKitHiCache(config)),
        ("SGLang's files", HiCacheFile(config, str(folder / "files"))),
    ):
        sub = folder / ("kvkit" if name == "kvkit" else "files")
        found[name] = Storage(backend, sub, Host(BATCH_BYTES // page_bytes, page_bytes))
    return found


@pytest.fixture
def both(tmp_path: Path, page_bytes: int) -> Iterator[dict[str, Storage]]:
    found = make(tmp_path, page_bytes)
    yield found
    found["kvkit"].backend.close()


SIZES = pytest.mark.parametrize("page_bytes", [128 << 10, 2 << 20, 8 << 20], ids=["128KiB", "2MiB", "8MiB"])


@SIZES
def test_store(benchmark: Any, both: dict[str, Storage]) -> None:
    """Store new pages; files of earlier batches are removed before."""

    def empty() -> None:
        for storage in both.values():
            for file in storage.files():
                file.unlink()

    calls = {name: storage.store for name, storage in both.items()}
    compare_batches(benchmark, calls, empty, BATCH_BYTES)


@SIZES
def test_load(benchmark: Any, both: dict[str, Storage]) -> None:
    """From the disk: the page cache has none of it."""
    for storage in both.values():
        storage.store()
        wanted = storage.host.buffer.clone()
        storage.host.buffer.zero_()
        storage.load()
        assert torch.equal(storage.host.buffer, wanted)

    def cold() -> None:
        for storage in both.values():
            forget(storage.files())

    calls = {name: storage.load for name, storage in both.items()}
    compare_batches(benchmark, calls, cold, BATCH_BYTES)
