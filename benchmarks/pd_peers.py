"""From a prompt at the prefill engine to the first token of the decode engine: kvkit beside NixlConnector.

    VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.pd_peers --json benchmarks/results/pd-<machine>.json

Two pairs of vLLM servers with the same model, one after the other in every round, with the same prompts: all
of them wait while one of them works. A prompt goes to the prefill engine for one token, and with the
parameters of its answer to the decode engine for one token. The decode engine's own prefill is measured, too:
it gets the same prompt without parameters, after other prompts have taken its place.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from kvkit.adapters import smollm2
from kvkit.bench.systems import ended_by_sigterm, serving
from kvkit.bench.workloads import random_prefill
from kvkit.environment import describe

BLOCK = 128
TIMEOUT_S = 300.0
Pair = tuple[str, str]


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def server(name: str, transfer: dict[str, Any], folder: Path) -> Iterator[str]:
    """The URL of a vLLM server with this `kv_transfer_config`."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2.fetch())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}

    def healthy() -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (URLError, OSError):
            return False

    with serving(name, command, os.environ | side, folder, healthy):
        yield f"http://127.0.0.1:{port}"


def kvkit_configs(folder: Path) -> list[dict[str, Any]]:
    """Of a prefill and a decode engine over shared memory."""
    sizes = {"chunk_tokens": 2 * BLOCK, "staging": "256MiB"}
    receives = {"role": "decode", "listen": [f"unix://{folder}/handoff/socket"], "buffer": "512MiB"}
    return [
        {
            "kv_connector": "KVKitConnector",
            "kv_connector_module_path": "kvkit.adapters.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvkit": sizes | {"handoff": handoff}},
        }
        for handoff in ({"role": "prefill"}, receives)
    ]


def ask(url: str, prompt: str, params: dict[str, Any] | None) -> tuple[float, dict[str, Any]]:
    """Seconds that one token takes, and the answer."""
    body = {"model": str(smollm2.fetch()), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    if params is not None:
        body["kv_transfer_params"] = params
    request = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urlopen(request, timeout=TIMEOUT_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    return time.perf_counter() - began, answer


def hand_off(pair: Pair, prompt: str, address: str | None) -> dict[str, float]:
    """One prompt over both engines, and by the decode engine alone."""
    prefill, decode = pair
    sends = {"do_remote_decode": True, "do_remote_prefill": False}
    first_s, first = ask(prefill, prompt, sends | ({"handoff": address} if address else {}))
    second_s, second = ask(decode, prompt, first["kv_transfer_params"])
    assert first["choices"][0]["text"] == second["choices"][0]["text"], (first, second)
    return {"prefill_s": first_s, "decode_s": second_s}


def measure(rounds: int, words: int, folder: Path) -> dict[str, Any]:
    """Every round one prompt of `words` words over each pair, the first of them as a warm-up."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    systems = {"kvkit": kvkit_configs(folder), "nixl": [nixl, nixl]}
    address = f"unix://{folder}/handoff/socket"
    with ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        pairs: dict[str, Pair] = {}
        for system, (prefill, decode) in systems.items():
            urls = [
                stack.enter_context(server(f"{system}-{role}", config, folder))
                for role, config in (("prefill", prefill), ("decode", decode))
            ]
            pairs[system] = urls[0], urls[1]
        found: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
        alone: list[float] = []
        for number in range(-2, rounds):
            prompts = [request.text for request in random_prefill(number + 2, 3, words)]
            for system in systems if number % 2 else reversed(systems):
                prompt = prompts[list(systems).index(system)]
                times = hand_off(pairs[system], prompt, address if system == "kvkit" else None)
                if number >= 0:
                    found[system].append(times)
            alone_s, _ = ask(pairs["kvkit"][1], prompts[2], None)
            if number >= 0:
                alone.append(alone_s)
        hits = {system: counted(pair[1]) for system, pair in pairs.items()}
    spread = {
        system: {
            key: {"median": statistics.median(t[key] for t in times), "min": min(t[key] for t in times)}
            for key in ("prefill_s", "decode_s")
        }
        for system, times in found.items()
    }
    return {
        "rounds": rounds,
        "words": words,
        "decode_alone_s": {"median": statistics.median(alone), "min": min(alone)},
        "systems": spread,
        "hit_tokens_of_decode": hits,
        "each": found,
    }


def counted(url: str) -> float:
    """Tokens that a decode engine did not compute."""
    with urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as reply:
        text = reply.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--json", type=Path, default=Path("pd.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvkit-pd-") as folder:
        found = measure(given.rounds, given.words, Path(folder))
    command = f"python -m benchmarks.pd_peers --rounds {given.rounds} --words {given.words}"
    given.json.write_text(json.dumps(describe() | {"command": command} | found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "each"}, indent=1))


if __name__ == "__main__":
    main()
