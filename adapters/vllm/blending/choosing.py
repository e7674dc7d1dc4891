"""Scores for choosing tokens: the question's attention, observed in the first layers of vLLM's model.

Scores are combined over the heads and layers of all ranks, so that every rank gets the same.
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
        BlendError: the pages hold anything but K and V.
    """

    def __init__(self, rows: RowRunner) -> None:
        self.layers = rows.layers
        order_of_form: dict[Any, PageOrder | None] = {}
        self.orders: list[PageOrder | None] = []
        for layer in rows.layers:
            pages = layer.module.kv_cache
            page_form = pages.shape[1:], pages.dtype, layer.module.head_size
            if page_form not in order_of_form:
                order_of_form[page_form] = PageOrder.of(layer.module)
            self.orders.append(order_of_form[page_form])

    def read(
        self, index: int, blocks: Tables, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
        """Return K and V [B, H, N, D] of layer `index`, and the blocks of a request's first `length` tokens.

        K and V are views of vLLM's pages; opaque pages are copied, into one block.
        """
        layer, order = self.layers[index], self.orders[index]
        table = _kernel_blocks(layer, blocks)
        if order is None:
            k, v = layer.module.kv_cache.split([layer.module.head_size, layer.module.head_size_v], -1)
            return k, v, table
        k, v = read_tokens(layer.module, order, table, length)
        return k[None], v[None], np.zeros(1, np.int64)


class QuestionAttention:
    """The question's attention to the tokens of a prompt, by layer.

    Args:
        pages: K and V of the rank's layers.
        layers: number of the model's first layers that rows run through.
        plan: the prompt's plan, which has the question's positions.
        blocks: block tables of the prompt, with its documents in place.
        asked: what the method needs of the attention; `registry.served` must accept it.
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
        self._adding: Any = None  # the sum over stages of a pipeline, in flight

    def look(self, index: int, q: torch.Tensor, positions: NDArray[np.int64]) -> None:
        """Add the attention of queries [M, Hq, D] of some rows in layer `index`. K and V must be written."""
        layer = self._pages.layers[index]
        first = int(np.searchsorted(positions, self._question))  # the question comes last
        if not self._first <= layer.number < self.layers or first == len(positions):
            return
        k, v, table = self._pages.read(index, self._blocks, self._tokens)
        question_rows, values = self._of(positions[first:], table, k), v if self._asked.value_norm else None
        layer_scores = query_scores(q[first:], k, values, question_rows, scoring(layer.module))
        self._paid[index] = self._paid[index] + layer_scores if index in self._paid else layer_scores

    def add_up(self) -> None:
        """Start combining the scores of all ranks. Call it on every rank, in the same order.

        Does not wait for other stages of a pipeline.
        """
        layer_scores = torch.zeros(len(self._paid), self._tokens)
        for row, index in zip(layer_scores, sorted(self._paid), strict=True):
            row.copy_(together(self._paid[index], self._asked))
        heads, stages = compat.find("get_tp_group")(), compat.find("get_pp_group")()
        if heads.world_size > 1 and layer_scores.numel():  # empty on all ranks of a stage without such layers
            use_max = self._asked.heads == "max"
            operation = ReduceOp.MAX if use_max else ReduceOp.SUM
            torch.distributed.all_reduce(layer_scores, operation, group=heads.cpu_group)
            layer_scores /= 1 if use_max else heads.world_size
        self._total = torch.zeros(self.layers - self._first, self._tokens)
        layer_numbers = [self._pages.layers[index].number - self._first for index in sorted(self._paid)]
        self._total[layer_numbers] = layer_scores
        if stages.world_size > 1:
            self._adding = torch.distributed.all_reduce(
                self._total, ReduceOp.SUM, group=stages.cpu_group, async_op=True
            )

    def seen(self) -> NDArray[np.float32]:
        """Return the scores of all rows and ranks, float32 [layers, N]. Waits for `add_up`, called before."""
        assert self._total is not None
        if self._adding is not None:
            self._adding.wait()
        return np.asarray(self._total.numpy(), np.float32)

    def _of(self, positions: NDArray[np.int64], table: NDArray[np.int64], pages: torch.Tensor) -> Rows:
        """Return `Rows` at these positions of one sequence, cached: all layers share its masks and tiles."""
        key = int(positions[0]), pages.shape[2], table.tobytes()
        if key not in self._rows:
            ends, lengths = np.array([0, len(positions)]), np.array([self._tokens])
            self._rows[key] = Rows.of(positions, ends, lengths, table[None], pages.shape[2], pages.device)
        return self._rows[key]


def _kernel_blocks(layer: AttentionLayer, blocks: Tables) -> NDArray[np.int64]:
    """Return the kernel's blocks for a request's blocks in one layer; missing ones map to the null block."""
    ratio = layer.block_tokens // layer.module.kv_cache.shape[2]
    table = np.maximum(np.array(blocks[layer.table], np.int64), 0)
    kernel_blocks: NDArray[np.int64] = (table[:, None] * ratio + np.arange(ratio)).reshape(-1)
    return kernel_blocks
