"""What pack and unpack take: every argument, before anything is written."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup, LayoutError
from kvkit.format.rope import Rope, RopeError, Rotation
from kvkit.kernels.checks import FLOATS, Form, LaunchError, check_overlap, check_rope
from kvkit.kernels.pages import reference


def dense(name: str, tensor: torch.Tensor, group: LayerGroup, channels: int) -> torch.Tensor:
    """The bytes [B, H, N, W] of [B, H, N, channels]; refuses what is not that or overlaps itself."""
    want = f"[B, {group.kv_heads}, N, {channels}] {group.dtype}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.ndim != 4 or dtype != group.dtype:
        raise LaunchError(f"{name}: {tuple(tensor.shape)} {dtype}, want {want}")
    blocks, heads, tokens, c = tensor.shape
    if (heads, c) != (group.kv_heads, channels) or not blocks or not tokens or not c:
        raise LaunchError(f"{name}: {tuple(tensor.shape)}, want {want}, none of them 0")
    if tensor.stride(3) != 1:
        raise LaunchError(f"{name}: stride {tensor.stride()}, want C innermost (stride 1)")
    check_overlap(name, Form.of(tensor))
    return tensor.detach().view(torch.uint8)


def opaque(name: str, tensor: object, page_bytes: int) -> torch.Tensor:
    """The bytes [B, 1, 1, page_bytes] of a tensor whose blocks are that many contiguous bytes."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or not tensor.numel():
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LaunchError(f"{name}: {shape}, want one tensor [B, ...]")
    item = tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if tensor[0].numel() * item != page_bytes or extent * item != page_bytes:
        raise LaunchError(
            f"{name}: {tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}, "
            f"want blocks of page_bytes={page_bytes} contiguous bytes"
        )
    check_overlap(name, Form.of(tensor))
    # a permuted block is contiguous bytes too, but torch views only what is innermost as bytes
    flat = tensor.detach().as_strided((len(tensor), page_bytes // item), (tensor.stride(0), 1))
    return flat.view(torch.uint8)[:, None, None, :]


def slots_of(
    group: LayerGroup,
    pool: tuple[int, int],
    blocks: NDArray[np.int64] | None,
    slots: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    """The slots [chunks, T] (opaque: whole pages) of a pool's [B, N] that a call's ids name, checked."""
    count, tokens = pool
    if (blocks is None) == (slots is None):
        raise LaunchError("blocks, slots: give one of the two")
    if slots is not None:
        if group.opaque:
            raise LaunchError("slots: opaque pages move whole, give blocks")
        check_ids("slots", slots, count * tokens)
        return np.ascontiguousarray(slots)
    assert blocks is not None
    if not group.opaque and tokens != group.block_tokens:
        raise LaunchError(
            f"blocks: the tensors' N = {tokens} is not block_tokens = {group.block_tokens}: give slots"
        )
    check_ids("blocks", blocks, count)
    every = blocks[:, :, None] * tokens + np.arange(tokens)
    every[blocks < 0] = -1  # the product may have wrapped around
    return every.reshape(len(blocks), blocks.shape[1] * tokens)


def check_ids(name: str, ids: NDArray[np.int64], limit: int) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64:
        raise LaunchError(f"{name}: {_kind(ids)}, want a numpy array of int64")
    if ids.ndim != 2 or (len(ids) and not ids.shape[1]):
        raise LaunchError(f"{name}: {ids.shape}, want [chunks, at least 1]")
    if ids.size and ids.max() >= limit:
        raise LaunchError(f"{name}: {ids.max()} is out of range, the pages have {limit} {name}")


def check_record(name: str, record: object, want: int, device: torch.device, to_records: bool) -> None:
    if isinstance(record, torch.Tensor) and device.type == "cuda":
        if record.dtype != torch.uint8 or record.device != device:
            raise LaunchError(f"{name}: {record.dtype} on {record.device}, want torch.uint8 on {device}")
        if record.shape != (want,) or not record.is_contiguous():
            raise LaunchError(
                f"{name}: {tuple(record.shape)} strides {record.stride()}, want ({want},) contiguous bytes"
            )
        return
    if not isinstance(record, np.ndarray) or record.dtype != np.uint8:
        raise LaunchError(f"{name}: {_kind(record)}, want a numpy array of uint8")
    if record.shape != (want,) or not record.flags.c_contiguous:
        raise LaunchError(f"{name}: {record.shape} strides {record.strides}, want ({want},) contiguous bytes")
    if to_records and not record.flags.writeable:
        raise LaunchError(f"{name}: read-only")


def row_bytes(group: LayerGroup, quantised: str | None) -> int:
    """Bytes of one head and token in a record."""
    if quantised is None:
        return group.page_bytes or group.channels * group.item_bytes
    if quantised not in reference.LARGEST:
        raise LaunchError(f"quantised={quantised!r}: want None or one of {', '.join(reference.LARGEST)}")
    try:
        return group.quantised().channels
    except LayoutError as error:
        raise LaunchError(f"quantised={quantised!r}: {error}") from error


class Turns(NamedTuple):
    """A rotation of some chunks as kernels take it: a model's embedding, and `Rotation.resolve`."""

    rope: Rope
    cos_sin: NDArray[np.float32]  # [U, R]
    which: NDArray[np.int32]  # [chunks, T], each token's row of them


def turns_of(group: LayerGroup, rotation: Rotation, chunks: int, tokens: int) -> Turns:
    """That of a rotation that fits the group."""
    if group.opaque or group.dtype not in FLOATS:
        kind = "opaque" if group.opaque else group.dtype
        raise LaunchError(f"rotate: the pages are {kind}, want {', '.join(FLOATS)}")
    check_rope("rotate", rotation.rope, group.k_size)
    try:
        return Turns(rotation.rope, *rotation.resolve(chunks, tokens))
    except RopeError as error:
        raise LaunchError(f"rotate: {error}") from error


def _kind(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
