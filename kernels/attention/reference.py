"""What attention to pages and its helpers mean, in plain torch: for any device and dtype; read it first."""

from __future__ import annotations

import torch

from kvkit.format.rope import Rope
from kvkit.kernels.pages.reference import rotate


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
