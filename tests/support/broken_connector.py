"""vLLM's example connector with a defect that a file names: the file may change while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from kvkit.adapters.vllm.blending.page_order import PageOrder
from kvkit.format.rope import Rope

LAYER = 3
"""Of one layer alone, where a defect is of one."""
THETA = 10_000.0
"""Of the tests' models."""


def stale_page(layers: list[Any], blocks: list[int], before: list[torch.Tensor]) -> None:
    """A layer's page keeps what it held before."""
    layers[LAYER].kv_cache[blocks[0]] = before[LAYER][blocks[0]]


def wrong_rank(layers: list[Any], blocks: list[int], before: list[torch.Tensor]) -> None:
    """Each head has the KV of its neighbour."""
    for layer in layers:
        layer.kv_cache[blocks] = layer.kv_cache[blocks].roll(1, 1)


def wrong_layer(layers: list[Any], blocks: list[int], before: list[torch.Tensor]) -> None:
    layers[LAYER].kv_cache[blocks] = layers[LAYER - 1].kv_cache[blocks]


def off_by_one_block(layers: list[Any], blocks: list[int], before: list[torch.Tensor]) -> None:
    for layer in layers:
        layer.kv_cache[blocks[1:]] = layer.kv_cache[blocks[:-1]].clone()


def missing_rotation(layers: list[Any], blocks: list[int], before: list[torch.Tensor]) -> None:
    """Keys as they were before they were rotated."""
    for layer in layers:
        order = PageOrder.of(layer)
        assert order is not None
        half, tokens = layer.head_size // 2, order.k.shape[1]
        rope = Rope(tuple(THETA ** (-i / half) for i in range(half)))
        for number, block in enumerate(blocks):
            page = layer.kv_cache[block].reshape(-1)
            positions = torch.arange(tokens) + number * tokens
            cos, sin = torch.from_numpy(rope.table(positions.numpy())).chunk(2, 1)
            one, other = page[order.k].chunk(2, 2)
            page[order.k] = torch.cat([one * cos + other * sin, other * cos - one * sin], 2)
            layer.kv_cache[block] = page.view_as(layer.kv_cache[block])


def truncated_tail(layers: list[Any], blocks: list[int], before: list[torch.Tensor]) -> None:
    """The last block's second half never came."""
    for layer in layers:
        layer.kv_cache[blocks[-1], :, layer.kv_cache.shape[2] // 2 :] = 0.0


FAULTS: dict[str, Callable[[list[Any], list[int], list[torch.Tensor]], None]] = {
    "stale page": stale_page,
    "wrong rank": wrong_rank,
    "wrong layer": wrong_layer,
    "off by one block": off_by_one_block,
    "missing rotation": missing_rotation,
    "truncated tail": truncated_tail,
}
ANOTHERS, NOTHING = "another's record", "nothing is loaded"


class BrokenConnector(ExampleConnector):
    """Spoils what was loaded as the file says that `fault_file` names; an empty one: not at all."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._file = Path(self._kv_transfer_config.get_from_extra_config("fault_file", ""))
        self._loading = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._file.read_text() == NOTHING:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        layers = [
            layer
            for layer in forward_context.no_compile_layers.values()
            if getattr(layer, "kv_cache", None) is not None
        ]
        requests = [one for one in self._get_connector_metadata().requests if not one.is_store]
        before = [layer.kv_cache.clone() for layer in layers] if requests else []
        self._loading = True
        super().start_load_kv(forward_context, **kwargs)
        self._loading = False
        fault = FAULTS.get(self._file.read_text())
        for request in requests if fault is not None else ():
            blocks = (request.slot_mapping[:: self._block_size] // self._block_size).tolist()
            fault(layers, blocks, before)

    def _generate_filename_debug(self, layer_name: str, token_ids: Any, mm_hashes: list[str]) -> str:
        own = Path(super()._generate_filename_debug(layer_name, token_ids, mm_hashes))
        if not self._loading or self._file.read_text() != ANOTHERS:
            return str(own)
        alike = sorted(Path(self._storage_path).glob(f"*/{own.name}"))
        return str(next(one for one in alike if one != own and one.stat().st_size == own.stat().st_size))
