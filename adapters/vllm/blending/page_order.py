"""Reads and writes of tokens' K and V in vLLM's pages, for any order of elements within a page.

On a GPU a page is [H, N, 2D], K and V side by side. On a CPU the order depends on the instruction set. kvkit
finds it by writing numbers with vLLM's own operator and reading their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm import compat
from kvkit.blend.plan import BlendError
from kvkit.settings import ConfigError

NULL_BLOCK = 0
"""vLLM's block that belongs to no request; nobody reads its content."""
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class PageOrder:
    """Offsets of the elements of each head and token in a page on a CPU. Make it with `PageOrder.of`.

    Attributes:
        k, v: int64 [H, N, D], offsets in elements of the page's dtype.
    """

    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def of(module: Any) -> PageOrder | None:
        """Find the order in the bound pages of a vLLM layer; None: its pages are plain, [B, H, N, 2D].

        Mutates the null block.

        Raises:
            BlendError: the pages hold anything but K and V of each token, each once.
        """
        if module.kv_cache.device.type != "cpu":
            return None
        pages, size = module.kv_cache, module.head_size
        _, heads, tokens, _ = pages.shape
        shape, page = (heads, tokens, size), pages[NULL_BLOCK]
        count = heads * tokens * size
        numbers, contents = torch.arange(2 * count), torch.zeros(page.numel(), dtype=torch.int64)
        slots = torch.arange(tokens) + NULL_BLOCK * tokens
        for bit in range((2 * count - 1).bit_length()):  # zeros and ones are exact in every dtype
            k, v = (numbers >> bit & 1).to(module.dtype).chunk(2)
            write_tokens(module, k.view(shape), v.view(shape), slots)
            contents |= (page.reshape(-1) != 0).long() << bit
        if not torch.equal(contents.sort().values, numbers):
            raise BlendError(
                f"layer {module.layer_name}: its pages hold something other than K and V, each once"
            )
        k, v = contents.argsort().chunk(2)
        return PageOrder(k.view(shape), v.view(shape))

    @property
    def joined(self) -> torch.Tensor:
        """The order as `kvkit.kernels.pages.memory.Pages.of` takes it, int64 [H, N, 2D]."""
        return torch.cat([self.k, self.v], -1)

    def of_heads(self, first: int, heads: int) -> PageOrder:
        """Return the order of `heads` adjacent heads; offsets count from the first of their elements."""
        k, v = (order[first : first + heads] for order in (self.k, self.v))
        start = torch.minimum(k.min(), v.min())
        return PageOrder(k - start, v - start)

    def read(
        self, pages: torch.Tensor, blocks: NDArray[np.int64] | Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V, contiguous [H, len(blocks) * N, D], out of some of the pages [B, ...]."""
        ids = np.asarray(blocks).tolist()
        k_steps, v_steps = self._steps
        return _copy(pages, ids, self.k, k_steps), _copy(pages, ids, self.v, v_steps)

    @cached_property
    def _steps(self) -> tuple[_Steps | None, _Steps | None]:
        """Strides of K and of V in a page."""
        return _steps(self.k), _steps(self.v)


_Steps = tuple[int, int, int]


def _steps(order: torch.Tensor) -> _Steps | None:
    """Return the strides of elements [H, N, D] at `order`; None: the order has no constant strides."""
    first, axes = int(order[0, 0, 0]), [torch.arange(size) for size in order.shape]
    steps = [int(order.select(axis, min(1, len(ids) - 1))[0, 0]) - first for axis, ids in enumerate(axes)]
    h, n, d = (ids * step for ids, step in zip(axes, steps, strict=True))
    same = torch.equal(order, first + h[:, None, None] + n[:, None] + d)
    return (steps[0], steps[1], steps[2]) if same else None


def _copy(pages: torch.Tensor, ids: list[int], order: torch.Tensor, steps: _Steps | None) -> torch.Tensor:
    """Copy the elements [H, len(ids) * N, D] at `order`, a page at a time: torch's indexing takes longer."""
    heads, tokens, size = order.shape
    out = pages.new_empty(heads, len(ids), tokens, size)
    places = order.reshape(-1).numpy()
    for i, page in enumerate(ids):
        flat = pages[page].reshape(-1)
        if steps is not None:
            start = flat.storage_offset() + int(places[0])
            out[:, i] = flat.as_strided(order.shape, steps, start)
        else:  # numpy takes elements faster than torch, but knows no bfloat16
            bits = _BITS[flat.element_size()]
            taken = torch.from_numpy(flat.view(bits).numpy().take(places))
            out[:, i] = taken.view(flat.dtype).view(order.shape)
    return out.flatten(1, 2)


def read_tokens(
    module: Any, order: PageOrder | None, blocks: NDArray[np.int64] | Sequence[int], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy K and V [H, T, D] of the first `length` tokens in `blocks` of one layer.

    Args:
        module: vLLM's attention layer.
        order: order in its pages; None: plain pages.
        blocks: the kernel's blocks, [ceil(T / N)] or more.
    """
    pages = module.kv_cache
    used = np.asarray(blocks[: -(-length // pages.shape[2])], np.int64)
    if order is not None:
        k, v = order.read(pages, used)
    else:
        kv = pages[torch.from_numpy(used).to(pages.device)].transpose(0, 1).flatten(1, 2)
        k, v = kv[..., : module.head_size], kv[..., module.head_size :]
    return k[:, :length], v[:, :length]


def write_tokens(module: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K and V [H, T, D] to a layer's pages at `slots`, int64 [T], with vLLM's own operator."""
    k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)


def find_page_orders(
    vllm_config: Any, kv_caches: Mapping[str, torch.Tensor], precision: str
) -> dict[str, PageOrder]:
    """Return the order of K and V in a CPU's pages by layer, for records in fewer bits. Mutates null blocks.

    Raises:
        ConfigError: pages of a layer hold something else, or K and V in fewer bits already.
    """
    modules = compat.attention_layers(vllm_config)
    known: dict[Any, PageOrder | None] = {}
    for name, pages in kv_caches.items():
        layout = pages.shape[1:], pages.dtype, getattr(modules[name], "head_size", None)
        setting = f"precision = {precision!r}: layer {name}"
        if not pages.dtype.is_floating_point or pages.element_size() < 2:
            raise ConfigError(f"{setting} holds {pages.dtype}; want none")
        try:
            known[name] = known[layout] = known.get(layout) or PageOrder.of(modules[name])
        except BlendError as error:
            raise ConfigError(f"{setting}: {error}") from error
    return {name: order for name in kv_caches if (order := known[name])}
