"""Reference of pack and unpack in plain torch, for any device and dtype: it defines their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LARGEST, SMALLEST_AMAX, LayerGroup, Precision
from kvkit.format.rope import Rope, Rotation


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Contiguous bytes of one layer's pages: K and V joined, or one of the two.

    Args:
        layer: position of the layer in its group.
        first_byte: start of this part in a row (one head and token) of a record.
        pages: uint8 [B, H, N, W], W bytes of a row; a view of the engine's memory.
    """

    layer: int
    first_byte: int
    pages: torch.Tensor


def pack(
    group: LayerGroup,
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
) -> None:
    """Set records[chunk][layer, head, t] = pages[layer][block, head, n], slots[chunk, t] = block * N + n.

    Args:
        group: group of the pages.
        parts: parts of every layer.
        records: per chunk the bytes of a canonical [L, H, T, C] or, with `group.precision`, of rows from
            `quantise`; written, except where a slot is < 0.
        slots: [chunks, T].
    """
    layers, heads = len(group.layers), parts[0].pages.shape[1]
    for record, row in zip(records, slots, strict=True):
        keep = torch.from_numpy(np.flatnonzero(row >= 0))  # [K]
        rows = torch.zeros(layers, heads, len(row), group.row_bytes, dtype=torch.uint8)
        for part in parts:
            block, n, span = _locate(part, row)
            rows[part.layer, :, keep, span] = part.pages[block, :, n].transpose(0, 1).cpu()
        if group.precision is not None:
            rows = quantise(rows.view(getattr(torch, group.dtype)), group.k_size, group.precision)
        torch.from_numpy(record).view(layers, heads, len(row), -1)[:, :, keep] = rows[:, :, keep]


def unpack(
    group: LayerGroup,
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    rotation: Rotation | None = None,
) -> None:
    """Set pages[layer][block, head, n] = records[chunk][layer, head, t]: the inverse of `pack`.

    Writes the pages of every slot >= 0 and nothing else; records may be read-only. K (not V) is rotated by
    its token's change of position. Values are dequantised and rotated in float32, rounded once to the pages'
    dtype; values that are neither quantised nor rotated keep their bits.
    """
    heads = parts[0].pages.shape[1]  # all heads of a record, or a share of them, as if it had more layers
    layers = len(group.layers) * (1 if group.opaque else group.kv_heads // heads)
    dtype: torch.dtype = getattr(torch, group.dtype)
    cos_sin, cos_sin_rows = rotation.resolve(*slots.shape) if rotation else (None, slots)
    for record, row, cos_sin_row in zip(records, slots, cos_sin_rows, strict=True):
        keep = torch.from_numpy(np.flatnonzero(row >= 0))  # [K]
        rows = torch.from_numpy(record.copy()).view(layers, heads, len(row), -1)
        if rotation is not None or group.precision is not None:
            k, v, precision = group.k_size, group.v_size, group.precision
            values = rows.view(dtype) if precision is None else dequantise(rows, k, v, precision)
            if rotation is not None and cos_sin is not None:  # K comes first in C
                values = rotate(values, torch.from_numpy(cos_sin[cos_sin_row]), rotation.rope)
            rows = values.to(dtype).view(torch.uint8)
        for part in parts:
            block, n, span = _locate(part, row)
            token_rows = rows[part.layer, :, keep, span].transpose(0, 1)  # [K, H, W]
            part.pages[block, :, n] = token_rows.to(part.pages.device)


def _locate(part: Part, row: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """Return block and token of each slot >= 0, on the pages' device, and the part's bytes of a row."""
    slot = torch.from_numpy(row[row >= 0]).to(part.pages.device)
    tokens, width = part.pages.shape[2:]
    return slot // tokens, slot % tokens, slice(part.first_byte, part.first_byte + width)


def quantise(values: torch.Tensor, k_size: int, to: Precision) -> torch.Tensor:
    """Quantise K and V to codes and scales, with scales for each token and head.

    Per token and head, K and V apart: scale = amax / LARGEST, code = round to nearest even(x * (LARGEST /
    amax)), all in float32. So |x - dequantised| <= amax / 254 for int8, and <= max(|x| / 16, amax / 448 /
    1024) for fp8, plus the rounding to the dtype. A NaN or an infinity spoils its own row (K or V of its
    token and head).

    Args:
        values: float [..., C], C = K then V channels.
        k_size: channels of K; V has the rest, if any.
        to: key of `LARGEST`.

    Returns:
        uint8 [..., C + 4 * S]: C codes, then the S = 1 or 2 scales (K's, V's) as float32, little-endian.
    """
    codes, scales = [], []
    for part in (values[..., :k_size], values[..., k_size:]):
        if not part.shape[-1]:
            continue
        x = part.float()
        amax = x.abs().amax(-1, keepdim=True)
        tiny = amax < SMALLEST_AMAX
        largest = torch.full_like(amax, LARGEST[to])  # torch divides by a plain number in two roundings
        inverse = torch.where(tiny, 0.0, largest / torch.where(tiny, 1.0, amax))
        scaled = (x * inverse).clamp(-LARGEST[to], LARGEST[to])
        code = scaled.to(torch.float8_e4m3fn) if to == "fp8" else scaled.round().to(torch.int8)
        codes.append(code.view(torch.uint8))
        scales.append(torch.where(tiny, 0.0, amax / largest).view(torch.uint8))
    return torch.cat([*codes, *scales], -1)


def dequantise(rows: torch.Tensor, k_size: int, v_size: int, to: Precision) -> torch.Tensor:
    """Return float32 [..., k_size + v_size] of the output of `quantise`: code * scale."""
    channels = k_size + v_size
    codes = rows[..., :channels].contiguous().view(torch.float8_e4m3fn if to == "fp8" else torch.int8).float()
    scales = rows[..., channels:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # [..., S]
    k = codes[..., :k_size] * scales[..., :1]
    return k if not v_size else torch.cat([k, codes[..., k_size:] * scales[..., 1:]], -1)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the rotary channels of x [..., D] by cos_sin [..., R] (`Rope.table` or `delta_table`).

    Computes in float32 (float64 if x is), rounded once to x's dtype. Other channels stay unchanged.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotary = x[..., rope.first : rope.first + rope.channels].to(wide)
    cos, sin = cos_sin.to(wide).chunk(2, -1)
    if rope.interleaved:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = rotary.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    out = x.clone()
    out[..., rope.first : rope.first + rope.channels] = turned.to(x.dtype)
    return out
