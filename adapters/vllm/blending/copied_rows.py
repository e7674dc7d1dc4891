"""Rows of blends for kvkit's attention on a CPU, whose opaque pages are copied once a layer and request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.kernels.attention.api import blend_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows

if TYPE_CHECKING:
    from kvkit.adapters.vllm.blending.rows import RequestRows


@dataclass(frozen=True, slots=True, eq=False)
class CopiedRows:
    """Rows of one run of the model, as kvkit's attention takes them. Make it with `of`.

    Args:
        pages: K and V of the rank's layers.
        scorings: scale, window and soft-cap of each layer.
        requests: of each request its rows among all, itself, and its rows as those of a single block.
    """

    pages: LayerPages
    scorings: tuple[Scoring, ...]
    requests: tuple[tuple[slice, RequestRows, Rows], ...]

    @staticmethod
    def of(pages: LayerPages, scorings: tuple[Scoring, ...], rows: Sequence[RequestRows]) -> CopiedRows:
        """Prepare the rows of one run of the model."""
        requests, first = [], 0
        for request in rows:
            count = len(request.positions)
            if count:
                length = int(request.positions[-1]) + 1
                starts, lengths = np.array([0, count]), np.array([length])
                block = Rows.of(request.positions, starts, lengths, np.zeros((1, 1), np.int64), length)
                requests.append((slice(first, first + count), request, block))
            first += count
        return CopiedRows(pages, scorings, tuple(requests))

    def forward_of(self, layer: int) -> Callable[..., Any]:
        """Return a replacement for `forward` of a layer's attention; K and V are written before its call."""

        def forward(
            module: Any, q: Any, k: Any, v: Any, pages: Any, metadata: Any, output: Any, **_: Any
        ) -> Any:
            self.attend(layer, q, output)
            return output

        return forward

    def attend(self, layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """Compute attention of the rows in one layer. Writes `output`.

        Args:
            layer: index of the layer in `RowRunner.layers`.
            query: [>= M, Hq, D]; the first M are the rows, the others padding.
            output: [>= M, Hq, D] of query's dtype, contiguous, allocated by vLLM.
        """
        for own, request, rows in self.requests:
            k, v, _ = self.pages.read(layer, request.blocks, rows.block_tokens)
            blend_attention(query[own], k, v, rows, self.scorings[layer], output[own])
