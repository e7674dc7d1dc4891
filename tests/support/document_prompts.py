"""Prompts whose documents were computed elsewhere, for the tests of blending in vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any

from vllm_engine import Engine, Settings, connector, on_disk

ANSWER = 8
"""Tokens of answers that are compared with plain vLLM's."""


@dataclass(frozen=True, slots=True)
class DocumentPrompt:
    """A prompt: a prefix that its documents were computed behind, the documents, a question.

    Args:
        tokens: all of it.
        prefix: how many tokens the prefix has.
        documents: (start, stop) of each.
    """

    tokens: list[int]
    prefix: int
    documents: list[tuple[int, int]]

    @staticmethod
    def of(prefix: list[int], documents: Sequence[list[int]], question: list[int]) -> DocumentPrompt:
        ends = list(itertools.accumulate((len(one) for one in documents), initial=len(prefix)))
        tokens = [*prefix, *itertools.chain(*documents), *question]
        return DocumentPrompt(tokens, len(prefix), list(itertools.pairwise(ends)))

    def blend(self, ratio: float = 0.15, **more: Any) -> Settings:
        """What a request asks, so that all documents are blended."""
        return {"documents": self.documents, "prefix": self.prefix, "ratio": ratio, **more}

    def alone(self) -> list[list[int]]:
        """What is asked to compute the documents."""
        prefix = self.tokens[: self.prefix]
        return [[*prefix, *self.tokens[start:stop]] for start, stop in self.documents]


def blending(folder: Path, chunk: int, drift: float = 0.5, **more: Any) -> Settings:
    """A connector that blends models whatever the gate says of them, with a folder as its only tier."""
    blend = {"unchecked": True, "drift": drift}
    return connector({"chunk_tokens": chunk} | on_disk(folder), blend=blend, **more)


def precompute(engine: Engine, prompts: Sequence[DocumentPrompt], **sampling: Any) -> None:
    """Have the tiers hold the documents, as ordinary requests do; vLLM forgets them."""
    alone = {tuple(text): text for one in prompts for text in one.alone()}
    engine.generate(list(alone.values()), tokens=1, **sampling)
    engine.flush()
    engine.do("reset", False)


def blended(
    engine: Engine, prompts: Sequence[DocumentPrompt], tokens: int, ratio: float, **sampling: Any
) -> list[Settings]:
    """The engine's answers to prompts that are blended."""
    asked = [one.blend(ratio) for one in prompts]
    return engine.generate([one.tokens for one in prompts], tokens, asked, **sampling)


def measure(
    engine: Engine,
    prompts: Sequence[DocumentPrompt],
    kv: Path,
    options: Settings,
    logprobs: int,
    rounds: bool = False,
    drift: float = 0.5,
) -> Settings:
    """What blending makes of a model's answers, against those of plain vLLM.

    Args:
        kv: folder of the tier.
        options: of the engine, its model among them.
        logprobs: how many tokens' log-probabilities count.
        rounds: see `Architecture`: what is computed in another order may have other tokens.
        drift: by how much reused tokens are corrected.

    Returns:
        `kl_naive`, `kl`, `kl_full`: mean KL divergence of the first token's distribution, with nothing, 15 %
        or everything computed again; `difference`: largest of any token's log-probability in the last of
        these; `difference_exact`: the same of requests that ask for no blending, after all of that. Both
        count while tokens are the same.

    Raises:
        AssertionError: it was refused, a log probability is not finite, or the last two have other tokens
            than plain vLLM though nothing is rounded.
    """
    texts = [one.tokens for one in prompts]
    options = options | {"max_logprobs": logprobs, "enable_prefix_caching": True}
    engine.open(None, **options)
    expected = engine.generate(texts, ANSWER, logprobs=logprobs)
    engine.open(blending(kv, options["block_size"], drift), **options)
    precompute(engine, prompts)
    divergences = {}
    for ratio in (0.0, 0.15):
        found = blended(engine, prompts, 1, ratio, logprobs=logprobs)
        told = [one["handoff"]["blend"] for one in found]
        assert all(one["blended"] > 0 for one in told), told
        assert all(isfinite(value) for one in found for value in one["likely"][0].values())
        divergences[ratio] = sum(map(divergence, expected, found)) / len(prompts)
    every = blended(engine, prompts, ANSWER, 1.0, logprobs=logprobs)
    told = [one["handoff"]["blend"] for one in every]
    assert all(one["recomputed"] > one["blended"] == 0 for one in told), told
    exact = engine.generate(texts, ANSWER)
    for answers in (every, exact):
        assert rounds or [one["tokens"] for one in answers] == [one["tokens"] for one in expected]
    return {
        "kl_naive": divergences[0.0],
        "kl": divergences[0.15],
        "kl_full": sum(map(divergence, expected, every)) / len(prompts),
        "difference": max(map(_difference, expected, every)),
        "difference_exact": max(map(_difference, expected, exact)),
    }


def divergence(full: Settings, found: Settings) -> float:
    """KL of `first` of two answers, in nats, over the tokens that both have."""
    p, q = full["likely"][0], found["likely"][0]
    return sum(exp(p[token]) * (p[token] - q[token]) for token in p.keys() & q.keys())


def _difference(one: Settings, other: Settings) -> float:
    same = itertools.takewhile(lambda i: one["tokens"][i] == other["tokens"][i], range(len(one["tokens"])))
    return max((abs(one["logprobs"][i] - other["logprobs"][i]) for i in same), default=0.0)
