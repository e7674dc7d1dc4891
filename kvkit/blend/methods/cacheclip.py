"""CacheClip: windows of tokens to which the question attends in a small auxiliary model's last layer.

Yang et al., "CacheClip: Accelerating RAG with Effective KV Cache Reuse", https://arxiv.org/abs/2510.10129:
attention in a small model's last layer resembles that of the large model, and runs on idle processors. Tokens
are chosen by window, so that neighbours are recomputed together; here windows have 8 tokens and do not
overlap. The paper's shared prefixes are `precompute(document, prefix)` here. The paper also fine-tunes the
auxiliary model.

Input: an auxiliary model's attention. Costs no rows of the blended model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsAuxiliary, View

WINDOW = 8


def scores(view: View) -> NDArray[np.float64]:
    """Score each token by its window's mean over tokens that may be chosen; spans begin with a new window."""
    window = np.cumsum(view.offsets % WINDOW == 0)
    attention = np.bincount(window, view.seen.mean(0) * view.free)
    mean: NDArray[np.float64] = (attention / np.maximum(np.bincount(window, view.free), 1))[window]
    return mean


METHOD = BlendMethod(scores, NeedsAuxiliary())
