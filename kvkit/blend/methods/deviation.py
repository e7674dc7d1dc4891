"""Largest changes of K or V in layer 1: CacheBlend with one check, as in its code and in LMCache.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion",
https://arxiv.org/abs/2405.16444. LMCache compares keys, the paper's code compares values. The method
`cacheblend` follows the paper's text.

Input: deviations of layer 1. Costs layer 0 of every row.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsDeviation, View


def scores(of: int, view: View) -> NDArray[np.float32]:
    """Return the deviation of K (0) or V (1)."""
    changed: NDArray[np.float32] = view.seen[of]
    return changed


BY_K, BY_V = (BlendMethod(partial(scores, of), NeedsDeviation()) for of in (0, 1))
