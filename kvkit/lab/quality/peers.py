"""Alternatives to recomputation of tokens, as baselines: fewer documents, and attention that is rescaled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvkit.lab.quality.tasks.sample import Sample

APE_TEMPERATURE, APE_SCALE = 0.9, 0.9
_APE = "kvkit_ape"


def fewer_documents(sample: Sample, share: float) -> Sample:
    """Return the sample with a share of its documents, those with most of the question's rare tokens.

    A retriever that returns fewer documents, which are then computed in full, saves rows as blending does. At
    least one document is kept; their order stays.
    """
    tokens = [set(sample.prompt[start:stop].tolist()) for start, stop in sample.documents]
    question = set(sample.prompt[sample.documents[-1][1] :].tolist())
    counts = {token: sum(token in document for document in tokens) for token in question}
    scores = [
        sum(math.log(1 + len(tokens) / counts[token]) for token in question & document) for document in tokens
    ]
    count = max(1, round(share * len(tokens)))
    kept = sorted(sorted(range(len(tokens)), key=lambda i: -scores[i])[:count])
    start, stop = sample.documents[0][0], sample.documents[-1][1]
    documents = [sample.prompt[slice(*sample.documents[i])] for i in kept]
    ends = np.cumsum([start, *map(len, documents)]).tolist()
    prompt = np.concatenate([sample.prompt[:start], *documents, sample.prompt[stop:]])
    return Sample(prompt, tuple(itertools.pairwise(ends)), sample.continuation, sample.answer)


@contextmanager
def adaptive_parallel_encoding(model: Any, start: int, stop: int) -> Iterator[None]:
    """Attend to the keys from `start` to `stop` as APE does, in a Hugging Face model, until the context ends.

    Yang et al., "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding" (ICLR
    2025), https://arxiv.org/abs/2502.05431: scores of the documents' keys are divided by a temperature, and
    the logarithm of their sum is multiplied by a scale. The paper tunes both for each task; here they are
    constants. It also gives all documents the same positions, and here they keep those of the prompt.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * scaling
        scores[..., start:stop] /= APE_TEMPERATURE
        if attention_mask is not None:
            scores += attention_mask
        total = scores[..., start:stop].logsumexp(-1, keepdim=True)
        is_seen = total > torch.finfo(scores.dtype).min / 2  # else all are masked
        scores[..., start:stop] += torch.where(is_seen, (APE_SCALE - 1) * total, 0.0)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register(_APE, attention)
    AttentionMaskInterface.register(_APE, eager_mask)
    model.set_attn_implementation(_APE)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
