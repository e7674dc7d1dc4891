"""CacheBlend as its paper has it: the deviation of K and V, with gradual filtering over the layers.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion",
https://arxiv.org/abs/2405.16444: rows whose KV deviates most in one layer are likely to in the next, so each
layer keeps somewhat fewer of the rows of the one before. The paper does not say how many each keeps: here it
is a straight line from a third more than the mean to a third fewer. K and V are added as squared distances.

Sees: deviations of every layer from 1 on, of the rows that are left. Costs layer 0 of every row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsDeviation, View


def scores(view: View) -> NDArray[np.float32]:
    """The deviation of K and V together."""
    total: NDArray[np.float32] = view.seen.sum(0)
    return total


METHOD = BlendMethod(scores, NeedsDeviation(gradual=True))
