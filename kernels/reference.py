"""What each kernel means, in plain torch: for any device, any dtype, and for reading first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The bytes of one layer's pages that lie side by side: K and V joined, or one of the two.

    Args:
        layer: position of the layer in its group.
        first_byte: where this part starts within a row (one head and token) of a record.
        pages: uint8 [B, H, N, W], W bytes of a row; a view of the engine's memory.
    """

    layer: int
    first_byte: int
    pages: torch.Tensor


def pack(
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    shape: tuple[int, int, int, int],
) -> None:
    """records[chunk][layer, head, t] = pages[layer][block, head, n], slots[chunk, t] = block * N + n.

    Args:
        parts: of every layer.
        records: per chunk the bytes of a canonical [L, H, T, C]; written, except where a slot is < 0.
        slots: [chunks, T].
        shape: of a record in bytes, [L, H, T, C * item_bytes].
    """
    for record, row in zip(records, slots, strict=True):
        target = torch.from_numpy(record).view(shape)
        keep = torch.from_numpy(np.flatnonzero(row >= 0))  # [K]
        for part in parts:
            block, n = _where(part, row)
            first, last = part.first_byte, part.first_byte + part.pages.shape[3]
            rows = part.pages[block, :, n]  # [K, H, W]
            target[part.layer, :, keep, first:last] = rows.transpose(0, 1).cpu()


def unpack(
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    shape: tuple[int, int, int, int],
) -> None:
    """pages[layer][block, head, n] = records[chunk][layer, head, t]: the inverse of `pack`.

    Writes the pages of every slot >= 0 and nothing else; records may be read-only.
    """
    for record, row in zip(records, slots, strict=True):
        source = torch.from_numpy(record.copy()).view(shape)
        keep = torch.from_numpy(np.flatnonzero(row >= 0))  # [K]
        for part in parts:
            block, n = _where(part, row)
            first, last = part.first_byte, part.first_byte + part.pages.shape[3]
            rows = source[part.layer, :, keep, first:last]  # [H, K, W]
            part.pages[block, :, n] = rows.transpose(0, 1).to(part.pages.device)


def _where(part: Part, row: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and token within the block of each slot >= 0, on the pages' device."""
    slot = torch.from_numpy(row[row >= 0]).to(part.pages.device)
    tokens = part.pages.shape[2]
    return slot // tokens, slot % tokens


LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Of each quantised form, the largest code: float8 e4m3fn (https://arxiv.org/abs/2209.05433), or int8."""
SMALLEST_AMAX = 1e-30
"""A head's K or V whose largest magnitude is below this becomes zeros: its reciprocal would overflow."""


def quantise(values: torch.Tensor, k_size: int, to: str) -> torch.Tensor:
    """Codes and scales of K and V, each token and head with scales of its own.

    Per token and head, K and V apart: scale = amax / LARGEST, code = round to nearest even(x * (LARGEST /
    amax)), all in float32. So |x - dequantised| <= amax / 254 for int8, and <= max(|x| / 16, amax / 448 /
    1024) for fp8, plus the rounding to the dtype. A NaN or an infinity spoils its own row (K or V of its
    token and head).

    Args:
        values: float [..., C], C = K then V channels.
        k_size: channels of K; V has the rest, or there is none.
        to: one of `LARGEST`.

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


def dequantise(rows: torch.Tensor, k_size: int, v_size: int, to: str) -> torch.Tensor:
    """float32 [..., k_size + v_size] of what `quantise` made: code * scale."""
    channels = k_size + v_size
    codes = rows[..., :channels].contiguous().view(torch.float8_e4m3fn if to == "fp8" else torch.int8).float()
    scales = rows[..., channels:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # [..., S]
    k = codes[..., :k_size] * scales[..., :1]
    return k if not v_size else torch.cat([k, codes[..., k_size:] * scales[..., 1:]], -1)


def encode(
    group: LayerGroup,
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    quantised: str,
) -> None:
    """`pack` through `quantise`: records[chunk][layer, head, t] = quantise(pages[layer][block, head, n]).

    Args:
        group: of the pages; records have the form of `group.quantised()`.
        parts, slots: as for `pack`.
        records: written, except where a slot is < 0.
        quantised: one of `LARGEST`.
    """
    dtype: torch.dtype = getattr(torch, group.dtype)
    for record, row in zip(records, slots, strict=True):
        shape = len(group.layers), group.kv_heads, len(row)
        raw = np.zeros((*shape, group.channels * group.item_bytes), np.uint8)
        pack(parts, [raw.reshape(-1)], row[None], raw.shape)
        values = torch.from_numpy(raw).view(dtype)  # [L, H, T, C]
        keep = np.flatnonzero(row >= 0)
        record.reshape(*shape, -1)[:, :, keep] = quantise(values, group.k_size, quantised).numpy()[:, :, keep]


def decode(
    group: LayerGroup,
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    rotation: Rotation | None,
    quantised: str | None,
) -> None:
    """`unpack` through `dequantise` and `rotate`: K (not V) turned by its token's difference of positions.

    Both in float32, rounded once to the pages' dtype. Arguments as for `encode` and `unpack`; where
    `quantised` is None, records hold the pages' own dtype, and what is not rotated keeps its bits.
    """
    dtype: torch.dtype = getattr(torch, group.dtype)
    turns, which = rotation.resolve(*slots.shape) if rotation else (None, slots)
    for record, row, turn in zip(records, slots, which, strict=True):
        shape = len(group.layers), group.kv_heads, len(row)
        rows = torch.from_numpy(record.copy()).view(*shape, -1)
        k, v = group.k_size, group.v_size
        values = dequantise(rows, k, v, quantised) if quantised else rows.view(dtype)
        if rotation is not None and turns is not None:
            values = rotate(values, torch.from_numpy(turns[turn]), rotation.rope)  # K comes first in C
        raw = values.to(dtype).view(torch.uint8)
        unpack(parts, [raw.numpy().reshape(-1)], row[None], (*shape, raw.shape[3]))


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turn the rotary channels of x [..., D] by cos_sin [..., R] (`Rope.table` or `turns`); D's rest stays.

    float32 in the middle (float64 if x is), rounded once to x's dtype.
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


def blend_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    row_starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some rows of some requests, each to the keys at or before its own position; in float64.

    Row i of request r attends to key j if j <= positions[i], j < lengths[r], and j > positions[i] - window:
    o = sum_j softmax_j(s_j) v_j, s_j = scale * q . k_j, or softcap * tanh(that / softcap). Query head h reads
    KV head h // (Hq / H).

    Args:
        q: [M, Hq, D], rows of all requests one after another.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv], any strides. Key j of request r is token j % N of
            block tables[r, j // N].
        tables: int [requests, blocks]; entries beyond a request's length are not read.
        positions: int [M], of each row, ascending within a request.
        row_starts: int [requests + 1], first row of each request, and M.
        lengths: int [requests], keys of each request.

    Returns:
        o [M, Hq, Dv] in q's dtype, and lse [M, Hq] float32: log sum_j exp(s_j). A row that sees no key is 0
        with lse -inf.
    """
    group = q.shape[1] // k_pages.shape[1]
    out = q.new_zeros(*q.shape[:2], v_pages.shape[3])
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for r in range(len(lengths)):
        rows, length = slice(int(row_starts[r]), int(row_starts[r + 1])), int(lengths[r])
        k, v = (gather(pages, tables[r], length).double() for pages in (k_pages, v_pages))  # [n, H, D]
        scores = torch.einsum("mhd,nhd->hmn", q[rows].double(), k.repeat_interleave(group, 1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = _seen(positions[rows], length, window)  # [m, n]
        scores = scores.masked_fill(~seen, -torch.inf)
        lse[rows] = torch.logsumexp(scores, -1).T.float()
        weights = torch.softmax(scores, -1).nan_to_num()  # nothing seen: 0 / 0
        out[rows] = torch.einsum("hmn,nhd->mhd", weights, v.repeat_interleave(group, 1)).to(q.dtype)
    return out, lse


def gather(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens [length, H, D] of pages [B, H, N, D] whose blocks `table` lists."""
    tokens = pages.shape[2]
    blocks = table[: -(-length // tokens)].long()
    return pages[blocks].transpose(1, 2).flatten(0, 1)[:length]


def rope_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rope: Rope,
    deviation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate recomputed queries and keys to their positions and write K and V into the pages.

    Args:
        q, k, v: [M, Hq, D], [M, H, D], [M, H, Dv], not yet rotated; any strides, so parts of a fused
            projection.
        cos_sin: float32 [M, R], `Rope.table` of the rows' positions.
        slots: int [M], where each row's K and V go: block * N + token, each at most once; < 0 is skipped.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv]; written at `slots`, nowhere else.
        deviation: float32 [M]; receives the sum over heads and channels of the squared difference between
            what a slot's K held before and holds now; 0 where skipped.

    Returns:
        the rotated q, [M, Hq, D].
    """
    turned = rotate(k, cos_sin[:, None], rope)
    keep = torch.nonzero(slots >= 0).flatten()
    block, n = slots[keep].long() // k_pages.shape[2], slots[keep].long() % k_pages.shape[2]
    if deviation is not None:
        deviation.zero_()
        deviation[keep] = token_deviation(turned[keep], k_pages[block, :, n])
    k_pages[block, :, n] = turned[keep]
    v_pages[block, :, n] = v[keep]
    return rotate(q, cos_sin[:, None], rope)


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Squared distance of each token's [H, D] of new and old [N, H, D]: float32 [N]."""
    return (new.double() - old.double()).square().sum((1, 2)).float()


def query_scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    length: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """How much attention some rows of a request pay to each key: float32 [Hq, length], computed in float64.

    score_hj = sum over rows of query head h's softmax_j, masked as in `blend_attention`; with `v_pages` times
    the norm of the v_j that it reads. Arguments are those of `blend_attention` for one
    request: q [S, Hq, D], table [blocks], positions [S].
    """
    group = q.shape[1] // k_pages.shape[1]
    k = gather(k_pages, table, length).double().repeat_interleave(group, 1)  # [n, Hq, D]
    scores = torch.einsum("mhd,nhd->hmn", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_seen(positions, length, window), -torch.inf)
    mass = torch.softmax(scores, -1).nan_to_num().sum(1)  # [Hq, n]
    if v_pages is not None:
        norm = gather(v_pages, table, length).double().norm(dim=-1)  # [n, H]
        mass = mass * norm.repeat_interleave(group, 1).T
    return mass.float()


def _seen(positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """[rows, keys]: which keys each row attends to."""
    j = torch.arange(length, device=positions.device)
    seen = j <= positions[:, None]
    return seen if window is None else seen & (j > positions[:, None] - window)
