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
    for name, pages in kv_caches.items():
        page_form = pages.shape[1:], pages.dtype, getattr(modules[name], "head_size", None)
        setting = f"precision = {precision!r}: layer {name}"
        if not pages.dtype.is_floating_point or pages.element_size() < 2:
            raise ConfigError(f"{setting} holds {pages.dtype}; want none")
        try:
            known[name] = known[page_form] = known.get(page_form) or PageOrder.of(modules[name])
        except BlendError as error:
            raise ConfigError(f"{setting}: {error}") from error
    return {name: order for name in kv_caches if (order := known[name])}
