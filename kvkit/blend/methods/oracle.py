"""Oracles: the tokens that the question attends to most in a full prefill, by attention or by error.

No method can know them in advance. `oracle` is an upper bound for methods that use the question's attention:
none covers more of its mass. It ignores how wrong a token's KV is. `oracle_change` does not: it multiplies
each layer's attention by the norm of the change in V.

Input: a full recompute, which is not counted; for `kvkit bench blend` alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsRecompute, View


def scores(view: View) -> NDArray[np.float32]:
    """Return the attention's mass over all layers."""
    total: NDArray[np.float32] = view.seen[0].sum(0)
    return total


def changes(view: View) -> NDArray[np.float32]:
    """Return the attention's mass times the change of V, summed over all layers."""
    total: NDArray[np.float32] = view.seen.prod(0).sum(0)
    return total


METHOD, CHANGE = (BlendMethod(function, NeedsRecompute()) for function in (scores, changes))
