"""What attention to pages and its helpers take, of tensors and JAX arrays alike: checked by their forms."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvkit.format.rope import Rope
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import FLOATS, Form, LaunchError, check_form, check_overlap, check_rope


def check_attention(
    q: Any, k_pages: Any, v_pages: Any, scale: float, window: int | None, softcap: float | None
) -> None:
    """Refuse arrays that do not fit one another, and what scores cannot be made with."""
    _check_pages(q, k_pages, v_pages)
    if not math.isfinite(scale):
        raise LaunchError(f"scale={scale}: want a finite number")
    if window is not None and window < 1:
        raise LaunchError(f"window={window}: want at least 1, or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise LaunchError(f"softcap={softcap}: want a finite number above 0, or None")


def check_lse(lse: Any, q: Any) -> None:
    """Refuse what is no logsumexp of the rows of q."""
    x, like = Form.of(lse), Form.of(q)
    if x._replace(strides=None) != (want := Form(like.shape[:2], "float32", None, like.device)):
        raise LaunchError(f"lse: {x}, want {want}")


def check_rows(rows: Rows, q: torch.Tensor, k_pages: torch.Tensor) -> None:
    """Refuse rows that are not those of q, or whose blocks are not in the pages."""
    if rows.count != len(q) or rows.device != q.device:
        raise LaunchError(f"rows: {rows.count} on {rows.device}, but q has {len(q)} on {q.device}")
    if rows.block_tokens != k_pages.shape[2]:
        raise LaunchError(f"rows: block_tokens={rows.block_tokens}, but the pages have {k_pages.shape[2]}")
    if rows.last_block >= len(k_pages):
        raise LaunchError(f"rows: block {rows.last_block} is out of range, the pages have {len(k_pages)}")


def check_scatter(q: Any, k: Any, v: Any, cos_sin: Any, k_pages: Any, v_pages: Any, rope: Rope) -> None:
    """Refuse arrays that do not fit one another, and rotary channels that the heads have not."""
    _check_pages(q, k_pages, v_pages)
    count, heads, size = q.shape[0], k_pages.shape[1], k_pages.shape[3]
    for name, x, channels in (("k", k, size), ("v", v, v_pages.shape[3])):
        _check_floats(name, x, 3, q)
        if x.shape != (count, heads, channels):
            raise LaunchError(f"{name}: {tuple(x.shape)}, want {(count, heads, channels)}")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_overlap(name, Form.of(x))
    check_rope("rope", rope, size)
    device = Form.of(q).device
    check_form("cos_sin", Form.of(cos_sin), Form((count, rope.channels), "float32", None, device))


def check_slots(q: torch.Tensor, slots: torch.Tensor, limit: int, deviation: torch.Tensor | None) -> None:
    """Refuse what are not slots of the rows of q or room for their deviation; on a CPU, too large ones."""
    count, device = len(q), str(q.device)
    check_form("slots", Form.of(slots), Form((count,), "int64", None, device))
    if deviation is not None:
        check_form("deviation", Form.of(deviation), Form((count,), "float32", None, device))
    if slots.device.type == "cpu" and count and int(slots.max()) >= limit:
        raise LaunchError(f"slots: {int(slots.max())} is out of range, the pages have {limit} slots")


def check_deviation(new: Any, old: Any) -> None:
    """Refuse two arrays that are not equal in form."""
    _check_floats("new", new, 3, None)
    _check_floats("old", old, 3, new)
    if old.shape != new.shape:
        raise LaunchError(f"old: {tuple(old.shape)}, but new is {tuple(new.shape)}")


def _check_pages(q: Any, k_pages: Any, v_pages: Any) -> None:
    _check_floats("q", q, 3, None)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_floats(name, pages, 4, q)
        if pages.shape[:3] != k_pages.shape[:3] or not pages.shape[0]:
            found, want = tuple(pages.shape), tuple(k_pages.shape[:3])
            raise LaunchError(f"{name}: {found}, want at least one block and [B, H, N] = {want} as k_pages")
    heads, size = k_pages.shape[1], k_pages.shape[3]
    if q.shape[1] % heads or q.shape[2] != size:
        raise LaunchError(f"q: {tuple(q.shape)}, want a multiple of {heads} heads, of {size} channels")


def _check_floats(name: str, array: Any, ndim: int, like: Any | None) -> None:
    """Axes, dtype, device and strides of what kernels read or write."""
    x = Form.of(array)
    if len(x.shape) != ndim or 0 in x.shape[1:]:
        raise LaunchError(f"{name}: {x}, want {ndim} axes, none but the first empty")
    if like is None:
        if x.dtype not in FLOATS:
            raise LaunchError(f"{name}: {x}, want {', '.join(FLOATS)}")
    elif (x.dtype, x.device) != ((want := Form.of(like)).dtype, want.device):
        raise LaunchError(f"{name}: {x}, want {want.dtype}" + (f" on {want.device}" if want.device else ""))
    if x.strides is not None and x.strides[-1] != 1 and x.shape[-1] > 1:
        raise LaunchError(f"{name}: strides {x.strides}, want the last axis contiguous (stride 1)")
