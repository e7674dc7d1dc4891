"""The tokens that the question attends to most in the first layers: kvkit's own method.

The score is the largest attention of any head, summed over the first layers: only few heads look for the
question's subject. It is weighted by the norm of the value, and corrected for the token's position.

Input: the question's attention in `Selection.layers` layers. Costs computed rows * these layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View, offsets


def scores(view: View) -> NDArray[np.float32]:
    """Return attention summed over layers, corrected `by_place`."""
    return by_place(view.seen.sum(0), view.starts, view.fade)


def by_place(scores: NDArray[np.float32], starts: NDArray[np.int32], fade: int) -> NDArray[np.float32]:
    """Correct the question's attention, `scores` [N], for the positions of tokens.

    The result is `scores` times

        sqrt(N - position) / (1 + offset / fade)

    The numerator removes half (on a logarithmic scale) of attention's preference for nearby tokens. The
    offset is a token's distance from the start of its span; tokens before the first span score almost 0.

    Args:
        starts: int [spans], starts of the spans, ascending.
        fade: as in `Selection`.
    """
    distance = np.arange(len(scores), 0, -1)
    fading = 1 + offsets(starts, len(scores)) / fade if fade else 1.0
    corrected: NDArray[np.float32] = (scores * np.sqrt(distance) / fading).astype(np.float32)
    return corrected


METHOD = BlendMethod(scores, NeedsQuestion())
