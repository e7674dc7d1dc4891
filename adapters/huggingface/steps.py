"""Steps of a Hugging Face model over its cache."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.huggingface.growing import GrowingCache


def forward(model: Any, ids: TokenIds, kv: Any) -> torch.Tensor:
    """Compute token ids, int32 [T], after those in `kv`; return the last logits [V]. Mutates `kv`."""
    out = model(input_ids=batch_of(model, ids), past_key_values=kv, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def extend(model: Any, ids: TokenIds, kv: GrowingCache) -> torch.Tensor:
    """Compute like `forward`, in steps that end where a model's states are kept. Mutates `kv`."""
    for start, stop in itertools.pairwise([0, *kv.step_ends(len(ids))]):
        logits = forward(model, ids[start:stop], kv)
        kv.save_states()
    return logits


def decode(
    model: Any, logits: torch.Tensor, kv: GrowingCache, max_new_tokens: int, stop: Collection[int]
) -> Iterator[int]:
    """Yield greedy token ids after a prompt's `logits` [V], until one of `stop`. Mutates `kv`."""
    for count in range(1, max_new_tokens + 1):
        token = int(logits.argmax())
        yield token
        if token in stop or count == max_new_tokens:
            return
        logits = extend(model, np.array([token], np.int32), kv)


def batch_of(model: Any, ids: TokenIds) -> torch.Tensor:
    """Return token ids as a model expects them, int64 [1, T] on its device."""
    return torch.from_numpy(ids.astype(np.int64))[None].to(next(model.parameters()).device)
