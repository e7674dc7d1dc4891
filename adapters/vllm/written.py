"""Check that vLLM writes a token's K and V into the page that kvkit reads for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvkit.adapters.vllm.blending.page_order import write_tokens
from kvkit.settings import ConfigError

_POISON = 0x5A
_BLOCK = 1
"""The block to write to, between two others. No request has blocks yet."""


def check_written(modules: Mapping[str, Any], pages: Mapping[str, torch.Tensor], quantised: bool) -> None:
    """Check that tokens which vLLM writes into a block fill its page and change nothing else.

    Called when an engine starts on a CPU, where the operator, not the tensor, decides where a block is.
    Mutates three blocks of each kind of layer, and restores their contents.

    Args:
        modules: vLLM's attention layers by name, with their pages bound. Other modules are ignored.
        pages: [B, H, N, C] by layer.
        quantised: True if K and V are kept in fewer bits than they are computed in, perhaps with scales.

    Raises:
        ConfigError: the check fails; the message names the layer and the setting.
    """
    checked = set()
    for name, tensor in pages.items():
        module: Any = modules.get(name)
        if not hasattr(getattr(module, "impl", None), "do_kv_cache_update"):
            continue
        kind = tensor.shape[1:], tensor.dtype, tensor.stride(), module.dtype
        if kind in checked:
            continue
        checked.add(kind)
        description = f"layer {name} computes {module.dtype} and its pages hold {tensor.dtype}"
        if not quantised and tensor.element_size() != module.dtype.itemsize:
            raise ConfigError(
                f"kv_cache_dtype: {description}: vLLM's attention on a CPU writes past them; want 'auto'"
            )
        if len(tensor) > _BLOCK + 1 and not _fills(module, tensor, quantised):
            raise ConfigError(
                f"kv_cache_dtype: {description}: vLLM writes K and V outside of their block's page; "
                "want 'auto', or an engine without kvkit"
            )


def _fills(module: Any, pages: torch.Tensor, quantised: bool) -> bool:
    """Return whether the tokens of a block fill its page and leave the neighbouring pages unchanged."""
    neighbours = pages[_BLOCK - 1 : _BLOCK + 2]
    before = neighbours.clone()
    neighbours.copy_(torch.full_like(before.view(torch.uint8), _POISON).view(before.dtype))
    poisoned = neighbours.clone()
    heads, tokens = pages.shape[1:3]
    k, v = (
        torch.ones(heads, tokens, size, dtype=module.dtype)
        for size in (module.head_size, getattr(module, "head_size_v", module.head_size))
    )
    write_tokens(module, k, v, torch.arange(tokens) + _BLOCK * tokens)
    found, expected = (tensor.contiguous().view(torch.uint8) for tensor in (neighbours, poisoned))
    changed = found != expected
    elements = changed.reshape(3, -1, pages.element_size()).any(-1)
    neighbours.copy_(before)
    filled = elements[1].any() if quantised else elements[1].all()
    return bool(filled) and not bool(elements[0].any() or elements[2].any())
