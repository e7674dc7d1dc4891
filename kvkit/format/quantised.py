"""Quantised records: records of a tier that keeps KV with fewer bits than it was computed with.

A row of floats is stored as 8-bit codes and float32 scales. In dense KV a row is one head of one token, with
one scale for K and one for V. In opaque pages a row is `OPAQUE_ROW` adjacent floats, whatever they mean, with
one scale. A quantised record has its own name (`kvkit.format.names.quantised_name`), and its header states
its precision, so it is never mistaken for the exact record.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvkit.format.layout import ITEM_BYTES, QUANTISABLE, KVLayout, LayerGroup, LayoutError, Precision
from kvkit.format.record import Header

OPAQUE_ROW = 64
_SCALE_BYTES = 4

Shape = tuple[int, int, int, int]


def float_rows(header: Header, precision: Precision | None = None) -> LayerGroup:
    """Describe the float rows of a record, quantised or not, as a layer group with one block per chunk.

    Args:
        precision: precision of the returned group.

    Raises:
        LayoutError: the record holds no 16- or 32-bit floats, or its opaque pages hold no whole rows.
    """
    dtype, is_quantised = header.kv_dtype, header.precision is not None
    layers, heads, tokens, channels = header.shape
    if dtype not in QUANTISABLE:
        raise LayoutError(f"dtype={dtype!r}: want one of {', '.join(QUANTISABLE)}")
    k_size, v_size = header.k_size, channels - header.k_size
    if k_size and is_quantised:  # the scales come last
        v_size = max(0, v_size - 2 * _SCALE_BYTES)
    elif not k_size:
        row_bytes = OPAQUE_ROW + _SCALE_BYTES if is_quantised else OPAQUE_ROW * ITEM_BYTES[dtype]
        if channels % row_bytes:
            raise LayoutError(f"page_bytes={channels}: want a multiple of {row_bytes}")
        tokens, k_size, v_size = tokens * (channels // row_bytes), OPAQUE_ROW, 0
    return LayerGroup(
        tuple(range(layers)), heads, k_size, v_size, dtype, block_tokens=tokens, precision=precision
    )


def quantised_shape(shape: Shape, k_size: int, dtype: str) -> Shape:
    """Convert the shape [L, H, T, C] of an exact record to the quantised record's, with C in bytes.

    Args:
        k_size: K's part of C, in elements; 0: pages are opaque, and C is in bytes already.
    """
    *rest, channels = shape
    if k_size:
        scales = 1 + (channels > k_size)
    else:
        channels //= ITEM_BYTES[dtype]
        scales = channels // OPAQUE_ROW
    layers, heads, tokens = rest
    return layers, heads, tokens, channels + _SCALE_BYTES * scales


def exact_shape(header: Header) -> Shape:
    """Return the shape of the exact record from a quantised record's header: inverts `quantised_shape`."""
    group = float_rows(header)
    layers, heads, tokens, _ = header.shape
    if header.k_size:
        return layers, heads, tokens, group.channels
    return layers, heads, tokens, group.layer_bytes(group.block_tokens) // heads // tokens


def check_quantisable(layout: KVLayout, precisions: Mapping[str, Precision | None]) -> None:
    """Check that `layout` can be quantised to the precisions of the tiers, by tier name.

    Raises:
        LayoutError: a layer's dtype or page size is unsuitable, or its records would be no smaller.
    """
    for tier, precision in precisions.items():
        for group in layout.groups if precision is not None else ():
            layers = f"layers {group.layers[0]}-{group.layers[-1]}"
            _check_group(group, f"tier {tier!r}: precision={precision!r}: {layers}")


def _check_group(group: LayerGroup, where: str) -> None:
    if group.precision or group.dtype not in QUANTISABLE:
        raise LayoutError(f"{where} hold {group.precision or group.dtype}; want {', '.join(QUANTISABLE)}")
    exact, row_bytes = group.record_shape(group.block_tokens), OPAQUE_ROW * group.item_bytes
    if group.opaque and exact[3] % row_bytes:
        raise LayoutError(f"{where} hold pages of {exact[3]} bytes; want a multiple of {row_bytes}")
    row = quantised_shape(exact, 0 if group.opaque else group.k_size, group.dtype)[3]
    if row >= exact[3] * (1 if group.opaque else group.item_bytes):
        raise LayoutError(f"{where}: quantised, {group.channels} {group.dtype} channels take no less space")
