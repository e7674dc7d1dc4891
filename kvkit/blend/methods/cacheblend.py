"""CacheBlend as in its paper: the deviation of K and V, with gradual filtering over the layers.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion",
https://arxiv.org/abs/2405.16444: rows with the largest KV deviation in one layer are likely to have it in the
next layer too, so each layer keeps somewhat fewer rows than the layer before. The paper does not state how
many: here the number of rows decreases linearly over the layers, from 4/3 to 2/3 of its mean. The squared
distances of K and V are added.

Input: deviations of every layer from 1 on, of the remaining rows. Costs layer 0 of every row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsDeviation, View


def scores(view: View) -> NDArray[np.float32]:
    """Return the deviation of K and V together."""
    total: NDArray[np.float32] = view.seen.sum(0)
    return total


METHOD = BlendMethod(scores, NeedsDeviation(gradual=True))
