"""Rows of some requests and the blocks of their keys, for JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

if TYPE_CHECKING:
    import jax


class Requests(NamedTuple):
    """What `Rows.of` takes, for JAX: the integers may be traced, so that none of them is checked.

    Rows from the last of `row_starts` on belong to no request, so that M may be rounded up.
    """

    tables: jax.Array | NDArray[Any]
    positions: jax.Array | NDArray[Any]
    row_starts: jax.Array | NDArray[Any]
    lengths: jax.Array | NDArray[Any]
