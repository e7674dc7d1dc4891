"""Arguments of attention for tensors and JAX arrays: scoring of keys, rotations of rows, requests for JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from kvkit.format.rope import Rope
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.once import once

if TYPE_CHECKING:
    import jax

T = TypeVar("T")


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
    _cached: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once per `key` and shared by all layers."""
        return once(self._cached, key, make)


class Requests(NamedTuple):
    """Rows of some requests, and the block tables of the requests' keys, for JAX.

    The fields are arguments of `Rows.of`: integers that may be traced, so no values are checked. Rows from
    the last of `row_starts` on belong to no request, so M may be rounded up.
    """

    tables: jax.Array | NDArray[Any]
    positions: jax.Array | NDArray[Any]
    row_starts: jax.Array | NDArray[Any]
    lengths: jax.Array | NDArray[Any]
