"""What attention to pages and its helpers take: every argument, before anything is written."""

from __future__ import annotations

import math

import torch

from kvkit.format.rope import Rope
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import LaunchError, check_overlap

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_floats(name: str, tensor: torch.Tensor, ndim: int, like: torch.Tensor | None) -> None:
    """Axes, dtype, device and strides of what the blend kernels read or write."""
    found = f"{name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    if tensor.ndim != ndim or 0 in tensor.shape[1:]:
        raise LaunchError(f"{found}, want {ndim} axes, none but the first empty")
    if like is None:
        if tensor.dtype not in FLOATS:
            raise LaunchError(f"{found}, want float32, float16 or bfloat16")
    elif (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise LaunchError(f"{found}, want {like.dtype} on {like.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise LaunchError(f"{name}: strides {tensor.stride()}, want the last axis contiguous (stride 1)")


def check_pages(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    check_floats("k_pages", k_pages, 4, q)
    check_floats("v_pages", v_pages, 4, q)
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise LaunchError(
            f"v_pages: [B, H, N] = {tuple(v_pages.shape[:3])}, but k_pages has {tuple(k_pages.shape[:3])}"
        )
    heads, size = k_pages.shape[1], k_pages.shape[3]
    if q.shape[1] % heads or q.shape[2] != size:
        raise LaunchError(f"q: {tuple(q.shape)}, want a multiple of {heads} heads, of {size} channels")


def check_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    check_floats("q", q, 3, None)
    check_pages(q, k_pages, v_pages)
    if rows.count != len(q) or rows.device != q.device:
        raise LaunchError(f"rows: {rows.count} on {rows.device}, but q has {len(q)} on {q.device}")
    if rows.block_tokens != k_pages.shape[2]:
        raise LaunchError(f"rows: block_tokens={rows.block_tokens}, but the pages have {k_pages.shape[2]}")
    if rows.last_block >= len(k_pages):
        raise LaunchError(f"rows: block {rows.last_block} is out of range, the pages have {len(k_pages)}")
    if not math.isfinite(scale):
        raise LaunchError(f"scale={scale}: want a finite number")
    if window is not None and window < 1:
        raise LaunchError(f"window={window}: want at least 1, or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise LaunchError(f"softcap={softcap}: want a finite number above 0, or None")


def check_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rope: Rope,
    deviation: torch.Tensor | None,
) -> None:
    check_floats("q", q, 3, None)
    check_pages(q, k_pages, v_pages)
    count, heads, size = len(q), k_pages.shape[1], k_pages.shape[3]
    for name, tensor, channels in (("k", k, size), ("v", v, v_pages.shape[3])):
        check_floats(name, tensor, 3, q)
        if tensor.shape != (count, heads, channels):
            raise LaunchError(f"{name}: {tuple(tensor.shape)}, want {(count, heads, channels)}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_overlap(name, pages.shape, pages.stride())
    if rope.first + rope.channels > size:
        raise LaunchError(f"rope: channels {rope.first} to {rope.first + rope.channels}, but D is {size}")
    wanted = [
        ("cos_sin", cos_sin, (count, rope.channels), torch.float32),
        ("slots", slots, (count,), torch.int64),
    ]
    if deviation is not None:
        wanted.append(("deviation", deviation, (count,), torch.float32))
    for name, tensor, shape, dtype in wanted:
        found = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != q.device:
            raise LaunchError(f"{name}: {found}, want {shape} {dtype} on {q.device}")
        if not tensor.is_contiguous():
            raise LaunchError(f"{name}: strides {tensor.stride()}, want it contiguous")
    if slots.device.type == "cpu" and count and int(slots.max()) >= len(k_pages) * k_pages.shape[2]:
        limit = len(k_pages) * k_pages.shape[2]
        raise LaunchError(f"slots: {int(slots.max())} is out of range, the pages have {limit} slots")
