"""Contexts of a sample's documents: the texts in which their KV is computed before the prompt is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvkit.lab.quality.tasks.sample import Sample

Context = Literal["prefix", "alone", "related", "anchored"]
"""prefix    behind the system prompt, as vLLM stores documents
alone     behind what the tokenizer puts before every text, often `<bos>`
related   behind the system prompt and the `RELATED` most similar of the prompt's other documents, as in
          FusionRAG (https://arxiv.org/abs/2601.12904), whose retrieval finds them in its corpus
anchored  the mean of `ANCHORS` earlier prompts with the same documents in other orders, as in KVCOMM
          (https://arxiv.org/abs/2510.12872), which weighs the prompts by their likeness"""
RELATED = 2
ANCHORS = 2


@dataclass(frozen=True, slots=True)
class ContextText:
    """A text to compute, and the positions in it at which documents begin, by their index."""

    tokens: NDArray[np.int32]
    starts: Mapping[int, int]


def context_texts(
    sample: Sample, lead: NDArray[np.int32], system: NDArray[np.int32], context: Context
) -> list[ContextText]:
    """Return the texts to compute for the documents of a sample; the KV of equal documents is averaged.

    Args:
        lead: tokens that the tokenizer puts before every text.
        system: the system prompt, without `lead`.
    """
    documents = [sample.prompt[start:stop] for start, stop in sample.documents]
    prefix = lead if context == "alone" else np.concatenate([lead, system])
    if context == "anchored":
        steps = {round(step * len(documents) / (ANCHORS + 1)) for step in range(1, ANCHORS + 1)} - {0}
        return [_in_order(prefix, documents, np.roll(range(len(documents)), step)) for step in sorted(steps)]
    texts = []
    for i, document in enumerate(documents):
        related = _related(documents, i) if context == "related" else []
        before = np.concatenate([prefix, *(documents[j] for j in related)])
        texts.append(ContextText(np.concatenate([before, document]), {i: len(before)}))
    return texts


def _in_order(
    prefix: NDArray[np.int32], documents: list[NDArray[np.int32]], order: NDArray[np.int64]
) -> ContextText:
    lengths = [len(prefix), *(len(documents[i]) for i in order)]
    starts = dict(zip(order.tolist(), np.cumsum(lengths).tolist(), strict=False))
    return ContextText(np.concatenate([prefix, *(documents[i] for i in order)]), starts)


def _related(documents: list[NDArray[np.int32]], i: int) -> list[int]:
    """Return the documents that share most tokens with document `i`, the most similar last."""
    tokens = [set(document.tolist()) for document in documents]
    shares = {
        j: len(tokens[i] & tokens[j]) / len(tokens[i] | tokens[j]) for j in range(len(documents)) if j != i
    }
    return sorted(shares, key=lambda j: (shares[j], j))[-RELATED:]
