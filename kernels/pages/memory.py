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
    """An engine's KV of one group of layers, checked and made ready for the kernels. Make it with `of`.

    Args:
        group: the layers' form.
        blocks: B, blocks of the pool.
        tokens: N of the tensors: slots of a block. Opaque: 1, a slot is a whole page.
        heads: H. Opaque: 1.
        row_bytes: C in bytes, one head of one token. Opaque: the bytes of a page.
        parts: the bytes of every layer, K and V apart where the engine keeps them so. They own the memory.
        span: slots that lie the token stride apart: N, or all where blocks follow one another.
        table: int64 [parts, 7], `parts` as numbers: layer, first byte in a record's row, bytes of a row,
            address, and strides of B, H, N in bytes.
        halves: int64 [P, 7], the same with K and V apart, whether or not the engine keeps them so.
    """

    group: LayerGroup
    blocks: int
    tokens: int
    heads: int
    row_bytes: int
    parts: tuple[Part, ...]
    span: int
    table: NDArray[np.int64]
    halves: NDArray[np.int64]

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
        if len(tensors) != len(group.layers):
            raise LaunchError(f"tensors: {len(tensors)} given, the group has {len(group.layers)} layers")
        parts: list[Part] = []
        for layer, tensor in enumerate(tensors):
            if group.page_bytes is not None:
                parts.append(Part(layer, 0, checks.opaque(f"tensors[{layer}]", tensor, group.page_bytes)))
            elif isinstance(tensor, torch.Tensor):
                parts.append(Part(layer, 0, checks.dense(f"tensors[{layer}]", tensor, group, group.channels)))
            else:
                k, v = tensor
                first = group.k_size * group.item_bytes
                parts.append(Part(layer, 0, checks.dense(f"tensors[{layer}][0]", k, group, group.k_size)))
                parts.append(Part(layer, first, checks.dense(f"tensors[{layer}][1]", v, group, group.v_size)))
        blocks, heads, tokens, _ = parts[0].pages.shape
        for part in parts:
            pages = part.pages
            if pages.shape[:3] != (blocks, heads, tokens) or pages.device != parts[0].pages.device:
                raise LaunchError(
                    f"tensors[{part.layer}]: [B, H, N] = {tuple(pages.shape[:3])} on {pages.device}, but "
                    f"tensors[0] has {(blocks, heads, tokens)} on {parts[0].pages.device}"
                )
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
            row_bytes=group.page_bytes or group.channels * group.item_bytes,
            parts=tuple(parts),
            span=blocks * tokens if follow else tokens,
            table=table,
            halves=_halves(table, group),
        )


def _halves(table: NDArray[np.int64], group: LayerGroup) -> NDArray[np.int64]:
    """`Pages.halves`: each row that holds K and V, [layer, 0, K's and V's bytes, address, ...], as two."""
    k_bytes = group.k_size * group.item_bytes
    joined = (table[:, 1] == 0) & (table[:, 2] > k_bytes)
    if group.opaque or not joined.any():
        return table
    k, v = table[joined].copy(), table[joined].copy()
    k[:, 2] = v[:, 1] = k_bytes
    v[:, 2:4] += -k_bytes, k_bytes
    return np.concatenate([k, v])
