"""Upload small arrays to a GPU in one copy that waits for nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Bytes of the widest access: each array begins at a multiple of them, as kernels are compiled for."""
TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32")}


class DeviceArray:
    """An array in a GPU's memory as kernels take it. A tensor would take the host longer to make.

    Args:
        memory: tensor that owns the memory.
        address: address of the array.
        dtype: dtype of its elements.
        length: number of its elements.
    """

    __slots__ = ("_length", "address", "dtype", "memory")

    def __init__(self, memory: torch.Tensor, address: int, dtype: torch.dtype, length: int) -> None:
        self.memory, self.address, self.dtype, self._length = memory, address, dtype, length

    def data_ptr(self) -> int:
        """Return the address, as a tensor does: Triton and its launcher call this."""
        return self.address

    def tensor(self) -> torch.Tensor:
        """Return the array as a tensor [length], which keeps the memory."""
        first = self.address - self.memory.data_ptr()
        return self.memory[first : first + self._length * self.dtype.itemsize].view(self.dtype)

    def __len__(self) -> int:
        return self._length


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device. Mutates nothing; the arrays may be reused.

    To a GPU, they are copied together. The copy is queued on the current stream, and the host does not wait:
    work on other streams must be ordered after it.

    Returns:
        a contiguous tensor of each array's shape and dtype; on a GPU, it begins at a multiple of `ALIGNMENT`
        bytes.
    """
    if _is_host(device):
        return [torch.from_numpy(array.copy()) for array in arrays]
    memory, sizes = _copied(arrays, device)
    pieces = memory.split_with_sizes(sizes)
    tensors = [
        piece.view(TORCH_DTYPES[array.dtype]) for piece, array in zip(pieces[::2], arrays, strict=True)
    ]
    return [
        tensor if array.ndim == 1 else tensor.view(array.shape)
        for tensor, array in zip(tensors, arrays, strict=True)
    ]


def upload_arguments(
    arrays: Sequence[NDArray[Any]], device: torch.device
) -> Sequence[torch.Tensor | DeviceArray]:
    """Copy arrays to a device as `upload` does, for a kernel alone: to a GPU, as arrays without a shape."""
    if _is_host(device):
        return upload(arrays, device)
    memory, sizes = _copied(arrays, device)
    address, found = memory.data_ptr(), []
    for array, size, gap in zip(arrays, sizes[::2], sizes[1::2], strict=True):
        found.append(DeviceArray(memory, address, TORCH_DTYPES[array.dtype], array.size))
        address += size + gap
    return found


def _copied(arrays: Sequence[NDArray[Any]], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Return a copy of the arrays' bytes on a GPU, and the bytes of each array and of the gap after it."""
    sizes, parts = [], []
    for array in arrays:
        gap = -array.nbytes % ALIGNMENT
        sizes += [array.nbytes, gap]
        parts += [array.tobytes(), bytes(gap)]
    count = sum(sizes)
    # torch's allocator of pinned memory notes the stream of a non-blocking copy, and hands the memory out
    # again only after the copy, so it may be freed before. From pageable memory, the host could have to wait.
    host = torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    ctypes.memmove(host.data_ptr(), b"".join(parts), count)
    return host.to(device, non_blocking=True), sizes


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"
