"""Tiles of the rows of requests, cut under `jax.jit` for the kernels for JAX arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvkit.kernels.attention.layer import Requests


class RowTiles(NamedTuple):
    """Request, first row and row after the last of each tile, int32 [tiles]; spare tiles have no rows.

    Rows of no request belong to an additional request with length 0, the last of `lengths`.
    """

    request: jax.Array
    first: jax.Array
    after: jax.Array
    lengths: jax.Array  # int32 [requests + 1], clipped to the keys of a table


def cut(requests: Requests, rows: int, tokens: int) -> RowTiles:
    """Cut rows into tiles of at most `rows`; the number of tiles is enough for any row starts.

    Args:
        tokens: tokens of a block.
    """
    m = len(requests.positions)
    row_starts = jnp.append(requests.row_starts, m).clip(0, m).astype(jnp.int32)
    lengths = jnp.append(requests.lengths, 0).clip(0, requests.tables.shape[1] * tokens).astype(jnp.int32)
    tile_count = (m + min(len(lengths), m) * (rows - 1)) // rows
    counts = -(-jnp.diff(row_starts) // rows)  # [requests + 1]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    i = jnp.arange(tile_count, dtype=jnp.int32)
    request = jnp.searchsorted(ends, i, side="right").astype(jnp.int32).clip(max=len(counts) - 1)
    first = row_starts[request] + (i - ends[request] + counts[request]) * rows
    return RowTiles(request, first, jnp.minimum(first + rows, row_starts[request + 1]), lengths)
