"""Sparse blend attention for CPU tensors: torch's own attention, called only where rows see keys.

Rows go through it in tiles, each with the keys that its last row sees. What torch's attention cannot do (a
soft-cap, values of another size than keys) is done with matrix products, a head at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.kernels.rows import Rows
from kvkit.rope import Rope

# query heads of a KV head x rows, at least so many rows: smaller tiles make smaller matrix products, in
# larger ones more of the products are with keys that a row does not see
TILE_ROWS = 128
LEAST_ROWS = 32


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.blend_attention` in float32."""
    count, query_heads, size = q.shape
    heads, v_size = k_pages.shape[1], v_pages.shape[3]
    group = query_heads // heads
    out = q.new_zeros(count, query_heads, v_size)
    lse = torch.full((count, query_heads), -math.inf)
    for request, tiles in _tiles(rows, group, window):
        length = max(end for *_, end in tiles)
        k, v = (gather(pages, rows.tables[request], length) for pages in (k_pages, v_pages))  # [H, n, D]
        for first, after, begin, full_begin, full_end, end in tiles:
            if begin == end:
                continue
            packed = _packed(q[first:after], heads)
            seen = _seen(rows.positions[first:after], begin, full_begin, full_end, end, window)
            keys, values = k[:, begin:end], v[:, begin:end]
            if size == v_size and softcap is None:
                o, logsum = _by_torch(packed, keys, values, scale, seen)
            else:
                o, logsum = _by_products(packed, keys, values, scale, softcap, seen)
            back = heads, group, after - first
            out[first:after] = o.view(*back, v_size).permute(2, 0, 1, 3).flatten(1, 2)
            lse[first:after] = logsum.reshape(back).permute(2, 0, 1).flatten(1, 2)
    return out, lse


def scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """`reference.query_scores` of the one request of `rows`, in float32."""
    heads = k_pages.shape[1]
    group, length = q.shape[1] // heads, int(rows.lengths[0])
    if lse is None:
        _, lse = attention(q, k_pages, k_pages, rows, scale, window, softcap)
    mass = torch.zeros(heads, length)
    for _, tiles in _tiles(rows, group, window):
        k = gather(k_pages, rows.tables[0], length)  # [H, n, D]
        for first, after, begin, full_begin, full_end, end in tiles:
            if begin == end:
                continue
            packed = _packed(q[first:after], heads)
            logsum = _packed(lse[first:after, :, None], heads)  # [H, group * rows, 1]
            logsum = logsum.masked_fill(logsum == -math.inf, 0.0)
            seen = _seen(rows.positions[first:after], begin, full_begin, full_end, end, window)
            for head in range(heads):
                found = _scores(packed[head], k[head, begin:end], scale, softcap, seen)
                mass[head, begin:end] += found.sub_(logsum[head]).exp_().sum(0)
    if v_pages is not None:
        mass *= gather(v_pages, rows.tables[0], length).float().norm(dim=-1)
    return mass.sum(0)


def scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rope: Rope,
    deviation: torch.Tensor | None,
) -> torch.Tensor:
    """`reference.rope_scatter`; the deviation in float32."""
    slots = slots.long()
    if bool((slots < 0).any()):
        keep = torch.nonzero(slots >= 0).flatten()
        at, k, v, turns = slots[keep], k[keep], v[keep], cos_sin[keep]
    else:
        keep, at, turns = None, slots, cos_sin
    turned = _rotate(k, turns, rope)
    block, n = at // k_pages.shape[2], at % k_pages.shape[2]
    if deviation is not None:
        moved = token_deviation(turned, k_pages[block, :, n])
        if keep is None:
            deviation.copy_(moved)
        else:
            deviation.zero_()[keep] = moved
    k_pages[block, :, n] = turned
    v_pages[block, :, n] = v
    return _rotate(q, cos_sin, rope)


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`reference.token_deviation` in float32."""
    return (new.float() - old.float()).square_().sum((1, 2))


def gather(pages: torch.Tensor, table: NDArray[np.int64], length: int) -> torch.Tensor:
    """Tokens [H, length, D] of pages [B, H, N, D] whose blocks `table` lists; a view if they are one run."""
    heads, tokens, size = pages.shape[1:]
    used = table[: -(-length // tokens)]
    if not len(used):
        return pages.new_empty(heads, 0, size)
    block_stride, head_stride, token_stride, _ = pages.stride()
    follow = block_stride == tokens * token_stride and bool((np.diff(used) == 1).all())
    if len(used) == 1 or follow:
        start = pages.storage_offset() + int(used[0]) * block_stride
        return pages.as_strided((heads, length, size), (head_stride, token_stride, 1), start)
    chosen = pages.transpose(0, 1)[:, torch.from_numpy(used)]  # [H, blocks, N, D]
    return chosen.flatten(1, 2)[:, :length]


def _tiles(rows: Rows, group: int, window: int | None) -> Iterator[tuple[int, list[list[int]]]]:
    """Of each request that has rows: row and key bounds of its tiles, as in `Tiles.items`."""
    items = rows.tiles(max(LEAST_ROWS, TILE_ROWS // group), window=window).items
    for request in np.unique(items[:, 0]).tolist():
        yield request, items[items[:, 0] == request, 1:7].tolist()


def _packed(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[m, Hq, D] as [H, group * m, D]: the query heads of a KV head are rows of one matrix product."""
    split = x.view(len(x), heads, x.shape[1] // heads, x.shape[2])
    return split.permute(1, 2, 0, 3).flatten(1, 2)


def _seen(
    positions: NDArray[np.int64], begin: int, full_begin: int, full_end: int, end: int, window: int | None
) -> torch.Tensor:
    """[m, end - begin]: which keys each row sees; those from `full_begin` to `full_end` all of them do."""
    seen = torch.ones(len(positions), end - begin, dtype=torch.bool)
    for left, right in ((begin, full_begin), (full_end, end)):
        j, p = np.arange(left, right), positions[:, None]
        visible = j <= p if window is None else (j <= p) & (j > p - window)
        seen[:, left - begin : right - begin] = torch.from_numpy(visible)
    return seen


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's attention for CPU tensors: q [H, group * m, D], k and v [H, n, D], seen [m, n] -> o, lse."""
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf).repeat(q.shape[1] // len(seen), 1)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], attn_mask=mask, scale=scale
    )
    blind = ~seen.any(1)
    if bool(blind.any()):  # torch says 0 there
        lse = lse.masked_fill(blind.repeat(q.shape[1] // len(seen)), -math.inf)
    return o[0], lse[0]


def _by_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None,
    seen: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with a soft-cap, and v of any size."""
    out = torch.empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[:2])
    for head in range(len(q)):
        found = _scores(q[head], k[head], scale, softcap, seen)
        lse[head] = torch.logsumexp(found, -1)
        found.sub_(lse[head].masked_fill(lse[head] == -math.inf, 0.0)[:, None]).exp_()
        torch.mm(found, v[head].float(), out=out[head])
    return out, lse


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None, seen: torch.Tensor
) -> torch.Tensor:
    """float32 [group * m, n] of one head, -inf where not seen."""
    found = torch.mm(q.float() * scale, k.float().T)
    if softcap is not None:
        found.div_(softcap).tanh_().mul_(softcap)
    found.view(-1, *seen.shape).masked_fill_(~seen, -math.inf)
    return found


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`reference.rotate` of x [M, heads, D] by cos_sin [M, R], with fewer passes over memory."""
    first, last = rope.first, rope.first + rope.channels
    out = torch.empty(x.shape, dtype=x.dtype)
    out[..., :first] = x[..., :first]
    out[..., last:] = x[..., last:]
    wide, turned = x[..., first:last].float(), out[..., first:last]
    cos, sin = cos_sin[:, None].chunk(2, -1)
    if rope.interleaved:
        a, b, to_a, to_b = wide[..., 0::2], wide[..., 1::2], turned[..., 0::2], turned[..., 1::2]
    else:
        (a, b), (to_a, to_b) = wide.chunk(2, -1), turned.chunk(2, -1)
    to_a.copy_((a * cos).addcmul_(b, sin, value=-1))
    to_b.copy_((b * cos).addcmul_(a, sin))
    return out
