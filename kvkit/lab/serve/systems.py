"""vLLM servers to measure, each a process on a free port of loopback.

    plain           without a connector
    prefix-caching  without a connector, with vLLM's own prefix cache
    kvkit           with kvkit's tiers
    kvkit-blend     with kvkit's tiers; requests ask for blending
    lmcache         with LMCache's tiers

All but `prefix-caching` run without vLLM's own prefix cache.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkit.lab.files import BenchError
from kvkit.lab.serve.memory import killed
from kvkit.lab.serve.memory import kills as memory_kills

SYSTEMS = ("plain", "prefix-caching", "kvkit", "kvkit-blend", "lmcache")
DEFAULT = ("plain", "kvkit", "lmcache")
"""Systems measured by default."""
WITH_CACHE = frozenset(SYSTEMS) - {"plain", "prefix-caching"}
"""Systems with memory beside vLLM's blocks."""
START_S = 600.0
"""Timeout for the start of a server in seconds: a large model loads slowly."""
_STOP_S = 30.0
_PAUSE_S = 0.1
_TAIL_LINES = 30
_CAUSES = 3
CHUNK_TOKENS = 256
BLEND_CHUNK_TOKENS = 128
"""Maximum with blending: the end of a document that fills no chunk is computed with every prompt."""
STAGING_BYTES = 256 << 20
"""Staging of kvkit without a configuration file."""
SAME_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
"""Environment that makes every vLLM on a CPU leave one core free.

By default vLLM does so only with a connector: plain vLLM and a cache would compute on different cores."""
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_QUIET = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all systems share."""

    model: str  # hub id or folder
    memory_gib: int  # capacity of kvkit's memory tier, and of LMCache's
    config: Path | None  # kvkit's TOML file, instead of that memory tier
    options: tuple[str, ...]  # additional options of vLLM, for every system
    folder: Path  # folder of the servers' logs
    chunk_tokens: int = CHUNK_TOKENS  # chunk size of LMCache, and of kvkit without a file
    cores: tuple[int, ...] = ()  # cores of a server without a GPU; empty: vLLM's choice
    memory: str = ""  # memory of each server by `options`, in words


def missing(system: str) -> str | None:
    """Return the reason that a system cannot be measured here; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if system == "lmcache" and not _peers() and importlib.util.find_spec("lmcache") is None:
        return "LMCache is neither installed nor in $KVKIT_PEERS/lmcache"
    return None


@contextmanager
def started(system: str, setup: Setup) -> Iterator[str]:
    """Start a server and yield its URL; stop it when the context ends.

    Raises:
        BenchError: the server ended, or did not serve within `START_S`.
    """
    with ExitStack() as stack:
        environment = SAME_CORES | os.environ
        if setup.cores:
            environment = {_BIND: ",".join(map(str, setup.cores))} | environment
        transfer: dict[str, Any] = {}
        if system in ("kvkit", "kvkit-blend"):
            transfer = _kvkit(setup, blend=system == "kvkit-blend")
        elif system == "lmcache":
            environment |= _QUIET
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_peers(), os.getenv("PYTHONPATH")]))
            port = stack.enter_context(_lmcache_server(setup, environment))
            server_address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
            transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
            transfer["kv_connector_extra_config"] = server_address
        connector = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
        port = free_port()
        # `options` come last, so they may still enable the prefix cache
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", setup.model, "--host", "127.0.0.1", "--port", str(port)]
        prefix_caching = (
            "--enable-prefix-caching" if system == "prefix-caching" else "--no-enable-prefix-caching"
        )
        command += ["--enable-prompt-tokens-details", prefix_caching, *connector]
        command += setup.options
        with serving(system, command, environment, setup.folder, lambda: healthy(port), setup.memory):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def routed(prefill: str, decode: str, folder: Path, handoff: str | None = None) -> Iterator[str]:
    """Start `kvkit router` before a prefill and a decode server and yield its URL; stop it at the end.

    The router sends every prompt to the prefill server, even if few of its tokens are new. `handoff` is the
    address where the decode server receives KV.

    Raises:
        BenchError: the router ended, or did not serve within `START_S`.
    """
    port = free_port()
    config = folder / "router.toml"
    handoff_line = "" if handoff is None else f'handoff = "{handoff}"\n'
    config.write_text(
        "direct_tokens = 0\ndirect_share = 0.0\nmax_slowdown = 1000.0\n"
        f'[prefill.p]\nurl = "{prefill}"\n[decode.d]\nurl = "{decode}"\n{handoff_line}'
    )
    command = [sys.executable, "-c", "from kvkit.cli import main; main()", "router", "--port", str(port)]
    command += ["--config", str(config)]
    with serving("router", command, os.environ, folder, lambda: healthy(port)):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    is_serving: Callable[[], bool],
    memory: str = "",
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, wait until it serves, and yield it; end it and its children with the context.

    Args:
        is_serving: polled until it returns True.
        memory: memory of the process in words, for the message if it is killed.

    Raises:
        BenchError: the process ended, or did not serve within `START_S`; or the context failed and the
            process was killed.
    """
    path = folder / f"{name}.log"
    kills = memory_kills()
    with open(path, "wb") as log:
        # a new session: its children share its process group, and Ctrl-C reaches only the client
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not is_serving():
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_PAUSE_S)
                raise BenchError(
                    f"{name} ended with {code}{_kill_clause(kills, code, path, memory)}:\n{tail(path)}"
                )
            if time.monotonic() > deadline:
                reason = _kill_clause(kills, None, path, memory)
                raise BenchError(f"{name} did not serve within {START_S:.0f} s{reason}:\n{tail(path)}")
        try:
            yield process
        except Exception as error:
            exit_code = process.poll()
            # the kernel's counter is no evidence if the process is alive: other processes run here, too
            reason = _kill_clause(None if exit_code is None else kills, exit_code, path, memory)
            if not reason:
                raise
            raise BenchError(f"{name} stopped serving{reason}:\n{tail(path)}") from error
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end this process by an exception, so that the servers it started end, too."""
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _kvkit(setup: Setup, blend: bool) -> dict[str, Any]:
    if setup.config is not None:
        extra: dict[str, Any] = {"kvkit_config": str(setup.config.absolute())}
    else:
        tiers = {"memory": {"capacity": f"{setup.memory_gib}GiB"}}
        chunk = min(setup.chunk_tokens, BLEND_CHUNK_TOKENS) if blend else setup.chunk_tokens
        extra = {"kvkit": {"chunk_tokens": chunk, "staging": STAGING_BYTES, "tiers": tiers}}
    if blend:  # unchecked, and always loads: the benchmark measures speed and answers itself
        extra |= {"blend": {"unchecked": True}, "prefill_tokens_per_s": 0.01, "lookup_timeout_s": 20.0}
    return {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


@contextmanager
def _lmcache_server(setup: Setup, environment: Mapping[str, str]) -> Iterator[int]:
    """Start LMCache's own process, which holds its memory, and yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--shm-name", f"kvkit-bench-{port}"]
    command += ["--l1-size-gb", str(setup.memory_gib), "--chunk-size", str(setup.chunk_tokens)]
    command += ["--supported-transfer-mode", "auto", "--eviction-policy", "LRU"]
    command += ["--no-l1-use-lazy", "--disable-metrics"]
    with serving("lmcache-server", command, environment, setup.folder, lambda: _listens(port)):
        yield port


def healthy(port: int) -> bool:
    """Return whether a server on loopback answers /health with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def free_port() -> int:
    """Return a free port of loopback, below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(22_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _peers() -> str | None:
    """Return the folder of an LMCache that is not installed; None without one."""
    folder = Path(os.environ.get("KVKIT_PEERS", "")) / "lmcache"
    return str(folder) if os.environ.get("KVKIT_PEERS") and folder.is_dir() else None


def _kill_clause(kills: int | None, code: int | None, path: Path, memory: str) -> str:
    """Return a clause that states the kill of a process and its memory; "" without evidence."""
    reason = killed(kills, code, path.read_text(errors="replace"))
    return "" if reason is None else f", {reason}" + (f" ({memory})" if memory else "")


def tail(path: Path) -> str:
    """Return the end of a log, after the last errors before it: vLLM logs their cause first."""
    lines = path.read_text(errors="replace").splitlines()
    error_lines = [line for line in lines[:-_TAIL_LINES] if re.search(r"ERROR.*\w(Error|Exception): ", line)]
    return "\n".join([*error_lines[-_CAUSES:], *lines[-_TAIL_LINES:]])
