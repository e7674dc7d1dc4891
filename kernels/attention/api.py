"""Attention to pages by absolute position, and helpers for blending, by the backend of the tensors' device.

Tensors may have any strides, but their last axis is contiguous. Sums are in float32, in a fixed order.
Nothing here has a gradient: while torch records gradients (`torch.is_grad_enabled()`), tensors that require
one are refused.

`blend_attention` may be captured in a CUDA graph after one call outside of it with the same `Rows` and sizes.
That call compiles the kernels and plans the tiles, which `Rows` keeps. Keep the `Rows` as long as the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvkit.kernels.attention import checks, torch_cpu
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import ArraySpec, LaunchError, check_array
from kvkit.kernels.once import form_of
from kvkit.kernels.tuning.configs import Launch, run_all

if TYPE_CHECKING:
    from kvkit.kernels.attention.triton import AttentionPlan, ScatterPlan


def blend_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scoring: Scoring,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of rows of requests to keys in pages, by absolute position. Writes only `out`.

    A row at position p of a request of length n attends to key j if j <= p, j < n and j > p - window:
    o = sum_j softmax_j(s_j) v_j, with s_j as defined by `scoring`. Query head h reads KV head h // (Hq / H).
    Computed in float32, in tiles with a running maximum as in FlashAttention
    (https://arxiv.org/abs/2205.14135).

    Args:
        q: [M, Hq, D] float32, float16 or bfloat16, the rows of one request after another.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv] of q's dtype. Pages beyond a request's length may
            hold anything.
        rows: positions and requests of the M rows, and the requests' pages; on q's device.
        scoring: scale, window and soft-cap.
        out: contiguous tensor for o that shares no memory with the others; None: a new tensor.

    Returns:
        o [M, Hq, Dv] in q's dtype (`out` if given), and lse [M, Hq] float32: log sum_j exp(s_j). A row that
        sees no key has o 0 and lse -inf.

    Raises:
        LaunchError: an argument does not fit.
    """
    _check_gradients(q=q, k_pages=k_pages, v_pages=v_pages, out=out)
    tensors = (q, k_pages, v_pages) if out is None else (q, k_pages, v_pages, out)
    addresses = k_pages.data_ptr(), v_pages.data_ptr()
    kind = addresses[0] == addresses[1], (addresses[0] | addresses[1]) % 16 == 0
    plan = rows.once(
        ("checked", scoring, kind, *map(form_of, tensors)),
        lambda: _plan_attention(q, k_pages, v_pages, rows, scoring, out),
    )
    if plan is None:
        o, lse = torch_cpu.attention(q, k_pages, v_pages, rows, scoring)
        return o if out is None else out.copy_(o), lse
    if out is None:
        out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    _run(plan.launches(q, k_pages, v_pages, out, lse), q.device)
    return out, lse


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
    """Rotate recomputed queries and keys to their positions and write K and V into the pages.

    Computes in float32 and rounds once. Writes `deviation`, and of `k_pages` and `v_pages` only `slots`.

    Args:
        q, k, v: [M, Hq, D], [M, H, D], [M, H, Dv], not yet rotated, float32, float16 or bfloat16; may be
            views of a fused projection.
        rotations: rotations to the rows' positions; arguments of equal form are checked and prepared once.
        slots: int64 [M] such as `Rows.slots`: block * N + token, each at most once. Rows with a slot < 0 are
            skipped. Slots beyond the pages are an error on a CPU, and skipped on a GPU, where a check would
            have to wait for the device.
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv] of q's dtype.
        deviation: float32 [M]; receives the squared difference between a slot's K before and after, summed
            over heads and channels; 0 for skipped rows.

    Returns:
        rotated q, [M, Hq, D].

    Raises:
        LaunchError: an argument does not fit; nothing was written.
    """
    _check_gradients(q=q, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    tensors = [x for x in (q, k, v, slots, k_pages, v_pages, deviation) if x is not None]
    plan = rotations.once(
        ("checked", *map(form_of, tensors)),
        lambda: _plan_scatter((q, k, v), rotations, slots, k_pages, v_pages, deviation),
    )
    if plan is None:
        checks.check_slot_range(slots, k_pages.shape[0] * k_pages.shape[2])
        return torch_cpu.scatter(q, k, v, rotations, slots, k_pages, v_pages, deviation)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _run(plan.launches((q, k, v), rotations, slots, k_pages, v_pages, deviation, out), q.device)
    return out


def token_deviation(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return each token's squared distance of keys or values over heads and channels, float32 [T].

    Mutates nothing.

    Args:
        new, old: [T, H, D] float32, float16 or bfloat16.

    Raises:
        LaunchError: an argument does not fit.
    """
    _check_gradients(new=new, old=old)
    checks.check_deviation(new, old)
    if _on_cpu(new):
        return torch_cpu.token_deviation(new, old)
    from kvkit.kernels.attention import triton

    out = new.new_empty(len(new), dtype=torch.float32)
    _run(triton.deviation(new, old, out), new.device)
    return out


def query_scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scoring: Scoring,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of a request's rows to each of its keys, summed over rows: float32 [Hq, length].

    score_hj = sum over rows of query head h's softmax_j, masked as in `blend_attention`; with `v_pages`,
    times the norm of v_j. Mutates nothing.

    Args:
        q: [S, Hq, D].
        k_pages, v_pages, scoring: as in `blend_attention`; `v_pages` None: no norms.
        rows: of one request.
        lse: float32 [S, Hq] that `blend_attention` returned for these rows; None: it is computed first.

    Raises:
        LaunchError: an argument does not fit.
    """
    _check_gradients(q=q, k_pages=k_pages, v_pages=v_pages)
    checks.check_pages(q, k_pages, k_pages if v_pages is None else v_pages)
    checks.check_rows(rows, q, k_pages)
    checks.check_scores(len(rows.lengths), lse, q)
    if _on_cpu(q):
        return torch_cpu.scores(q, k_pages, v_pages, rows, scoring, lse)
    from kvkit.kernels.attention import triton

    out = q.new_empty(q.shape[1], int(rows.lengths[0]), dtype=torch.float32)
    _run(triton.scores(q, k_pages, v_pages, rows, scoring, lse, out), q.device)
    return out


def _plan_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scoring: Scoring,
    out: torch.Tensor | None,
) -> AttentionPlan | None:
    """Check the arguments, and plan the launches; None: torch computes."""
    checks.check_pages(q, k_pages, v_pages)
    checks.check_rows(rows, q, k_pages)
    if out is not None:
        like = ArraySpec.of(q)
        want = ArraySpec((*like.shape[:2], v_pages.shape[3]), like.dtype, None, like.device)
        check_array("out", ArraySpec.of(out), want)
    if _on_cpu(q):
        return None
    from kvkit.kernels.attention import hopper

    return hopper.plan_attention(q, k_pages, v_pages, rows, scoring)


def _plan_scatter(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotations: RowRotations,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviation: torch.Tensor | None,
) -> ScatterPlan | None:
    """Check the arguments, and plan the launches; None: torch computes."""
    checks.check_scatter(*qkv, rotations, k_pages, v_pages)
    checks.check_slots(qkv[0], slots, deviation)
    if _on_cpu(slots):
        return None
    from kvkit.kernels.attention import triton

    return triton.plan_scatter(qkv, rotations, k_pages, v_pages, deviation is not None)


def _check_gradients(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors that torch records gradients of: the results would be silently detached."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise LaunchError(
                f"{name}: requires_grad=True, want it detached, or a call under torch.no_grad()"
            )


def _on_cpu(tensor: torch.Tensor) -> bool:
    """Return whether torch computes, not a kernel of Triton."""
    return tensor.device.type == "cpu"


def _run(launches: Sequence[Launch], device: torch.device) -> None:
    with torch.cuda.device(device):
        run_all(launches)
