"""What a layer's attention is made with: how scores come of products, and by how much rows are turned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvkit.format.rope import Rope
from kvkit.kernels.checks import LaunchError


@dataclass(frozen=True, slots=True)
class Scoring:
    """How keys are scored: scale * q . k, or softcap * tanh(that / softcap).

    Args:
        scale: such as D ** -0.5; not negative.
        window: of a sliding window, in tokens, itself included; None: every key before the row.
        softcap: as in Gemma 2; None: none.

    Raises:
        LaunchError: a number is out of range.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.scale < math.inf:
            raise LaunchError(f"scale={self.scale}: want a finite number, 0 or above")
        if self.window is not None and self.window < 1:
            raise LaunchError(f"window={self.window}: want at least 1, or None")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise LaunchError(f"softcap={self.softcap}: want a finite number above 0, or None")


@dataclass(frozen=True, slots=True, eq=False)
class RowTurns:
    """By how much rows are turned.

    Args:
        rope: the model's.
        cos_sin: float32 [M, R], `rope.table` of the rows' positions; a tensor, or an array for JAX.
    """

    rope: Rope
    cos_sin: Any
