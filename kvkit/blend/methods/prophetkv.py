"""ProphetKV: the question's attention, averaged over all heads and layers. The default.

Wang et al., "ProphetKV: User-Query-Driven Selective Recomputation for Efficient KV Cache Reuse in
Retrieval-Augmented Generation" (ICML 2026), https://arxiv.org/abs/2602.02579: the question runs over the KV
as it was found, the attention of all layers is fused to one set of tokens, and these are recomputed in all
layers. The paper's fusion function was not available: this file uses the mean.

Input: the question's attention in every layer. Costs computed rows * all layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View


def scores(view: View) -> NDArray[np.float32]:
    """Return the mean over layers."""
    mean: NDArray[np.float32] = view.seen.mean(0)
    return mean


METHOD = BlendMethod(scores, NeedsQuestion(depth=1.0, heads="mean", value_norm=False))
