"""The first tokens of every document, which lost most: EPIC.

Hu et al., "EPIC: Efficient Position-Independent Caching for Serving Large Language Models",
https://arxiv.org/abs/2410.15332: each document was computed as the start of a text, whose first tokens draw
attention to themselves. The paper takes a fixed number of each, up to 32; here the budget says how many.

Sees: nothing. Costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, View


def scores(view: View) -> NDArray[np.float64]:
    """The nearer to its span's start, the higher."""
    return -view.offsets.astype(np.float64)


METHOD = BlendMethod(scores)
