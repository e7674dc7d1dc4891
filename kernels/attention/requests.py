"""Rows of some requests and the block tables of their keys, for JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

if TYPE_CHECKING:
    import jax


class Requests(NamedTuple):
    """Arguments of `Rows.of` for JAX: integers that may be traced, so no values are checked.

    Rows from the last of `row_starts` on belong to no request, so M may be rounded up.
    """

    tables: jax.Array | NDArray[Any]
    positions: jax.Array | NDArray[Any]
    row_starts: jax.Array | NDArray[Any]
    lengths: jax.Array | NDArray[Any]
