"""What tokens are chosen by: the question's attention, seen while rows run through vLLM's first layers.

Every rank gets the same scores: those of its heads and layers are put together with the others'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.attention import scoring
from kvkit.adapters.vllm.blending.order import PageOrder, read_tokens
from kvkit.adapters.vllm.blending.rows import AttentionLayer, RowRunner
from kvkit.adapters.vllm.step import Tables
from kvkit.blend.methods.method import NeedsQuestion
from kvkit.blend.plan import BlendPlan
from kvkit.blend.run import together
from kvkit.kernels.attention.api import query_scores
from kvkit.kernels.attention.rows import Rows


class PagesOfLayers:
    """K and V of a rank's layers, in vLLM's pages.

    Raises:
        BlendError: pages hold something other than K and V.
    """

    def __init__(self, rows: RowRunner) -> None:
        self.layers = rows.layers
        known: dict[Any, PageOrder | None] = {}
        self.orders: list[PageOrder | None] = []
        for layer in rows.layers:
            pages = layer.module.kv_cache
            form = pages.shape[1:], pages.dtype, layer.module.head_size
            if form not in known:
                known[form] = PageOrder.of(layer.module)
            self.orders.append(known[form])

    def read(
        self, index: int, blocks: Tables, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
        """K and V [B, H, N, D] of layer `index`, and in which blocks a request's first `length` tokens are.

        vLLM's own pages; those that are opaque copied, into one block.
        """
        layer, order = self.layers[index], self.orders[index]
        table = _kernel_blocks(layer, blocks)
        if order is None:
            k, v = layer.module.kv_cache.split([layer.module.head_size, layer.module.head_size_v], -1)
            return k, v, table
        k, v = read_tokens(layer.module, order, table, length)
        return k[None], v[None], np.zeros(1, np.int64)


class QuestionAttention:
    """Attention that the question pays, by layer.

    Args:
        layers: how many of the model's are looked into.
        blocks: of the prompt, its documents in their places.
        asked: what the method needs to see of it: one that `registry.served` lets pass.
    """

    def __init__(
        self, pages: PagesOfLayers, layers: int, plan: BlendPlan, blocks: Tables, asked: NeedsQuestion
    ) -> None:
        self.layers = layers
        self._first = max(0, layers - (asked.last or layers))
        self._pages, self._blocks, self._asked = pages, blocks, asked
        self._question, self._tokens = int(plan.question[0]), plan.tokens
        self._paid: dict[int, torch.Tensor] = {}  # [Hq, N] by layer
        self._rows: dict[tuple[int, int, bytes], Rows] = {}
        self._total: torch.Tensor | None = None
        self._adding: Any = None  # while stages of a pipeline add up

    def look(self, index: int, q: torch.Tensor, positions: NDArray[np.int64]) -> None:
        """See the queries [M, Hq, D] of some of the rows in layer `index`, whose K and V are written."""
        layer = self._pages.layers[index]
        first = int(np.searchsorted(positions, self._question))  # the question is what is computed last
        if not self._first <= layer.number < self.layers or first == len(positions):
            return
        k, v, table = self._pages.read(index, self._blocks, self._tokens)
        asked, values = self._of(positions[first:], table, k), v if self._asked.value_norm else None
        paid = query_scores(q[first:], k, values, asked, scoring(layer.module))
        self._paid[index] = self._paid[index] + paid if index in self._paid else paid

    def add_up(self) -> None:
        """Begin to put together what all rows paid, over all ranks. To be called on each, in the same order.

        It waits for no other stage of a pipeline.
        """
        found = torch.zeros(len(self._paid), self._tokens)
        for row, index in zip(found, sorted(self._paid), strict=True):
            row.copy_(together(self._paid[index], self._asked))
        heads, stages = compat.find("get_tp_group")(), compat.find("get_pp_group")()
        if heads.world_size > 1 and found.numel():  # of another stage's layers, none of its ranks has any
            highest = self._asked.heads == "max"
            operation = ReduceOp.MAX if highest else ReduceOp.SUM
            torch.distributed.all_reduce(found, operation, group=heads.cpu_group)
            found /= 1 if highest else heads.world_size
        self._total = torch.zeros(self.layers - self._first, self._tokens)
        numbers = [self._pages.layers[index].number - self._first for index in sorted(self._paid)]
        self._total[numbers] = found
        if stages.world_size > 1:
            self._adding = torch.distributed.all_reduce(
                self._total, ReduceOp.SUM, group=stages.cpu_group, async_op=True
            )

    def seen(self) -> NDArray[np.float32]:
        """float32 [layers, N]: what all rows paid, over all ranks, once that was begun to be put together."""
        assert self._total is not None
        if self._adding is not None:
            self._adding.wait()
        return np.asarray(self._total.numpy(), np.float32)

    def _of(self, positions: NDArray[np.int64], table: NDArray[np.int64], pages: torch.Tensor) -> Rows:
        """Rows at these positions of one sequence, made once: masks and tiles in them serve all layers."""
        key = int(positions[0]), pages.shape[2], table.tobytes()
        if key not in self._rows:
            ends, lengths = np.array([0, len(positions)]), np.array([self._tokens])
            self._rows[key] = Rows.of(positions, ends, lengths, table[None], pages.shape[2], pages.device)
        return self._rows[key]


def _kernel_blocks(layer: AttentionLayer, blocks: Tables) -> NDArray[np.int64]:
    """The kernel's blocks of a request's of one layer; of what is absent, the null block's."""
    ratio = layer.block_tokens // layer.module.kv_cache.shape[2]
    table = np.maximum(np.array(blocks[layer.table], np.int64), 0)
    found: NDArray[np.int64] = (table[:, None] * ratio + np.arange(ratio)).reshape(-1)
    return found
