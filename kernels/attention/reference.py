"""Reference of the functions of `api` in plain torch, for any device and dtype; read it first."""

from __future__ import annotations

import torch

from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages.reference import rotate


def blend_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: Rows, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `api.blend_attention` in float64; q may have another dtype than the pages."""
    group = q.shape[1] // k_pages.shape[1]
    out = q.new_zeros(*q.shape[:2], v_pages.shape[3])
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for r, first in enumerate(rows.row_starts[:-1]):
        own_rows = slice(first, rows.row_starts[r + 1])
        scores = _scores(q[own_rows], k_pages, rows, r, scoring)  # [Hq, m, n]
        lse[own_rows] = torch.logsumexp(scores, -1).T.float()
        weights = _weights(scores)
        v = gather(v_pages, rows, r).double().repeat_interleave(group, 1)  # [n, Hq, Dv]
        out[own_rows] = torch.einsum("hmn,nhd->mhd", weights, v).to(q.dtype)
    return out, lse


def gather(pages: torch.Tensor, rows: Rows, request: int) -> torch.Tensor:
    """Return the tokens [length, H, D] of a request from pages [B, H, N, D]."""
    length = int(rows.lengths[request])
    blocks = rows.device_tables[request, : -(-length // rows.block_tokens)].long()
    return pages[blocks].transpose(1, 2).flatten(0, 1)[:length]


def rope_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotations: RowRotations,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `api.rope_scatter`; `slots` may have any dtype, `deviation` is summed in float64."""
    rotated_k = rotate(k, rotations.cos_sin[:, None], rotations.rope)
    keep = torch.nonzero(slots >= 0).flatten()
    block, n = slots[keep].long() // k_pages.shape[2], slots[keep].long() % k_pages.shape[2]
    if deviation is not None:
        deviation.zero_()
        deviation[keep] = token_deviation(rotated_k[keep], k_pages[block, :, n])
    k_pages[block, :, n] = rotated_k[keep]
    v_pages[block, :, n] = v[keep]
    return rotate(q, rotations.cos_sin[:, None], rotations.rope)


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Compute `api.token_deviation`, summed in float64."""
    return (new.double() - old.double()).square().sum((1, 2)).float()


def query_scores(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor | None, rows: Rows, scoring: Scoring
) -> torch.Tensor:
    """Compute `api.query_scores` in float64."""
    mass = _weights(_scores(q, k_pages, rows, 0, scoring)).sum(1)  # [Hq, n]
    if v_pages is not None:
        norm = gather(v_pages, rows, 0).double().norm(dim=-1)  # [n, H]
        mass = mass * norm.repeat_interleave(q.shape[1] // k_pages.shape[1], 1).T
    return mass.float()


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last axis, 0 where a row sees no key; a NaN that it sees stays one."""
    return torch.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)


def _scores(
    q: torch.Tensor, k_pages: torch.Tensor, rows: Rows, request: int, scoring: Scoring
) -> torch.Tensor:
    """Score a request's rows q: float64 [Hq, rows, keys], -inf where a row does not attend to a key."""
    k = gather(k_pages, rows, request).double()  # [n, H, D]
    k = k.repeat_interleave(q.shape[1] // k_pages.shape[1], 1)
    scores = torch.einsum("mhd,nhd->hmn", q.double(), k) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    p = rows.device_positions[rows.row_starts[request] : rows.row_starts[request + 1], None]
    j = torch.arange(len(k), device=q.device)
    seen = j <= p
    if scoring.window is not None:
        seen &= j > p - scoring.window
    return scores.masked_fill(~seen, -torch.inf)
