"""Blending methods: a method is a statement of the input that it needs, and a pure function to scores.

A method decides which reused tokens are recomputed. It states the input that it needs. The code that runs the
model provides the input, charges its cost to the selection's budget, and chooses the tokens with the highest
scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NeedsQuestion:
    """The question's attention, from the computed rows in the first layers over the KV as found.

    Input: float32 [layers, N], the attention to each token. Costs computed rows * layers run; fewer layers
    run if this would take more than half of the budget.

    Args:
        depth: share of the model's layers to run; None: as many layers as `Selection.layers`.
        last: number of these layers in the input, the last ones; None: all.
        heads: reduction over a layer's heads and the question's rows. `max`: sum over rows, maximum over
            heads; `mean`: sum over rows, mean over heads; `norm`: mean over heads, then root of the sum of
            squares over rows; `each`: sum over rows, so the input is [layers, heads, N].
        value_norm: True: weight attention by the norm of the value; None: as in `Selection.value_norm`.
        anchors: share of every span's tokens that the rows attend to, those with the smallest keys; its
            first four are always among them. The input still has the attention to all tokens. 1: all.
        dense: True: every row that is not exact runs through these layers, not the computed rows alone, and
            the chosen rows go on from there. Costs all of these rows * layers run.
    """

    depth: float | None = None
    last: int | None = None
    heads: Literal["max", "mean", "norm", "each"] = "max"
    value_norm: bool | None = None
    anchors: float = 1.0
    dense: bool = False

    def __str__(self) -> str:
        parts = (("heads='norm'", self.heads == "norm"), ("heads='each'", self.heads == "each"))
        more = ("anchors", self.anchors < 1), ("dense layers", self.dense)
        kinds = [name for name, is_so in (*parts, *more) if is_so]
        return "the question's attention" + (f" with {' and '.join(kinds)}" if kinds else "")


@dataclass(frozen=True, slots=True)
class NeedsDeviation:
    """The change of a layer's K and V when the layers before it are computed.

    Input: float32 [2, N], squared distances of K and of V over heads and channels; 0 for tokens that were not
    computed. Costs layer 0 of every row that is not exact; the input is then of layer 1.

    Args:
        gradual: True: choose in every layer from 1 on, among the remaining rows: from a third more rows than
            the mean to a third fewer.
    """

    gradual: bool = False

    def __str__(self) -> str:
        return "deviations of a layer's K and V"


@dataclass(frozen=True, slots=True)
class NeedsAuxiliary:
    """The question's attention in the last layer of a smaller model that reads the whole prompt.

    Input: float32 [1, N], the mean over heads and rows. Costs no rows: the other model computes them.
    """

    def __str__(self) -> str:
        return "an auxiliary model"


@dataclass(frozen=True, slots=True)
class NeedsRecompute:
    """The question's attention in every layer of a full prefill, and the error of each token's value.

    Input: float32 [2, layers, N]: attention, mean over heads and sum over rows; norm over heads and channels
    of the change in V. Its cost is not counted, so it serves for comparisons only.
    """

    def __str__(self) -> str:
        return "full recompute"


Needs = NeedsQuestion | NeedsDeviation | NeedsAuxiliary | NeedsRecompute


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The input of a method for a prompt of N tokens.

    Args:
        starts: int [spans], starts of the spans with reused tokens, ascending.
        free: bool [N], tokens that can be chosen.
        seen: float32, the input that the method's `needs` describe; [0, N] if it needs none.
        fade: `Selection.fade`.
    """

    starts: NDArray[np.int32]
    free: NDArray[np.bool_]
    seen: NDArray[np.float32]
    fade: int = 0

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Distance of each token from its span's start, int64 [N]; huge before the first span."""
        return offsets(self.starts, len(self.free))


@dataclass(frozen=True, slots=True)
class BlendMethod:
    """A method to choose the tokens to recompute.

    Args:
        scores: pure function that returns float [N]; free tokens with the highest scores are chosen, equal
            scores by position. Tokens with -inf are chosen only among the first of a span.
        needs: input that it needs; None: only the positions of spans.
    """

    scores: Callable[[View], NDArray[np.floating]]
    needs: Needs | None = None


def offsets(starts: NDArray[np.int32], tokens: int) -> NDArray[np.int64]:
    """Return the distance of each token from its span's start, as `View.offsets`, for `tokens` tokens."""
    positions = np.arange(tokens)
    span = np.searchsorted(starts, positions, side="right") - 1  # -1 before the first
    origin = starts[span] if len(starts) else np.zeros(tokens, np.int64)
    return np.where(span >= 0, positions - origin, np.iinfo(np.int64).max)
