"""Compare the time that vLLM allows an engine to shut down with the time that its cache may take to close."""

from __future__ import annotations

import logging
import math
from typing import Any

from kvkit.adapters.vllm import compat
from kvkit.config import Config

log = logging.getLogger(__name__)

KILLED_AFTER_S = 4.0
"""Seconds between vLLM's SIGTERM and its SIGKILL to a worker's process (`MultiprocExecutor`)."""


def limit_s(config: Config, vllm_config: Any) -> float:
    """Return the seconds that a worker's cache may take to close.

    If the worker has its own process, this ends before vLLM kills the process.
    """
    if not _in_processes(vllm_config):
        return config.shutdown_timeout_s
    granted = compat.worker_shutdown_s() + KILLED_AFTER_S
    return min(config.shutdown_timeout_s, granted - 1)


def tell(config: Config, vllm_config: Any) -> None:
    """Log a hint if vLLM may kill the engine before its caches have saved everything."""
    needed = config.shutdown_timeout_s
    limits = {"--shutdown-timeout": int(getattr(vllm_config, "shutdown_timeout", 0))}
    if _in_processes(vllm_config):
        limits["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = compat.worker_shutdown_s()
    short = [f"{name} = {value}" for name, value in limits.items() if value <= needed]
    tiers = [n for n in config.resolved_policy().store_to if n in config.tiers]
    slow = [name for name in tiers if not config.tiers[name].in_memory]
    if slow and short:
        log.info(
            "on SIGTERM vLLM may kill the engine before all is saved to %s: shutdown_timeout_s = %s, but %s; "
            "want %d or more",
            ", ".join(slow),
            needed,
            " and ".join(short),
            math.floor(needed) + 1,
        )


def _in_processes(vllm_config: Any) -> bool:
    """Return whether workers have processes of their own, which vLLM's `MultiprocExecutor` ends."""
    return bool(vllm_config.parallel_config.distributed_executor_backend == "mp")
