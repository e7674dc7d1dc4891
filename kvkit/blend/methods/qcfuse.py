"""QCFuse: the attention of a question that has seen a compressed view of the documents, in critical layers.

Yan et al., "QCFuse: Query-Aware Cache Fusion via Compressed View for Efficient RAG Serving",
https://arxiv.org/abs/2606.05875: the question runs over a tenth of each document's tokens, its anchors, and
its attention to all tokens in a few critical layers decides. Two things are taken otherwise. Its anchors are
ranked by KVzip when a document is stored, for which records here have no room: taken are the tokens with the
smallest keys, to which attention tends (Devoto et al., https://arxiv.org/abs/2406.11430). Its critical layers
are profiled per model: taken are three a little past the middle, where those of its four models are.

Sees: the question's attention in three layers. Costs computed rows * 0.6 of the layers; what it saves, KV
that need not be there before the choice, is not counted in rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import BlendMethod, NeedsQuestion, View


def scores(view: View) -> NDArray[np.float32]:
    """The mean over layers."""
    mean: NDArray[np.float32] = view.seen.mean(0)
    return mean


METHOD = BlendMethod(scores, NeedsQuestion(depth=0.6, last=3, heads="mean", value_norm=False, anchors=0.1))
