"""How the connector reaches vLLM's model: vLLM gives its connectors the pages, not what computes them.

Every worker, whatever its platform and model runner, gets its pages in
`vllm.v1.worker.worker_base.WorkerWrapperBase.initialize_from_config`, after vLLM has loaded its plug-ins in
that process. kvkit's plug-in wraps that one method: once the pages are there, kvkit's connector is told of
the model runner. A class of kvkit's own as `worker_cls` would have to exist for each platform, and both it
and a `worker_extension_cls` would have to be named by whoever starts vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker.worker_base import WorkerWrapperBase

_INSTALLED = "_kvkit_tells_of_runner"


def installed() -> bool:
    """Whether `install` was called in this process: not where vLLM's plug-ins are off (VLLM_PLUGINS)."""
    return hasattr(WorkerWrapperBase, _INSTALLED)


def connectors() -> list[Any]:
    """Those of the worker in this process; none where it is in another."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return list(getattr(group, "sub_connectors", [group] if group else []))


def install() -> None:
    """Have connectors with a method `open_blending` called with the model runner, once there are pages.

    May be called again. Mutates vLLM's class, for as long as the process lives.
    """
    if installed():
        return
    initialize = WorkerWrapperBase.initialize_from_config

    def initialize_and_tell(wrapper: Any, kv_cache_configs: list[Any]) -> None:
        initialize(wrapper, kv_cache_configs)
        for connector in connectors():
            if hasattr(connector, "open_blending"):
                connector.open_blending(wrapper.worker.model_runner)

    WorkerWrapperBase.initialize_from_config = initialize_and_tell
    setattr(WorkerWrapperBase, _INSTALLED, True)
