"""vLLM on a CPU takes from kvkit's tiers, through LMCache's own server, what it computed before a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_attacks import files

pytest.importorskip("lmcache", reason="needs LMCache's files; `make test-lmcache` runs it")
pytest.importorskip("vllm")

from models.lmcache import CONNECTOR, environment, lmcache_server
from mooncake_libraries import library_path
from vllm_engine import Engine, prompt

CHUNK = 128
PROMPTS = [prompt(300, seed) for seed in range(3)]
STORED = 2 * len(PROMPTS)

Served = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With libraries that LMCache asks for where Mooncake is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", library_path(tmp_path_factory.mktemp("libraries")))
        with Engine(**environment()) as found:
            yield found


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[list[int]]:
    """Return what vLLM answers by itself."""
    return engine.open(None).text(*PROMPTS)


@pytest.fixture
def served(engine: Engine, tmp_path: Path) -> Served:
    """Start LMCache's server with kvkit's folder as its L2, and an engine that asks it."""
    tiers = {"disk": {"url": str(tmp_path / "disk")}}
    l2 = {
        "type": "plugin",
        "module_path": "kvkit.adapters.lmcache.l2",
        "class_name": "KVKitL2Adapter",
        "adapter_params": {"kvkit": {"staging": "64MiB", "tiers": tiers}},
    }

    @contextmanager
    def start() -> Iterator[int]:
        with lmcache_server(tmp_path, CHUNK, l2) as server:
            address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
            transfer = {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": CONNECTOR,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": address | {"lmcache.mp.mq_timeout": 10.0},
            }
            engine.open(transfer)
            yield server.pid
            engine.open(None)

    return start


def test_a_restart(engine: Engine, wanted: list[list[int]], served: Served, tmp_path: Path) -> None:
    """The second server has nothing in its memory; a damaged object is computed anew, and stored."""
    with served():
        assert engine.text(*PROMPTS) == wanted
    assert len(files(tmp_path / "disk")) == STORED
    with served():
        assert engine.cached(*PROMPTS) == [2 * CHUNK] * len(PROMPTS)
        assert engine.text(*PROMPTS) == wanted
    file = files(tmp_path / "disk")[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with served():
        assert sum(engine.cached(*PROMPTS)) in ((STORED - 1) * CHUNK, (STORED - 2) * CHUNK)
        assert engine.text(*PROMPTS) == wanted
    with served():
        assert sum(engine.cached(*PROMPTS)) == STORED * CHUNK
        assert engine.text(*PROMPTS) == wanted


def test_a_server_that_is_killed(engine: Engine, wanted: list[list[int]], served: Served) -> None:
    """Amid its stores: the next server finds whole objects or none, and what is missing is stored again.

    The engine of a killed server is not asked: LMCache's connector may end it.
    """
    with served() as pid:
        assert engine.text(*PROMPTS) == wanted
        os.kill(pid, signal.SIGKILL)
    with served():
        assert engine.text(*PROMPTS) == wanted
        assert sum(engine.cached(*PROMPTS)) == STORED * CHUNK
