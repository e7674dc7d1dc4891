"""EPIC: the first tokens of every document, which lost most context.

Hu et al., "EPIC: Efficient Position-Independent Caching for Serving Large Language Models",
https://arxiv.org/abs/2410.15332: each document was computed as the start of a text, and the first tokens of a
text draw attention to themselves. The paper takes a fixed number per document, up to 32; here the budget
decides the number.

Input: none. Costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, View


def scores(view: View) -> NDArray[np.float64]:
    """Score tokens higher the nearer they are to the start of their span."""
    return -view.offsets.astype(np.float64)


METHOD = BlendMethod(scores)
