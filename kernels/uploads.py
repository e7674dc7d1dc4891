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
    sizes, parts = [], []  # bytes of each array, then of the gap after it
    for array in arrays:
        gap = -array.nbytes % ALIGNMENT
        sizes += [array.nbytes, gap]
        parts += [array.tobytes(), bytes(gap)]
    # torch's allocator of pinned memory notes the stream of a non-blocking copy, and hands the memory out
    # again only after the copy, so it may be freed before. From pageable memory, the host could have to wait.
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    ctypes.memmove(host.data_ptr(), b"".join(parts), len(host))
    pieces = host.to(device, non_blocking=True).split_with_sizes(sizes)
    tensors = [
        piece.view(TORCH_DTYPES[array.dtype]) for piece, array in zip(pieces[::2], arrays, strict=True)
    ]
    return [
        tensor if array.ndim == 1 else tensor.view(array.shape)
        for tensor, array in zip(tensors, arrays, strict=True)
    ]


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"
