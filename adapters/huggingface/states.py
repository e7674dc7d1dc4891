"""States of layers without K and V (linear attention, Mamba, short convolutions), and snapshots.

A snapshot holds the states after the last token of a chunk, as uint8 pages: all tensors that a layer keeps in
transformers' cache, one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvkit.adapters.engine.dividing import divide
from kvkit.cache import SequencePages
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.pages.api import Pages

FIRST_LAYER = 1 << 15
"""Layout index of the states of layer 0; K and V of a layer have the layer's own index."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of state that a layer keeps.

    Attributes:
        kind: "conv" or "recurrent", as transformers names them.
        index: index among the layer's tensors of this kind.
        dtype: torch's name of the dtype.
        shape: shape for one sequence, without the batch.
    """

    kind: str
    index: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def tensors_of(layer: Any) -> tuple[StateTensor, ...]:
    """List the tensors of state that a layer of transformers' cache holds, without the batch."""
    return tuple(
        StateTensor(kind, i, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        for kind in ("conv", "recurrent")
        for i, tensor in getattr(layer, f"{kind}_states", {}).items()
        if tensor is not None
    )


def with_states(layout: KVLayout, layers: Mapping[int, Sequence[StateTensor]], chunk_tokens: int) -> KVLayout:
    """Add the states of `layers` to a layout of K and V, in records no larger than those of K and V.

    Raises:
        LayoutError: `layout` does not divide into chunks of `chunk_tokens`.
    """
    layers_by_states: dict[tuple[StateTensor, ...], list[int]] = {}
    for layer, tensors in layers.items():
        if tensors:
            layers_by_states.setdefault(tuple(tensors), []).append(layer)
    groups = list(layout.groups)
    max_bytes = max(group.chunk_bytes(chunk_tokens) for group in groups) if layers_by_states else 0
    for tensors, layer_ids in layers_by_states.items():
        size = sum(tensor.nbytes for tensor in tensors)
        spec = json.dumps([[t.kind, t.index, t.dtype, t.shape] for t in tensors], separators=(",", ":"))
        groups += [
            LayerGroup.of_states(
                [FIRST_LAYER + layer for layer in shard], size, chunk_tokens, f"transformers:{spec}"
            )
            for shard in divide(layer_ids, size, max_bytes)
        ]
    return replace(layout, groups=tuple(groups))


def states_of(layout: KVLayout) -> dict[int, tuple[StateTensor, ...]]:
    """Return the tensors of state of each layer, from a layout made by `with_states`."""
    states = {}
    for group in layout.groups[layout.token_groups :]:
        spec = json.loads((group.state or "").partition(":")[2])
        tensors = tuple(StateTensor(kind, i, dtype, tuple(shape)) for kind, i, dtype, shape in spec)
        states.update({layer - FIRST_LAYER: tensors for layer in group.layers})
    return states


class Snapshots:
    """States of one sequence at the ends of chunks, in pages for each group of states of a layout.

    Args:
        layers: layers of transformers' cache.

    Attributes:
        chunk_tokens: tokens of a chunk; 0 if the layout has no states.
    """

    def __init__(self, layout: KVLayout, layers: Sequence[Any], device: torch.device) -> None:
        self._groups = layout.groups[layout.token_groups :]
        self._states = states_of(layout)
        self._layers = layers
        self._device = device
        self._slots: dict[int, int] = {}  # slot in the pools by number of chunks up to the snapshot
        self._pools = self._new_pools(1)
        self.chunk_tokens = self._groups[0].block_tokens if self._groups else 0

    def save(self, chunks: int) -> None:
        """Copy the layers' states, which are those after `chunks` chunks. Mutates the pages."""
        slot = self._slot(chunks)
        for layer, page in self._pages(slot):
            for tensor, stored in self._tensor_views(layer, page):
                value = getattr(self._layers[layer], f"{tensor.kind}_states")[tensor.index]
                stored.copy_(value.contiguous().view(-1).view(torch.uint8))

    def restore(self, chunks: int) -> None:
        """Restore the states after `chunks` chunks to the layers. Mutates the layers."""
        for layer, page in self._pages(self._slots[chunks]):
            cache_layer = self._layers[layer]
            for tensor, stored in self._tensor_views(layer, page):
                dtype = getattr(torch, tensor.dtype)
                value = torch.empty((1, *tensor.shape), dtype=dtype, device=self._device)
                value.view(-1).view(torch.uint8).copy_(stored)
                getattr(cache_layer, f"{tensor.kind}_states")[tensor.index] = value
                getattr(cache_layer, f"is_{tensor.kind}_states_initialized")[tensor.index] = True
                if tensor.kind == "conv":
                    cache_layer.conv_kernel_size[tensor.index] = tensor.shape[-1]
                    cache_layer.has_previous_state[tensor.index] = True
                if cache_layer.device is None:
                    cache_layer.dtype, cache_layer.device = dtype, self._device

    def reserve(self, chunks: int) -> None:
        """Reserve pages for the states after `chunks` chunks, which a load fills. Mutates the snapshots."""
        if self._groups and chunks:
            self._slot(chunks)

    def clear(self) -> None:
        """Drop all snapshots. Mutates the snapshots."""
        self._slots.clear()

    def pages(self, chunks: int) -> list[SequencePages]:
        """Return the pages of the snapshots of the first `chunks` chunks, for each group of states."""
        blocks = np.full(chunks, -1, np.int64)
        for end_chunk, slot in self._slots.items():
            if end_chunk <= chunks:
                blocks[end_chunk - 1] = slot
        return [
            SequencePages(Pages.of(group, pool), blocks=blocks)
            for group, pool in zip(self._groups, self._pools, strict=True)
        ]

    def _slot(self, chunks: int) -> int:
        slot = self._slots.setdefault(chunks, len(self._slots))
        if self._pools and slot >= len(self._pools[0][0]):
            old_pools, self._pools = self._pools, self._new_pools(2 * slot)
            for old_pool, new_pool in zip(old_pools, self._pools, strict=True):
                for old_pages, new_pages in zip(old_pool, new_pool, strict=True):
                    new_pages[: len(old_pages)] = old_pages
        return slot

    def _new_pools(self, slots: int) -> list[list[torch.Tensor]]:
        return [group.pages(slots, device=str(self._device)) for group in self._groups]

    def _pages(self, slot: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each layer with states, and its page at `slot`, uint8 [bytes]."""
        for group, pool in zip(self._groups, self._pools, strict=True):
            for layer, pages in zip(group.layers, pool, strict=True):
                yield layer - FIRST_LAYER, pages[slot, 0, 0]

    def _tensor_views(self, layer: int, page: torch.Tensor) -> Iterator[tuple[StateTensor, torch.Tensor]]:
        """Yield each tensor of a layer, and the view of its bytes in a page."""
        start = 0
        for tensor in self._states[layer]:
            yield tensor, page[start : start + tensor.nbytes]
            start += tensor.nbytes
