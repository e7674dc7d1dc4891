"""kvkit's tiers as the storage (L3) of SGLang's HiCache, loaded by its dynamic backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvkit", "module_path": "kvkit.adapters.sglang.hicache",
        "class_name": "KVKitHiCache", "kvkit_config": "kvkit.toml"}'

A page of one of SGLang's host pools is a page of `KeyedPages`, under SGLang's hash of tokens, adapter and
salt. Pools may be page first or layer first: a page is stored as the pool gives it, flat.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkit.adapters.engine import tier_settings
from kvkit.adapters.engine.keyed_pages import KeyedPages, KeyedStore
from kvkit.adapters.engine.weights import weights_of
from kvkit.adapters.sglang.settings import WHERE, StorageSettings
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A host pool of SGLang's, and its pages in kvkit's tiers."""

    host: Any  # `HostKVCache`
    page_bytes: int
    pages: KeyedPages
    whole: bool  # a page is contiguous in the pool's memory

    def read(self, keys: Sequence[str], indices: Sequence[int]) -> list[bool]:
        """Load pages into the pool, at the tokens `indices`; return for each whether it was loaded."""
        if self.whole:
            there = [_bytes_of(self.host.get_data_page(index, flat=False)) for index in indices]
            return self._load_each(keys, there, lambda row: None)
        memory = torch.empty(len(keys), self.page_bytes, dtype=torch.uint8)

        def place(row: int) -> None:
            dummy = self.host.get_dummy_flat_data_page()
            self.host.set_from_flat_data_page(indices[row], memory[row].view(dummy.dtype))

        return self._load_each(keys, list(memory), place)

    def read_into(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Load pages into tensors of a page each; return for each whether it was loaded."""
        memory = torch.empty(len(keys), self.page_bytes, dtype=torch.uint8)

        def place(row: int) -> None:
            targets[row].view(-1).copy_(memory[row].view(targets[row].dtype))

        return self._load_each(keys, list(memory), place)

    def write(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> bool:
        """Store pages of any shape; return whether a tier has each of them."""
        flat = [_bytes_of(page.contiguous()) for page in pages]  # lives as long as the store
        memory, rows = self.pages.scattered(flat)
        ended, complete = threading.Event(), list[bool]()

        def stored(all_of_them: bool) -> None:
            complete.append(all_of_them)
            ended.set()

        self.pages.store(_encoded(keys), memory, rows, stored)
        ended.wait()  # `store` has a deadline
        return complete == [True]

    def _load_each(
        self, keys: Sequence[str], memory: Sequence[torch.Tensor], place: Callable[[int], None]
    ) -> list[bool]:
        """Load runs of pages that are held into `memory`, and place each by its number."""
        if not keys:
            return []
        encoded, (target, rows) = _encoded(keys), self.pages.scattered(memory)
        found, first = [False] * len(keys), 0
        while first < len(keys):
            count = self.pages.load(encoded[first:], target, rows[first:])
            for row in range(first, first + count):
                place(row)
                found[row] = True
            first += count + 1  # the page after these is missing
        return found


class KVKitHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not typed for mypy
    """HiCache's storage in kvkit's tiers. Errors of tiers are misses: none leaves it.

    SGLang calls it in threads that wait for storage.

    Args:
        storage_config: ranks and model, as SGLang has them; `extra_config` has `StorageSettings`.

    Raises:
        ConfigError: a setting is impossible, or a tier cannot be opened.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: object = None) -> None:
        self._config = storage_config
        extra = storage_config.extra_config or {}
        self._settings, self._kvkit = tier_settings.read(StorageSettings, extra, WHERE)
        self._hosts: dict[str, Any] = {}
        self._pools: dict[str, Pool] = {}
        self._stores: list[KeyedStore] = []
        self._lock = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Note the pool of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        self._hosts[str(PoolName.KV)] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Note a further pool, such as that of states or of a draft model."""
        self._hosts[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self) -> None:
        """Open the tiers, so that SGLang learns here if one cannot be opened, and not in its threads."""
        for name in self._hosts:
            self._pool(name)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the length of the leading run of `keys` whose pages of keys and values are held."""
        return self._pool(PoolName.KV).pages.leading(_encoded(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefixes that can be restored: those whose pages every pool holds, by its policy."""
        count = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: count} if count else {}
        restorable = list(range(1, count + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            held = self._pool(transfer.name).pages.held(_encoded(keys[:count]))
            wanted = self._restorable(transfer, held)
            if wanted:
                hits[transfer.name] = wanted[-1]
            restorable = [prefix for prefix in restorable if prefix in set(wanted)]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into each transfer's pool; the rows of pages that are missing stay as they are."""
        return {t.name: self._moved(t, lambda pool, keys, at: pool.read(keys, at)) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of each transfer's pool."""

        def write(pool: Pool, keys: Sequence[str], at: Sequence[int]) -> list[bool]:
            done = pool.write(keys, [pool.host.get_data_page(index, flat=False) for index in at])
            return [done] * len(keys)

        return {transfer.name: self._moved(transfer, write) for transfer in transfers}

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages of keys and values into the pool."""
        (found,) = self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)]).values()
        return found

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of keys and values from the pool."""
        (stored,) = self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)]).values()
        return stored

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Load a page into a tensor; return it, or None if no tier has the page."""
        (found,) = self.batch_get([key], None if target_location is None else [target_location])
        return found

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors; return these, and None for each page that no tier has."""
        pool = self._pool(PoolName.KV)
        targets = target_locations or [pool.host.get_dummy_flat_data_page() for _ in keys]
        found = pool.read_into(keys, targets)
        return [target if here else None for target, here in zip(targets, found, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: object = None, target_sizes: object = None
    ) -> bool:
        """Store a page; return whether a tier has it."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store pages; return whether a tier has each of them."""
        return not keys or self._pool(PoolName.KV).write(keys, values)

    def exists(self, key: str) -> bool:
        """Return whether a tier has a page of keys and values."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Delete this engine's pages from all tiers; pages of other models and engines stay."""
        for pool in self._pools.values():
            pool.pages.clear()

    def close(self) -> None:
        """Finish what is under way and close the tiers. May be repeated."""
        with self._lock:
            stores, self._stores, self._pools = self._stores, [], {}
        for store in stores:
            store.close()

    def _moved(
        self, transfer: PoolTransfer, move: Callable[[Pool, Sequence[str], Sequence[int]], list[bool]]
    ) -> list[bool]:
        """Move a transfer's pages; return for each whether it was moved."""
        keys, pool = transfer.keys or [], self._pool(transfer.name)
        size = getattr(pool.host, "page_size", 1) or 1
        indices = transfer.host_indices
        if indices is None or indices.numel() != len(keys) * size:
            count = 0 if indices is None else indices.numel()
            log.error("%s: %d host indices for %d pages of %d", transfer.name, count, len(keys), size)
            return [False] * len(keys)
        return move(pool, keys, indices.view(-1, size)[:, 0].tolist()) if keys else []

    @staticmethod
    def _restorable(transfer: PoolTransfer, held: Sequence[bool]) -> list[int]:
        """Return the numbers of leading pages for which the pool has what its policy asks."""
        prefixes = range(1, len(held) + 1)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return [prefix for prefix in prefixes if all(held[:prefix])]
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            last = max(1, len(transfer.keys or ()))
            return [prefix for prefix in prefixes if all(held[max(0, prefix - last) : prefix])]
        raise ValueError(f"hit_policy = {transfer.hit_policy}: want all_pages or trailing_pages")

    def _pool(self, name: Any) -> Pool:
        """Return a pool. The first opens the tiers, for those that are registered by then."""
        found = self._pools.get(str(name))
        if found is not None:
            return found
        with self._lock:
            host = self._hosts[str(name)]
            size = _page_bytes(host)
            if not any(size <= store.largest_bytes for store in self._stores):
                self._stores.append(self._opened(max(map(_page_bytes, self._hosts.values()))))
            store = next(store for store in self._stores if size <= store.largest_bytes)
            pages = store.pages(size, self._layout(str(name), host))
            page = host.get_data_page(0, flat=False)
            whole = page.is_contiguous() and page._base is not None  # a view of the pool, and no copy
            return self._pools.setdefault(str(name), Pool(host, size, pages, whole))

    def _opened(self, largest_bytes: int) -> KeyedStore:
        host = self._hosts[str(PoolName.KV)]
        name = (self._config.model_name or "").removesuffix(f"-{getattr(host, 'storage_format_tag', '')}")
        dtype = str(host.dtype).removeprefix("torch.")
        rank = self._config.dp_rank * self._config.tp_size + self._config.tp_rank
        config = self._kvkit.model_copy(update={"server": self._kvkit.server.of_rank(rank)})
        return KeyedStore(
            config,
            largest_bytes,
            model=name.rstrip("/").rpartition("/")[2],
            dtype=dtype,
            weights=self._settings.identity or weights_of(name, WHERE),
        )

    def _layout(self, pool: str, host: Any) -> dict[str, Any]:
        """Return what determines a page's bytes besides tokens and weights.

        SGLang keeps the same latents (MLA) on all tensor-parallel ranks, which share these pages.
        """
        config = self._config
        page = host.get_dummy_flat_data_page()
        alike = config.is_mla_model and pool == str(PoolName.KV)
        return {
            "engine": "sglang hicache",
            "pool": pool,
            "layout": [getattr(host, "layout", ""), str(getattr(host, "storage_format_tag", None))],
            "page_tokens": getattr(host, "page_size", 1),
            "dtype": [str(getattr(host, "dtype", "")), str(page.dtype)],
            "layers": [getattr(host, "start_layer", 0), getattr(host, "layer_num", 0)],
            "pipeline": [config.pp_rank, config.pp_size],
            "context": [config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size],
            "tensor": [0, 0] if alike else [config.tp_rank, config.tp_size],
        }


def _page_bytes(host: Any) -> int:
    page = host.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    """Return a contiguous page, uint8 [page_bytes], as a view."""
    return page.view(-1).view(torch.uint8)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
