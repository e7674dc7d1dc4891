"""CacheClip: windows of tokens that a small auxiliary model's question attends to in its last layer.

Yang et al., "CacheClip: Accelerating RAG with Effective KV Cache Reuse", https://arxiv.org/abs/2510.10129: a
small model's last layer attends much as the large one's, and runs on processors that idle. Tokens are chosen
by windows, so that what stands together is computed together; taken are windows of 8 tokens that do not
overlap. Its shared prefixes are `precompute(document, prefix)` here; it fine-tunes the auxiliary.

Sees: an auxiliary model's attention. Costs no rows: the auxiliary reads the whole prompt, elsewhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsAuxiliary, View

WINDOW = 8


def scores(view: View) -> NDArray[np.float64]:
    """Of each token the mean over its window's free ones; windows begin with spans."""
    window = np.cumsum(view.offsets % WINDOW == 0)
    paid = np.bincount(window, view.seen.mean(0) * view.free)
    mean: NDArray[np.float64] = (paid / np.maximum(np.bincount(window, view.free), 1))[window]
    return mean


METHOD = BlendMethod(scores, NeedsAuxiliary())
