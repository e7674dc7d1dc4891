"""An engine's pages as the kernels take them: checked, with the address of every part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import checks
from kvkit.kernels.pages.reference import Part


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """An engine's KV of one group of layers, checked and made ready for the kernels. Make it with `of`."""

    group: LayerGroup
    blocks: int  # B, of the pool
    tokens: int  # N of the tensors: slots of a block; opaque: 1, a slot is a whole page
    heads: int  # H; opaque: 1
    parts: tuple[Part, ...]  # bytes of every layer, K and V apart where the engine keeps them so; the owners
    span: int  # slots that lie the token stride apart: N, or all where blocks follow one another
    table: NDArray[np.int64]  # [parts, 7]: layer, first byte in a record's row, bytes of a row,
    # address, and strides of B, H, N in bytes

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.parts[0].pages.device

    def layer(self, place: int) -> Pages:
        """The pages of the layer at this place in the group, as if it were a group of its own: a view."""
        rows = self.table[self.table[:, 0] == place].copy()
        rows[:, 0] = 0
        return replace(
            self,
            group=replace(self.group, layers=self.group.layers[place : place + 1]),
            parts=tuple(replace(part, layer=0) for part in self.parts if part.layer == place),
            table=rows,
        )

    def halves(self) -> NDArray[np.int64]:
        """int64 [P, 7]: `table` with K and V apart, whether or not the engine keeps them so."""
        k_bytes = self.group.k_size * self.group.item_bytes
        joined = (self.table[:, 1] == 0) & (self.table[:, 2] > k_bytes)
        if self.group.opaque or not joined.any():
            return self.table
        k, v = self.table[joined].copy(), self.table[joined].copy()
        k[:, 2] = v[:, 1] = k_bytes
        v[:, 2:4] += -k_bytes, k_bytes
        return np.concatenate([k, v])

    @staticmethod
    def of(group: LayerGroup, tensors: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]) -> Pages:
        """Pages of `group` in an engine's own memory; neither copies nor writes it.

        Args:
            tensors: per layer of the group, in its order: [B, H, N, C] with K and V side by side in C, or
                K and V apart as (k [B, H, N, Dk], v [B, H, N, Dv]). Any strides with C innermost. N may
                differ from `group.block_tokens` where only slots will be used (a Hugging Face cache: B = 1,
                N = its capacity). Opaque: any dtype and shape [B, ...] whose blocks are `page_bytes`
                contiguous bytes.

        Raises:
            LaunchError: the tensors do not fit the group or one another, or one overlaps itself.
        """
        parts = [
            Part(layer, first_byte, _as_bytes(tensor, group.page_bytes))
            for layer, first_byte, tensor in checks.check_pages("tensors", group, tensors)
        ]
        blocks, heads, tokens, _ = parts[0].pages.shape
        table = np.array(
            [
                (p.layer, p.first_byte, p.pages.shape[3], p.pages.data_ptr(), *p.pages.stride()[:3])
                for p in parts
            ],
            np.int64,
        )
        if len(set(table[:, 3])) < len(parts):
            raise LaunchError("tensors: two of them start at the same address")
        follow = bool((table[:, 4] == tokens * table[:, 6]).all())
        return Pages(
            group=group,
            blocks=blocks,
            tokens=tokens,
            heads=heads,
            parts=tuple(parts),
            span=blocks * tokens if follow else tokens,
            table=table,
        )


def _as_bytes(tensor: torch.Tensor, page_bytes: int | None) -> torch.Tensor:
    """[B, H, N, W]; of opaque pages [B, 1, 1, page_bytes]."""
    if page_bytes is None:
        return tensor.detach().view(torch.uint8)
    # a permuted block is contiguous bytes too, but torch views only what is innermost as bytes
    size = len(tensor), page_bytes // tensor.element_size()
    return tensor.detach().as_strided(size, (tensor.stride(0), 1)).view(torch.uint8)[:, None, None, :]
