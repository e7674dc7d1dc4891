"""Names of vLLM that the tests alone use and that are not public, wherever a version has them."""

from __future__ import annotations

try:
    from vllm.v1.core.kv_cache_planning import _project_kv_cache_groups_to_worker as project_groups
except ImportError:  # 0.32
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker as project_groups

__all__ = ["project_groups"]
