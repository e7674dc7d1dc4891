"""Blend attention for JAX arrays on an NVIDIA GPU: a Pallas kernel that XLA compiles with its Triton.

The kernel computes the same as `attend` of `kvkit.kernels.attention.triton`, over the same tiles: some rows
times the query heads of a KV head are the rows of one matrix product. Keys that all rows see are taken
without a mask; keys that no row sees are not touched. A program finds the first and last key of its tile
from the positions in memory, because the host does not know them under `jax.jit`. Long tiles are not split
among programs, so a few rows with many keys leave most of a GPU idle. Scores are in units of log2, because
the hardware has exp2.

Tests run the kernel in Pallas' interpreter, lower it for CUDA and compile the result with PyTorch's Triton.
On an H100 it was right, and took three times as long as the Triton kernel (`make gpu`, step "with_jax").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kvkit.kernels.attention.jax_tiles import RowTiles, cut
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.traced import shape, vary, varying

try:
    from jax.experimental.pallas import triton
except ImportError as error:
    raise ImportError(
        f"jax {jax.__version__} has no Pallas kernels in Triton any more: want jax<0.12"
    ) from error

LOG2_E = math.log2(math.e)
LEAST = 16  # smallest side of a matrix product in Triton
TILES: Mapping[int, Mapping[float, tuple[int, int, int, int]]] = {
    2: {64: (128, 64, 8, 3), 128: (64, 32, 4, 3), 256: (32, 32, 4, 2), math.inf: (32, 16, 8, 1)},
    4: {64: (16, 32, 4, 2), 128: (16, 32, 4, 1), math.inf: (16, 16, 8, 1)},
}
"""Rows and keys of a tile, warps and stages, by bytes of an item and largest head size.

Not tuned: chosen to compile for sm_80 and sm_90 without spills."""

RunningSums: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Sum of weighted values, sum of weights and highest score of each row; and the next tile's blocks."""


def blend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    requests: Requests,
    scoring: Scoring,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute `kvkit.kernels.attention.jax.blend_attention`, traced for CUDA; checks nothing.

    Within `jax.shard_map` all arrays vary over the same axes (`kvkit.kernels.traced.vary`). Nothing outside
    the pages is read, whatever tables and lengths hold.

    Args:
        interpret: run on any platform, slowly.
    """
    m, query_heads, size = q.shape
    blocks, heads, tokens, v_size = v_pages.shape
    axes = varying(q)
    if not m:
        nothing = jnp.zeros((0, query_heads, v_size), q.dtype), jnp.zeros((0, query_heads), jnp.float32)
        return vary(nothing, axes)
    group = query_heads // heads
    tile_rows, tile_keys, warps, stages = _tile(m * group, max(size, v_size), q.dtype.itemsize)
    # query heads of a program: all that read one KV head, or as many as a tile has rows for
    packed = max(n for n in range(1, min(group, tile_rows) + 1) if group % n == 0)
    tiles = cut(requests, tile_rows // packed, tokens)
    shapes = (
        shape(m, query_heads, v_size, dtype=q.dtype, axes=axes) if v_size else None,
        shape(m, query_heads, dtype=jnp.float32, axes=axes),
    )
    kernel = functools.partial(
        _attend, packed=packed, tile_rows=tile_rows, tile_keys=tile_keys, scoring=scoring
    )
    attend = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(len(tiles.request), query_heads // packed),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="blend_attention",
    )
    table, positions = requests.tables.clip(0, blocks - 1), requests.positions
    ids = (x.astype(jnp.int32) for x in (table, positions))
    o, lse = attend(tiles, *ids, q, k_pages, v_pages if v_size else None)
    return vary(jnp.zeros((m, query_heads, 0), q.dtype), axes) if o is None else o, lse


def _tile(count: int, size: int, item_bytes: int) -> tuple[int, int, int, int]:
    """Return rows and keys of a tile, warps and stages, for `count` rows of `size` channels."""
    rows, keys, warps, stages = next(tile for most, tile in TILES[item_bytes].items() if size <= most)
    return min(rows, max(LEAST, pl.next_power_of_2(count))), keys, warps, stages


def _attend(
    tiles: RowTiles,
    tables: jax.Ref,
    positions: jax.Ref,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref | None,
    o: jax.Ref | None,
    lse: jax.Ref,
    *,
    packed: int,
    tile_rows: int,
    tile_keys: int,
    scoring: Scoring,
) -> None:
    """Attend with some rows of a request and `packed` query heads of a KV head. The arrays are whole."""
    scale, window, softcap = scoring.scale, scoring.window, scoring.softcap
    tile, first_head = pl.program_id(0), pl.program_id(1) * packed
    head, tokens = _div(first_head, q.shape[1] // k.shape[1]), k.shape[2]
    request, first, after = (part[tile] for part in tiles[:3])
    lane = _arange(tile_rows)
    row, query_head = first + _div(lane, packed), first_head + _rem(lane, packed)
    valid = row < after  # False also for lanes left over, where `packed` does not divide the tile
    queries = _load(q, (row[:, None], query_head[:, None]), valid)
    position = triton.load(positions.at[row], mask=valid, other=-1)

    nearest, farthest = jnp.min(jnp.where(valid, position, 2**31 - 1)), jnp.max(position)
    end = jnp.clip(farthest + 1, 0, tiles.lengths[request])
    full_end = jnp.clip(nearest + 1, 0, end)
    begin = full_begin = jnp.int32(0)
    if window is not None:
        begin = jnp.clip(nearest - window + 1, 0, end)
        full_begin = jnp.clip(farthest - window + 1, begin, end)

    def blocks(t: jax.Array) -> jax.Array:
        """Return the block of all keys of tile `t` if they share one, else their blocks [tile_keys, 1]."""
        j = t * tile_keys + (0 if tokens % tile_keys == 0 else _arange(tile_keys)[:, None])
        block: jax.Array = triton.load(tables.at[request, _div(j, tokens)], mask=j < end, other=0)
        return block

    def some_keys(masked: bool, t: jax.Array, state: RunningSums) -> RunningSums:
        """Add tile `t` of keys to the running sums and maximum.

        The table is read one tile ahead, so that keys and values are fetched while a tile is computed.
        """
        acc, norm, top, block = state
        j = t * tile_keys + _arange(tile_keys)
        inside = (j >= begin) & (j < end) if masked else None
        place = block, head, _rem(j, tokens)[:, None]
        s = _dot(queries, _load(k, place, inside), trans_b=True)
        factor = scale * LOG2_E
        if softcap is not None:  # softcap * tanh(x / softcap)
            s = softcap * LOG2_E * (1 - 2 / (1 + jnp.exp2(s * (2 * factor / softcap))))
            factor = 1.0
        if inside is not None:
            s, factor = s * factor, 1.0  # a scale of 0 times -inf is NaN
            seen = inside & (j <= position[:, None])
            if window is not None:
                seen &= j > position[:, None] - window
            s = jnp.where(seen, s, -jnp.inf)
        # scaled after the maximum, in one instruction with the difference, as the scale is not negative
        higher = jnp.maximum(top, s.max(1) * factor)
        # a row may have seen no key yet: -inf - -inf is NaN
        shift = jnp.where(higher == -jnp.inf, 0.0, higher) if masked else higher
        p = jnp.exp2(s * factor - shift[:, None])
        fade = jnp.exp2(top - shift)
        if v is not None:
            acc = acc * fade[:, None] + _dot(p.astype(v.dtype), _load(v, place, inside))
        return acc, norm * fade + p.sum(1), higher, blocks(t + 1)

    full_start = _div(full_begin + tile_keys - 1, tile_keys)
    full_stop = jnp.maximum(_div(full_end, tile_keys), full_start)
    stop = _div(end + tile_keys - 1, tile_keys)
    state: RunningSums = (
        jnp.zeros((tile_rows, _padded(0 if v is None else v.shape[3])), jnp.float32),
        jnp.zeros(tile_rows, jnp.float32),
        jnp.full(tile_rows, -jnp.inf, jnp.float32),
        blocks(full_start if window is None else _div(begin, tile_keys)),
    )
    masked, full = functools.partial(some_keys, True), functools.partial(some_keys, False)
    if window is not None:
        full_start, full_stop = jnp.minimum(full_start, stop), jnp.minimum(full_stop, stop)
        state = lax.fori_loop(_div(begin, tile_keys), full_start, masked, state)
    state = lax.fori_loop(full_start, full_stop, full, state)
    acc, norm, top, _ = lax.fori_loop(full_stop, stop, masked, state)

    total = jnp.where(norm > 0, norm, 1.0)
    triton.store(lse.at[row, query_head], top / LOG2_E + jnp.log(total), mask=valid)  # no key seen: -inf
    if o is not None:
        channel = _arange(acc.shape[1])[None]
        triton.store(
            o.at[row[:, None], query_head[:, None], channel],
            (acc / total[:, None]).astype(o.dtype),
            mask=valid[:, None] & (channel < o.shape[2]),
        )


def _load(x: jax.Ref, place: tuple[jax.Array, ...], inside: jax.Array | None) -> jax.Array:
    """Load rows of x at a place, [rows, padded channels]; zeros outside."""
    channel = _arange(_padded(x.shape[-1]))[None]
    at = x.at[*place, channel]
    wanted = channel < x.shape[-1]
    if inside is not None:
        wanted &= inside[:, None]
    every = inside is None and channel.size == x.shape[-1]
    rows: jax.Array = at[...] if every else triton.load(at, mask=wanted, other=0.0)
    return rows


def _dot(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    """Multiply to float32; float32 operands in full precision, where the default is TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product: jax.Array = triton.dot(a, b, trans_b=trans_b, precision=precision)
    return product


def _padded(channels: int) -> int:
    return max(LEAST, pl.next_power_of_2(channels))


def _div(a: jax.Array, n: int) -> jax.Array:
    """Divide numbers that are not negative; `//` would check signs."""
    return lax.div(a, np.int32(n))


def _rem(a: jax.Array, n: int) -> jax.Array:
    return lax.rem(a, np.int32(n))


def _arange(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)
