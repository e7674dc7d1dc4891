"""The order of K and V in the pages of all of a CPU's layers, for records in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.order import PageOrder
from kvkit.blend.plan import BlendError
from kvkit.settings import ConfigError


def find_orders(
    vllm_config: Any, kv_caches: Mapping[str, torch.Tensor], precision: str
) -> dict[str, PageOrder]:
    """Return the order of K and V in a CPU's pages, by layer. Mutates blocks that no request uses.

    Raises:
        ConfigError: pages of a layer hold something else, or K and V in fewer bits already.
    """
    modules = compat.attention_layers(vllm_config)
    known: dict[Any, PageOrder | None] = {}
    for name, held in kv_caches.items():
        form = held.shape[1:], held.dtype, getattr(modules[name], "head_size", None)
        where = f"precision = {precision!r}: layer {name}"
        if not held.dtype.is_floating_point or held.element_size() < 2:
            raise ConfigError(f"{where} holds {held.dtype}; want none")
        try:
            known[name] = known[form] = known.get(form) or PageOrder.of(modules[name])
        except BlendError as error:
            raise ConfigError(f"{where}: {error}") from error
    return {name: order for name in kv_caches if (order := known[name])}
