"""InfoFlow KV: the norm of the question's attention, with tokens at their positions in this prompt.

Teng et al., "InfoFlow KV: Information-Flow-Aware KV Recomputation for Long Context" (ICML 2026),
https://arxiv.org/abs/2603.05353. As in the authors' code, attention is averaged over heads, the L2 norm is
over the question's rows, and the mean is over the last two layers. The paper's other half, which reorders the
documents, does not concern selection.

Input: the question's attention in the last two layers. Costs computed rows * all layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View


def scores(view: View) -> NDArray[np.float32]:
    """Return the mean over layers."""
    mean: NDArray[np.float32] = view.seen.mean(0)
    return mean


METHOD = BlendMethod(scores, NeedsQuestion(depth=1.0, last=2, heads="norm", value_norm=False))
