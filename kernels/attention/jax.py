"""The functions of `api` for JAX arrays; they return the arrays that those of `api` write.

As in `kvkit.kernels.pages.jax`, every function may be called directly or under `jax.jit`, with scorings and
ropes as Python values. Equal shapes compile once: slots, tables, positions and lengths are data.

XLA compiles the same functions for every platform, except for `blend_attention`. On CUDA, the Triton kernel
that computes it for tensors computes it here too, with the same bits (`kvkit.kernels.attention.jax_triton`):
where jax-triton is installed, and where the host knows the values of the requests, from which it plans. On a
TPU it is a Pallas kernel, for the arguments that this supports (`kvkit.kernels.attention.pallas_tpu`). The
choice of the platform is made when a function is lowered, so that one function serves every platform. The
other functions gather and scatter; `query_scores` loops over tiles.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvkit.kernels.attention import checks, jax_choice, jax_plan, pallas_tpu
from kvkit.kernels.attention.layer import Requests, RowRotations, Scoring
from kvkit.kernels.checks import check_ids
from kvkit.kernels.pages.jax import Ids, bits, in_range, locate, rotate, scatter
from kvkit.kernels.traced import operation, vary, varying

if TYPE_CHECKING:
    from kvkit.kernels.attention.rows import Rows

ROW_TILE = 128  # query rows that share a loop over keys

KEY_TILE = 512  # keys of a step of that loop: it makes scores [Hq, ROW_TILE, KEY_TILE]

jax.tree_util.register_dataclass(RowRotations, data_fields=["cos_sin"], meta_fields=["rope"])


class Scattered(NamedTuple):
    """Results of `rope_scatter`.

    Args:
        q: [M, Hq, D], rotated.
        k_pages, v_pages: pages with the rows' K and V in their slots.
        deviation: float32 [M]; None unless requested.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    deviation: jax.Array | None


def blend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    requests: Requests | Rows,
    scoring: Scoring,
    backend: jax_choice.Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute `api.blend_attention` of rows given as `requests`.

    With XLA, an online softmax (https://arxiv.org/abs/1805.02867) runs over tiles of keys, up to a row tile's
    last position and, with a window, from its first. At most [Hq, ROW_TILE, KEY_TILE] scores exist at a time.

    On CUDA the Triton kernels compute it, if jax-triton is there and `requests` have values: `Rows`, or
    arrays that are no arguments of a `jax.jit` around the call. They are then checked as by `Rows.of`. Make
    `Rows` once per batch, on the CPU, so that layers share the plan. Traced requests, heads of more channels
    than the kernels take and `jax.vmap` are left to XLA, and so is everything without jax-triton; a warning
    then says once what to install.

    Over several devices, shard heads (axis 1 of q and of the pages) and replicate requests; pages of one
    head are replicated too. Or shard requests in `jax.shard_map`, with a pool and ids for each device.
    With the Triton kernels and on TPUs the function is a call that JAX does not split among devices by
    itself: use `jax.shard_map`. On a TPU, float16 and tables of more than 512 KiB in int32 are left to XLA.

    Args:
        requests: requests, or `Rows` on the CPU.
        backend: "triton" or "xla" to have that and nothing else; "triton" is lowered for CUDA alone.

    Raises:
        LaunchError: an argument does not fit, or `backend` cannot compute this.
        RowsError: values of `requests` do not fit each other, where Triton would compute.
        NotImplementedError: a gradient of this or another function here is taken.
    """
    checks.check_pages(q, k_pages, v_pages)
    arrays = requests if isinstance(requests, Requests) else jax_plan.requests_of(requests)
    checks.check_requests(arrays, q)
    work, calls = jax_choice.choose((q, k_pages, v_pages), requests, scoring, backend) or (None, None)
    result: tuple[jax.Array, jax.Array] = _blend_attention(
        q, k_pages, v_pages, arrays, scoring, work, calls, backend is None
    )
    return result


def rope_scatter(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rotations: RowRotations,
    slots: Ids,
    k_pages: jax.Array,
    v_pages: jax.Array,
    deviation: bool = False,
) -> Scattered:
    """Compute `api.rope_scatter` for integer slots [M], and the deviation if requested.

    Slots out of range are treated as by `kvkit.kernels.pages.jax.pack`.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_scatter(q, k, v, rotations, k_pages, v_pages)
    check_ids("slots", slots, (len(q),))
    checked_slots = in_range("slots", slots, k_pages.shape[0] * k_pages.shape[2])
    result: Scattered = _rope_scatter(q, k, v, rotations, checked_slots, k_pages, v_pages, deviation)
    return result


def token_deviation(new: jax.Array, old: jax.Array) -> jax.Array:
    """Compute `api.token_deviation`.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_deviation(new, old)
    distance: jax.Array = _token_deviation(new, old)
    return distance


def query_scores(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    requests: Requests,
    scoring: Scoring,
    lse: jax.Array | None = None,
) -> jax.Array:
    """Compute `api.query_scores` of one request, as float32 [Hq, blocks * N] for its whole block table.

    Scores from the request's length on are 0, so that a longer request compiles nothing new. At most
    [Hq, ROW_TILE, KEY_TILE] are made at a time.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_pages(q, k_pages, k_pages if v_pages is None else v_pages)
    checks.check_requests(requests, q)
    checks.check_scores(len(requests.lengths), lse, q)
    mass: jax.Array = _query_scores(q, k_pages, v_pages, requests, scoring, lse)
    return mass


@operation("scoring", "calls", "anywhere")
def _blend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    requests: Requests,
    scoring: Scoring,
    work: jax_plan.Work | None = None,
    calls: jax_plan.Calls | None = None,
    anywhere: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Attend by `calls` on CUDA, and by other means on other platforms; `anywhere` False: by the one only."""
    arrays, xla = (q, k_pages, v_pages, requests, work), functools.partial(_xla, scoring=scoring)
    on_cuda = xla if calls is None else functools.partial(_triton, scoring=scoring, calls=calls)
    varied = vary(arrays, varying(arrays))  # to one type, so that all branches return one type
    result: tuple[jax.Array, jax.Array]
    if not anywhere:
        result = on_cuda(*varied)
        return result
    by_tpu = functools.partial(_tpu, scoring=scoring)
    result = lax.platform_dependent(
        *varied,
        cuda=on_cuda,
        tpu=by_tpu if pallas_tpu.supports(q, v_pages, requests) else xla,
        default=xla,
    )
    return result


def _triton(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    requests: Requests,
    work: jax_plan.Work,
    scoring: Scoring,
    calls: jax_plan.Calls,
) -> tuple[jax.Array, jax.Array]:
    """Compute `blend_attention` with the Triton kernels; under `jax.vmap`, with XLA."""
    from kvkit.kernels.attention import jax_triton

    @jax.custom_batching.custom_vmap
    def attend(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        q, k_pages, v_pages, _, work = arrays
        return vary(jax_triton.blend_attention(q, k_pages, v_pages, work, calls), varying(arrays))

    @attend.def_vmap
    def batched(_: int, is_batched: Any, *arrays: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
        axes = jax.tree.map(lambda batch: 0 if batch else None, is_batched)
        return jax.vmap(functools.partial(_xla, scoring=scoring), axes)(*arrays), (True, True)

    result: tuple[jax.Array, jax.Array] = attend(q, k_pages, v_pages, requests, work)
    return result


def _xla(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, requests: Requests, _: object, scoring: Scoring
) -> tuple[jax.Array, jax.Array]:
    return _attention(q, k_pages, v_pages, requests, scoring)


def _tpu(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, requests: Requests, _: object, scoring: Scoring
) -> tuple[jax.Array, jax.Array]:
    return pallas_tpu.blend_attention(q, k_pages, v_pages, requests, scoring)


@operation()
def _token_deviation(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum((1, 2))


@operation("deviation")
def _rope_scatter(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rotations: RowRotations,
    slots: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    deviation: bool,
) -> Scattered:
    cos_sin, rope = rotations.cos_sin[:, None], rotations.rope
    rotated_k = rotate(k, cos_sin, rope)
    distance = None
    if deviation:
        block, n, keep = locate(slots, k_pages)
        distance = jnp.where(keep, _token_deviation(rotated_k, k_pages[block, :, n]), 0.0)
    k_filled, v_filled = scatter(k_pages, slots, bits(rotated_k)), scatter(v_pages, slots, bits(v))
    return Scattered(rotate(q, cos_sin, rope), k_filled, v_filled, distance)


@operation("scoring")
def _query_scores(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    requests: Requests,
    scoring: Scoring,
    lse: jax.Array | None,
) -> jax.Array:
    if lse is None:
        _, lse = _blend_attention(q, k_pages, k_pages[..., :0], requests, scoring)
    table, length = requests.tables[0], requests.lengths[0]
    rows, kv_heads = max(1, min(ROW_TILE, len(q))), k_pages.shape[1]
    total, keys = len(table) * k_pages.shape[2], _key_tile(table, k_pages)
    own = jnp.arange(len(q)) < requests.row_starts[1]
    positions = jnp.where(own, requests.positions, -1)
    padding = -len(q) % rows
    q, lse = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (q, lse))
    positions = jnp.pad(positions, (0, padding), constant_values=-1)

    def row_tile(i: jax.Array, mass: jax.Array) -> jax.Array:
        tiles = (lax.dynamic_slice_in_dim(x, i * rows, rows) for x in (q, positions, lse))
        tile_q, tile_positions, tile_lse = tiles
        packed, row_positions = _by_kv_head(tile_q, tile_positions, kv_heads)
        sums, _ = _by_kv_head(tile_lse[..., None], tile_positions, kv_heads)

        def key_tile(t: jax.Array, mass: jax.Array) -> jax.Array:
            j = t * keys + jnp.arange(keys)
            scores = _scores(packed, _keys(k_pages, table, j), row_positions, j, length, scoring)
            weights = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - sums))  # [H, rows * G, keys]
            weights = weights.reshape(kv_heads, rows, -1, keys).sum(1)
            if v_pages is not None:
                v = jnp.where(j[:, None] < length, _keys(v_pages, table, j), 0).astype(jnp.float32)
                weights = weights * jnp.sqrt(jnp.square(v).sum(-1))[:, None]
            return mass.at[:, j].add(weights.reshape(-1, keys), mode="drop")

        bounds = _key_tiles(tile_positions, length, scoring.window, keys)
        new_mass: jax.Array = lax.fori_loop(*bounds, key_tile, mass)
        return new_mass

    no_mass = jnp.zeros((q.shape[1], total), jnp.float32)
    axes = varying(q, k_pages, v_pages, requests, lse)
    result: jax.Array = lax.fori_loop(0, len(q) // rows, row_tile, vary(no_mass, axes))
    return result


def _attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, requests: Requests, scoring: Scoring
) -> tuple[jax.Array, jax.Array]:
    """Compute `blend_attention` with XLA."""
    tables, positions, row_starts, lengths = requests
    m, query_heads, _ = q.shape
    rows = max(1, min(ROW_TILE, m))
    # the last tile may end beyond the last row
    q, positions = (jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)) for x in (q, positions))
    tiles = -(-jnp.diff(row_starts) // rows)  # [requests]
    ends = jnp.cumsum(tiles)

    def tile(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        r = jnp.searchsorted(ends, i, side="right")
        first = row_starts[r] + (i - ends[r] + tiles[r]) * rows
        own = first + jnp.arange(rows) < row_starts[r + 1]
        tile_positions = jnp.where(own, lax.dynamic_slice_in_dim(positions, first, rows), -1)
        tile_q = lax.dynamic_slice_in_dim(q, first, rows)
        o, lse = _attend(tile_q, k_pages, v_pages, tables[r], tile_positions, lengths[r], scoring)
        # a tile may write into rows of the next request; that one's tile comes later and overwrites them
        return (
            lax.dynamic_update_slice_in_dim(results[0], o.astype(q.dtype), first, 0),
            lax.dynamic_update_slice_in_dim(results[1], lse, first, 0),
        )

    initial = (
        jnp.zeros((m + rows, query_heads, v_pages.shape[3]), q.dtype),
        jnp.full((m + rows, query_heads), -jnp.inf, jnp.float32),
    )
    o, lse = lax.fori_loop(0, ends[-1], tile, vary(initial, varying(q)))
    return o[:m], lse[:m]


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    scoring: Scoring,
) -> tuple[jax.Array, jax.Array]:
    """Return float32 o [rows, Hq, Dv] and lse [rows, Hq] of rows of a request; position -1 sees no key."""
    rows, kv_heads, v_size = len(q), k_pages.shape[1], v_pages.shape[3]
    keys = _key_tile(table, k_pages)
    packed, row_positions = _by_kv_head(q, positions, kv_heads)

    def key_tile(
        t: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        o, maximum, total = state
        j = t * keys + jnp.arange(keys)
        scores = _scores(packed, _keys(k_pages, table, j), row_positions, j, length, scoring)
        v = jnp.where(j[:, None] < length, _keys(v_pages, table, j), 0)  # 0 * NaN is NaN
        new_maximum = jnp.maximum(maximum, scores.max(-1, keepdims=True))
        shift = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        weights = jnp.exp(scores - shift)
        decay = jnp.exp(maximum - shift)
        total = total * decay + weights.sum(-1, keepdims=True)
        return o * decay + _dot("hrk,hkd->hrd", weights.astype(v.dtype), v), new_maximum, total

    column = (kv_heads, packed.shape[1], 1)
    initial = (
        jnp.zeros((*column[:2], v_size), jnp.float32),
        jnp.full(column, -jnp.inf, jnp.float32),
        jnp.zeros(column, jnp.float32),
    )
    initial = vary(initial, varying(q))
    o, maximum, total = lax.fori_loop(*_key_tiles(positions, length, scoring.window, keys), key_tile, initial)
    o = o / jnp.where(total == 0, 1.0, total)
    lse = maximum + jnp.log(total)  # nothing seen: -inf
    group = q.shape[1] // kv_heads
    o, lse = (x.reshape(kv_heads, rows, group, x.shape[2]).swapaxes(0, 1) for x in (o, lse))
    return o.reshape(rows, q.shape[1], v_size), lse.reshape(rows, q.shape[1])


def _by_kv_head(q: jax.Array, positions: jax.Array, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return query heads grouped by KV head, [H, rows * G, D], and the positions of these rows."""
    rows, query_heads, size = q.shape
    packed = q.reshape(rows, kv_heads, -1, size).swapaxes(0, 1).reshape(kv_heads, -1, size)
    return packed, jnp.repeat(positions, query_heads // kv_heads)


def _key_tile(table: jax.Array, pages: jax.Array) -> int:
    return min(KEY_TILE, len(table) * pages.shape[2])


def _key_tiles(
    positions: jax.Array, length: jax.Array, window: int | None, keys: int
) -> tuple[jax.Array | int, jax.Array]:
    """Return the first tile of `keys` keys that some row sees, and the tile after the last."""
    last = jnp.minimum(positions.max() + 1, length)
    if window is None:
        return 0, -(-last // keys)
    first = jnp.where(positions < 0, length, positions - window + 1).min()
    return jnp.maximum(first, 0) // keys, -(-last // keys)


def _keys(pages: jax.Array, table: jax.Array, j: jax.Array) -> jax.Array:
    """Return keys j [keys] of a request, [H, keys, D]; arbitrary rows where it has none."""
    tokens = pages.shape[2]
    block = table.at[j // tokens].get(mode="clip")
    return pages.at[block, :, j % tokens].get(mode="clip").swapaxes(0, 1)


def _scores(
    q: jax.Array,
    k: jax.Array,
    positions: jax.Array,
    j: jax.Array,
    length: jax.Array,
    scoring: Scoring,
) -> jax.Array:
    """Score q [H, rows, D] and keys j, k [H, keys, D]: float32 [H, rows, keys], -inf where not seen."""
    scores = _dot("hrd,hkd->hrk", q, k) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    seen = (j <= positions[:, None]) & (j < length)
    if scoring.window is not None:
        seen &= j > positions[:, None] - scoring.window
    return jnp.where(seen, scores, -jnp.inf)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply to float32; float32 operands in full precision, where a GPU's default is TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
