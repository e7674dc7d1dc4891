"""Multi-head latent attention (MLA) to pages of latents: absorbed for few rows, expanded for many.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434) keeps one latent and one rotary key per token for all heads.
Absorbed, queries and outputs are projected instead of the latents, and each row pays for the latent's many
channels. Expanded, K and V of every key are projected first, and each row pays for a head's few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from kvkit.kernels.attention.api import blend_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import ArraySpec, LaunchError

ABSORBED_RATE, EXPANDED_RATE, PRODUCT_RATE = 0.3, 0.45, 0.9
"""Shares of a GPU's product rate: absorbed attention, expanded attention (both on an H200), projections."""
EXPANDED_BYTES = 256 << 20
"""Maximum bytes of expanded K and V at a time; more heads take several turns, at least one head each."""


class LatentWeights(NamedTuple):
    """Up-projections of a layer's latents, of the pages' dtype; Dn: channels of a head without rotation.

    Args:
        k: [Hq, Dn, L], k = k_weight @ latent.
        v: [Hq, Dv, L], v = v_weight @ latent.
    """

    k: torch.Tensor
    v: torch.Tensor


def latent_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    weights: LatentWeights,
    rows: Rows,
    scoring: Scoring,
    absorbed: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of rows to latents in pages, by absolute position; mutates nothing.

    Both ways compute what `api.blend_attention` does with k = (weights.k @ latent, rotary key) and
    v = weights.v @ latent, but round at other places.

    Args:
        q: [M, Hq, Dn + Dr], the rotated channels last.
        pages: [B, 1, N, L + Dr] of q's dtype: latents, then rotated keys.
        weights: up-projections of the latents.
        rows, scoring: as for `api.blend_attention`.
        absorbed: which way; None: `absorbs`.

    Returns:
        o [M, Hq, Dv] in q's dtype, and lse [M, Hq] float32.

    Raises:
        LaunchError: an argument does not fit.
    """
    latent = _check(q, pages, weights)
    if absorbed is None:
        absorbed = absorbs(rows, scoring, weights, q.shape[2] - weights.k.shape[1])
    if not absorbed:
        return _expanded(q, pages, weights, rows, scoring)
    size = weights.k.shape[1]
    projected = torch.einsum("mhd,hdl->mhl", q[..., :size], weights.k)
    absorbed_q = torch.cat([projected, q[..., size:]], -1)
    o, lse = blend_attention(absorbed_q, pages, pages[..., :latent], rows, scoring)
    return torch.einsum("mhl,hdl->mhd", o, weights.v), lse


def absorbs(rows: Rows, scoring: Scoring, weights: LatentWeights, rotary: int) -> bool:
    """Return whether the absorbed way is expected to be faster, by flops and rates that were measured."""
    _, size, latent = weights.k.shape
    v_size = weights.v.shape[1]
    found = rows.tile_ranges(1, scoring.window)
    seen, keys = int((found.end - found.begin).sum()), int(rows.lengths.sum())
    projected = size + v_size
    absorbed = seen * (2 * latent + rotary) / ABSORBED_RATE + rows.count * latent * projected / PRODUCT_RATE
    expanded = seen * (projected + rotary) / EXPANDED_RATE + keys * latent * projected / PRODUCT_RATE
    return absorbed <= expanded


def _expanded(
    q: torch.Tensor, pages: torch.Tensor, weights: LatentWeights, rows: Rows, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, size, latent = weights.k.shape
    v_size, rotary = weights.v.shape[1], q.shape[2] - size
    o = q.new_zeros(*q.shape[:2], v_size)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for request, own, one in rows.once("one block each", lambda: tuple(_one_block_each(rows))):
        tokens = int(rows.lengths[request])
        blocks = rows.device_tables[request, : -(-tokens // rows.block_tokens)].long()
        cached = pages[blocks, 0].flatten(0, 1)[:tokens]  # [n, L + Dr]
        turn = max(1, EXPANDED_BYTES // (tokens * (size + rotary + v_size) * q.element_size()))
        for first in range(0, heads, turn):
            some = slice(first, first + turn)
            count = len(weights.k[some])
            k = q.new_empty(1, count, tokens, size + rotary)
            torch.matmul(cached[:, :latent], weights.k[some].mT, out=k[0, ..., :size])
            k[0, ..., size:] = cached[:, latent:]
            v = torch.matmul(cached[:, :latent], weights.v[some].mT)[None]
            o[own, some], lse[own, some] = blend_attention(q[own, some], k, v, one, scoring)
    return o, lse


def _one_block_each(rows: Rows) -> Iterator[tuple[int, slice, Rows]]:
    """Yield each request with rows and keys: its index, its rows, and these as those of a single block."""
    for request, tokens in enumerate(rows.lengths):
        own = slice(int(rows.row_starts[request]), int(rows.row_starts[request + 1]))
        count = own.stop - own.start
        if count and tokens:
            table, starts = np.zeros((1, 1), np.int64), np.array([0, count])
            lengths = np.array([tokens])
            yield (
                request,
                own,
                Rows.of(rows.positions[own], starts, lengths, table, int(tokens), rows.device),
            )


def _check(q: torch.Tensor, pages: torch.Tensor, weights: LatentWeights) -> int:
    """Refuse tensors that do not fit each other; return L."""
    if weights.k.ndim != 3 or weights.v.ndim != 3:
        raise LaunchError(
            f"weights: k {tuple(weights.k.shape)} and v {tuple(weights.v.shape)}, "
            "want [Hq, Dn, L] and [Hq, Dv, L]"
        )
    heads, size, latent = weights.k.shape
    if q.ndim != 3 or q.shape[1] != heads or q.shape[2] < size:
        raise LaunchError(f"q: {tuple(q.shape)}, want [M, {heads}, at least {size} channels]")
    for name, weight in (("weights.k", weights.k), ("weights.v", weights.v)):
        want = ArraySpec((heads, weight.shape[1], latent), ArraySpec.of(q).dtype, None, str(q.device))
        if ArraySpec.of(weight)._replace(strides=None) != want:
            raise LaunchError(f"{name}: {ArraySpec.of(weight)}, want {want}")
    channels = latent + q.shape[2] - size
    if pages.ndim != 4 or pages.shape[1] != 1 or pages.shape[3] != channels:
        raise LaunchError(
            f"pages: {tuple(pages.shape)}, want [B, 1, N, {channels}]: latents of {latent} channels, "
            f"rotated keys of {q.shape[2] - size}"
        )
    return int(latent)
