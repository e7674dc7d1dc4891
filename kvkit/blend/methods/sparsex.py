"""SparseX: the question's attention in the first layers, through which every row runs.

Zhang et al., "SparseX: Efficient Segment-Level KV Cache Sharing for Interleaved LLM Serving",
https://arxiv.org/abs/2606.01751: early layers are computed in full, so that their KV is exact and the
question's attention a stable signal; later layers run the tokens that it selects. The paper sets the layer of
the change per model: here it is what half of the budget has room for, at most a quarter of the layers.

Input: the question's attention in these layers. Costs every reused row * these layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View


def scores(view: View) -> NDArray[np.float32]:
    """Return the mean over layers."""
    mean: NDArray[np.float32] = view.seen.mean(0)
    return mean


METHOD = BlendMethod(scores, NeedsQuestion(depth=0.25, heads="mean", value_norm=False, dense=True))
