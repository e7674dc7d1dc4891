"""kvkit's tiers as an L2 of LMCache's server, loaded by its adapter type "plugin".

    {"type": "plugin", "module_path": "kvkit.adapters.lmcache.l2", "class_name": "KVKitL2Adapter",
     "adapter_params": {"kvkit_config": "kvkit.toml"}}

An object of LMCache's is a page of `KeyedPages`. LMCache's key names a model, which is known here by its
weights, a rank, a group of layers, a salt and a hash of tokens.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from kvkit.adapters.engine import tier_settings
from kvkit.adapters.engine.keyed_pages import KeyedPages, KeyedStore
from kvkit.adapters.engine.tier_settings import PageSettings
from kvkit.adapters.engine.weights import weights_of
from kvkit.adapters.lmcache.held import HeldObjects
from kvkit.settings import ConfigError
from kvkit.workers import Closed, Workers
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

log = logging.getLogger(__name__)

WHERE = "adapter_params: "
THREADS = 4
"""Threads for lookups and loads; they mostly wait for tiers."""
LOCK_S = 60.0
"""Seconds for which a lookup protects what it found from eviction, unless it is unlocked before."""

Layout = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Shapes and dtypes of an object's tensors."""


class KVKitL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not typed for mypy
    """An L2 whose objects are verified records in kvkit's tiers, which evict by themselves. Thread-safe.

    Args:
        params: `PageSettings`.

    Raises:
        ConfigError: a setting is unknown or impossible.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._settings, self._config = tier_settings.read(PageSettings, params, WHERE)
        self._events = {what: create_event_notifier() for what in ("store", "lookup", "load")}
        self._results: dict[str, dict[int, Any]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._next_task = 0
        self._stores: list[KeyedStore] = []
        self._pages: dict[tuple[Any, ...], KeyedPages] = {}
        self._workers = Workers(THREADS, "kvkit-lmcache")
        self._telling = Workers(1, "kvkit-lmcache-tell")  # in order, and never with a tier's lock
        self._held = HeldObjects(
            lambda keys, sizes: self._tell(self._notify_keys_stored, keys, sizes),
            lambda keys, sizes: self._tell(self._notify_keys_deleted, keys, sizes),
        )

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is signalled when a store has ended."""
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is signalled when a lookup has ended."""
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is signalled when a load has ended."""
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Start storing objects; return the task's number."""
        task = self._begin()
        try:
            by_kind = self._by_kind(keys, [_layout_of(each) for each in objects])
        except ConfigError as error:
            log.warning("%d objects are not stored: %s", len(keys), error)
            self._end("store", task, L2StoreResult(False, 0))
            return task
        waiting, failed = [len(by_kind)], list[bool]()
        size = sum(len(each.byte_array) for each in objects)

        def stored(names: Sequence[str], complete: bool) -> None:
            self._held.end(names)
            with self._lock:
                waiting[0] -= 1
                failed.extend([True] * (not complete))
                last = not waiting[0]
            if last:
                result = L2StoreResult(not failed, 0 if failed else size)
                self._tell(self._end, "store", task, result)

        if not by_kind:
            self._end("store", task, L2StoreResult(True, 0))
        for pages, indices in by_kind:
            names: Sequence[str] = ()
            try:
                memory, rows = pages.scattered([_bytes_of(objects[i]) for i in indices])
                chosen = [keys[i].chunk_hash for i in indices]
                names = pages.names(chosen)
                self._held.begin(names, [keys[i] for i in indices], pages.page_bytes)
                pages.store(chosen, memory, rows, partial(stored, names))
            except Exception as error:  # else the task would never end
                log.warning("%d objects are not stored: %r", len(indices), error)
                stored(names, False)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of stores that have ended since the last call."""
        with self._lock:
            return self._results.pop("store", {})

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Start looking up objects, whose layouts are those of their groups; return the task's number."""
        layouts = [_layout(group_layout_descs.get(key.object_group_id)) for key in keys]

        def look(found: Bitmap) -> None:
            for pages, indices in self._by_kind(keys, layouts):
                chosen = [keys[i].chunk_hash for i in indices]
                names = pages.names(chosen)
                self._held.begin(names, [keys[i] for i in indices], pages.page_bytes)
                try:
                    for i, held in zip(indices, pages.held(chosen), strict=True):
                        if held:
                            found.set(i)
                finally:
                    self._held.end(names)
                pages.pin(chosen, LOCK_S)

        return self._start("lookup", len(keys), look)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return what a lookup found, once; None while it is under way."""
        with self._lock:
            return self._results["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: what a lookup found is protected for `LOCK_S` seconds."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Start loading objects into LMCache's buffers; return the task's number.

        A buffer is written after its record was verified. Those of missing objects stay as they are.
        """
        layouts = [_layout_of(each) for each in objects]

        def load(found: Bitmap) -> None:
            for pages, indices in self._by_kind(keys, layouts):
                target, rows = pages.scattered([_bytes_of(objects[i]) for i in indices])
                first = 0
                chosen = [keys[i].chunk_hash for i in indices]
                while first < len(indices):
                    count = pages.load(chosen[first:], target, rows[first:])
                    for i in indices[first : first + count]:
                        found.set(i)
                    first += count + 1  # the object after these is missing
            if accessed := [key for i, key in enumerate(keys) if found.test(i)]:
                self._notify_keys_accessed(accessed)

        return self._start("load", len(keys), load)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return what a load brought, once; None while it is under way."""
        with self._lock:
            return self._results["load"].pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, of every layout that this server has met, from all tiers; failures are logged."""
        by_kind: dict[tuple[Any, ...], list[bytes]] = defaultdict(list)
        for key in keys:
            by_kind[_whose(key)].append(key.chunk_hash)
        for kind, pages in list(self._pages.items()):
            if chosen := by_kind.get(kind[:4]):
                try:
                    pages.delete(chosen)
                except OSError as error:
                    log.warning("of %d objects some could not be deleted: %s", len(chosen), error)
        with suppress(Closed, TimeoutError):
            self._telling.submit(lambda: None).result(self._config.timeout_s)  # LMCache has heard of them

    def close(self) -> None:
        """Finish what is under way and close the tiers. May be repeated."""
        with self._lock:
            stores, self._stores = self._stores, []
        self._workers.close(self._config.shutdown_timeout_s)
        for store in stores:
            store.close()
        self._telling.close(self._config.shutdown_timeout_s)
        for event in self._events.values():
            event.close()

    def _begin(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _end(self, what: str, task: int, result: object) -> None:
        with self._lock:
            self._results[what][task] = result
        self._events[what].notify()

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run a call after those that were told before; at once if the adapter is closed."""
        try:
            self._telling.start(partial(call, *arguments))
        except Closed:
            call(*arguments)

    def _start(self, what: str, count: int, work: Callable[[Bitmap], None]) -> int:
        """Run `work` in the background on a bitmap of `count` bits; its errors are logged."""
        task, found = self._begin(), Bitmap(count)

        def run() -> None:
            try:
                work(found)
            except Exception:
                log.exception("%s of %d objects failed", what, count)
            self._end(what, task, found)

        self._workers.start(run, urgent=what == "load")
        return task

    def _by_kind(
        self, keys: Sequence[ObjectKey], layouts: Sequence[Layout | None]
    ) -> list[tuple[KeyedPages, list[int]]]:
        """Return the indices of keys by kind of page; those without a layout are left out."""
        found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            if layout is not None:
                found[*_whose(key), layout].append(i)
        return [(self._pages_of(*kind), indices) for kind, indices in found.items()]

    def _pages_of(self, model: str, rank: int, group: int, salt: str, layout: Layout) -> KeyedPages:
        kind = model, rank, group, salt, layout
        if (known := self._pages.get(kind)) is not None:
            return known
        weights = self._settings.identity or _weights(model)
        size = sum(_tensor_bytes(shape, dtype) for shape, dtype in zip(*layout, strict=True))
        determines = {
            "engine": "lmcache",
            "rank": rank,
            "group": group,
            "layout": [list(map(list, layout[0])), list(layout[1])],
        }
        with self._lock:
            store = next((store for store in self._stores if size <= store.largest_bytes), None)
            if store is None:
                store = KeyedStore(self._config, size, model=model, dtype=layout[1][0], weights=weights)
                store.cache.tier_set.subscribe(list(store.cache.tiers), self._held.report)
                self._stores.append(store)
            name = model.rstrip("/").rpartition("/")[2]
            fields = {"model": name, "dtype": layout[1][0], "weights": weights, "salt": salt}
            return self._pages.setdefault(kind, store.pages(size, determines, **fields))


def _whose(key: ObjectKey) -> tuple[str, int, int, str]:
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


@functools.cache
def _weights(model: str) -> str:
    return weights_of(model, WHERE)


def _layout(desc: MemoryLayoutDesc | None) -> Layout | None:
    if desc is None:
        return None
    shapes = tuple(tuple(int(size) for size in shape) for shape in desc.shapes)
    return shapes, tuple(str(dtype).removeprefix("torch.") for dtype in desc.dtypes)


def _layout_of(object: Any) -> Layout:
    about = object.metadata
    shapes, dtypes = about.shapes or [about.shape], about.dtypes or [about.dtype]
    found = _layout(MemoryLayoutDesc(list(shapes), list(dtypes)))
    assert found is not None
    return found


def _tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * int(getattr(torch, dtype).itemsize)


def _bytes_of(object: Any) -> torch.Tensor:
    """Return an object's memory, uint8 [size], as a view."""
    return torch.frombuffer(object.byte_array, dtype=torch.uint8)
