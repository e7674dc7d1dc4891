"""What pack and unpack mean, in plain torch: for any device, any dtype, and for reading first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The bytes of one layer's pages that lie side by side: K and V joined, or one of the two.

    Args:
        layer: position of the layer in its group.
        first_byte: where this part starts within a row (one head and token) of a record.
        pages: uint8 [B, H, N, W], W bytes of a row; a view of the engine's memory.
    """

    layer: int
    first_byte: int
    pages: torch.Tensor


def pack(
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    shape: tuple[int, int, int, int],
) -> None:
    """records[chunk][layer, head, t] = pages[layer][block, head, n], slots[chunk, t] = block * N + n.

    Args:
        parts: of every layer.
        records: per chunk the bytes of a canonical [L, H, T, C]; written, except where a slot is < 0.
        slots: [chunks, T].
        shape: of a record in bytes, [L, H, T, C * item_bytes].
    """
    for record, row in zip(records, slots, strict=True):
        target = torch.from_numpy(record).view(shape)
        keep = torch.from_numpy(np.flatnonzero(row >= 0))  # [K]
        for part in parts:
            block, n = _where(part, row)
            first, last = part.first_byte, part.first_byte + part.pages.shape[3]
            rows = part.pages[block, :, n]  # [K, H, W]
            target[part.layer, :, keep, first:last] = rows.transpose(0, 1).cpu()


def unpack(
    parts: Sequence[Part],
    records: Sequence[NDArray[np.uint8]],
    slots: NDArray[np.int64],
    shape: tuple[int, int, int, int],
) -> None:
    """pages[layer][block, head, n] = records[chunk][layer, head, t]: the inverse of `pack`.

    Writes the pages of every slot >= 0 and nothing else; records may be read-only.
    """
    for record, row in zip(records, slots, strict=True):
        source = torch.from_numpy(record.copy()).view(shape)
        keep = torch.from_numpy(np.flatnonzero(row >= 0))  # [K]
        for part in parts:
            block, n = _where(part, row)
            first, last = part.first_byte, part.first_byte + part.pages.shape[3]
            rows = source[part.layer, :, keep, first:last]  # [H, K, W]
            part.pages[block, :, n] = rows.transpose(0, 1).to(part.pages.device)


def _where(part: Part, row: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and token within the block of each slot >= 0, on the pages' device."""
    slot = torch.from_numpy(row[row >= 0]).to(part.pages.device)
    tokens = part.pages.shape[2]
    return slot // tokens, slot % tokens
