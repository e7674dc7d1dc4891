"""A pytest plug-in: kvkit's tier in the place of vLLM's file tier, for vLLM's own tests of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.tiering.fs import manager

from kvkit.adapters.vllm_tier.tier import KVKitTier


class FileTier(KVKitTier):
    """kvkit's, as those tests make vLLM's, look at its files and submit jobs of requests that never began."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, root_dir: str, **more: Any
    ) -> None:
        settings = {"locality": more["locality"]} if more.get("locality") else {}
        kvkit = {"staging": "64MiB", "tiers": {"disk": {"url": str(root_dir)}}}
        super().__init__(offloading_spec, primary_kv_view, tier_type, identity="w", kvkit=kvkit, **settings)
        self.file_mapper = SimpleNamespace(
            base_path=str(Path(root_dir) / self._name(b"").partition("/")[0]),
            get_file_name=lambda key: str(Path(root_dir) / self._name(key)),
        )
        self.root_dir = root_dir

    def _name(self, key: Any) -> str:
        return self._pages.names([key])[0]

    @property
    def _lookup_manager(self) -> Any:
        return self._lookups

    def submit_store(self, job_metadata: Any) -> None:
        self.on_new_request(job_metadata.req_context)
        super().submit_store(job_metadata)


manager.FileSystemTierManager = FileTier
