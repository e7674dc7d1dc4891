"""A stand-in for an engine whose KV is floats, and what is left of it with fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from caches import CHUNK

from kvkit.kernels.pages import reference
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig


class FloatEngine(Engine):
    """Its KV is normally distributed, and a known function of the tokens before it."""

    def __init__(self, groups: int = 1, dtype: str = "bfloat16", blocks: int = 64) -> None:
        layout = small_layout(groups, dtype)
        super().__init__(layout, small_namespace(layout, CHUNK), blocks)

    def kv(self, key: bytes, group: int) -> npt.NDArray[np.uint8]:
        return _bytes(self._floats(key, group))

    def narrowed(self, key: bytes, group: int, precision: str) -> npt.NDArray[np.uint8]:
        """The payload as it is restored from fewer bits."""
        exact, form = self._floats(key, group), self.layout.groups[group]
        rows = reference.quantise(exact.view(-1, form.channels), form.k_size, precision)
        return _bytes(reference.dequantise(rows, form.k_size, form.v_size, precision).to(exact.dtype))

    def _floats(self, key: bytes, group: int) -> torch.Tensor:
        form = self.layout.groups[group]
        count = form.chunk_bytes(CHUNK) // form.item_bytes
        chance = np.random.default_rng(int.from_bytes(key, "big") + group)
        return torch.from_numpy(chance.standard_normal(count, np.float32)).to(getattr(torch, form.dtype))

    def loaded_as(self, tokens: Any, table: list[int], chunks: int, precision: str) -> str:
        """Of each of the first `chunks` chunks in the pages: e: exact, a: approximate, ?: neither."""
        found, kinds = self.read(tokens, table, chunks), ""
        for chunk, key in enumerate(self.keys(tokens)[:chunks]):
            groups = range(len(self.layout.groups))
            held = [found[g][chunk] for g in groups]
            exact = held == [self.kv(key, g).tobytes() for g in groups]
            approximate = held == [self.narrowed(key, g, precision).tobytes() for g in groups]
            kinds += "e" if exact else "a" if approximate else "?"
        return kinds


def narrow_tier(url: Path | str, precision: str, name: str = "narrow", **settings: Any) -> ObjectTier:
    return ObjectTier(TierConfig(url=str(url), precision=precision, **settings), name=name)


def _bytes(floats: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = floats.reshape(-1).view(torch.uint8).numpy()
    return found
