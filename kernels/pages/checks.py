"""Checks of all arguments of pack and unpack, tensors and JAX arrays, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, RopeError, Rotation
from kvkit.kernels.checks import FLOATS, ArraySpec, LaunchError, check_overlap, check_rope

if TYPE_CHECKING:
    import torch


def check_pages(name: str, group: LayerGroup, layers: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Refuse anything but the pages of a group's layers, as `Pages.of` takes them.

    Returns:
        layer, first byte in a row of a record, and array of each part.
    """
    if len(layers) != len(group.layers):
        raise LaunchError(f"{name}: {len(layers)} given, the group has {len(group.layers)} layers")
    arrays: list[tuple[int, int, Any]] = []
    for i, layer in enumerate(layers):
        is_pair = isinstance(layer, tuple | list) and not group.opaque
        sizes = (group.k_size, group.v_size) if is_pair else (group.channels,)
        for part, (array, size) in enumerate(zip(layer if is_pair else (layer,), sizes, strict=True)):
            label = f"{name}[{i}][{part}]" if is_pair else f"{name}[{i}]"
            if group.page_bytes is None:
                _check_dense(label, ArraySpec.of(array), f"[B, {group.kv_heads}, N, {size}] {group.dtype}")
            else:
                _check_opaque(label, array, group.page_bytes)
            arrays.append((i, part * group.k_size * group.item_bytes, array))
            x, first = ArraySpec.of(array), ArraySpec.of(arrays[0][2])
            check_overlap(label, x)
            same_pool = x.shape[0] == first.shape[0] and (group.opaque or x.shape[2] == first.shape[2])
            if not same_pool or x.device != first.device:
                raise LaunchError(f"{label}: {x}, but {name}[0] is {first}")
    return arrays


def check_share(group: LayerGroup, heads: range | None) -> tuple[int, int]:
    """Return the number of equal shares of a record's heads, and the index of the share `heads`."""
    all_heads = range(group.kv_heads)
    if heads is None:
        return 1, 0
    fits = len(heads) and not group.kv_heads % len(heads) and not heads.start % len(heads)
    if not fits or heads.step != 1 or heads.start not in all_heads or heads.stop > group.kv_heads:
        raise LaunchError(f"heads={heads}: want one of the equal shares of {group.kv_heads} heads")
    return group.kv_heads // len(heads), heads.start // len(heads)


def check_order(order: torch.Tensor, group: LayerGroup, tensors: Sequence[Any]) -> None:
    """Refuse an order that does not fit the group's blocks or these tensors."""
    want = (group.kv_heads, group.block_tokens, group.channels)
    if tuple(order.shape) != want or str(order.dtype) != "torch.int64":
        raise LaunchError(f"order: {tuple(order.shape)} {order.dtype}, want {want} torch.int64")
    for i, tensor in enumerate(tensors):
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind != group.dtype or tensor.device.type != "cpu" or int(order.max()) >= tensor[0].numel():
            raise LaunchError(
                f"tensors[{i}]: {tuple(tensor.shape)} {kind} on {tensor.device}, want blocks of more than "
                f"{int(order.max())} {group.dtype} on a CPU"
            )


def _check_dense(name: str, x: ArraySpec, want: str) -> None:
    if len(x.shape) != 4 or 0 in x.shape or f"[B, {x.shape[1]}, N, {x.shape[3]}] {x.dtype}" != want:
        raise LaunchError(f"{name}: {x.shape} {x.dtype}, want {want}, none of them 0")
    if x.strides is not None and x.strides[3] != 1:
        raise LaunchError(f"{name}: stride {x.strides}, want C innermost (stride 1)")


def _check_opaque(name: str, tensor: object, page_bytes: int) -> None:
    import torch  # JAX arrays, which come without it, are never opaque

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


def check_chunks(
    group: LayerGroup, pool: tuple[int, int], blocks: Any | None, slots: Any | None, dtypes: Sequence[str]
) -> tuple[str, Any, int]:
    """Refuse ids that do not name [chunks, T] by blocks or slots of a pool [B, N].

    Returns:
        name of the argument that is given, its value, and the number of such ids in the pool.
    """
    arguments = {name: ids for name, ids in (("blocks", blocks), ("slots", slots)) if ids is not None}
    if len(arguments) != 1:
        raise LaunchError("blocks, slots: give one of the two")
    ((name, ids),) = arguments.items()
    count, tokens = pool
    if name == "slots" and group.opaque:
        raise LaunchError("slots: opaque pages move whole, give blocks")
    if name == "blocks" and not group.opaque and tokens != group.block_tokens:
        raise LaunchError(
            f"blocks: the pages' N = {tokens} is not block_tokens = {group.block_tokens}: give slots"
        )
    dtype = getattr(ids, "dtype", type(ids).__name__)
    if dtype not in dtypes:  # numpy compares a dtype with a name
        raise LaunchError(f"{name}: {dtype}, want an array of {' or '.join(dtypes)}")
    if ids.ndim != 2 or (len(ids) and not ids.shape[1]):
        raise LaunchError(f"{name}: {ids.shape}, want [chunks, at least 1]")
    return name, ids, count * tokens if name == "slots" else count


def check_range(name: str, ids: NDArray[Any], limit: int) -> None:
    """Refuse ids that the pages do not have."""
    if ids.size and ids.max() >= limit:
        raise LaunchError(f"{name}: {ids.max()} is out of range, the pages have {limit} {name}")


def check_records(records: Sequence[object], want: int, device: torch.device, to_records: bool) -> None:
    """Refuse records that are not `want` contiguous bytes where `device` reaches them."""
    for i, record in enumerate(records):
        fits = isinstance(record, np.ndarray) and record.dtype == np.uint8 and record.shape == (want,)
        flags = record.flags if fits else None  # type: ignore[attr-defined]
        if flags is None or not flags.c_contiguous or (to_records and not flags.writeable):
            _check_record(f"records[{i}]", record, want, device, to_records)


def _check_record(name: str, record: object, want: int, device: torch.device, to_records: bool) -> None:
    import torch

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


def token_slots(blocks: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Return the slots [chunks, T] of all tokens in blocks [chunks, T / tokens]; -1 for a block < 0."""
    slots: NDArray[np.int64] = blocks[:, :, None] * tokens + np.arange(tokens)
    slots[blocks < 0] = -1  # the product may have wrapped around
    return slots.reshape(len(blocks), blocks.shape[1] * tokens)


class ResolvedRotation(NamedTuple):
    """Rotation of the keys of some chunks as kernels take it: see `Rotation.resolve`."""

    rope: Rope
    cos_sin: NDArray[np.float32]  # [U, R]
    rows: NDArray[np.int32]  # [chunks, T], row of `cos_sin` of each token


def check_rotation(name: str, group: LayerGroup, rope: Rope) -> None:
    """Refuse a rotary embedding that does not fit the group's keys."""
    if group.opaque or group.dtype not in FLOATS:
        kind = "opaque" if group.opaque else group.dtype
        raise LaunchError(f"{name}: the pages are {kind}, want {', '.join(FLOATS)}")
    check_rope(name, rope, group.k_size)


def resolve_rotation(group: LayerGroup, rotation: Rotation, chunks: int, tokens: int) -> ResolvedRotation:
    """Resolve a rotation for kernels; refuse one that does not fit the group."""
    check_rotation("rotate", group, rotation.rope)
    try:
        return ResolvedRotation(rotation.rope, *rotation.resolve(chunks, tokens))
    except RopeError as error:
        raise LaunchError(f"rotate: {error}") from error


def _kind(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
