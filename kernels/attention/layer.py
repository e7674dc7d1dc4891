"""Parameters of a layer's attention: the scoring of keys, and the rotations of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvkit.format.rope import Rope
from kvkit.kernels.checks import LaunchError


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring of keys: s = scale * q . k, or softcap * tanh(s / softcap).

    Args:
        scale: factor such as D ** -0.5; not negative.
        window: tokens of a sliding window, the row's own included; None: every key up to the row's own.
        softcap: soft-cap as in Gemma 2; None: no soft-cap.

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
class RowRotations:
    """Rotations of rows to their positions.

    Args:
        rope: rotary embedding of the model.
        cos_sin: float32 [M, R], `rope.table` of the rows' positions; a tensor, or an array for JAX.
    """

    rope: Rope
    cos_sin: Any
