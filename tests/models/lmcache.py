"""LMCache's connector in a visit to the zoo: the same ways, but for the handoff, which it has none of."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from models.architectures import Architecture
from models.ways import Visit
from vllm_engine import Engine, Settings

from kvkit.lab.serve.systems import free_port, serving

CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"


class LMCacheVisit(Visit):
    """As `Visit`, with LMCache's server in the place of kvkit's tiers.

    Args:
        server: which it asks.
    """

    def __init__(
        self, engine: Engine, other: Engine, architecture: Architecture, folder: Path, server: Server
    ) -> None:
        self._server = server
        super().__init__(engine, other, architecture, folder)
        self.loaded("")  # it counts from now on

    def transfer(self) -> Settings:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._server.port,
                "lmcache.mp.save_decode_cache": True,
            },
        }

    def forget_memory(self) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._server.http_port}/cache/clear",
            json.dumps({}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200

    def loaded(self, tier: str) -> float:
        (found,) = self.engine.do("call", __name__, "brought")
        return float(found)


def brought(_: Any) -> int:
    """How many tokens LMCache's connector has brought since this was first asked, in an engine's process.

    vLLM's own count leaves out requests that were preempted.
    """
    connector = sys.modules[CONNECTOR].LMCacheMPConnector
    if "brought" not in vars(connector):
        connector.brought, update = 0, connector.update_state_after_alloc

        def note(self: Any, request: Any, blocks: Any, tokens: int) -> None:
            connector.brought += tokens
            update(self, request, blocks, tokens)

        connector.update_state_after_alloc = note
    found: int = connector.brought
    return found


def environment() -> dict[str, str]:
    """Return variables of processes that find LMCache where `KVKIT_PEERS` says, or where this one does."""
    peers = os.environ.get("KVKIT_PEERS")
    package = None if peers is None else str(Path(peers) / "lmcache")
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


def version() -> str:
    """Of LMCache there."""
    (found,) = distributions(name="lmcache", path=[str(Path(os.environ["KVKIT_PEERS"]) / "lmcache")])
    return found.version


class Server(NamedTuple):
    """LMCache's server: its ports for engines and for HTTP, and its process."""

    port: int
    http_port: int
    pid: int


@contextmanager
def lmcache_server(folder: Path, chunk_tokens: int, l2: Settings | None = None) -> Iterator[Server]:
    """One with memory and an L2, LMCache\'s own files if none is given."""
    ports = free_port(), free_port()
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1"]
    command += ["--port", str(ports[0]), "--http-host", "127.0.0.1", "--http-port", str(ports[1])]
    command += ["--shm-name", f"zoo-{ports[0]}", "--l1-size-gb", "1", "--no-l1-use-lazy"]
    command += ["--chunk-size", str(chunk_tokens), "--eviction-policy", "LRU", "--disable-metrics"]
    command += ["--supported-transfer-mode", "engine_driven"]  # the only one without a GPU
    command += ["--l2-adapter", json.dumps(l2 or {"type": "fs", "base_path": str(folder / "l2")})]

    def serves() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/healthcheck", timeout=5):
                return True
        except OSError:
            return False

    with serving("lmcache", command, os.environ | environment(), folder, serves) as process:
        yield Server(*ports, process.pid)
