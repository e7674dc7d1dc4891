"""kvkit's attention for the rows of blends, in place of the engine's where it is faster.

The engine takes every run of consecutive rows as a sequence, each sequence reads all KV before it, and a run
of the model takes at most `max_num_seqs` sequences, so many rows need several runs. kvkit's attention reads a
tile of keys once for all rows of a tile, and takes any number of rows. It gets its rows through the engine's
attention metadata: one `KvkitRows` per run of the model replaces the metadata of all layers.

A tile of the engine holds rows of one run, a tile of kvkit any rows. Both read all keys before a tile and do
the same work per tile and key, so on a GPU the number of tiles predicts which one is faster. On a CPU it is
measured, in `cpu_speeds`.
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
from kvkit.adapters.vllm.blending.copied_rows import CopiedRows
from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.environment import version_of
from kvkit.kernels.attention.api import blend_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config
from kvkit.kernels.tuning.tables import best

if TYPE_CHECKING:
    from kvkit.adapters.vllm.blending.rows import AttentionLayer, RequestRows

log = logging.getLogger(__name__)

TILE_ROWS = 128
"""Rows of a tile, each of one query head, both in engines' kernels and in kvkit's."""

MARGIN = 2
"""Assumed speed of an engine's kernel per tile, relative to kvkit's: a guess, which tuning replaces."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Sizes of an attention problem over rows.

    Args:
        rows: number of rows of all requests.
        runs: number of runs of consecutive rows.
        context: number of keys that the last row sees, in the longest request.
        group: query heads per KV head.
        size: channels of a head.
        dtype: dtype of the pages.
    """

    rows: int
    runs: int
    context: int
    group: int
    size: int
    dtype: str

    def tiles(self, together: bool) -> int:
        """Return the number of tiles that a KV head's rows fill if all runs are equally long.

        Args:
            together: whether they are kvkit's tiles, which hold rows of any run.
        """
        runs = 1 if together else self.runs
        return runs * -(-self.rows * self.group // (runs * TILE_ROWS))

    @property
    def is_kvkit_expected_faster(self) -> bool:
        """True if kvkit's attention is chosen without tuned results: it has far fewer tiles."""
        return self.tiles(together=False) >= MARGIN * self.tiles(together=True)

    @property
    def bucket(self) -> ProblemBucket:
        """Bucket of the problems that share a choice, for this version of vLLM."""
        counts = self.rows * self.group, self.runs, self.context
        sizes = tuple(1 << (count - 1).bit_length() for count in counts)
        kind = f"{self.dtype} SIZE={self.size} vllm {version_of('vllm')}"
        return ProblemBucket("rows_of_blends", kind, sizes)

    def is_kvkit_faster(self) -> bool:
        """Return whether kvkit's attention was faster when tuned on this process's GPU.

        Without tuned results, return `is_kvkit_expected_faster`.
        """
        from kvkit.kernels.attention.triton_kernels import attend

        expected = self.is_kvkit_expected_faster
        choices = tuned_entry(expected), tuned_entry(not expected)
        return best(self.bucket, choices[0], choices, attend) == tuned_entry(True)


def tuned_entry(together: bool) -> KernelConfig:
    """Return the entry of tuned tables for kvkit's attention, or for the engine's."""
    return host_config(TOGETHER=int(together))


@dataclass(frozen=True, slots=True)
class KvkitLayer:
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
    def of(layer: AttentionLayer) -> KvkitLayer:
        """Describe a layer of vLLM with bound pages that hold K and V side by side.

        Raises:
            ValueError: kvkit's attention does not support the layer; gives the reasons.
        """
        module, page_tokens = layer.module, layer.module.kv_cache.shape[2]
        if reason := _unsupported(module):
            raise ValueError(f"{module.layer_name}: {reason}")
        ratio = layer.block_tokens // page_tokens
        return KvkitLayer(scoring(module), module.head_size, layer.table, page_tokens, ratio)


def scoring(module: Any) -> Scoring:
    """Return scale, window and soft-cap of one of vLLM's attention layers."""
    softcap = getattr(module.impl, "logits_soft_cap", None)
    return Scoring(float(module.impl.scale), module.sliding_window, softcap or None)


def _unsupported(module: Any) -> str:
    """Return the features of a layer of vLLM that `blend_attention` does not support; "": none."""
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
class KvkitAttention:
    """kvkit's attention for all layers of a rank's model.

    Args:
        pages: K and V of the layers.
        layers: attention layers, in the order of `RowRunner.layers`.
        head_sizes: group, size and dtype of `RowSizes`, from the first layer.
        prefers: function that returns whether to use kvkit's attention instead of the engine's.
        prefers_rows: the same for rows on a CPU, in place of `prefers`; None: on a GPU.
    """

    pages: LayerPages
    layers: tuple[KvkitLayer, ...]
    head_sizes: tuple[int, int, str]
    prefers: Callable[[RowSizes], bool]
    prefers_rows: Callable[[Sequence[RequestRows]], bool] | None = None

    @staticmethod
    def of(pages: LayerPages, ranks: int) -> KvkitAttention | None:
        """Describe all layers; None if kvkit's attention does not support one, which is logged.

        Args:
            pages: K and V of all attention layers of this rank's model.
            ranks: number of ranks that run the model together. All ranks have to cut rows alike, so several
                ranks ignore tuned results.
        """
        try:
            kvkit_layers = tuple(map(KvkitLayer.of, pages.layers))
        except ValueError as error:
            log.info("rows of blends go through the engine's attention: %s", error)
            return None
        first = pages.layers[0].module
        dtype = str(first.dtype).removeprefix("torch.")
        head_sizes = first.num_heads // first.num_kv_heads, first.head_size, dtype
        prefers = RowSizes.is_kvkit_faster if ranks == 1 else attrgetter("is_kvkit_expected_faster")
        return KvkitAttention(pages, kvkit_layers, head_sizes, prefers)

    def is_faster(self, rows: Sequence[RequestRows], max_runs: int) -> bool:
        """Return whether kvkit's attention is expected to be faster for these rows than the engine's.

        Args:
            max_runs: number of runs of rows that the engine takes in one run of the model.
        """
        runs = sum(len(request.runs) - 1 for request in rows)
        if runs > max_runs:
            return True
        count = sum(len(request.positions) for request in rows)
        if self.prefers_rows is not None:
            return bool(count) and self.prefers_rows(rows)
        context = max(
            (int(request.positions[-1]) + 1 for request in rows if len(request.positions)), default=0
        )
        return bool(count) and self.prefers(RowSizes(count, runs, context, *self.head_sizes))

    def plan_rows(self, rows: Sequence[RequestRows], device: torch.device) -> KvkitRows | CopiedRows:
        """Return the rows of one run of the model, which replace the attention metadata of all layers."""
        if self.pages.opaque:
            return CopiedRows.of(self.pages, tuple(layer.scoring for layer in self.layers), rows)
        positions = np.concatenate([request.positions for request in rows])
        starts = np.cumsum([0, *(len(request.positions) for request in rows)])
        lengths = np.array([request.positions[-1] + 1 for request in rows])
        planned: dict[KvkitLayer, Rows] = {}
        for layer in dict.fromkeys(self.layers):
            tables = _page_tables([request.blocks[layer.table] for request in rows], layer)
            planned[layer] = Rows.of(positions, starts, lengths, tables, layer.page_tokens, device)
        return KvkitRows(self.layers, planned)


@dataclass(frozen=True, slots=True, eq=False)
class KvkitRows:
    """Rows of one run of the model, as kvkit's attention takes them."""

    layers: tuple[KvkitLayer, ...]
    rows: dict[KvkitLayer, Rows]

    def forward_of(self, layer: int) -> Callable[..., Any]:
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
        kvkit_layer = self.layers[layer]
        rows, size = self.rows[kvkit_layer], kvkit_layer.size
        k, v = pages[..., :size], pages[..., size:]
        blend_attention(query[: rows.count], k, v, rows, kvkit_layer.scoring, output[: rows.count])


def _page_tables(blocks: Sequence[Sequence[int]], layer: KvkitLayer) -> NDArray[np.int64]:
    """Convert vLLM's blocks per request to block tables of the layer's pages, padded with -1."""
    tables = np.full((len(blocks), max(map(len, blocks))), -1)
    for table, ids in zip(tables, blocks, strict=True):
        table[: len(ids)] = ids
    if layer.scoring.window is not None:  # any block serves before the window: its tokens are masked
        tables = np.maximum(tables, 0)
    # entries of missing blocks stay negative
    page_tables: NDArray[np.int64] = tables[..., None] * layer.pages + np.arange(layer.pages)
    return page_tables.reshape(len(blocks), -1)
