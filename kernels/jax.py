"""The kernels for JAX arrays: what `kvkit.kernels.reference` means, as functions that XLA compiles.

JAX arrays are values with a dtype, so nothing here is written in place and no record is a row of bytes:
- pages are a sequence of one entry per layer: [B, H, N, C] with K and V side by side in C, or K and V apart
  as (k [B, H, N, Dk], v [B, H, N, Dv]);
- records are one array [chunks, L, H, T, C] of the pages' dtype or, quantised, uint8
  [chunks, L, H, T, C + 4 or 8]; the bytes of records[i] are the payload of chunk i's record;
- what the reference writes is returned. Under `jax.jit` donate the pages (`donate_argnums`), and XLA writes
  them in place; only on a CPU it copies a layer's pages if they are floats of 8 or 16 bits.

Every function may be called as it is or under `jax.jit`, where groups, ropes, scales, windows and names are
Python values. Equal shapes compile once: slots, tables, positions and lengths are data. Slots are int32
unless JAX's x64 mode is on; a pool of 2**31 slots or more is refused.

XLA compiles the same functions for every platform, except that `blend_attention` is the Pallas kernel of
`kvkit.kernels.attention.pallas` on CUDA; which one is chosen when a function is lowered, so that one function
serves every platform. The rest gathers and scatters, which XLA does at the speed of memory, or, as
`query_scores`, loops over tiles. The Triton kernels are not called through jax-triton: they find pages by
their addresses, which JAX keeps to itself, and start on a plan that the host makes of positions, which under
`jax.jit` are not known yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope
from kvkit.kernels.attention import pallas
from kvkit.kernels.launch import LaunchError, Quantised
from kvkit.kernels.reference import LARGEST, SMALLEST_AMAX

Pages: TypeAlias = Sequence[jax.Array | tuple[jax.Array, jax.Array]]
Ids: TypeAlias = jax.Array | NDArray[np.integer[Any]]

ROW_TILE = 128  # query rows that share a loop over keys
KEY_TILE = 512  # keys that a step of that loop takes: scores are [Hq, ROW_TILE, KEY_TILE] at a time
FLOATS = ("float32", "float16", "bfloat16")
BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


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


def pack(
    group: LayerGroup,
    pages: Pages,
    *,
    blocks: Ids | None = None,
    slots: Ids | None = None,
    records: jax.Array | None = None,
    quantised: Quantised | None = None,
) -> jax.Array:
    """Chunks out of an engine's pages: [chunks, L, H, T, C].

    Args:
        group: the layers' form; not opaque.
        pages: of its layers, in its order.
        blocks: int [chunks, T / N], each chunk's blocks in order.
        slots: instead of `blocks`, int [chunks, T]: each token's block * N + place in the block.
        records: what the rows of a block or slot < 0 keep; None: zeros.
        quantised: "fp8" or "int8": `quantise` each row on the way.

    Returns:
        records: of the group's dtype, or uint8 as `group.quantised()` has it.

    Raises:
        LaunchError: an argument does not fit. A NumPy array of ids is also checked to be in range; in a JAX
            array an id out of range is skipped, for its value is not known when the call is compiled.
    """
    _check_pages(group, pages, quantised)
    every = _slots(group, pages, blocks, slots)
    if records is not None:
        _check("records", records, _record_shape(group, every, quantised), _record_dtype(group, quantised))
    found: jax.Array = _pack(group, pages, every, records, quantised)
    return found


def unpack(
    group: LayerGroup,
    pages: Pages,
    records: jax.Array,
    *,
    blocks: Ids | None = None,
    slots: Ids | None = None,
    rope: Rope | None = None,
    turns: jax.Array | NDArray[np.float32] | None = None,
    quantised: Quantised | None = None,
) -> Pages:
    """The pages with chunks in them: the inverse of `pack`.

    Args:
        group, pages, blocks, slots: as for `pack`. A block or slot < 0 is skipped; of one that is named
            twice either chunk's row arrives, or a mix.
        records: [chunks, L, H, T, C], or what `pack` quantised.
        rope, turns: rotate K by float32 turns [chunks, R] or [chunks, T, R], `rope.turns` of each chunk's or
            token's move (with `Rotation.resolve`: turns[row]); in float32, rounded once.
        quantised: how `records` are.

    Raises:
        LaunchError: as for `pack`.
    """
    _check_pages(group, pages, quantised)
    every = _slots(group, pages, blocks, slots)
    shape = _record_shape(group, every, quantised)
    _check("records", records, shape, _record_dtype(group, quantised))
    if (rope is None) != (turns is None):
        raise LaunchError("rope, turns: give both or neither")
    if rope is not None and turns is not None:
        _check_rope(rope, group.k_size)
        if group.dtype not in FLOATS:
            raise LaunchError(f"rope: pages hold {group.dtype}, want one of {', '.join(FLOATS)}")
        if turns.ndim == 2:
            turns = turns[:, None]
            _check("turns", turns, (shape[0], 1, rope.channels), "float32")
        else:
            _check("turns", turns, (shape[0], shape[3], rope.channels), "float32")
    filled: Pages = _unpack(group, pages, records, every, rope, turns, quantised)
    return filled


def quantise(values: jax.Array, k_size: int, to: Quantised) -> jax.Array:
    """Codes and scales of K and V: uint8 [..., C + 4 * S] of float [..., C], as the reference's, bit by bit.

    Rows with a NaN or an infinity dequantise to what is not finite, as there, but from other bits.
    """
    # XLA multiplies by a constant's reciprocal instead of dividing, which is another number
    largest = lax.optimization_barrier(jnp.float32(LARGEST[to]))  # type: ignore[no-untyped-call]  # JAX's
    codes, scales = [], []
    for part in (values[..., :k_size], values[..., k_size:]):
        if not part.shape[-1]:
            continue
        x = part.astype(jnp.float32)
        amax = jnp.abs(x).max(-1, keepdims=True)
        tiny = amax < SMALLEST_AMAX
        inverse = jnp.where(tiny, 0.0, largest / jnp.where(tiny, 1.0, amax))
        scaled = jnp.clip(x * inverse, -LARGEST[to], LARGEST[to])
        code = scaled.astype(jnp.float8_e4m3fn) if to == "fp8" else jnp.round(scaled).astype(jnp.int8)
        codes.append(lax.bitcast_convert_type(code, jnp.uint8))
        scale = jnp.where(tiny, 0.0, amax / largest)
        scales.append(lax.bitcast_convert_type(scale[..., 0], jnp.uint8))  # [..., 4]
    return jnp.concatenate([*codes, *scales], -1)


def dequantise(rows: jax.Array, k_size: int, v_size: int, to: Quantised) -> jax.Array:
    """float32 [..., k_size + v_size] of what `quantise` made: code * scale."""
    channels = k_size + v_size
    codes = lax.bitcast_convert_type(rows[..., :channels], jnp.float8_e4m3fn if to == "fp8" else jnp.int8)
    scales = rows[..., channels:].reshape(*rows.shape[:-1], -1, 4)
    wide = lax.bitcast_convert_type(scales, jnp.float32)  # [..., S]
    k = codes[..., :k_size].astype(jnp.float32) * wide[..., :1]
    return jnp.concatenate([k, codes[..., k_size:].astype(jnp.float32) * wide[..., 1:]], -1) if v_size else k


def rotate(x: jax.Array, cos_sin: jax.Array, rope: Rope) -> jax.Array:
    """Turn the rotary channels of x [..., D] by cos_sin [..., R]: in float32, rounded once to x's dtype."""
    last = rope.first + rope.channels
    rotary = x[..., rope.first : last].astype(jnp.float32)
    cos, sin = jnp.split(cos_sin, 2, -1)
    a, b = (rotary[..., 0::2], rotary[..., 1::2]) if rope.interleaved else jnp.split(rotary, 2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = jnp.stack(pair, -1).reshape(rotary.shape) if rope.interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([x[..., : rope.first], turned.astype(x.dtype), x[..., last:]], -1)


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
    _check_attention(q, k_pages, v_pages, scale, window, softcap)
    if tables.ndim != 2 or not tables.size:
        raise LaunchError(f"tables: {tables.shape}, want [requests, blocks], none of them 0")
    for name, ids, shape in (
        ("tables", tables, tables.shape),
        ("positions", positions, (len(q),)),
        ("row_starts", row_starts, (len(tables) + 1,)),
        ("lengths", lengths, (len(tables),)),
    ):
        _check_int(name, ids, shape)
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
    for name, x, kind in (("q", q, "Hq"), ("k", k, "H"), ("v", v, "H")):
        if x.ndim != 3 or x.shape[0] != len(q):
            raise LaunchError(f"{name}: {x.shape}, want [M, {kind}, channels], M = {len(q)} as in q")
        if str(x.dtype) not in FLOATS:
            raise LaunchError(f"{name}: {x.dtype}, want one of {', '.join(FLOATS)}")
    if k_pages.ndim != 4 or not k_pages.size:
        raise LaunchError(f"k_pages: {k_pages.shape}, want [B, H, N, D], none of them 0")
    _check("k_pages", k_pages, (k_pages.shape[0], k.shape[1], k_pages.shape[2], k.shape[2]), str(k.dtype))
    _check("v_pages", v_pages, (*k_pages.shape[:3], v.shape[2]), str(v.dtype))
    if v.shape[1] != k.shape[1]:
        raise LaunchError(f"v: {v.shape}, want {k.shape[1]} heads as k")
    if q.shape[2] != k.shape[2]:
        raise LaunchError(f"q: {q.shape}, want {k.shape[2]} channels as k")
    _check_rope(rope, k.shape[2])
    _check("cos_sin", cos_sin, (len(q), rope.channels), "float32")
    _check_int("slots", slots, (len(q),))
    every = _in_range("slots", slots, k_pages.shape[0] * k_pages.shape[2])
    made: Scattered = _rope_scatter(q, k, v, cos_sin, every, k_pages, v_pages, rope, deviation)
    return made


@jax.jit
def token_deviation(new: jax.Array, old: jax.Array) -> jax.Array:
    """Squared distance of each token's [H, D] of new and old [N, H, D]: float32 [N], computed in it."""
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
    _check_attention(q, k_pages, k_pages if v_pages is None else v_pages, scale, window, softcap)
    if table.ndim != 1 or not table.size:
        raise LaunchError(f"table: {table.shape}, want [blocks], at least 1")
    for name, ids, shape in (
        ("table", table, table.shape),
        ("positions", positions, (len(q),)),
        ("length", np.asarray(length) if isinstance(length, int) else length, ()),
    ):
        _check_int(name, ids, shape)
    if lse is not None:
        _check("lse", lse, q.shape[:2], "float32")
    mass: jax.Array = _query_scores(
        q, k_pages, v_pages, table, positions, length, scale, window, softcap, lse
    )
    return mass


@functools.partial(jax.jit, static_argnames=("group", "quantised"))
def _pack(
    group: LayerGroup, pages: Pages, slots: jax.Array, records: jax.Array | None, quantised: Quantised | None
) -> jax.Array:
    layers = []
    for layer in pages:
        parts = layer if isinstance(layer, tuple) else (layer,)
        block, n, keep = _where(slots, parts[0])
        rows = [_bits(part)[block, :, n] for part in parts]  # [chunks, T, H, C]
        layers.append(jnp.concatenate(rows, -1).swapaxes(1, 2))
    found = jnp.stack(layers, 1)  # [chunks, L, H, T, C]
    if quantised is not None:
        found = quantise(lax.bitcast_convert_type(found, jnp.dtype(group.dtype)), group.k_size, quantised)
    kept = jnp.zeros_like(found) if records is None else _bits(records)
    found = jnp.where(keep[:, None, None, :, None], found, kept)
    return found if quantised is not None else lax.bitcast_convert_type(found, jnp.dtype(group.dtype))


@functools.partial(jax.jit, static_argnames=("group", "rope", "quantised"))
def _unpack(
    group: LayerGroup,
    pages: Pages,
    records: jax.Array,
    slots: jax.Array,
    rope: Rope | None,
    turns: jax.Array | None,
    quantised: Quantised | None,
) -> Pages:
    dtype = jnp.dtype(group.dtype)
    if quantised is not None:
        values = dequantise(records, group.k_size, group.v_size, quantised)
        k, v = values[..., : group.k_size], values[..., group.k_size :].astype(dtype)
    else:
        raw = _bits(records)  # before anything else: see `_bits`
        k, v = raw[..., : group.k_size], raw[..., group.k_size :]
        if rope is not None:
            k = lax.bitcast_convert_type(k, dtype)
    if rope is not None and turns is not None:
        k = rotate(k, turns[:, None, None], rope)
    if rope is not None or quantised is not None:
        k = k.astype(dtype)
    k, v = (_bits(part).swapaxes(2, 3) for part in (k, v))  # [chunks, L, T, H, D]
    out: list[jax.Array | tuple[jax.Array, jax.Array]] = []
    for i, layer in enumerate(pages):
        if isinstance(layer, tuple):
            out.append((_scatter(layer[0], slots, k[:, i]), _scatter(layer[1], slots, v[:, i])))
        else:
            out.append(_scatter(layer, slots, jnp.concatenate([k[:, i], v[:, i]], -1)))
    return out


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
        block, n, keep = _where(slots, k_pages)
        changed = jnp.where(keep, token_deviation(turned, k_pages[block, :, n]), 0.0)
    return Scattered(
        rotate(q, cos_sin[:, None], rope),
        _scatter(k_pages, slots, _bits(turned)),
        _scatter(v_pages, slots, _bits(v)),
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


def _bits(x: jax.Array) -> jax.Array:
    """The same bytes as unsigned integers of the same width: XLA's copies of floats may change a NaN."""
    return lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])


def _where(slots: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block and token of each slot, and whether it is one of these pages'; others point beyond them."""
    blocks, _, tokens, _ = pages.shape
    keep = (slots >= 0) & (slots < blocks * tokens)
    return jnp.where(keep, slots // tokens, blocks), slots % tokens, keep


def _scatter(pages: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Pages with bits rows [..., H, C] in their slots [...]."""
    block, n, _ = _where(slots, pages)

    def as_they_are(pages: jax.Array) -> jax.Array:
        return pages.at[block, :, n].set(lax.bitcast_convert_type(rows, pages.dtype), mode="drop")

    def as_bits(pages: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(_bits(pages).at[block, :, n].set(rows, mode="drop"), pages.dtype)

    if pages.dtype.itemsize == 4 or jnp.issubdtype(pages.dtype, jnp.integer):
        return as_they_are(pages)
    # on a CPU XLA would turn all pages into float32 and back, twice the copies and not all of the NaNs
    found: jax.Array = lax.platform_dependent(pages, cpu=as_bits, default=as_they_are)
    return found


def _slots(group: LayerGroup, pages: Pages, blocks: Ids | None, slots: Ids | None) -> jax.Array:
    """The slots [chunks, T] that a call's ids name."""
    if (blocks is None) == (slots is None):
        raise LaunchError("blocks, slots: give one of the two")
    first = pages[0][0] if isinstance(pages[0], tuple) else pages[0]
    pool, tokens = first.shape[0], first.shape[2]
    if slots is not None:
        _check_chunks("slots", slots)
        return _in_range("slots", slots, pool * tokens)
    assert blocks is not None
    _check_chunks("blocks", blocks)
    if tokens != group.block_tokens:
        raise LaunchError(
            f"blocks: the pages' N = {tokens} is not block_tokens = {group.block_tokens}: give slots"
        )
    ids = _in_range("blocks", blocks, pool)
    every = ids[:, :, None] * tokens + jnp.arange(tokens, dtype=ids.dtype)
    known = (ids >= 0) & (ids < pool)  # the product may have wrapped around
    return jnp.where(known[:, :, None], every, -1).reshape(len(ids), -1)


def _in_range(name: str, ids: Ids, limit: int) -> jax.Array:
    """Ids as a JAX array; NumPy's are checked, and every one < 0 becomes -1: JAX would cut 64 bits to 32."""
    if limit >= 2**31:
        raise LaunchError(f"{name}: the pages have {limit}, want fewer than {2**31}")
    if isinstance(ids, jax.Array):
        return ids
    if ids.size and ids.max() >= limit:
        raise LaunchError(f"{name}: {ids.max()} is out of range, the pages have {limit} {name}")
    return jnp.asarray(np.maximum(ids, -1).astype(np.int32))


def _check_chunks(name: str, ids: Ids) -> None:
    if getattr(ids, "ndim", None) != 2:
        raise LaunchError(f"{name}: {getattr(ids, 'shape', type(ids).__name__)}, want [chunks, at least 1]")
    _check_int(name, ids, ids.shape)
    if not ids.shape[1]:
        raise LaunchError(f"{name}: {ids.shape}, want [chunks, at least 1]")


def _check_int(name: str, ids: Ids, shape: tuple[int, ...]) -> None:
    if not isinstance(ids, jax.Array | np.ndarray) or str(ids.dtype) not in ("int32", "int64"):
        raise LaunchError(f"{name}: {getattr(ids, 'dtype', type(ids).__name__)}, want an array of int32")
    if ids.shape != shape:
        raise LaunchError(f"{name}: {ids.shape}, want {shape}")


def _check(name: str, x: jax.Array | NDArray[Any], shape: tuple[int, ...], dtype: str) -> None:
    if x.shape != shape or str(x.dtype) != dtype:
        raise LaunchError(f"{name}: {x.shape} {x.dtype}, want {shape} {dtype}")


def _check_rope(rope: Rope, channels: int) -> None:
    if rope.first + rope.channels > channels:
        raise LaunchError(
            f"rope: channels {rope.first} to {rope.first + rope.channels}, a head has {channels}"
        )


def _check_pages(group: LayerGroup, pages: Pages, quantised: Quantised | None) -> None:
    if group.opaque:
        raise LaunchError("group: opaque pages are an engine's bytes, JAX arrays have none")
    if quantised is not None:
        if quantised not in LARGEST:
            raise LaunchError(f"quantised={quantised!r}: want one of {', '.join(LARGEST)}")
        if group.dtype not in FLOATS:
            raise LaunchError(f"quantised: pages hold {group.dtype}, want one of {', '.join(FLOATS)}")
    if len(pages) != len(group.layers):
        raise LaunchError(f"pages: {len(pages)} given, the group has {len(group.layers)} layers")
    pool: tuple[int, ...] | None = None
    for i, layer in enumerate(pages):
        apart = isinstance(layer, tuple)
        parts = layer if isinstance(layer, tuple) else (layer,)
        sizes = (group.k_size, group.v_size) if apart else (group.channels,)
        for part, (x, size) in enumerate(zip(parts, sizes, strict=True)):
            name = f"pages[{i}][{part}]" if apart else f"pages[{i}]"
            if x.ndim != 4 or not x.size:
                raise LaunchError(f"{name}: {x.shape}, want [B, {group.kv_heads}, N, {size}], none of them 0")
            pool = pool or x.shape
            _check(name, x, (pool[0], group.kv_heads, pool[2], size), group.dtype)


def _record_shape(group: LayerGroup, slots: jax.Array, quantised: Quantised | None) -> tuple[int, ...]:
    channels = group.channels if quantised is None else group.quantised().channels
    return slots.shape[0], len(group.layers), group.kv_heads, slots.shape[1], channels


def _record_dtype(group: LayerGroup, quantised: Quantised | None) -> str:
    return group.dtype if quantised is None else "uint8"


def _check_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    if q.ndim != 3 or str(q.dtype) not in FLOATS:
        raise LaunchError(f"q: {q.shape} {q.dtype}, want [M, Hq, D] of {', '.join(FLOATS)}")
    if k_pages.ndim != 4 or not k_pages.size:
        raise LaunchError(f"k_pages: {k_pages.shape}, want [B, H, N, D], none of them 0")
    blocks, heads, tokens, _ = k_pages.shape
    _check("k_pages", k_pages, (blocks, heads, tokens, q.shape[2]), str(q.dtype))
    if v_pages.ndim != 4:
        raise LaunchError(f"v_pages: {v_pages.shape}, want [B, H, N, Dv]")
    _check("v_pages", v_pages, (blocks, heads, tokens, v_pages.shape[3]), str(q.dtype))
    if not q.shape[1] or q.shape[1] % heads:
        raise LaunchError(f"q: {q.shape[1]} query heads, want a multiple of the {heads} KV heads")
    if not math.isfinite(scale):
        raise LaunchError(f"scale={scale}: want a finite number")
    if window is not None and window < 1:
        raise LaunchError(f"window={window}: want None or at least 1 token")
    if softcap is not None and not softcap > 0:
        raise LaunchError(f"softcap={softcap}: want None or a number above 0")
