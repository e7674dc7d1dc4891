"""K and V of a rank's layers in vLLM's pages: views of plain pages, copies of opaque ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm.blending.page_order import PageOrder, read_tokens

if TYPE_CHECKING:
    from kvkit.adapters.vllm.blending.rows import AttentionLayer
    from kvkit.adapters.vllm.step import Tables


class LayerPages:
    """K and V of a rank's layers, in vLLM's pages.

    Args:
        layers: the layers, with bound pages.

    Attributes:
        orders: order of elements in each layer's pages; None: its pages are plain.

    Raises:
        BlendError: the pages hold anything but K and V.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self.layers = layers
        known: dict[Any, PageOrder | None] = {}
        self.orders: list[PageOrder | None] = []
        for layer in layers:
            pages = layer.module.kv_cache
            layout = pages.shape[1:], pages.dtype, layer.module.head_size
            if layout not in known:
                known[layout] = PageOrder.of(layer.module)
            self.orders.append(known[layout])

    @property
    def opaque(self) -> bool:
        """True if K and V have to be copied out of the pages."""
        return any(order is not None for order in self.orders)

    def read(
        self, index: int, blocks: Tables, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
        """Return K and V [B, H, N, D] of layer `index`, and the blocks of a request's first `length` tokens.

        K and V are views of vLLM's pages; opaque pages are copied, into one block.
        """
        layer, order = self.layers[index], self.orders[index]
        table = layer.kernel_blocks(blocks[layer.table])
        if order is None:
            k, v = layer.module.kv_cache.split([layer.module.head_size, layer.module.head_size_v], -1)
            return k, v, table
        k, v = read_tokens(layer.module, order, table, length)
        return k[None], v[None], np.zeros(1, np.int64)
