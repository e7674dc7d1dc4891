"""LMCache's calls of an L2, one after another, and its own objects."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
    PluginL2AdapterConfig,
    _create_plugin_adapter,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvkit.tiers.testing.contract import DEADLINE_S

SHAPE, DTYPE = torch.Size([2, 3, 16, 64]), torch.bfloat16
LAYOUTS = {0: MemoryLayoutDesc([SHAPE], [DTYPE])}
HASHES = [os.urandom(32) for _ in range(12)]


def some_keys(count: int, first: int = 0, **changes: Any) -> list[ObjectKey]:
    """Return keys of `HASHES`; `changes` are fields."""
    fields = {"model_name": "org/model", "kv_rank": 0} | changes
    return [ObjectKey(chunk_hash=each, **fields) for each in HASHES[first : first + count]]


def object_of(raw: torch.Tensor, shape: torch.Size = SHAPE) -> TensorMemoryObj:
    """LMCache's own, around bytes."""
    about = MemoryObjMetadata(shape, DTYPE, raw.data_ptr(), raw.numel(), 1, fmt=MemoryFormat.KV_2LTD)
    about.shapes, about.dtypes = [shape], [DTYPE]
    return TensorMemoryObj(raw, about, None)


def objects(count: int, seed: int | None = None, shape: torch.Size = SHAPE) -> list[TensorMemoryObj]:
    """LMCache's own; without a seed all bytes are 7."""
    size = shape.numel() * DTYPE.itemsize
    found = []
    for i in range(count):
        if seed is None:
            raw = torch.full((size,), 7, dtype=torch.uint8)
        else:
            generator = torch.Generator().manual_seed(seed * 100 + i)
            raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        found.append(object_of(raw, shape))
    return found


def same(one: TensorMemoryObj, other: TensorMemoryObj) -> bool:
    return bytes(one.byte_array) == bytes(other.byte_array)


class Adapter:
    """The adapter as LMCache makes it, and its tasks one after another."""

    def __init__(self, folder: Path, **params: Any) -> None:
        kvkit = {"staging": "2MiB", "timeout_s": DEADLINE_S, "tiers": {"disk": {"url": str(folder)}}}
        config = PluginL2AdapterConfig(
            "kvkit.adapters.lmcache.l2", "KVKitL2Adapter", {"kvkit": kvkit, "identity": "w"} | params
        )
        self.l2: Any = _create_plugin_adapter(config)

    @staticmethod
    def around(l2: Any) -> Adapter:
        """Another L2 of LMCache's, to be asked in the same way."""
        found = object.__new__(Adapter)
        found.l2 = l2
        return found

    def wait(self, descriptor: int) -> None:
        assert select.select([descriptor], [], [], DEADLINE_S)[0]
        os.read(descriptor, 8)

    def store(self, wanted: Sequence[ObjectKey], given: list[TensorMemoryObj]) -> Any:
        task = self.l2.submit_store_task(wanted, given)
        self.wait(self.l2.get_store_event_fd())
        (found,) = self.l2.pop_completed_store_tasks().items()
        assert found[0] == task
        assert self.l2.pop_completed_store_tasks() == {}
        return found[1]

    def lookup(self, wanted: Sequence[ObjectKey], layouts: Any = None) -> list[bool]:
        task = self.l2.submit_lookup_and_lock_task(wanted, LAYOUTS if layouts is None else layouts)
        self.wait(self.l2.get_lookup_and_lock_event_fd())
        found = self.l2.query_lookup_and_lock_result(task)
        assert self.l2.query_lookup_and_lock_result(task) is None
        self.l2.submit_unlock(wanted)
        return [found.test(i) for i in range(len(wanted))]

    def load(self, wanted: Sequence[ObjectKey], targets: list[TensorMemoryObj]) -> list[bool]:
        task = self.l2.submit_load_task(wanted, targets)
        self.wait(self.l2.get_load_event_fd())
        found = self.l2.query_load_result(task)
        return [found.test(i) for i in range(len(wanted))]

    def compute(self, wanted: Sequence[ObjectKey]) -> None:
        """Store the objects of these keys: the bytes that `kv` says."""
        self.store(wanted, [object_of(kv(key)) for key in wanted])

    def forget(self) -> None:
        """LMCache's own memory is not here."""

    def found(self, wanted: Sequence[ObjectKey]) -> int:
        """Leading objects that are loaded; they are checked, and targets of others must stay as they were."""
        targets, untouched = objects(len(wanted)), objects(1)[0]
        hits = self.load(wanted, targets)
        for key, target, hit in zip(wanted, targets, hits, strict=True):
            assert same(target, object_of(kv(key)) if hit else untouched)
        return hits.index(False) if False in hits else len(hits)

    def shutdown(self) -> None:
        self.l2.close()


def kv(key: ObjectKey) -> torch.Tensor:
    """The KV of an object: bytes that its key decides."""
    size = SHAPE.numel() * DTYPE.itemsize
    return torch.from_numpy(np.random.default_rng(list(key.chunk_hash)).integers(0, 256, size, np.uint8))


def keys(count: int, seed: int) -> list[ObjectKey]:
    rng = np.random.default_rng(seed)
    return [ObjectKey(chunk_hash=rng.bytes(32), model_name="org/model", kv_rank=0) for _ in range(count)]


def attacked(folder: Path, **disk: Any) -> Adapter:
    """One whose tier is a folder."""
    tiers = {"disk": {"url": str(folder)} | disk}
    return Adapter(folder, kvkit={"staging": "2MiB", "timeout_s": DEADLINE_S, "tiers": tiers})
