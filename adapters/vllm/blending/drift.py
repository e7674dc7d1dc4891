"""Correction of tokens that a blend does not recompute, in vLLM's pages, by `kvkit.blend.drift`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.adapters.vllm.blending.page_order import write_tokens
from kvkit.adapters.vllm.blending.rows import RequestRows
from kvkit.blend.drift import Drift, KAndV
from kvkit.blend.plan import BlendPlan, Selection
from kvkit.format.rope import Rope


class PromptDrift:
    """The drift of one prompt in the run of the model that computes all of its rows.

    Make it before the run. It reads what the rows replace, so `correct` each layer in order.

    Args:
        pages: K and V of the rank's layers, with the prompt's documents.
        ropes: rope of each layer; None: its keys are not rotated.
        rows: all rows of the prompt that are computed.
    """

    def __init__(
        self,
        pages: LayerPages,
        ropes: Sequence[Rope | None],
        selection: Selection,
        plan: BlendPlan,
        rows: RequestRows,
    ) -> None:
        self._pages, self._ropes, self._rows = pages, ropes, rows
        self._selection, self._plan = selection, plan
        self._drifts: dict[tuple[int, int], Drift | None] = {}
        self._before = self._read_sources(0)

    def correct(self, index: int) -> None:
        """Correct layer `index` once the rows' K and V are written, before they attend. Mutates the pages."""
        drift, pages = self._drift_at(index)
        if drift is not None and self._before is not None:
            drift.correct(pages, self._before, self._ropes[index])
            if self._pages.orders[index] is not None:  # `pages` are a copy
                self._write_back(index, drift, pages)
        self._before = self._read_sources(index + 1) if index + 1 < len(self._ropes) else None

    def _read_sources(self, index: int) -> KAndV | None:
        drift, pages = self._drift_at(index)
        return None if drift is None else drift.read_sources(pages)

    def _drift_at(self, index: int) -> tuple[Drift | None, KAndV]:
        """Return the drift with slots in layer `index`, and the layer's K and V."""
        layer, tokens = self._pages.layers[index], self._plan.tokens
        k, v, table = self._pages.read(index, self._rows.blocks, tokens)
        key = layer.table, k.shape[2]
        if key not in self._drifts:
            positions = np.arange(tokens)
            blocks = np.asarray(self._rows.blocks[layer.table])
            present = blocks[positions // layer.block_tokens] >= 0
            slots = torch.from_numpy(_slots(table, positions, k.shape[2])).to(k.device)
            self._drifts[key] = Drift.of(self._selection, self._plan, self._rows.positions, slots, present)
        return self._drifts[key], (k, v)

    def _write_back(self, index: int, drift: Drift, pages: KAndV) -> None:
        """Write the targets' K and V, which were copied out of opaque pages, into them."""
        layer, positions = self._pages.layers[index], drift.targets[0]
        table = layer.kernel_blocks(self._rows.blocks[layer.table])
        slots = torch.from_numpy(_slots(table, positions, layer.module.kv_cache.shape[2]))
        k, v = (copied[0][:, positions] for copied in pages)
        write_tokens(layer.module, k, v, slots)


def _slots(table: NDArray[np.int64], positions: NDArray[np.int64], block_tokens: int) -> NDArray[np.int64]:
    """Return the slots of tokens at `positions`, given the blocks of their sequence."""
    slots: NDArray[np.int64] = table[positions // block_tokens] * block_tokens + positions % block_tokens
    return slots
