"""Checks of the arguments of attention and its helpers, for tensors and JAX arrays alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkit.kernels.attention.layer import Requests, RowRotations
from kvkit.kernels.checks import (
    FLOATS,
    ArraySpec,
    LaunchError,
    check_array,
    check_ids,
    check_overlap,
    check_rope,
)

if TYPE_CHECKING:
    import torch

    from kvkit.kernels.attention.rows import Rows


def check_pages(q: Any, k_pages: Any, v_pages: Any) -> None:
    """Refuse queries and pages that do not fit each other."""
    _check_floats("q", q, 3, None)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_floats(name, pages, 4, q)
        if pages.shape[:3] != k_pages.shape[:3] or not pages.shape[0]:
            found, want = tuple(pages.shape), tuple(k_pages.shape[:3])
            raise LaunchError(f"{name}: {found}, want at least one block and [B, H, N] = {want} as k_pages")
    heads, size = k_pages.shape[1], k_pages.shape[3]
    if q.shape[1] % heads or q.shape[2] != size:
        raise LaunchError(f"q: {tuple(q.shape)}, want a multiple of {heads} heads, of {size} channels")


def check_rows(rows: Rows, q: torch.Tensor, k_pages: torch.Tensor) -> None:
    """Refuse rows that do not fit q, or name blocks that the pages do not have."""
    if rows.count != len(q) or rows.device != q.device:
        raise LaunchError(f"rows: {rows.count} on {rows.device}, but q has {len(q)} on {q.device}")
    if rows.block_tokens != k_pages.shape[2]:
        raise LaunchError(f"rows: block_tokens={rows.block_tokens}, but the pages have {k_pages.shape[2]}")
    if rows.last_block >= len(k_pages):
        raise LaunchError(f"rows: block {rows.last_block} is out of range, the pages have {len(k_pages)}")


def check_requests(requests: Requests, q: Any) -> None:
    """Refuse requests with shapes or dtypes that do not fit q; their values may be traced."""
    tables = requests.tables
    if tables.ndim != 2 or not tables.size:
        raise LaunchError(f"tables: {tables.shape}, want [requests, blocks], none of them 0")
    count = len(tables)
    shapes = tables.shape, (len(q),), (count + 1,), (count,)
    for name, ids, shape in zip(Requests._fields, requests, shapes, strict=True):
        check_ids(name, ids, shape)


def check_scores(requests: int, lse: Any | None, q: Any) -> None:
    """Refuse several requests, and an `lse` that does not fit the rows of q."""
    if requests != 1:
        raise LaunchError(f"rows: of {requests} requests, want one")
    if lse is not None:
        x, like = ArraySpec.of(lse), ArraySpec.of(q)
        if x._replace(strides=None) != (want := ArraySpec(like.shape[:2], "float32", None, like.device)):
            raise LaunchError(f"lse: {x}, want {want}")


def check_scatter(q: Any, k: Any, v: Any, rotations: RowRotations, k_pages: Any, v_pages: Any) -> None:
    """Refuse arrays that do not fit each other, and rotary channels that the heads do not have."""
    check_pages(q, k_pages, v_pages)
    count, heads, size = q.shape[0], k_pages.shape[1], k_pages.shape[3]
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        _check_floats(name, x, 3, q)
        if x.shape != (want := (count, heads, pages.shape[3])):
            raise LaunchError(f"{name}: {tuple(x.shape)}, want {want}")
        check_overlap(f"{name}_pages", ArraySpec.of(pages))
    check_rope("rope", rotations.rope, size)
    want_turns = ArraySpec((count, rotations.rope.channels), "float32", None, ArraySpec.of(q).device)
    check_array("cos_sin", ArraySpec.of(rotations.cos_sin), want_turns)


def check_slots(q: torch.Tensor, slots: torch.Tensor, deviation: torch.Tensor | None) -> None:
    """Refuse slots or a deviation that do not fit q."""
    count, device = len(q), str(q.device)
    check_array("slots", ArraySpec.of(slots), ArraySpec((count,), "int64", None, device))
    if deviation is not None:
        check_array("deviation", ArraySpec.of(deviation), ArraySpec((count,), "float32", None, device))


def check_slot_range(slots: torch.Tensor, limit: int) -> None:
    """Refuse slots, on a CPU, beyond the pages."""
    if len(slots) and int(slots.max()) >= limit:
        raise LaunchError(f"slots: {int(slots.max())} is out of range, the pages have {limit} slots")


def check_deviation(new: Any, old: Any) -> None:
    """Refuse two arrays that differ in shape, dtype or device."""
    _check_floats("new", new, 3, None)
    _check_floats("old", old, 3, new)
    if old.shape != new.shape:
        raise LaunchError(f"old: {tuple(old.shape)}, but new is {tuple(new.shape)}")


def _check_floats(name: str, array: Any, ndim: int, like: Any | None) -> None:
    """Refuse an array with wrong axes, dtype or device, or with a last axis that is not contiguous."""
    x = ArraySpec.of(array)
    if len(x.shape) != ndim or 0 in x.shape[1:]:
        raise LaunchError(f"{name}: {x}, want {ndim} axes, none but the first empty")
    if like is None:
        if x.dtype not in FLOATS:
            raise LaunchError(f"{name}: {x}, want {', '.join(FLOATS)}")
    elif (x.dtype, x.device) != ((want := ArraySpec.of(like)).dtype, want.device):
        raise LaunchError(f"{name}: {x}, want {want.dtype}" + (f" on {want.device}" if want.device else ""))
    if x.strides is not None and x.strides[-1] != 1 and x.shape[-1] > 1:
        raise LaunchError(f"{name}: strides {x.strides}, want the last axis contiguous (stride 1)")
