"""vLLM servers to measure. Each is a process on a free port of loopback.

    plain           without a connector
    prefix-caching  the same, with vLLM's own prefix cache
    kvkit           with kvkit's tiers
    kvkit-blend     with kvkit's tiers, and blending, which requests ask for
    lmcache         with LMCache's tiers

The others than `prefix-caching` are without vLLM's own prefix cache.
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

from kvkit.bench.files import BenchError
from kvkit.bench.memory import killed
from kvkit.bench.memory import kills as memory_kills

SYSTEMS = ("plain", "prefix-caching", "kvkit", "kvkit-blend", "lmcache")
DEFAULT = ("plain", "kvkit", "lmcache")
"""What is measured where nobody says what."""
WITH_CACHE = frozenset(SYSTEMS) - {"plain", "prefix-caching"}
"""Those that have memory beside vLLM's blocks."""
START_S = 600.0
"""How long a server may take until it serves, in seconds: a large model is long in loading."""
_STOP_S = 30.0
_PAUSE_S = 0.1
_TAIL_LINES = 30
_CAUSES = 3
CHUNK_TOKENS = 256
BLEND_CHUNK_TOKENS = 128
"""With blending, at most: what of a document fills no chunk is computed with every prompt."""
STAGING_BYTES = 256 << 20
"""Of kvkit without a file."""
SAME_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
"""On a CPU vLLM computes on one core less with a connector, or on all where that would leave none: plain vLLM
and a cache would be compared on different cores."""
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_QUIET = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Setup:
    """What all systems have in common."""

    model: str  # hub id or folder
    memory_gib: int  # of kvkit's memory tier, and of LMCache's
    config: Path | None  # kvkit's TOML file, in place of that memory tier
    options: tuple[str, ...]  # more of vLLM's command line, for every system
    folder: Path  # of the servers' logs
    chunk_tokens: int = CHUNK_TOKENS  # of LMCache, and of kvkit without a file
    cores: tuple[int, ...] = ()  # that a server computes on without a GPU; none: as vLLM chooses
    memory: str = ""  # what each server is given, as `options` say it, in words


def missing(system: str) -> str | None:
    """Why a system cannot be measured here; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if system == "lmcache" and not _peers() and importlib.util.find_spec("lmcache") is None:
        return "LMCache is neither installed nor in $KVKIT_PEERS/lmcache"
    return None


@contextmanager
def started(system: str, setup: Setup) -> Iterator[str]:
    """The URL of a server, which is ended with the context.

    Raises:
        BenchError: it ended, or did not serve within `START_S`.
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
            server = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
            transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
            transfer["kv_connector_extra_config"] = server
        connector = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
        port = free_port()
        # else its own prefix cache is off, unless the options, which come later, have it on
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", setup.model, "--host", "127.0.0.1", "--port", str(port)]
        own = "--enable-prefix-caching" if system == "prefix-caching" else "--no-enable-prefix-caching"
        command += ["--enable-prompt-tokens-details", own, *connector]
        command += setup.options
        with serving(system, command, environment, setup.folder, lambda: healthy(port), setup.memory):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def routed(prefill: str, decode: str, folder: Path, handoff: str | None = None) -> Iterator[str]:
    """The URL of `kvkit router` before a prefill and a decode server; it is ended with the context.

    Every prompt goes over the prefill server, however little of it is new. `handoff` is where the decode
    server takes in what the other computed.

    Raises:
        BenchError: it ended, or did not serve within `START_S`.
    """
    port = free_port()
    config = folder / "router.toml"
    where = "" if handoff is None else f'handoff = "{handoff}"\n'
    config.write_text(
        "direct_tokens = 0\ndirect_share = 0.0\nmax_slowdown = 1000.0\n"
        f'[prefill.p]\nurl = "{prefill}"\n[decode.d]\nurl = "{decode}"\n{where}'
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
    serves: Callable[[], bool],
    memory: str = "",
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves; it and its children are ended with the context.

    Args:
        serves: asked again and again until it is true.
        memory: what it was given, in words, to be told where it is killed.

    Raises:
        BenchError: it ended, or did not serve within `START_S`. Or it was killed, and what was done with it
            failed.
    """
    path = folder / f"{name}.log"
    kills = memory_kills()
    with open(path, "wb") as log:
        # in a session of its own: its children are in its group, and Ctrl-C is for the client alone
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not serves():
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_PAUSE_S)
                raise BenchError(
                    f"{name} ended with {code}{_killed(kills, code, path, memory)}:\n{tail(path)}"
                )
            if time.monotonic() > deadline:
                why = _killed(kills, None, path, memory)
                raise BenchError(f"{name} did not serve within {START_S:.0f} s{why}:\n{tail(path)}")
        try:
            yield process
        except Exception as error:
            ended = process.poll()
            # of one that lives on the kernel's counter says nothing: others run here, too
            why = _killed(None if ended is None else kills, ended, path, memory)
            if not why:
                raise
            raise BenchError(f"{name} served{why}:\n{tail(path)}") from error
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """A SIGTERM ends the process as an exception does, so that the servers that it started end, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kvkit(setup: Setup, blend: bool) -> dict[str, Any]:
    if setup.config is not None:
        extra: dict[str, Any] = {"kvkit_config": str(setup.config.absolute())}
    else:
        tiers = {"memory": {"capacity": f"{setup.memory_gib}GiB"}}
        chunk = min(setup.chunk_tokens, BLEND_CHUNK_TOKENS) if blend else setup.chunk_tokens
        extra = {"kvkit": {"chunk_tokens": chunk, "staging": STAGING_BYTES, "tiers": tiers}}
    if blend:  # whatever is asked for: what that takes, and does to answers, is measured
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
    """The port of LMCache's own process, which holds its memory."""
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--shm-name", f"kvkit-bench-{port}"]
    command += ["--l1-size-gb", str(setup.memory_gib), "--chunk-size", str(setup.chunk_tokens)]
    command += ["--supported-transfer-mode", "auto", "--eviction-policy", "LRU"]
    command += ["--no-l1-use-lazy", "--disable-metrics"]
    with serving("lmcache-server", command, environment, setup.folder, lambda: _listens(port)):
        yield port


def healthy(port: int) -> bool:
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
    """One of loopback that nobody listens on, and no connection is given before a server binds it."""
    while True:
        port = random.randrange(22_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _peers() -> str | None:
    """The folder that holds LMCache without being installed."""
    folder = Path(os.environ.get("KVKIT_PEERS", "")) / "lmcache"
    return str(folder) if os.environ.get("KVKIT_PEERS") and folder.is_dir() else None


def _killed(kills: int | None, code: int | None, path: Path, memory: str) -> str:
    """That a process was killed, and what it had been given, in words; empty where nothing says so."""
    why = killed(kills, code, path.read_text(errors="replace"))
    return "" if why is None else f", {why}" + (f" ({memory})" if memory else "")


def tail(path: Path) -> str:
    """Read the end of a log, after what was wrong further up: vLLM ends with what became of that."""
    lines = path.read_text(errors="replace").splitlines()
    wrong = [line for line in lines[:-_TAIL_LINES] if re.search(r"ERROR.*\w(Error|Exception): ", line)]
    return "\n".join([*wrong[-_CAUSES:], *lines[-_TAIL_LINES:]])
