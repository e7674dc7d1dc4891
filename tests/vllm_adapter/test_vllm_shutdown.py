"""kvkit closes before vLLM kills its process, and warns at the start of too short a shutdown time."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvkit.adapters.vllm import shutdown
from kvkit.config import load_config

DISK = {"disk": {"url": "file:///nowhere"}}
MEMORY = {"memory": {"capacity": "1MiB"}}
WORKERS = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


def engine(timeout_s: int, backend: str) -> SimpleNamespace:
    """As much of vLLM's configuration as is asked for."""
    return SimpleNamespace(
        shutdown_timeout=timeout_s,
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
    )


@pytest.mark.parametrize(
    ("timeout_s", "backend", "worker_s", "told"),
    [
        (0, "uni", 5, "shutdown_timeout_s = 12.0, but --shutdown-timeout = 0; want 13 or more"),
        (12, "uni", 5, "--shutdown-timeout = 12; want 13"),
        (13, "uni", 5, None),
        (0, "mp", 5, f"--shutdown-timeout = 0 and {WORKERS} = 5; want 13"),
        (60, "mp", 5, f"but {WORKERS} = 5; want 13"),
        (60, "mp", 13, None),
    ],
)
def test_too_little_time_is_told_at_the_start(
    timeout_s: int,
    backend: str,
    worker_s: int,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(WORKERS, str(worker_s))
    with caplog.at_level(logging.INFO, "kvkit"):
        shutdown.log_short_limits(
            load_config(tiers=MEMORY | DISK, shutdown_timeout_s=12), engine(timeout_s, backend)
        )
        assert (told or "") in caplog.text
        assert bool(told) == ("saved to disk" in caplog.text)
        caplog.clear()
        shutdown.log_short_limits(
            load_config(tiers=MEMORY, shutdown_timeout_s=12), engine(timeout_s, backend)
        )
        assert not caplog.text, "memory does not outlive the engine"


def test_a_worker_closes_before_vllm_kills_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(tiers=DISK, shutdown_timeout_s=12)
    monkeypatch.setenv(WORKERS, "5")
    assert shutdown.cache_timeout_s(config, engine(0, "uni")) == 12
    assert shutdown.cache_timeout_s(config, engine(60, "mp")) == 8
    monkeypatch.setenv(WORKERS, "60")
    assert shutdown.cache_timeout_s(config, engine(60, "mp")) == 12
