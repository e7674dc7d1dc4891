"""Rotary position embeddings as data: the tables that a kernel needs to move keys to other positions.

RoPE (https://arxiv.org/abs/2104.09864) rotates each pair of channels (a, b) of a query or key at position p
by the angle p * inv_freq: a' = a cos - b sin, b' = b cos + a sin. Rotations add up, so rotating a key by the
difference of two positions moves it from one to the other. llama3, yarn, linear and default scaling differ
only in `inv_freq` and `scale`, which come from the model. Keys cannot be moved this way if the frequencies
depend on the length of the text (dynamic, longrope with two lists of factors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class RopeError(ValueError):
    """An invalid rotary embedding or rotation. The message names the field and the value."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of a model's queries and keys.

    Args:
        inv_freq: radians per position of each pair, R / 2 values.
        interleaved: True: pairs are channels (2i, 2i + 1), as in GPT-J and DeepSeek; False: (i, i + R / 2),
            as in Llama.
        first: first of a head's R rotary channels; its other channels are not rotated (partial rotary; MLA's
            latent).
        scale: factor of cos and sin in the model (yarn's attention factor).

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
        """R, the number of rotary channels of a head."""
        return 2 * len(self.inv_freq)

    def table(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return cos (first R / 2 columns) and sin of positions' angles, times `scale`: float32 [n, R].

        Angles are computed in double precision: over 131,072 positions, single is off by up to 4e-3 radians.
        """
        return (self._cos_sin(positions) * self.scale).astype(np.float32)

    def delta_table(self, deltas: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the table of differences of positions, without `scale`: stored keys are scaled already."""
        return self._cos_sin(deltas).astype(np.float32)

    def _cos_sin(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        angles = positions[:, None] * np.array(self.inv_freq)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """A rotation of the keys of some chunks to new positions.

    Args:
        rope: rotary embedding of the model.
        delta: new position minus the position at which the key was computed: int64 [chunks], or [chunks, T]
            if tokens of a chunk move by different distances.
    """

    rope: Rope
    delta: NDArray[np.int64]

    def resolve(self, chunks: int, tokens: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the kernels' inputs: a table of the distinct deltas, and each token's row in it.

        Returns:
            `Rope.delta_table` of the distinct deltas, float32 [U, R], and rows, int32 [chunks, T].

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
        row_ids = row.reshape(delta.shape if delta.ndim == 2 else (chunks, 1))
        rows = np.broadcast_to(row_ids, (chunks, tokens))
        return self.rope.delta_table(distinct), np.ascontiguousarray(rows, np.int32)
