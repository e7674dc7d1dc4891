"""kvkit's attention for the rows of blends on a GPU, in place of the engine's.

The engine takes rows as many short sequences. Each sequence reads all KV before it, and a run of the model
takes at most `max_num_seqs` sequences, so many rows need several runs. kvkit's attention reads a tile of keys
once for all rows of a tile, and takes any number of rows. It gets its rows through the engine's attention
metadata: one `OwnRows` per run of the model takes the place of the metadata of all layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.choice import RowsForm
from kvkit.kernels.attention.api import blend_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows

if TYPE_CHECKING:
    from kvkit.adapters.vllm.blending.rows import AttentionLayer, RowsOf

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """An attention layer that kvkit's attention supports.

    Args:
        scoring: scale, window and soft-cap.
        size: D, channels of a head of K; in a page they precede those of V.
        table: index of its block table among vLLM's.
        page_tokens: N of its pages [B, H, N, D + Dv].
        pages: number of pages per block of that table.
    """

    scoring: Scoring
    size: int
    table: int
    page_tokens: int
    pages: int

    @staticmethod
    def of(layer: AttentionLayer) -> OwnLayer:
        """Describe a layer of vLLM with bound pages that hold K and V side by side.

        Raises:
            ValueError: kvkit's attention does not support the layer; gives the reasons.
        """
        module, page_tokens = layer.module, layer.module.kv_cache.shape[2]
        if reason := _only_the_engines(module):
            raise ValueError(f"{module.layer_name}: {reason}")
        ratio = layer.block_tokens // page_tokens
        return OwnLayer(scoring(module), module.head_size, layer.table, page_tokens, ratio)


def scoring(module: Any) -> Scoring:
    """Return scale, window and soft-cap of one of vLLM's attention layers."""
    softcap = getattr(module.impl, "logits_soft_cap", None)
    return Scoring(float(module.impl.scale), module.sliding_window, softcap or None)


def _only_the_engines(module: Any) -> str:
    """Return why `blend_attention` cannot replace the attention of a layer of vLLM; "" if it can."""
    impl, pages = module.impl, module.kv_cache
    reasons = {
        f"is a {type(module).__name__}": type(module) is not compat.find("Attention"),
        f"attention is {module.attn_type}": module.attn_type != "decoder",
        "has ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "has sinks": getattr(impl, "sinks", None) is not None,
        "attends to a prefix in both directions": module.use_mm_prefix,
        "attends to chunks": getattr(impl, "chunk_lookback", -1) >= 0,
        "quantises queries": module.query_quant is not None,
        "writes K and V within its attention": module.attn_backend.forward_includes_kv_cache_update,
        f"has pages of {pages.dtype}": pages.dtype != module.dtype,
        f"has pages {tuple(pages.shape)}": pages.shape[3] != module.head_size + module.head_size_v,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


@dataclass(frozen=True, slots=True, eq=False)
class OwnAttention:
    """kvkit's attention for all layers of a rank's model.

    Args:
        layers: attention layers, in the order of `RowRunner.layers`.
        form: group, size and dtype of `RowsForm`, from the first layer.
        prefers: returns whether to use kvkit's attention instead of the engine's.
    """

    layers: tuple[OwnLayer, ...]
    form: tuple[int, int, str]
    prefers: Callable[[RowsForm], bool]

    @staticmethod
    def of(layers: Sequence[AttentionLayer], ranks: int) -> OwnAttention | None:
        """Describe all layers; None if kvkit's attention does not support one, which is logged.

        Args:
            layers: all attention layers of this rank's model.
            ranks: number of ranks that run the model together. All ranks have to cut rows alike, so several
                ranks choose by the untuned model of `choice` and ignore tuned results.
        """
        try:
            own_layers = tuple(map(OwnLayer.of, layers))
        except ValueError as error:
            log.info("rows of blends go through the engine's attention: %s", error)
            return None
        first = layers[0].module
        dtype = str(first.dtype).removeprefix("torch.")
        form = first.num_heads // first.num_kv_heads, first.head_size, dtype
        return OwnAttention(own_layers, form, RowsForm.tuned if ranks == 1 else attrgetter("untuned"))

    def wins(self, rows: Sequence[RowsOf], most_runs: int) -> bool:
        """Return whether kvkit's attention is expected to be faster for these rows than the engine's.

        Args:
            most_runs: number of runs of rows that the engine takes in one run of the model.
        """
        runs = sum(len(request.runs) - 1 for request in rows)
        if runs > most_runs:
            return True
        count = sum(len(request.positions) for request in rows)
        context = max(
            (int(request.positions[-1]) + 1 for request in rows if len(request.positions)), default=0
        )
        return bool(count) and self.prefers(RowsForm(count, runs, context, *self.form))

    def plan(self, rows: Sequence[RowsOf], device: torch.device) -> OwnRows:
        """Return the object that replaces the attention metadata of all layers in one run of the model."""
        positions = np.concatenate([request.positions for request in rows])
        starts = np.cumsum([0, *(len(request.positions) for request in rows)])
        lengths = np.array([request.positions[-1] + 1 for request in rows])
        planned: dict[OwnLayer, Rows] = {}
        for layer in dict.fromkeys(self.layers):
            tables = _tables([request.blocks[layer.table] for request in rows], layer)
            planned[layer] = Rows.of(positions, starts, lengths, tables, layer.page_tokens, device)
        return OwnRows(self.layers, planned)


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """Rows of one run of the model, in the form that kvkit's attention takes."""

    layers: tuple[OwnLayer, ...]
    rows: dict[OwnLayer, Rows]

    def forward(self, layer: int) -> Callable[..., Any]:
        """Return a replacement for `forward` of a layer's attention; K and V are written before its call."""

        def forward(
            module: Any, q: Any, k: Any, v: Any, pages: Any, metadata: Any, output: Any, **_: Any
        ) -> Any:
            self.attend(layer, q, pages, output)
            return output

        return forward

    def attend(self, layer: int, query: torch.Tensor, pages: torch.Tensor, output: torch.Tensor) -> None:
        """Compute attention of the rows in one layer, with K and V from its pages. Writes `output`.

        Args:
            layer: index of the layer in `RowRunner.layers`.
            query: [>= M, Hq, D]; the first M are the rows, the others padding.
            pages: [B, H, N, D + Dv], the layer's pages.
            output: [>= M, Hq, Dv] of query's dtype, contiguous, allocated by vLLM.
        """
        own = self.layers[layer]
        rows = self.rows[own]
        k, v = pages[..., : own.size], pages[..., own.size :]
        blend_attention(query[: rows.count], k, v, rows, own.scoring, output[: rows.count])


def _tables(blocks: Sequence[Sequence[int]], layer: OwnLayer) -> NDArray[np.int64]:
    """Convert vLLM's blocks per request to block tables of the layer's pages, padded with -1."""
    tables = np.full((len(blocks), max(map(len, blocks))), -1)
    for table, ids in zip(tables, blocks, strict=True):
        table[: len(ids)] = ids
    if layer.scoring.window is not None:  # blocks before the window are read and masked: any will do
        tables = np.maximum(tables, 0)
    page_tables: NDArray[np.int64] = tables[..., None] * layer.pages + np.arange(layer.pages)  # < 0 stays so
    return page_tables.reshape(len(blocks), -1)
