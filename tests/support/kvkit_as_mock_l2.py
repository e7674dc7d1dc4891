"""A pytest plug-in: kvkit's L2 in the place of LMCache's mock of one, for LMCache's own tests."""

from __future__ import annotations

import tempfile
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

from kvkit.adapters.lmcache.l2 import KVKitL2Adapter


class MockL2(KVKitL2Adapter):
    """kvkit's, as those tests make the mock; their lookups tell no layout: it is the last object's."""

    def __init__(self, config: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._layouts: dict[int, MemoryLayoutDesc] = {}
        kvkit = {"staging": "8MiB", "tiers": {"disk": {"url": self._folder.name}}}
        super().__init__({"identity": "w", "kvkit": kvkit})

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        about = objects[-1].metadata
        self._layouts = {0: MemoryLayoutDesc([about.shape], [about.dtype])}
        return super().submit_store_task(keys, objects)

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        return super().submit_lookup_and_lock_task(keys, self._layouts)


mock_l2_adapter.MockL2Adapter = MockL2
