"""Time that vLLM gives an engine to shut down, compared with the time that its cache may take to close."""

from __future__ import annotations

import logging
import math
from typing import Any

from kvkit.adapters.vllm import compat
from kvkit.config import Config

log = logging.getLogger(__name__)

KILLED_AFTER_S = 4.0
"""Seconds between vLLM's SIGTERM and its SIGKILL to a worker's process (`MultiprocExecutor`)."""


def cache_timeout_s(config: Config, vllm_config: Any) -> float:
    """Return the seconds that a worker's cache may take to close.

    If the worker has its own process, this ends before vLLM kills the process.
    """
    if not _has_worker_processes(vllm_config):
        return config.shutdown_timeout_s
    granted_s = compat.worker_shutdown_s() + KILLED_AFTER_S
    return min(config.shutdown_timeout_s, granted_s - 1)


def log_short_limits(config: Config, vllm_config: Any) -> None:
    """Log a hint if vLLM may kill the engine before its caches have saved everything."""
    needed_s = config.shutdown_timeout_s
    limits = {"--shutdown-timeout": int(getattr(vllm_config, "shutdown_timeout", 0))}
    if _has_worker_processes(vllm_config):
        limits["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = compat.worker_shutdown_s()
    short = [f"{name} = {value}" for name, value in limits.items() if value <= needed_s]
    store_to = config.resolved_policy().store_to
    slow = [name for name in store_to if name in config.tiers and not config.tiers[name].in_memory]
    if slow and short:
        log.info(
            "on SIGTERM vLLM may kill the engine before all is saved to %s: shutdown_timeout_s = %s, but %s; "
            "want %d or more",
            ", ".join(slow),
            needed_s,
            " and ".join(short),
            math.floor(needed_s) + 1,
        )


def _has_worker_processes(vllm_config: Any) -> bool:
    """Return whether workers have processes of their own, which vLLM's `MultiprocExecutor` ends."""
    return bool(vllm_config.parallel_config.distributed_executor_backend == "mp")
