"""The layers of a model, in order, for loads and stores of one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkit.kernels.pages.api import Pages
from kvkit.transfer.sequence import CacheError, SequencePages


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model, or some of its heads: its group, its index in the group, and its pages."""

    number: int
    group: int
    index: int
    pages: Pages
    last: bool = True  # the last entry of its layer, in the order of `layers_of`


def layers_of(pages: Sequence[SequencePages]) -> list[Layer]:
    """Return the model's layers in order, each with its own pages; one entry per group of heads.

    Raises:
        CacheError: a group has states, which are moved as whole snapshots only.
    """
    if any(entry.pages.group.state for entry in pages):
        raise CacheError("pages: layers with states cannot be moved one at a time; want `load` and `store`")
    layers = [
        Layer(number, group, index, entry.pages.layer(index))
        for group, entry in enumerate(pages)
        for index, number in enumerate(entry.pages.group.layers)
    ]
    layers.sort(key=lambda layer: layer.number)
    last = {layer.number: layer.group for layer in layers}
    return [replace(layer, last=layer.group == last[layer.number]) for layer in layers]
