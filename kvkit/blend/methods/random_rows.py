"""Random tokens, as a baseline: the same choice for prompts with equally many reused tokens.

Input: none. Costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, View


def scores(view: View) -> NDArray[np.float64]:
    """Rank the reused tokens in random order; the seed is the number of reused tokens."""
    reused = np.flatnonzero(view.free)
    ranks = np.zeros(len(view.free))
    ranks[default_rng(len(reused)).permutation(reused)] = -np.arange(len(reused))
    return ranks


METHOD = BlendMethod(scores)
