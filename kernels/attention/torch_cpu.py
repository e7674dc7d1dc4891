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
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows

TILE_ROWS = 64
"""Rows of a tile. Smaller tiles make smaller products; larger ones have more keys that a row does not see."""


def attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: Rows, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    size, v_size = q.shape[2], v_pages.shape[3]
    out = q.new_zeros(*q.shape[:2], v_size)
    lse = torch.full(q.shape[:2], -math.inf)
    for tile_rows, keys, tile_q, mask, (k, v) in _tiles(q, rows, scoring.window, k_pages, v_pages):
        if size == v_size and scoring.softcap is None:
            ranges = tile_rows.start, tile_rows.stop, keys.start, keys.stop
            head_masks = rows.mask(*ranges, scoring.window, tile_q.shape[1])
            o, logsum = _by_torch(tile_q, k, v, scoring.scale, head_masks)
            logsum = logsum.masked_fill(mask.amax(1) == -math.inf, -math.inf)  # torch returns 0 there
        else:
            o, logsum = _by_products(tile_q, k, v, scoring, mask)
        out[tile_rows] = o.permute(2, 0, 1, 3).flatten(1, 2)
        lse[tile_rows] = logsum.permute(2, 0, 1).flatten(1, 2)
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
    for tile_rows, tile_keys, tile_q, mask, (k,) in _tiles(q, rows, scoring.window, k_pages):
        blind_rows = torch.nonzero(mask.amax(1) == -math.inf).flatten()
        for head in range(heads):
            tile_scores = _scores(tile_q[head], k[head], scoring, mask)
            if lse is None:  # a tile has all keys that its rows see
                weights = torch.softmax(tile_scores, -1).index_fill_(1, blind_rows, 0.0)
            else:
                weights = tile_scores.sub_(lse[tile_rows, head].T[..., None]).exp_()
            mass[head, :, tile_keys] += weights.sum(1)
    if v_pages is not None:
        mass *= gather(v_pages, rows.tables[0], length).float().norm(dim=-1)[:, None]
    return mass.flatten(0, 1)


def scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotations: RowRotations,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviation: torch.Tensor | None,
) -> torch.Tensor:
    keep, kept_slots, cos_sin = None, slots, rotations.cos_sin
    if bool((slots < 0).any()):
        keep = torch.nonzero(slots >= 0).flatten()
        kept_slots, k, v, cos_sin = slots[keep], k[keep], v[keep], cos_sin[keep]
    rotated_k = _rotate(k, cos_sin, rotations.rope)
    block, n = kept_slots // k_pages.shape[2], kept_slots % k_pages.shape[2]
    if deviation is not None:
        distance = token_deviation(rotated_k, k_pages[block, :, n])
        if keep is None:
            deviation.copy_(distance)
        else:
            deviation.zero_()[keep] = distance
    k_pages[block, :, n] = rotated_k
    v_pages[block, :, n] = v
    return _rotate(q, rotations.cos_sin, rotations.rope)


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (new.float() - old.float()).square_().sum((1, 2))


def gather(pages: torch.Tensor, table: NDArray[np.int64], length: int) -> torch.Tensor:
    """Return tokens [H, length, D] of pages [B, H, N, D], by block table; a view if blocks are one run."""
    heads, tokens, size = pages.shape[1:]
    used = table[: -(-length // tokens)]
    if not len(used):
        return pages.new_empty(heads, 0, size)
    block_stride, head_stride, token_stride, _ = pages.stride()
    contiguous = block_stride == tokens * token_stride and bool((np.diff(used) == 1).all())
    if len(used) == 1 or contiguous:
        start = pages.storage_offset() + int(used[0]) * block_stride
        return pages.as_strided((heads, length, size), (head_stride, token_stride, 1), start)
    blocks = pages.transpose(0, 1)[:, torch.from_numpy(used)]  # [H, blocks, N, D]
    return blocks.flatten(1, 2)[:, :length]


def _tiles(
    q: torch.Tensor, rows: Rows, window: int | None, *pages: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Yield tiles that see keys: rows, keys, q [H, group, m, D], mask [m, n], keys [H, n, D] of `pages`."""
    items = rows.tiles(TILE_ROWS, window=window).items.numpy()
    for request in np.unique(items[:, 0]).tolist():
        tiles = items[items[:, 0] == request][:, [1, 2, 3, 6]].tolist()
        length = max(end for *_, end in tiles)
        tokens = [gather(kv_pages, rows.tables[request], length) for kv_pages in pages]
        for first, after, begin, end in tiles:
            if begin < end:
                tile_q = q[first:after]
                split = tile_q.view(len(tile_q), pages[0].shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)
                mask = rows.mask(first, after, begin, end, window)
                yield slice(first, after), slice(begin, end), split, mask, [x[:, begin:end] for x in tokens]


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, masks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's attention on q [H, group, m, D], k and v [H, n, D]; return o and lse.

    The query heads of a KV head are taken as rows, so that its keys are read once; `masks` are theirs,
    [group * m, n].
    """
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.flatten(1, 2)[None], k[None], v[None], attn_mask=masks[None, None], scale=scale
    )
    return o[0].unflatten(1, q.shape[1:3]), lse[0].unflatten(1, q.shape[1:3])


def _by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same by matrix products, with a soft-cap and v of any size."""
    out = torch.empty(*q.shape[:3], v.shape[2])
    lse = torch.empty(q.shape[:3])
    for head in range(len(q)):
        weights = _scores(q[head], k[head], scoring, mask)
        lse[head] = torch.logsumexp(weights, -1)
        weights.sub_(lse[head].masked_fill(lse[head] == -math.inf, 0.0)[..., None]).exp_()
        torch.matmul(weights, v[head].float(), out=out[head])
    return out, lse


def _scores(q: torch.Tensor, k: torch.Tensor, scoring: Scoring, mask: torch.Tensor) -> torch.Tensor:
    """Return float32 scores [group, m, n] of one KV head, -inf where not seen."""
    scores = torch.matmul(q.float() * scoring.scale, k.float().T)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores.add_(mask)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Compute `reference.rotate` of x [M, heads, D] by cos_sin [M, R], in fewer passes over memory."""
    first, last = rope.first, rope.first + rope.channels
    out = torch.empty(x.shape, dtype=x.dtype)
    out[..., :first] = x[..., :first]
    out[..., last:] = x[..., last:]
    rotary, out_rotary = x[..., first:last].float(), out[..., first:last]
    cos, sin = cos_sin[:, None].chunk(2, -1)
    if rope.interleaved:
        a, b, to_a, to_b = rotary[..., 0::2], rotary[..., 1::2], out_rotary[..., 0::2], out_rotary[..., 1::2]
    else:
        (a, b), (to_a, to_b) = rotary.chunk(2, -1), out_rotary.chunk(2, -1)
    to_a.copy_((a * cos).addcmul_(b, sin, value=-1))
    to_b.copy_((b * cos).addcmul_(a, sin))
    return out
