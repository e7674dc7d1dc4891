"""Blend attention for JAX arrays on a TPU: a Pallas kernel over ragged rows and paged keys.

XLA first gathers the rows into tiles, [tiles, heads, rows * group, D], because a TPU moves whole tiles of
memory. A program then takes the keys that a tile sees in steps of some pages. Pallas fetches the pages one
step ahead, by block tables in scalar memory; steps that a tile does not need fetch and compute nothing. The
softmax is online (https://arxiv.org/abs/1805.02867), as in the kernels for GPUs.

No TPU has run the kernel, and nothing is known of its speed. Tests run it in Pallas' interpreter on a CPU,
where it equals the reference, and lower it for a TPU, with JAX 0.10, 0.11 and 0.12.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from kvkit.kernels.attention.jax_tiles import cut
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.traced import shape, varying

TILE_ROWS = 128  # about: query rows times query heads of a KV head
STEP_KEYS = 128
TABLE_BYTES = 512 << 10  # most bytes of block tables in scalar memory, which has 1 MiB
MULTIPLE = 16  # pages can be joined if their tokens are a multiple of this, a tile of 16-bit numbers


def supports(q: jax.Array, v_pages: jax.Array, requests: Requests) -> bool:
    """Return whether the kernel supports these: not empty, not float16, tables that fit scalar memory."""
    return (
        len(q) > 0
        and v_pages.shape[3] > 0
        and q.dtype != jnp.float16
        and 4 * requests.tables.size <= TABLE_BYTES
    )


def blend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    requests: Requests,
    scoring: Scoring,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute `kvkit.kernels.attention.jax.blend_attention`, traced for a TPU.

    Checks nothing: `supports` does. Within `jax.shard_map` all arrays vary over the same
    axes (`kvkit.kernels.traced.vary`).

    Args:
        interpret: run on any platform, slowly.
    """
    m, query_heads, size = q.shape
    blocks, heads, tokens, v_size = v_pages.shape
    group, width = query_heads // heads, requests.tables.shape[1]
    rows = max(1, min(TILE_ROWS // group, m))
    tiles = cut(requests, rows, tokens)
    row = tiles.first[:, None] + jnp.arange(rows, dtype=jnp.int32)  # [tiles, rows]
    valid = row < tiles.after[:, None]
    position = jnp.where(valid, requests.positions[row.clip(0, m - 1)].astype(jnp.int32), -1)
    end = jnp.clip(position.max(1) + 1, 0, tiles.lengths[tiles.request])
    begin = jnp.zeros_like(end)
    if scoring.window is not None:
        nearest = jnp.where(valid, position, 2**31 - 1).min(1)
        begin = jnp.clip(nearest - scoring.window + 1, 0, end)

    pages = min(width, max(1, STEP_KEYS // tokens)) if tokens % MULTIPLE == 0 else 1  # per step
    packed = q[row.clip(0, m - 1)].reshape(len(row), rows, heads, group, size)
    packed = packed.swapaxes(1, 2).reshape(len(row), heads, rows * group, size)
    request = tiles.request.clip(max=len(requests.lengths) - 1)
    scalars = request, begin, end, requests.tables.clip(0, blocks - 1).astype(jnp.int32).ravel()
    attend = _kernel(packed, v_pages, width, pages, scoring, interpret)
    lane_positions = jnp.repeat(position, group, axis=1)[:, :, None]
    results = attend(*scalars, lane_positions, packed, *[k_pages] * pages, *[v_pages] * pages)
    o, lse = (x.reshape(len(row), heads, rows, group, -1).swapaxes(1, 2) for x in results)
    to = jnp.where(valid, row, m).ravel()
    nothing = jnp.zeros((m, query_heads, v_size), q.dtype), jnp.zeros((m, query_heads), jnp.float32)
    o, lse = (
        x.at[to].set(y.reshape(-1, *x.shape[1:]), mode="drop") for x, y in zip(nothing, (o, lse), strict=True)
    )
    return o, lse


def _kernel(
    q: jax.Array, v_pages: jax.Array, width: int, pages: int, scoring: Scoring, interpret: bool
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the call of the kernel.

    Args:
        q: [tiles, heads, lanes, D], rows gathered into tiles; a lane is a row's query head.
        width: blocks of a request in the tables.
        pages: pages of a step.
    """
    (tiles, heads, lanes, size), (_, _, tokens, v_size) = q.shape, v_pages.shape

    def tile_spec(channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, lanes, channels), lambda i, h, *_: (i, h, 0, 0))

    def page_spec(nth: int, channels: int) -> pl.BlockSpec:
        def index_map(i: int, h: int, t: int, *scalars: jax.Ref) -> tuple[jax.Array, int, int, int]:
            request, begin, end, table = scalars
            last = lax.div(jnp.maximum(end[i] - 1, 0), jnp.int32(tokens))  # repeated if there is no next
            j = (lax.div(begin[i], jnp.int32(pages * tokens)) + t) * pages + nth
            return table[request[i] * width + jnp.minimum(j, last)], h, 0, 0

        return pl.BlockSpec((None, None, tokens, channels), index_map)

    return pl.pallas_call(
        functools.partial(_attend, pages=pages, scoring=scoring),
        out_shape=(
            shape(tiles, heads, lanes, v_size, dtype=q.dtype, axes=varying(q)),
            shape(tiles, heads, lanes, 1, dtype=jnp.float32, axes=varying(q)),
        ),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles, heads, pl.cdiv(width, pages)),
            in_specs=[
                pl.BlockSpec((None, lanes, 1), lambda i, *_: (i, 0, 0)),
                tile_spec(size),
                *(page_spec(nth, size) for nth in range(pages)),
                *(page_spec(nth, v_size) for nth in range(pages)),
            ],
            out_specs=(tile_spec(v_size), tile_spec(1)),
            scratch_shapes=[tpu.VMEM((lanes, n), jnp.float32) for n in (v_size, 1, 1)],
        ),
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="blend_attention",
    )


def _attend(
    request: jax.Ref,
    begin: jax.Ref,
    end: jax.Ref,
    table: jax.Ref,
    position: jax.Ref,
    q: jax.Ref,
    *refs: jax.Ref,
    pages: int,
    scoring: Scoring,
) -> None:
    """Run a step for some rows of a request and one KV head.

    `refs` has pages [tokens, D] of K, those of V, the outputs and the scratch memory.
    """
    k, v, (o, lse, acc, norm, top) = refs[:pages], refs[pages : 2 * pages], refs[2 * pages :]
    tile, step, keys = pl.program_id(0), pl.program_id(2), pages * k[0].shape[0]
    first = (lax.div(begin[tile], jnp.int32(keys)) + step) * keys

    @pl.when(step == 0)
    def _() -> None:
        acc[...], norm[...] = jnp.zeros_like(acc), jnp.zeros_like(norm)
        top[...] = jnp.full_like(top, -jnp.inf)

    @pl.when(first < end[tile])
    def _() -> None:
        s = _dot(q[...], _joined(k), 1) * scoring.scale
        if scoring.softcap is not None:
            s = scoring.softcap * jnp.tanh(s / scoring.softcap)
        j = first + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        seen = (j <= position[...]) & (j < end[tile])
        if scoring.window is not None:
            seen &= j > position[...] - scoring.window
        s = jnp.where(seen, s, -jnp.inf)
        higher = jnp.maximum(top[...], s.max(1, keepdims=True))
        shift = jnp.where(higher == -jnp.inf, 0.0, higher)  # -inf - -inf is NaN
        p, fade = jnp.exp(s - shift), jnp.exp(top[...] - shift)
        values = _joined(v)
        own = first + lax.broadcasted_iota(jnp.int32, values.shape, 0) < end[tile]
        values = jnp.where(own, values, jnp.zeros_like(values))  # 0 * NaN is NaN
        acc[...] = acc[...] * fade + _dot(p.astype(values.dtype), values, 0)
        norm[...] = norm[...] * fade + p.sum(1, keepdims=True)
        top[...] = higher

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        total = jnp.where(norm[...] > 0, norm[...], 1.0)
        o[...] = (acc[...] / total).astype(o.dtype)
        lse[...] = top[...] + jnp.log(total)  # no key seen: -inf


def _joined(pages: tuple[jax.Ref, ...]) -> jax.Array:
    return jnp.concatenate([page[...] for page in pages])


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Multiply to float32 over channels of a and an axis of b; float32 operands in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
