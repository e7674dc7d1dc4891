"""Rotary position embeddings as data: what a kernel needs to move keys to other positions.

RoPE (https://arxiv.org/abs/2104.09864) turns each pair of channels (a, b) of a query or key at position p by
the angle p * inv_freq: a' = a cos - b sin, b' = b cos + a sin. Turns add up, so a key computed at one
position is moved to another by turning it by the difference. llama3, yarn, linear and default scaling differ
in `inv_freq` and `scale` alone; both are the model's own. Scalings whose frequencies follow the length
(dynamic, longrope) cannot be moved so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class RopeError(ValueError):
    """A rotary embedding or rotation is impossible. Names the field and the value."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model rotates its queries and keys.

    Args:
        inv_freq: radians per position of each pair; R / 2 of them.
        interleaved: pairs are channels (2i, 2i + 1), as in GPT-J and DeepSeek; else (i, i + R / 2), as in
            Llama.
        first: channel of a head where the R rotary channels begin; those outside are left alone (partial
            rotary; MLA's latent).
        scale: what the model multiplies cos and sin by (yarn's attention factor).

    Raises:
        RopeError: a field is out of range.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    first: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.inv_freq or not all(math.isfinite(f) for f in self.inv_freq):
            raise RopeError(f"inv_freq: {len(self.inv_freq)} values, want at least 1, all of them finite")
        if self.first < 0:
            raise RopeError(f"first={self.first}: want at least 0")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise RopeError(f"scale={self.scale}: want a finite number above 0")

    @property
    def channels(self) -> int:
        """R, the rotary channels of a head."""
        return 2 * len(self.inv_freq)

    def table(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """cos (first R / 2 columns) and sin of each position's angles, times `scale`: float32 [n, R].

        Angles are computed in double precision: in single, 131,072 positions are off by up to 4e-3 radians.
        """
        return (self._cos_sin(positions) * self.scale).astype(np.float32)

    def turns(self, deltas: NDArray[np.int64]) -> NDArray[np.float32]:
        """The same of differences of positions, without `scale`: stored keys have that already."""
        return self._cos_sin(deltas).astype(np.float32)

    def _cos_sin(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        angles = positions[:, None] * np.array(self.inv_freq)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """By how many positions the keys of some chunks move.

    Args:
        rope: the model's.
        delta: new position - the position that the key was computed at: int64 [chunks], or [chunks, T] where
            tokens of a chunk move by different numbers of positions.
    """

    rope: Rope
    delta: NDArray[np.int64]

    def resolve(self, chunks: int, tokens: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """What kernels read: `Rope.turns` of the distinct deltas, [U, R], and each token's row, [chunks, T].

        Raises:
            RopeError: `delta` has another shape or dtype.
        """
        delta = self.delta
        if not isinstance(delta, np.ndarray) or delta.dtype != np.int64:
            kind = delta.dtype if isinstance(delta, np.ndarray) else type(delta).__name__
            raise RopeError(f"delta: {kind}, want a numpy array of int64")
        if delta.shape not in ((chunks,), (chunks, tokens)):
            raise RopeError(f"delta: {delta.shape}, want ({chunks},) or ({chunks}, {tokens})")
        distinct, row = np.unique(delta, return_inverse=True)
        each = row.reshape(delta.shape if delta.ndim == 2 else (chunks, 1))
        rows = np.broadcast_to(each, (chunks, tokens))
        return self.rope.turns(distinct), np.ascontiguousarray(rows, np.int32)
