"""QCFuse: the question's attention in critical layers, after it saw a part of the documents.

Yan et al., "QCFuse: Query-Aware Cache Fusion via Compressed View for Efficient RAG Serving",
https://arxiv.org/abs/2606.05875: the question runs over the anchors, a tenth of each document's tokens, and
its attention to all tokens in a few critical layers decides. Two things differ here. The paper ranks anchors
by KVzip when a document is stored, and records here have no room for the ranks: the tokens with the smallest
keys, which attract attention (Devoto et al., https://arxiv.org/abs/2406.11430), are used as anchors. The
paper profiles each model for its critical layers: here these are three layers a little past the middle, as in
the paper's four models.

Input: the question's attention in three layers. Costs computed rows * 0.6 of the layers. The
choice does not need all KV, which saves time; the number of rows does not show it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View


def scores(view: View) -> NDArray[np.float32]:
    """Return the mean over layers."""
    mean: NDArray[np.float32] = view.seen.mean(0)
    return mean


METHOD = BlendMethod(scores, NeedsQuestion(depth=0.6, last=3, heads="mean", value_norm=False, anchors=0.1))
