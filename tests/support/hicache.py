"""SGLang's HiCache over kvkit's storage, without a GPU: its host pools and their pages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvkit.tiers.testing.contract import DEADLINE_S

PAGES, PAGE, LAYERS, HEADS, SIZE = 16, 4, 2, 2, 8
KEYS = [os.urandom(32).hex() for _ in range(PAGES)]
BACKEND = {"module_path": "kvkit.adapters.sglang.hicache", "class_name": "KVKitHiCache", "backend_name": "k"}


class Host:
    """Show a storage what HiCache's host pools show, in two of their layouts, and with latents (MLA)."""

    page_size, layer_num, start_layer, storage_format_tag = PAGE, LAYERS, 0, None

    def __init__(
        self, layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS
    ) -> None:
        self.layout, self.dtype, self.layer_num = layout, dtype, layers
        tokens = PAGES * PAGE
        shapes = {"layer_first": (2, layers, tokens), "page_first": (2, tokens, layers)}
        shape = shapes.get(layout, (tokens, 2, layers))  # latents of all layers side by side
        self.buffer = torch.randn(*shape, HEADS, SIZE).to(dtype)

    def _page(self, index: int) -> Any:
        part = slice(index, index + PAGE)
        before = {"layer_first": 2, "page_first": 1}.get(self.layout, 0)
        return (*[slice(None)] * before, part)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.buffer[self._page(index)]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * self.layer_num * PAGE * HEADS * SIZE, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        target = self.buffer[self._page(index)]
        target.copy_(page.view(target.shape))

    def page(self, number: int) -> torch.Tensor:
        return self.get_data_page(number * PAGE).clone()


def config(folder: Path, **changes: Any) -> HiCacheStorageConfig:
    kvkit = {"staging": "1MiB", "timeout_s": DEADLINE_S, "tiers": {"disk": {"url": str(folder)}}}
    extra = BACKEND | {"kvkit": kvkit, "identity": "w"} | changes.pop("extra", {})
    fields = {
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        **dict.fromkeys(("is_mla_model", "enable_storage_metrics"), False),
        "is_page_first_layout": True,
        "model_name": "org/model",
    }
    return HiCacheStorageConfig(**fields | changes, extra_config=extra)


def opened(folder: Path, host: Any = None, **changes: Any) -> Any:
    """The backend as SGLang makes it."""
    host = host or Host()
    backend = StorageBackendFactory.create_backend("dynamic", config(folder, **changes), host)
    backend.register_mem_pool_host(host)
    return backend


def at(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE) + PAGE * page for page in pages])


def transfer(keys: list[str], pages: torch.Tensor, pool: Any = PoolName.KV, **more: Any) -> PoolTransfer:
    return PoolTransfer(pool, host_indices=pages, keys=keys, **more)


class HiCache:
    """HiCache's storage and its host pool; pages are asked for as far as the pool has room."""

    def __init__(self, folder: Path, **disk: Any) -> None:
        self.host = Host()
        tiers = {"disk": {"url": str(folder)} | disk}
        self.storage = opened(
            folder, self.host, extra={"kvkit": {"staging": "1MiB", "timeout_s": DEADLINE_S, "tiers": tiers}}
        )

    def compute(self, keys: Sequence[str]) -> None:
        """Store the pages of these keys: the KV that `kv` says."""
        for some in _parts(keys):
            for page, key in enumerate(some):
                self.host.set_from_flat_data_page(PAGE * page, kv(key))
            self.storage.batch_set_v1(some, at(*range(len(some))))

    def forget(self) -> None:
        self.host.buffer.fill_(7)

    def found(self, keys: Sequence[str]) -> int:
        """Leading pages that are loaded; they are checked, and pages of others must stay as they were."""
        hits = list[bool]()
        for some in _parts(keys):
            self.forget()
            here = self.storage.batch_get_v1(some, at(*range(len(some))))
            for page, (key, hit) in enumerate(zip(some, here, strict=True)):
                untouched = torch.full_like(self.host.page(page), 7)
                assert torch.equal(self.host.page(page), kv(key) if hit else untouched)
            hits += here
        return hits.index(False) if False in hits else len(hits)

    def shutdown(self) -> None:
        self.storage.close()


def _parts(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[first : first + PAGES]) for first in range(0, len(keys), PAGES)]


def kv(key: str) -> torch.Tensor:
    """The KV of a page, which its key decides."""
    size = 2 * LAYERS * PAGE * HEADS * SIZE
    values = np.frombuffer(hashlib.shake_128(key.encode()).digest(size), np.uint8).astype(np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)


def keys(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32).hex() for _ in range(count)]


attacked = HiCache
