"""Attention to pages by absolute position, and what blending needs besides: picks the backend by device."""

from __future__ import annotations

import torch

from kvkit.format.rope import Rope
from kvkit.kernels.attention import checks
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import LaunchError


def blend_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some rows of some requests to keys in pages, by absolute position. Mutates nothing.

    A row at position p of a request of length n attends to key j if j <= p, j < n and j > p - window:
    o = sum_j softmax_j(s_j) v_j, s_j = scale * q . k_j, or softcap * tanh(that / softcap). Query head h
    reads KV head h // (Hq / H). Computed in tiles with a running maximum as in FlashAttention
    (https://arxiv.org/abs/2205.14135), in float32.

    Args:
        q: [M, Hq, D] float32, float16 or bfloat16, rows of all requests one after another.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv] of q's dtype. Pages beyond a request's length may
            hold anything.
        rows: where the M rows are, and the pages of their requests; on q's device.
        scale: of the scores, such as D ** -0.5.
        window: of a sliding window, in tokens, itself included.
        softcap: of the scores, as in Gemma 2.

    Every tensor: any strides, but the last axis is contiguous.

    Returns:
        o [M, Hq, Dv] in q's dtype, and lse [M, Hq] float32: log sum_j exp(s_j). A row that sees no key is 0
        with lse -inf.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_attention(q, k_pages, v_pages, scale, window, softcap)
    checks.check_rows(rows, q, k_pages)
    if q.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.attention(q, k_pages, v_pages, rows, scale, window, softcap)
    from kvkit.kernels.attention import triton

    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    with torch.cuda.device(q.device):
        for launch in triton.attention(q, k_pages, v_pages, rows, scale, window, softcap, out, lse):
            launch.run()
    return out, lse


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

    float32 in the middle, rounded once. Writes `k_pages` and `v_pages` at `slots` and nowhere else, and
    `deviation`.

    Args:
        q, k, v: [M, Hq, D], [M, H, D], [M, H, Dv], not yet rotated, float32, float16 or bfloat16; parts of
            a fused projection will do.
        cos_sin: float32 [M, R], `Rope.table` of the rows' positions.
        slots: int64 [M] such as `Rows.slots`: block * N + token, each at most once. A row whose slot is < 0
            is skipped; on a GPU, where looking would wait for it, so is one beyond the pages.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv] of q's dtype.
        rope: the model's.
        deviation: float32 [M]; receives the sum over heads and channels of the squared difference between
            what a slot's K held before and holds now; 0 where skipped.

    Every tensor: any strides, but the last axis is contiguous.

    Returns:
        the rotated q, [M, Hq, D].

    Raises:
        LaunchError: an argument does not fit; nothing was written.
    """
    checks.check_scatter(q, k, v, cos_sin, k_pages, v_pages, rope)
    checks.check_slots(q, slots, k_pages.shape[0] * k_pages.shape[2], deviation)
    if q.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.scatter(q, k, v, cos_sin, slots, k_pages, v_pages, rope, deviation)
    from kvkit.kernels.attention import triton

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device(q.device):
        for launch in triton.scatter(q, k, v, cos_sin, slots, k_pages, v_pages, rope, deviation, out):
            launch.run()
    return out


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """How far each token's keys or values moved: float32 [T], the squared distance over heads and channels.

    Mutates nothing; sums in float32, in an order that is always the same.

    Args:
        new, old: [T, H, D] float32, float16 or bfloat16; any strides, but the last axis is contiguous.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_deviation(new, old)
    if new.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.token_deviation(new, old)
    from kvkit.kernels.attention import triton

    out = new.new_empty(len(new), dtype=torch.float32)
    with torch.cuda.device(new.device):
        for launch in triton.deviation(new, old, out):
            launch.run()
    return out


def query_scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much attention the rows of a request pay to each of its keys: float32 [Hq, length].

    score_hj = sum over rows of query head h's softmax_j, masked as in `blend_attention`; with `v_pages` times
    the norm of the v_j that it reads. Mutates nothing; sums in float32, in an order that is
    always the same.

    Args:
        q: [S, Hq, D].
        k_pages, v_pages: as in `blend_attention`; `v_pages` None for the plain attention.
        rows: of one request.
        scale, window, softcap: as in `blend_attention`.
        lse: float32 [S, Hq] that `blend_attention` gave for these rows; None: computed here first.

    Raises:
        LaunchError: an argument does not fit.
    """
    checks.check_attention(q, k_pages, k_pages if v_pages is None else v_pages, scale, window, softcap)
    checks.check_rows(rows, q, k_pages)
    if len(rows.lengths) != 1:
        raise LaunchError(f"rows: of {len(rows.lengths)} requests, want one")
    if lse is not None:
        checks.check_lse(lse, q)
    if q.device.type == "cpu":
        from kvkit.kernels.attention import torch_cpu

        return torch_cpu.scores(q, k_pages, v_pages, rows, scale, window, softcap, lse)
    from kvkit.kernels.attention import triton

    out = q.new_empty(q.shape[1], int(rows.lengths[0]), dtype=torch.float32)
    with torch.cuda.device(q.device):
        for launch in triton.scores(q, k_pages, v_pages, rows, scale, window, softcap, lse, out):
            launch.run()
    return out
