"""Attention to pages and its helpers for JAX arrays: what `kvkit.kernels.attention.reference` means.

As in `kvkit.kernels.pages.jax`, what the reference writes is returned, and every function may be called as it
is or under `jax.jit`, where ropes, scales, windows and names are Python values. Equal shapes compile once:
slots, tables, positions and lengths are data.

XLA compiles the same functions for every platform, except that `blend_attention` is the Pallas kernel of
`kvkit.kernels.attention.pallas` on CUDA; which one is chosen when a function is lowered, so that one function
serves every platform. The rest gathers and scatters or, as `query_scores`, loops over tiles. The Triton
kernels are not called through jax-triton: they start on a plan that the host makes of positions, which under
`jax.jit` are not known yet.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from kvkit.format.rope import Rope
from kvkit.kernels.attention import checks, pallas
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages.jax import (
    Ids,
    bits,
    check_int,
    in_range,
    rotate,
    scatter,
    where,
)

ROW_TILE = 128  # query rows that share a loop over keys

KEY_TILE = 512  # keys that a step of that loop takes: scores are [Hq, ROW_TILE, KEY_TILE] at a time


class Scattered(NamedTuple):
    """What `rope_scatter` made.

    Args:
        q: [M, Hq, D], rotated.
        k_pages, v_pages: with the rows' K and V in their slots.
        deviation: float32 [M], `token_deviation` of what a slot's K holds now and held before, 0 where
            skipped; None unless asked for.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    deviation: jax.Array | None


def blend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: Ids,
    positions: Ids,
    row_starts: Ids,
    lengths: Ids,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of some rows of some requests, each to the keys at or before its own position.

    An online softmax (https://arxiv.org/abs/1805.02867) over tiles of keys, up to a row tile's last position
    and, with a window, from its first: never more scores at once than [Hq, ROW_TILE, KEY_TILE]. Products
    add up in float32.

    On CUDA it is one Pallas kernel, which JAX does not split among GPUs by itself: use `jax.shard_map`.
    `jax.export` takes CUDA as the only platform, and with it
    `disabled_checks=[DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]`: later versions need not
    understand the call.

    Args:
        q: [M, Hq, D], rows of all requests one after another; float32, float16 or bfloat16, as the pages.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv].
        tables: int [requests, blocks]; entries beyond a request's length may be anything.
        positions: int [M], of each row.
        row_starts: int [requests + 1], the first 0; rows from the last one on belong to no request, so that
            M may be rounded up.
        lengths: int [requests], keys of each request.
        scale, window, softcap: as in the reference.

    Returns:
        o [M, Hq, Dv] in q's dtype, and lse [M, Hq] float32. A row that sees no key is 0 with lse -inf.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_attention(q, k_pages, v_pages, scale, window, softcap)
    if tables.ndim != 2 or not tables.size:
        raise LaunchError(f"tables: {tables.shape}, want [requests, blocks], none of them 0")
    for name, ids, shape in (
        ("tables", tables, tables.shape),
        ("positions", positions, (len(q),)),
        ("row_starts", row_starts, (len(tables) + 1,)),
        ("lengths", lengths, (len(tables),)),
    ):
        check_int(name, ids, shape)
    found: tuple[jax.Array, jax.Array] = _blend_attention(
        q, k_pages, v_pages, tables, positions, row_starts, lengths, scale, window, softcap
    )
    return found


def rope_scatter(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos_sin: jax.Array | NDArray[np.float32],
    slots: Ids,
    k_pages: jax.Array,
    v_pages: jax.Array,
    rope: Rope,
    deviation: bool = False,
) -> Scattered:
    """Rotate recomputed queries and keys to their positions and put K and V into the pages.

    Args:
        q, k, v: [M, Hq, D], [M, H, D], [M, H, Dv], not yet rotated; k and v of the pages' dtype.
        cos_sin: float32 [M, R], `Rope.table` of the rows' positions.
        slots: int [M], where each row's K and V go: block * N + token, each at most once; < 0 is skipped.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv].
        deviation: whether to say by how much each slot's K changed.

    Raises:
        LaunchError: an argument does not fit. Slots out of range are treated as by `pack`.
    """
    checks.check_scatter(q, k, v, cos_sin, k_pages, v_pages, rope)
    check_int("slots", slots, (len(q),))
    every = in_range("slots", slots, k_pages.shape[0] * k_pages.shape[2])
    made: Scattered = _rope_scatter(q, k, v, cos_sin, every, k_pages, v_pages, rope, deviation)
    return made


def token_deviation(new: jax.Array, old: jax.Array) -> jax.Array:
    """Squared distance of each token's [H, D] of new and old [N, H, D]: float32 [N], computed in it.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_deviation(new, old)
    distance: jax.Array = _token_deviation(new, old)
    return distance


@jax.jit
def _token_deviation(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum((1, 2))


def query_scores(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: Ids,
    positions: Ids,
    length: int | Ids,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    lse: jax.Array | None = None,
) -> jax.Array:
    """How much attention some rows of a request pay to each key: float32 [Hq, blocks * N].

    As the reference says, but of the shape of the table, 0 from `length` on, so that a longer request
    compiles nothing new.
    Never more scores at once than [Hq, ROW_TILE, KEY_TILE].

    Args:
        q: [S, Hq, D].
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv]; with v_pages scores are multiplied by the norm of v.
        table: int [blocks].
        positions: int [S].
        length: keys of the request, a scalar.
        scale, window, softcap: as in the reference.
        lse: float32 [S, Hq] that `blend_attention` gave for these rows; None: computed here first.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_attention(q, k_pages, k_pages if v_pages is None else v_pages, scale, window, softcap)
    if table.ndim != 1 or not table.size:
        raise LaunchError(f"table: {table.shape}, want [blocks], at least 1")
    for name, ids, shape in (
        ("table", table, table.shape),
        ("positions", positions, (len(q),)),
        ("length", np.asarray(length) if isinstance(length, int) else length, ()),
    ):
        check_int(name, ids, shape)
    if lse is not None:
        checks.check_lse(lse, q)
    mass: jax.Array = _query_scores(
        q, k_pages, v_pages, table, positions, length, scale, window, softcap, lse
    )
    return mass


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap"))
def _blend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    row_starts: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    found: tuple[jax.Array, jax.Array] = lax.platform_dependent(
        q,
        k_pages,
        v_pages,
        tables,
        positions,
        row_starts,
        lengths,
        cuda=functools.partial(pallas.blend_attention, **options),
        default=functools.partial(_attention, **options),
    )
    return found


def _attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    row_starts: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """`blend_attention` for XLA."""
    m, query_heads, _ = q.shape
    rows = max(1, min(ROW_TILE, m))
    # a tile that begins among the last rows ends beyond them
    q, positions = (jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)) for x in (q, positions))
    tiles = -(-jnp.diff(row_starts) // rows)  # [requests]
    ends = jnp.cumsum(tiles)

    def tile(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        r = jnp.searchsorted(ends, i, side="right")
        first = row_starts[r] + (i - ends[r] + tiles[r]) * rows
        own = first + jnp.arange(rows) < row_starts[r + 1]
        at = jnp.where(own, lax.dynamic_slice_in_dim(positions, first, rows), -1)
        of_tile = lax.dynamic_slice_in_dim(q, first, rows)
        o, lse = _attend(of_tile, k_pages, v_pages, tables[r], at, lengths[r], scale, window, softcap)
        # rows of the next request are written by its own tile, which comes later
        return (
            lax.dynamic_update_slice_in_dim(done[0], o.astype(q.dtype), first, 0),
            lax.dynamic_update_slice_in_dim(done[1], lse, first, 0),
        )

    nothing = (
        jnp.zeros((m + rows, query_heads, v_pages.shape[3]), q.dtype),
        jnp.full((m + rows, query_heads), -jnp.inf, jnp.float32),
    )
    o, lse = lax.fori_loop(0, ends[-1], tile, nothing)
    return o[:m], lse[:m]


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap"))
def _query_scores(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
    lse: jax.Array | None,
) -> jax.Array:
    if lse is None:
        no_v = k_pages[..., :0]
        request = table[None], positions, jnp.array([0, len(q)]), jnp.reshape(length, 1)
        _, lse = _blend_attention(q, k_pages, no_v, *request, scale, window, softcap)
    rows, kv_heads = max(1, min(ROW_TILE, len(q))), k_pages.shape[1]
    total, keys = len(table) * k_pages.shape[2], _key_tile(table, k_pages)
    padding = -len(q) % rows
    q, lse = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (q, lse))
    positions = jnp.pad(positions, (0, padding), constant_values=-1)

    def row_tile(i: jax.Array, mass: jax.Array) -> jax.Array:
        of_tile, at, of_sum = (lax.dynamic_slice_in_dim(x, i * rows, rows) for x in (q, positions, lse))
        packed, of_row = _by_kv_head(of_tile, at, kv_heads)
        sums, _ = _by_kv_head(of_sum[..., None], at, kv_heads)

        def key_tile(t: jax.Array, mass: jax.Array) -> jax.Array:
            j = t * keys + jnp.arange(keys)
            scores = _scores(packed, _keys(k_pages, table, j), of_row, j, length, scale, window, softcap)
            share = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - sums))  # [H, rows * G, keys]
            share = share.reshape(kv_heads, rows, -1, keys).sum(1)
            if v_pages is not None:
                v = jnp.where(j[:, None] < length, _keys(v_pages, table, j), 0).astype(jnp.float32)
                share = share * jnp.sqrt(jnp.square(v).sum(-1))[:, None]
            return mass.at[:, j].add(share.reshape(-1, keys), mode="drop")

        more: jax.Array = lax.fori_loop(*_key_tiles(at, length, window, keys), key_tile, mass)
        return more

    found: jax.Array = lax.fori_loop(0, len(q) // rows, row_tile, jnp.zeros((q.shape[1], total), jnp.float32))
    return found


@functools.partial(jax.jit, static_argnames=("rope", "deviation"))
def _rope_scatter(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos_sin: jax.Array,
    slots: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    rope: Rope,
    deviation: bool,
) -> Scattered:
    turned = rotate(k, cos_sin[:, None], rope)
    changed = None
    if deviation:
        block, n, keep = where(slots, k_pages)
        changed = jnp.where(keep, _token_deviation(turned, k_pages[block, :, n]), 0.0)
    return Scattered(
        rotate(q, cos_sin[:, None], rope),
        scatter(k_pages, slots, bits(turned)),
        scatter(v_pages, slots, bits(v)),
        changed,
    )


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Some rows of one request: o [rows, Hq, Dv] and lse [rows, Hq], float32. Position -1 sees no key."""
    rows, kv_heads, v_size = len(q), k_pages.shape[1], v_pages.shape[3]
    keys = _key_tile(table, k_pages)
    packed, of_row = _by_kv_head(q, positions, kv_heads)

    def key_tile(
        t: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        o, top, total = state
        j = t * keys + jnp.arange(keys)
        scores = _scores(packed, _keys(k_pages, table, j), of_row, j, length, scale, window, softcap)
        v = jnp.where(j[:, None] < length, _keys(v_pages, table, j), 0)  # 0 * NaN is NaN
        higher = jnp.maximum(top, scores.max(-1, keepdims=True))
        shift = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights = jnp.exp(scores - shift)
        fade = jnp.exp(top - shift)
        total = total * fade + weights.sum(-1, keepdims=True)
        return o * fade + _dot("hrk,hkd->hrd", weights.astype(v.dtype), v), higher, total

    column = (kv_heads, packed.shape[1], 1)
    nothing = (
        jnp.zeros((*column[:2], v_size), jnp.float32),
        jnp.full(column, -jnp.inf, jnp.float32),
        jnp.zeros(column, jnp.float32),
    )
    o, top, total = lax.fori_loop(*_key_tiles(positions, length, window, keys), key_tile, nothing)
    o = o / jnp.where(total == 0, 1.0, total)
    lse = top + jnp.log(total)  # nothing seen: -inf
    group = q.shape[1] // kv_heads
    o, lse = (x.reshape(kv_heads, rows, group, x.shape[2]).swapaxes(0, 1) for x in (o, lse))
    return o.reshape(rows, q.shape[1], v_size), lse.reshape(rows, q.shape[1])


def _by_kv_head(q: jax.Array, positions: jax.Array, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Query heads that read one KV head together, [H, rows * G, D], and the positions of these rows."""
    rows, query_heads, size = q.shape
    packed = q.reshape(rows, kv_heads, -1, size).swapaxes(0, 1).reshape(kv_heads, -1, size)
    return packed, jnp.repeat(positions, query_heads // kv_heads)


def _key_tile(table: jax.Array, pages: jax.Array) -> int:
    return min(KEY_TILE, len(table) * pages.shape[2])


def _key_tiles(
    positions: jax.Array, length: jax.Array, window: int | None, keys: int
) -> tuple[jax.Array | int, jax.Array]:
    """The first of the tiles of `keys` keys that some row sees, and the one after the last."""
    last = jnp.minimum(positions.max() + 1, length)
    if window is None:
        return 0, -(-last // keys)
    first = jnp.where(positions < 0, length, positions - window + 1).min()
    return jnp.maximum(first, 0) // keys, -(-last // keys)


def _keys(pages: jax.Array, table: jax.Array, j: jax.Array) -> jax.Array:
    """Keys j [keys] of a request, [H, keys, D]; any rows where it has none."""
    tokens = pages.shape[2]
    block = table.at[j // tokens].get(mode="clip")
    return pages.at[block, :, j % tokens].get(mode="clip").swapaxes(0, 1)


def _scores(
    q: jax.Array,
    k: jax.Array,
    positions: jax.Array,
    j: jax.Array,
    length: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """float32 [H, rows, keys] of q [H, rows, D] and keys j, k [H, keys, D]; -inf where a row does not see."""
    scores = _dot("hrd,hkd->hrk", q, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = (j <= positions[:, None]) & (j < length)
    if window is not None:
        seen &= j > positions[:, None] - window
    return jnp.where(seen, scores, -jnp.inf)


def _dot(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 products; of float32 in full, where a GPU's default would be TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(form, a, b, precision=precision, preferred_element_type=jnp.float32)
