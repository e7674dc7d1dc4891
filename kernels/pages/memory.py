"""Pages of an engine as the kernels take them: checked, with the address of every part."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.once import once
from kvkit.kernels.pages import checks
from kvkit.kernels.pages.reference import Part

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """KV of one group of layers in an engine's memory, checked and ready for kernels. Make it with `of`."""

    group: LayerGroup  # group of the records
    blocks: int  # B, blocks of the pool
    tokens: int  # N, slots of a block of the tensors; opaque: 1, a slot is a whole page
    heads: int  # heads of the pages: H, or a share of them; opaque: 1
    parts: tuple[Part, ...]  # bytes of every layer, K and V apart as in the engine; they own the memory
    span: int  # consecutive slots at the token stride: N, or all if blocks are contiguous
    table: NDArray[np.int64]  # [parts, 7]: layer * shares + index of the layer's share, first byte in a
    # record's row, bytes of a row, address, and strides of B, H, N in bytes
    order: torch.Tensor | None = None  # offset of each element in a block that is not dense; see `of`
    _cached: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        return self.parts[0].pages.device

    @property
    def shares(self) -> int:
        """Number of equal shares of a record's heads; opaque: 1, as a row is a page of all heads."""
        return 1 if self.group.opaque else self.group.kv_heads // self.heads

    @property
    def held(self) -> range:
        """Heads of a record that the pages have; opaque: the only one."""
        first = int(self.table[0, 0]) % self.shares * self.heads
        return range(first, first + self.heads)

    @property
    def whole(self) -> bool:
        """True if the pages have all heads of the records."""
        return self.shares == 1 and self.group.page_bytes in (None, int(self.table[0, 2]))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once per `key` and shared by all moves."""
        return once(self._cached, key, make)

    def layer(self, index: int) -> Pages:
        """Return the pages of the layer with this index, as a group of its own: a view, made once."""
        return self.once(("layer", index), lambda: self._layer(index))

    def _layer(self, index: int) -> Pages:
        rows = self.table[self.table[:, 0] // self.shares == index].copy()
        rows[:, 0] %= self.shares
        layer_parts = (part for part in self.parts if part.layer // self.shares == index)
        return replace(
            self,
            group=replace(self.group, layers=self.group.layers[index : index + 1]),
            parts=tuple(replace(part, layer=part.layer % self.shares) for part in layer_parts),
            table=rows,
        )

    def halves(self) -> NDArray[np.int64]:
        """Return `table` with K and V apart, int64 [P, 7], even if the engine keeps them side by side.

        K and V of a layer are neighbours: their bytes share sectors of records, and the kernels' programs
        take one part after the other, so that both find a sector in the GPU's cache.
        """
        k_bytes = self.group.k_size * self.group.item_bytes
        joined = (self.table[:, 1] == 0) & (self.table[:, 2] > k_bytes)
        if self.group.opaque or not joined.any():
            return self.table
        halves = np.repeat(self.table, 1 + joined, axis=0)
        k = np.flatnonzero(joined) + np.arange(joined.sum())
        halves[k, 2] = halves[k + 1, 1] = k_bytes
        halves[k + 1, 2:4] += -k_bytes, k_bytes
        return halves

    @staticmethod
    def of(
        group: LayerGroup,
        tensors: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
        order: torch.Tensor | None = None,
        heads: range | None = None,
    ) -> Pages:
        """Describe an engine's own memory as pages of `group`, without copying or writing it.

        Args:
            tensors: per layer of the group, in its order: [B, H, N, C] with K and V side by side in C, or
                K and V apart as (k [B, H, N, Dk], v [B, H, N, Dv]). Any strides with C innermost. N may
                differ from `group.block_tokens` if only slots are used (a Hugging Face cache: B = 1, N = its
                capacity). Opaque: any dtype and shape [B, ...] with blocks of `page_bytes` contiguous bytes.
            order: int64 [H, N, C], offset of each element in its block, in elements, for pages on a CPU in an
                engine's own order. They are moved through dense pages; a tensor is then [B, ...] with
                contiguous blocks.
            heads: heads of a record that the pages have, one of equal shares of its H heads. Such pages can
                only be unpacked into, not packed. None: all heads.

        Raises:
            LaunchError: the tensors do not fit the group or each other, or one overlaps itself.
        """
        shares, share = checks.check_share(group, heads)
        share_group = replace(
            group,
            kv_heads=group.kv_heads // shares,
            page_bytes=group.page_bytes and group.page_bytes // shares,
        )
        tensor_group = share_group
        if order is not None:
            checks.check_order(order, share_group, tensors)
            size = tensors[0][0].numel() * group.item_bytes
            tensor_group = replace(share_group, page_bytes=size, precision=None)
        # a record of H heads is treated as more layers with a share of heads each; opaque: parts of a row
        page_bytes = share_group.page_bytes
        factor, index, first = (1, 0, share * page_bytes) if page_bytes else (shares, share, 0)
        parts = [
            Part(factor * layer + index, first + first_byte, _as_bytes(tensor, tensor_group.page_bytes))
            for layer, first_byte, tensor in checks.check_pages("tensors", tensor_group, tensors)
        ]
        pages = Pages._made(group, parts, order)
        if len(set(pages.table[:, 3])) < len(parts):
            raise LaunchError("tensors: two of them start at the same address")
        return pages

    @staticmethod
    def scattered(group: LayerGroup, pages: Sequence[torch.Tensor]) -> tuple[Pages, NDArray[np.int64]]:
        """Describe opaque pages of a CPU's memory that lie anywhere in it, without copying or writing it.

        Args:
            pages: uint8 [page_bytes] each. They must outlive what is returned, which does not own them.

        Returns:
            pages, and the block of each tensor, int64 [pages]. A block begins at each multiple of the
            tensors' alignment, so blocks overlap: only those that are returned may be moved.

        Raises:
            LaunchError: the group has several layers, or a tensor does not fit it.
        """
        for i, page in enumerate(pages):
            if page.shape != (group.page_bytes,) or page.dtype != torch.uint8 or page.device.type != "cpu":
                found = f"{page.dtype} {tuple(page.shape)} on {page.device}"
                raise LaunchError(f"pages[{i}]: {found}, want uint8 [{group.page_bytes}] on a CPU")
        starts, size = np.array([page.data_ptr() for page in pages], np.int64), len(pages[0])
        offsets = starts - starts.min()
        step = math.gcd(*offsets.tolist()) or size
        memory = (ctypes.c_uint8 * (int(offsets.max()) + size)).from_address(int(starts.min()))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        blocks = whole.as_strided((int(offsets.max()) // step + 1, 1, 1, size), (step, size, size, 1))
        return Pages._made(group, [Part(0, 0, blocks)], None), offsets // step

    def copied(self, blocks: NDArray[np.int64]) -> Pages:
        """Return a copy of only `blocks`, int64 [n], on the host: they become blocks 0 to n - 1."""
        ids = torch.from_numpy(blocks).to(self.device)
        parts = [replace(part, pages=part.pages[ids].cpu()) for part in self.parts]
        return Pages._made(self.group, parts, self.order)

    @staticmethod
    def _made(group: LayerGroup, parts: Sequence[Part], order: torch.Tensor | None) -> Pages:
        blocks, heads, tokens, _ = parts[0].pages.shape
        table = np.array(
            [
                (p.layer, p.first_byte, p.pages.shape[3], p.pages.data_ptr(), *p.pages.stride()[:3])
                for p in parts
            ],
            np.int64,
        )
        if order is not None:
            heads, tokens = order.shape[:2]
        contiguous = bool((table[:, 4] == tokens * table[:, 6]).all())
        return Pages(
            group=group,
            blocks=blocks,
            tokens=tokens,
            heads=heads,
            parts=tuple(parts),
            span=blocks * tokens if contiguous else tokens,
            table=table,
            order=order,
        )


def _as_bytes(tensor: torch.Tensor, page_bytes: int | None) -> torch.Tensor:
    """Return a tensor's bytes as [B, H, N, W]; opaque pages as [B, 1, 1, page_bytes]."""
    if page_bytes is None:
        return tensor.detach().view(torch.uint8)
    # a permuted block is contiguous bytes too, but torch views only the innermost axis as bytes
    size = len(tensor), page_bytes // tensor.element_size()
    return tensor.detach().as_strided(size, (tensor.stride(0), 1)).view(torch.uint8)[:, None, None, :]
