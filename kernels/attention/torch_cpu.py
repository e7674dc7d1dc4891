"""The functions of `api` for CPU tensors, in float32, with torch's attention only where rows see keys.

Rows are taken in tiles, each with the keys that its last row sees. Where torch's attention does not apply (a
soft-cap, values of another size than keys), matrix products replace it, one head at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.rope import Rope
from kvkit.kernels.attention.layer import RowTurns, Scoring
from kvkit.kernels.attention.rows import Rows

TILE_ROWS = 64
"""Rows of a tile. Smaller tiles make smaller products; larger ones take more keys that a row does not see."""


def attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: Rows, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    size, v_size = q.shape[2], v_pages.shape[3]
    out = q.new_zeros(*q.shape[:2], v_size)
    lse = torch.full(q.shape[:2], -math.inf)
    for some, _, split, mask, (k, v) in _tiles(q, rows, scoring.window, k_pages, v_pages):
        if size == v_size and scoring.softcap is None:
            o, logsum = _by_torch(split, k, v, scoring.scale, mask)
            logsum = logsum.masked_fill(mask.amax(1) == -math.inf, -math.inf)  # torch returns 0 there
        else:
            o, logsum = _by_products(split, k, v, scoring, mask)
        out[some] = o.permute(2, 0, 1, 3).flatten(1, 2)
        lse[some] = logsum.permute(2, 0, 1).flatten(1, 2)
    return out, lse


def scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scoring: Scoring,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    heads, length = k_pages.shape[1], int(rows.lengths[0])
    group = q.shape[1] // heads
    if lse is not None:
        lse = lse.masked_fill(lse == -math.inf, 0.0).view(-1, heads, group)
    mass = torch.zeros(heads, group, length)
    for some, seen, split, mask, (k,) in _tiles(q, rows, scoring.window, k_pages):
        blind = torch.nonzero(mask.amax(1) == -math.inf).flatten()
        for head in range(heads):
            found = _scores(split[head], k[head], scoring, mask)
            if lse is None:  # a tile has all keys that its rows see
                paid = torch.softmax(found, -1).index_fill_(1, blind, 0.0)
            else:
                paid = found.sub_(lse[some, head].T[..., None]).exp_()
            mass[head, :, seen] += paid.sum(1)
    if v_pages is not None:
        mass *= gather(v_pages, rows.tables[0], length).float().norm(dim=-1)[:, None]
    return mass.flatten(0, 1)


def scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    turns: RowTurns,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviation: torch.Tensor | None,
) -> torch.Tensor:
    keep, at, cos_sin = None, slots, turns.cos_sin
    if bool((slots < 0).any()):
        keep = torch.nonzero(slots >= 0).flatten()
        at, k, v, cos_sin = slots[keep], k[keep], v[keep], cos_sin[keep]
    turned = _rotate(k, cos_sin, turns.rope)
    block, n = at // k_pages.shape[2], at % k_pages.shape[2]
    if deviation is not None:
        moved = token_deviation(turned, k_pages[block, :, n])
        if keep is None:
            deviation.copy_(moved)
        else:
            deviation.zero_()[keep] = moved
    k_pages[block, :, n] = turned
    v_pages[block, :, n] = v
    return _rotate(q, turns.cos_sin, turns.rope)


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (new.float() - old.float()).square_().sum((1, 2))


def gather(pages: torch.Tensor, table: NDArray[np.int64], length: int) -> torch.Tensor:
    """Return tokens [H, length, D] of pages [B, H, N, D], by block table; a view if blocks are one run."""
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


def _tiles(
    q: torch.Tensor, rows: Rows, window: int | None, *pages: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Yield tiles that see keys: rows, keys, q [H, group, m, D], mask [m, n], keys [H, n, D] of `pages`."""
    items = rows.tiles(TILE_ROWS, window=window).items.numpy()
    for request in np.unique(items[:, 0]).tolist():
        tiles = items[items[:, 0] == request][:, [1, 2, 3, 6]].tolist()
        length = max(end for *_, end in tiles)
        held = [gather(part, rows.tables[request], length) for part in pages]
        for first, after, begin, end in tiles:
            if begin < end:
                some = q[first:after]
                split = some.view(len(some), pages[0].shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)
                mask = rows.mask(first, after, begin, end, window)
                yield slice(first, after), slice(begin, end), split, mask, [x[:, begin:end] for x in held]


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's attention on q [H, group, m, D], k and v [H, n, D], mask [m, n]; return o and lse."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask[None, None], scale=scale
    )
    return o, lse


def _by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same by matrix products, with a soft-cap and v of any size."""
    out = torch.empty(*q.shape[:3], v.shape[2])
    lse = torch.empty(q.shape[:3])
    for head in range(len(q)):
        found = _scores(q[head], k[head], scoring, mask)
        lse[head] = torch.logsumexp(found, -1)
        found.sub_(lse[head].masked_fill(lse[head] == -math.inf, 0.0)[..., None]).exp_()
        torch.matmul(found, v[head].float(), out=out[head])
    return out, lse


def _scores(q: torch.Tensor, k: torch.Tensor, scoring: Scoring, mask: torch.Tensor) -> torch.Tensor:
    """Return float32 scores [group, m, n] of one KV head, -inf where not seen."""
    found = torch.matmul(q.float() * scoring.scale, k.float().T)
    if scoring.softcap is not None:
        found.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return found.add_(mask)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Compute `reference.rotate` of x [M, heads, D] by cos_sin [M, R], in fewer passes over memory."""
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
