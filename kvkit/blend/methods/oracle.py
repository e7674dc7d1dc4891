"""The tokens that the question attends to most when all is computed, and of these the ones that are wrong.

What no method can know. `oracle` is a roof for methods that go by the question's attention: none covers more
of its mass. It says nothing of how wrong a token's KV is. `oracle_change` does: each layer's attention times
the norm of what changes in V.

Sees: full recompute. Costs nothing, and is for `kvkit bench blend` alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsRecompute, View


def scores(view: View) -> NDArray[np.float32]:
    """The attention's mass over layers."""
    total: NDArray[np.float32] = view.seen[0].sum(0)
    return total


def changes(view: View) -> NDArray[np.float32]:
    """The attention's mass times the change of what is attended to, over layers."""
    total: NDArray[np.float32] = view.seen.prod(0).sum(0)
    return total


METHOD, CHANGE = (BlendMethod(function, NeedsRecompute()) for function in (scores, changes))
