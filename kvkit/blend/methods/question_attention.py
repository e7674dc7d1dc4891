"""What the question attends to most: kvkit's own method, the default.

The attention of the head that pays most, summed over the first layers: few heads look for what the question
is about. It is weighed by the norm of the value that is attended to, and corrected for where a token stands.

Sees: the question's attention in `Selection.layers` layers. Costs computed rows * these layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View, offsets


def scores(view: View) -> NDArray[np.float32]:
    """Attention summed over layers, `by_place`."""
    return by_place(view.seen.sum(0), view.starts, view.fade)


def by_place(scores: NDArray[np.float32], starts: NDArray[np.int32], fade: int) -> NDArray[np.float32]:
    """What a question attends to, [N], corrected for where tokens stand: `scores` times

        sqrt(N - position) / (1 + offset / fade)

    The numerator takes back half (on a logarithmic scale) of attention's preference for what is near. The
    offset is that from the start of a token's span; what stands before the first span gets nothing.

    Args:
        starts: int [spans], ascending, where spans begin.
        fade: as in `Selection`.
    """
    distance = np.arange(len(scores), 0, -1)
    fading = 1 + offsets(starts, len(scores)) / fade if fade else 1.0
    placed: NDArray[np.float32] = (scores * np.sqrt(distance) / fading).astype(np.float32)
    return placed


METHOD = BlendMethod(scores, NeedsQuestion())
