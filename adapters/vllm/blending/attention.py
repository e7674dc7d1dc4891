"""On a GPU, kvkit's attention in the place of the engine's, for the rows of blends.

The engine takes rows as many short sequences, each of which reads the KV before it again, and at most
`max_num_seqs` of them at once, so that many rows take several runs of the whole model. kvkit's attention
reads a tile of keys once for all rows of a tile, and has no limit. It stands where the metadata of the
engine's attention would: `OwnRows` is made once for a run of the model, for all of its layers.
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
from kvkit.adapters.vllm.blending.choice import KVKIT, RowsForm
from kvkit.kernels.attention.api import blend_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning.configs import KernelConfig

if TYPE_CHECKING:
    from kvkit.adapters.vllm.blending.rows import AttentionLayer, RowsOf

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """A layer whose attention kvkit computes, too.

    Args:
        scoring: how it scores keys.
        size: channels of a head of K, which lie in front of those of V.
        table: which of vLLM's block tables is its.
        page_tokens: N of its pages [B, H, N, D + Dv].
        pages: of them in one block of that table.
    """

    scoring: Scoring
    size: int
    table: int
    page_tokens: int
    pages: int

    @staticmethod
    def of(layer: AttentionLayer) -> OwnLayer:
        """That of vLLM's layer, whose pages are bound and hold K and V side by side.

        Raises:
            ValueError: its attention is none of kvkit's; says why.
        """
        module, page_tokens = layer.module, layer.module.kv_cache.shape[2]
        if reason := _only_the_engines(module):
            raise ValueError(f"{module.layer_name}: {reason}")
        ratio = layer.block_tokens // page_tokens
        return OwnLayer(scoring(module), module.head_size, layer.table, page_tokens, ratio)


def scoring(module: Any) -> Scoring:
    """How one of vLLM's attention layers scores keys."""
    softcap = getattr(module.impl, "logits_soft_cap", None)
    return Scoring(float(module.impl.scale), module.sliding_window, softcap or None)


def _only_the_engines(module: Any) -> str:
    """Why an attention layer of vLLM's computes something other than `blend_attention`; "" if it does not."""
    impl, pages = module.impl, module.kv_cache
    more = {
        f"is a {type(module).__name__}": type(module) is not compat.find("Attention"),
        f"attention is {module.attn_type}": module.attn_type != "decoder",
        "has ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "has sinks": getattr(impl, "sinks", None) is not None,
        "attends to a prefix both ways": module.use_mm_prefix,
        "attends to chunks": getattr(impl, "chunk_lookback", -1) >= 0,
        "quantises queries": module.query_quant is not None,
        "writes K and V within its attention": module.attn_backend.forward_includes_kv_cache_update,
        f"has pages of {pages.dtype}": pages.dtype != module.dtype,
        f"has pages {tuple(pages.shape)}": pages.shape[3] != module.head_size + module.head_size_v,
    }
    return ", ".join(reason for reason, found in more.items() if found)


@dataclass(frozen=True, slots=True, eq=False)
class OwnAttention:
    """kvkit's attention for all layers of a rank's model.

    Args:
        layers: in the order of `RowRunner.layers`.
        form: `RowsForm`'s group, size and dtype, of the first layer.
        choose: between it and the engine's.
    """

    layers: tuple[OwnLayer, ...]
    form: tuple[int, int, str]
    choose: Callable[[RowsForm], KernelConfig]

    @staticmethod
    def of(layers: Sequence[AttentionLayer], ranks: int) -> OwnAttention | None:
        """None where a layer's attention is none of kvkit's: that is logged, and the engine's is taken.

        Args:
            layers: all that run when the model does.
            ranks: that run the model together. They have to cut rows alike, so that several choose by the
                model of `choice`, whatever was tuned where they run.
        """
        try:
            found = tuple(map(OwnLayer.of, layers))
        except ValueError as error:
            log.info("rows of blends go through the engine's attention: %s", error)
            return None
        first = layers[0].module
        dtype = str(first.dtype).removeprefix("torch.")
        form = first.num_heads // first.num_kv_heads, first.head_size, dtype
        return OwnAttention(found, form, RowsForm.tuned if ranks == 1 else attrgetter("untuned"))

    def wins(self, rows: Sequence[RowsOf], most_runs: int) -> bool:
        """Whether rows are sooner done by kvkit's attention than by the engine's.

        Args:
            most_runs: more than so many take the engine several runs of the model.
        """
        runs = sum(len(some.runs) - 1 for some in rows)
        if runs > most_runs:
            return True
        count = sum(len(some.positions) for some in rows)
        context = max((int(some.positions[-1]) + 1 for some in rows if len(some.positions)), default=0)
        return bool(count) and self.choose(RowsForm(count, runs, context, *self.form)) == KVKIT

    def plan(self, rows: Sequence[RowsOf], device: torch.device) -> OwnRows:
        """What stands where the metadata of every layer's attention would, for one run of the model."""
        positions = np.concatenate([some.positions for some in rows])
        starts = np.cumsum([0, *(len(some.positions) for some in rows)])
        lengths = np.array([some.positions[-1] + 1 for some in rows])
        planned: dict[OwnLayer, Rows] = {}
        for layer in dict.fromkeys(self.layers):
            tables = _tables([some.blocks[layer.table] for some in rows], layer)
            planned[layer] = Rows.of(positions, starts, lengths, tables, layer.page_tokens, device)
        return OwnRows(self.layers, planned)


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """The rows of one run of the model, as kvkit's attention takes them."""

    layers: tuple[OwnLayer, ...]
    rows: dict[OwnLayer, Rows]

    def forward(self, layer: int) -> Callable[..., Any]:
        """What stands in the place of `forward` of that layer's attention in vLLM; K and V are written."""

        def forward(
            module: Any, q: Any, k: Any, v: Any, pages: Any, metadata: Any, output: Any, **_: Any
        ) -> Any:
            self.attend(layer, q, pages, output)
            return output

        return forward

    def attend(self, layer: int, query: torch.Tensor, pages: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of the rows in one layer, whose K and V are in the pages. Writes `output`.

        Args:
            layer: its index in `RowRunner.layers`.
            query: [>= M, Hq, D]; what is behind the M rows is padding.
            pages: [B, H, N, D + Dv], of the layer.
            output: [>= M, Hq, Dv] of query's dtype, contiguous, as vLLM makes it.
        """
        own = self.layers[layer]
        rows = self.rows[own]
        k, v = pages[..., : own.size], pages[..., own.size :]
        blend_attention(query[: rows.count], k, v, rows, own.scoring, output[: rows.count])


def _tables(blocks: Sequence[Sequence[int]], layer: OwnLayer) -> NDArray[np.int64]:
    """Block tables of the layer's pages, -1 where one is shorter, of vLLM's blocks per request."""
    tables = np.full((len(blocks), max(map(len, blocks))), -1)
    for table, some in zip(tables, blocks, strict=True):
        table[: len(some)] = some
    if layer.scoring.window is not None:  # what it has left behind is read, but never seen: any block will do
        tables = np.maximum(tables, 0)
    split: NDArray[np.int64] = tables[..., None] * layer.pages + np.arange(layer.pages)  # < 0 stays so
    return split.reshape(len(blocks), -1)
