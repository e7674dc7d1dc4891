"""Pack and unpack for JAX arrays: the functions of `kvkit.kernels.pages.api`, compiled by XLA.

JAX arrays are immutable and typed, so nothing here is written in place and no record is a row of bytes.
Records are one array [chunks, L, H, T, C] of the pages' dtype or, with a precision, uint8 [chunks, L, H, T,
C + 4 or 8] with the bytes of the chunks' payloads. Functions return what those of `api` write. Under
`jax.jit`, with groups and ropes as Python values, donate the pages (`donate_argnums`), and XLA writes them in
place; only on a CPU does it copy a layer's pages of 8- or 16-bit floats. Equal shapes compile once: slots are
data. Slots are int32 unless JAX's x64 mode is on; a pool of 2**31 slots or more is refused.

All functions gather and scatter, which XLA does at the speed of memory on every platform. The Triton kernels
are not called through jax-triton: they find pages by address, which JAX does not expose.

Over several devices, shard heads (axis 1 of pages, axis 2 of records) and replicate ids. Nothing is then sent
between devices, neither under `jax.jit` on a mesh of auto axes nor in `jax.shard_map`, where the group's
`kv_heads` are those of one device. A mesh's explicit axes are refused outside of `jax.shard_map`. Blocks are
not sharded, because any device may need any block; in `jax.shard_map`, a device may have a pool and ids of
its own. There is no gradient.

Records may be in pinned host memory: `pack(..., pinned=True)` leaves them there, and `unpack` reads them
from any memory. Backends of CPUs, CUDA and TPUs have such memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from kvkit.format.layout import LARGEST, SMALLEST_AMAX, LayerGroup, Precision
from kvkit.format.rope import Rope
from kvkit.kernels.checks import ArraySpec, LaunchError, check_array
from kvkit.kernels.pages import checks
from kvkit.kernels.traced import operation

JaxPages: TypeAlias = Sequence[jax.Array | tuple[jax.Array, jax.Array]]

Ids: TypeAlias = jax.Array | NDArray[np.integer[Any]]


BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def pack(
    group: LayerGroup,
    pages: JaxPages,
    *,
    blocks: Ids | None = None,
    slots: Ids | None = None,
    records: jax.Array | None = None,
    pinned: bool = False,
) -> jax.Array:
    """Gather chunks out of an engine's pages: records [chunks, L, H, T, C], as `api.pack` fills them.

    Args:
        pages: per layer [B, H, N, C], or (k [B, H, N, Dk], v [B, H, N, Dv]); not opaque.
        blocks, slots: integers. NumPy ids are checked to be in range; in a JAX array, an id out of range is
            skipped, because its value is unknown when the call is compiled.
        records: values of the rows of a block or slot < 0; None: zeros.
        pinned: whether to return the records in pinned host memory.

    Raises:
        LaunchError: an argument does not fit.
        NotImplementedError: a gradient is taken.
    """
    checked_slots, record_spec = _checked(group, pages, blocks, slots)
    if records is not None:
        check_array("records", ArraySpec.of(records), record_spec)
    result: jax.Array = _pack(group, pages, checked_slots, records, pinned)
    return result


def unpack(
    group: LayerGroup,
    pages: JaxPages,
    records: jax.Array,
    *,
    blocks: Ids | None = None,
    slots: Ids | None = None,
    rope: Rope | None = None,
    cos_sin: jax.Array | NDArray[np.float32] | None = None,
) -> JaxPages:
    """Return the pages with chunks in them, as `api.unpack` writes them.

    Args:
        records: [chunks, L, H, T, C], as `pack` makes them.
        rope, cos_sin: rotary embedding and float32 rotations of K, [chunks, R] or [chunks, T, R]:
            `rope.delta_table` of the change of position of each chunk or token.

    The other arguments and the errors are those of `pack`.
    """
    checked_slots, record_spec = _checked(group, pages, blocks, slots)
    check_array("records", ArraySpec.of(records), record_spec)
    if (rope is None) != (cos_sin is None):
        raise LaunchError("rope, cos_sin: give both or neither")
    if rope is not None and cos_sin is not None:
        checks.check_rotation("rope", group, rope)
        tokens = record_spec.shape[3]
        if cos_sin.ndim == 2:
            cos_sin, tokens = cos_sin[:, None], 1
        check_array(
            "cos_sin",
            ArraySpec.of(cos_sin),
            ArraySpec((record_spec.shape[0], tokens, rope.channels), "float32"),
        )
    filled: JaxPages = _unpack(group, pages, records, checked_slots, rope, cos_sin)
    return filled


def quantise(values: jax.Array, k_size: int, to: Precision) -> jax.Array:
    """Quantise float K and V [..., C] to uint8 [..., C + 4 * S], codes and scales, as the reference does.

    Bits are equal, except in rows with a NaN or an infinity: these dequantise to values that are not finite,
    as in the reference, but from other bits.
    """
    codes, scales = [], []
    for tensor in (values[..., :k_size], values[..., k_size:]):
        if not tensor.shape[-1]:
            continue
        x = tensor.astype(jnp.float32)
        amax = jnp.abs(x).max(-1, keepdims=True)
        # XLA would multiply with the reciprocal of a single number, which gives another result
        largest = lax.optimization_barrier(jnp.full_like(amax, LARGEST[to]))  # type: ignore[no-untyped-call]
        tiny = amax < SMALLEST_AMAX
        inverse = jnp.where(tiny, 0.0, largest / jnp.where(tiny, 1.0, amax))
        scaled = jnp.clip(x * inverse, -LARGEST[to], LARGEST[to])
        code = scaled.astype(jnp.float8_e4m3fn) if to == "fp8" else jnp.round(scaled).astype(jnp.int8)
        codes.append(lax.bitcast_convert_type(code, jnp.uint8))
        scale = jnp.where(tiny, 0.0, amax / largest)
        scales.append(lax.bitcast_convert_type(scale[..., 0], jnp.uint8))  # [..., 4]
    return jnp.concatenate([*codes, *scales], -1)


def dequantise(rows: jax.Array, k_size: int, v_size: int, to: Precision) -> jax.Array:
    """Return float32 [..., k_size + v_size] of the output of `quantise`: code * scale."""
    channels = k_size + v_size
    codes = lax.bitcast_convert_type(rows[..., :channels], jnp.float8_e4m3fn if to == "fp8" else jnp.int8)
    scales = rows[..., channels:].reshape(*rows.shape[:-1], -1, 4)
    wide = lax.bitcast_convert_type(scales, jnp.float32)  # [..., S]
    k = codes[..., :k_size].astype(jnp.float32) * wide[..., :1]
    return jnp.concatenate([k, codes[..., k_size:].astype(jnp.float32) * wide[..., 1:]], -1) if v_size else k


def rotate(x: jax.Array, cos_sin: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the rotary channels of x [..., D] by cos_sin [..., R] in float32, rounded once to x's dtype."""
    last = rope.first + rope.channels
    rotary = x[..., rope.first : last].astype(jnp.float32)
    cos, sin = jnp.split(cos_sin, 2, -1)
    a, b = (rotary[..., 0::2], rotary[..., 1::2]) if rope.interleaved else jnp.split(rotary, 2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = jnp.stack(pair, -1).reshape(rotary.shape) if rope.interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([x[..., : rope.first], turned.astype(x.dtype), x[..., last:]], -1)


@operation("group", "pinned")
def _pack(
    group: LayerGroup,
    pages: JaxPages,
    slots: jax.Array,
    records: jax.Array | None,
    pinned: bool,
) -> jax.Array:
    layers = []
    for layer in pages:
        tensors = layer if isinstance(layer, tuple) else (layer,)
        block, n, keep = locate(slots, tensors[0])
        rows = [bits(tensor)[block, :, n] for tensor in tensors]  # [chunks, T, H, C]
        layers.append(jnp.concatenate(rows, -1).swapaxes(1, 2))
    packed = jnp.stack(layers, 1)  # [chunks, L, H, T, C]
    if group.precision is not None:
        values = lax.bitcast_convert_type(packed, jnp.dtype(group.dtype))
        packed = quantise(values, group.k_size, group.precision)
    kept = (
        jnp.zeros_like(packed) if records is None else bits(jax.device_put(records, jax.memory.Space.Device))
    )
    packed = jnp.where(keep[:, None, None, :, None], packed, kept)
    if group.precision is None:
        packed = lax.bitcast_convert_type(packed, jnp.dtype(group.dtype))
    return jax.device_put(packed, jax.memory.Space.Host) if pinned else packed


@operation("group", "rope")
def _unpack(
    group: LayerGroup,
    pages: JaxPages,
    records: jax.Array,
    slots: jax.Array,
    rope: Rope | None,
    cos_sin: jax.Array | None,
) -> JaxPages:
    dtype, records = jnp.dtype(group.dtype), jax.device_put(records, jax.memory.Space.Device)
    if group.precision is not None:
        values = dequantise(records, group.k_size, group.v_size, group.precision)
        k, v = values[..., : group.k_size], values[..., group.k_size :].astype(dtype)
    else:
        raw = bits(records)  # before anything else: see `bits`
        k, v = raw[..., : group.k_size], raw[..., group.k_size :]
        if rope is not None:
            k = lax.bitcast_convert_type(k, dtype)
    if rope is not None and cos_sin is not None:
        k = rotate(k, cos_sin[:, None, None], rope)
    if rope is not None or group.precision is not None:
        k = k.astype(dtype)
    k, v = (bits(tensor).swapaxes(2, 3) for tensor in (k, v))  # [chunks, L, T, H, D]
    out: list[jax.Array | tuple[jax.Array, jax.Array]] = []
    for i, layer in enumerate(pages):
        if isinstance(layer, tuple):
            out.append((scatter(layer[0], slots, k[:, i]), scatter(layer[1], slots, v[:, i])))
        else:
            out.append(scatter(layer, slots, jnp.concatenate([k[:, i], v[:, i]], -1)))
    return out


def bits(x: jax.Array) -> jax.Array:
    """Return an array's bits as unsigned integers of equal width: XLA's copies of floats may change a NaN."""
    return lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])


def locate(slots: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return block and token of each slot, and whether the pages have it; if not, its block is B."""
    blocks, _, tokens, _ = pages.shape
    keep = (slots >= 0) & (slots < blocks * tokens)
    return jnp.where(keep, slots // tokens, blocks), slots % tokens, keep


def scatter(pages: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Return pages with the bits `rows` [..., H, C] in their slots [...]."""
    block, n, _ = locate(slots, pages)

    def set_values(pages: jax.Array) -> jax.Array:
        return pages.at[block, :, n].set(lax.bitcast_convert_type(rows, pages.dtype), mode="drop")

    def set_bits(pages: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits(pages).at[block, :, n].set(rows, mode="drop"), pages.dtype)

    if pages.dtype.itemsize == 4 or jnp.issubdtype(pages.dtype, jnp.integer):
        return set_values(pages)
    # on a CPU, XLA would convert all pages to float32 and back: twice the copies, and some NaNs change
    result: jax.Array = lax.platform_dependent(pages, cpu=set_bits, default=set_values)
    return result


def _checked(
    group: LayerGroup, pages: JaxPages, blocks: Ids | None, slots: Ids | None
) -> tuple[jax.Array, ArraySpec]:
    """Check a call; return the slots [chunks, T] that its ids name, and the spec of its records."""
    if group.opaque:
        raise LaunchError("group: opaque pages are an engine's bytes, JAX arrays have none")
    kind = group.stored
    (_, _, first), *_ = checks.check_pages("pages", group, pages)
    pool, _, tokens, _ = first.shape
    name, given, limit = checks.check_chunks(group, (pool, tokens), blocks, slots, ("int32", "int64"))
    token_slots = in_range(name, given, limit)
    if name == "blocks":
        known = (token_slots >= 0) & (token_slots < pool)  # the product may wrap around
        each = token_slots[:, :, None] * tokens + jnp.arange(tokens, dtype=token_slots.dtype)
        token_slots = jnp.where(known[:, :, None], each, -1).reshape(len(given), given.shape[1] * tokens)
    shape = len(given), len(group.layers), group.kv_heads, token_slots.shape[1], kind.channels
    return token_slots, ArraySpec(shape, kind.dtype)


def in_range(name: str, ids: Ids, limit: int) -> jax.Array:
    """Return ids as a JAX array; NumPy ids are checked, and those < 0 become -1 to fit 32 bits."""
    if limit >= 2**31:
        raise LaunchError(f"{name}: the pages have {limit}, want fewer than {2**31}")
    if isinstance(ids, jax.Array):
        return ids
    checks.check_range(name, ids, limit)
    return jnp.asarray(np.maximum(ids, -1).astype(np.int32))
