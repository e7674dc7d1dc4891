"""What a blending method is: what it needs to see, and a pure function from that to scores.

A method decides which reused tokens are computed again. It says what it needs to see; whoever runs the model
shows it that, takes the cost out of the selection's budget, and chooses the tokens with the highest scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NeedsQuestion:
    """The question's attention, while the computed rows run through the first layers over the KV as found.

    Shown: float32 [layers, N], what each token is paid. Costs computed rows * layers run through, which are
    fewer than asked for where that would take more than half of the budget.

    Args:
        depth: the share of the model's layers to run through; None: as many layers as `Selection.layers`.
        last: of these layers the last so many are shown; None: all.
        heads: how a layer's heads and the question's rows are brought together. `max`: summed over rows, of
            the head that pays most; `mean`: summed over rows, the mean over heads; `norm`: the mean over
            heads, then the root of the sum of squares over rows; `each`: summed over rows, and shown is
            [layers, heads, N].
        value_norm: weigh attention by the norm of the value; None: as `Selection.value_norm` says.
        anchors: the rows see this share of every span's tokens, those with the smallest keys, and its first
            four; what they pay is of all tokens nevertheless. 1: they see all.
    """

    depth: float | None = None
    last: int | None = None
    heads: Literal["max", "mean", "norm", "each"] = "max"
    value_norm: bool | None = None
    anchors: float = 1.0

    def __str__(self) -> str:
        parts = (("heads='norm'", self.heads == "norm"), ("heads='each'", self.heads == "each"))
        kinds = [name for name, is_so in (*parts, ("anchors", self.anchors < 1)) if is_so]
        return "the question's attention" + (f" with {' and '.join(kinds)}" if kinds else "")


@dataclass(frozen=True, slots=True)
class NeedsDeviation:
    """How much a layer's K and V change when the layers before it are computed.

    Shown: float32 [2, N], of K and of V the squared distance over heads and channels; 0 where nothing was
    computed. Costs every row that is not exact in layer 0; then layer 1 is shown.

    Args:
        gradual: the choice is made in every layer from 1 on, among the rows still left: from a third more
            rows than the mean to a third fewer.
    """

    gradual: bool = False

    def __str__(self) -> str:
        return "deviations of a layer's K and V"


@dataclass(frozen=True, slots=True)
class NeedsAuxiliary:
    """What the question pays each token in the last layer of another, smaller model that reads all of it.

    Shown: float32 [1, N], the mean over heads and rows. Costs no rows: they are the other model's.
    """

    def __str__(self) -> str:
        return "an auxiliary model"


@dataclass(frozen=True, slots=True)
class NeedsRecompute:
    """What the question pays each token in every layer of a full prefill, and how wrong its value is.

    Shown: float32 [2, layers, N]: attention, the mean over heads, summed over rows; the norm over heads and
    channels of what changes in V. Costs nothing, and cannot be had for that: it is for comparisons.
    """

    def __str__(self) -> str:
        return "full recompute"


Needs = NeedsQuestion | NeedsDeviation | NeedsAuxiliary | NeedsRecompute


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A prompt of N tokens as a method sees it.

    Args:
        starts: int [spans], ascending, where spans of reused tokens begin.
        free: bool [N], tokens that can be chosen.
        seen: float32, as the method's `needs` has it; [0, N] where that is nothing.
        fade: `Selection.fade`.
    """

    starts: NDArray[np.int32]
    free: NDArray[np.bool_]
    seen: NDArray[np.float32]
    fade: int = 0

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 [N]: how far each token is from its span's start; huge before the first."""
        return offsets(self.starts, len(self.free))


@dataclass(frozen=True, slots=True)
class BlendMethod:
    """How tokens to compute again are chosen.

    Args:
        scores: float [N]; the highest of those that are free are chosen, equal ones by position, and a token
            of score -inf is not. Must be pure.
        needs: what it is shown; None: nothing but where spans are.
    """

    scores: Callable[[View], NDArray[np.floating]]
    needs: Needs | None = None


def offsets(starts: NDArray[np.int32], tokens: int) -> NDArray[np.int64]:
    """As `View.offsets`, of so many tokens."""
    positions = np.arange(tokens)
    span = np.searchsorted(starts, positions, side="right") - 1  # -1 before the first
    origin = starts[span] if len(starts) else np.zeros(tokens, np.int64)
    return np.where(span >= 0, positions - origin, np.iinfo(np.int64).max)
