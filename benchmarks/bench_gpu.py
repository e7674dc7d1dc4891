"""Moving KV between a GPU's pages and host records, against the bare copies. For `make gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvkit.kernels import launch
from kvkit.kernels.launch import Pages
from kvkit.layout import LayerGroup
from kvkit.staging import Staging
from timing import interleaved, ratio

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; `make gpu` runs it there")

LLAMA = LayerGroup(tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16)
CHUNKS, CHUNK_TOKENS = 8, 256


@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_pages(benchmark: Any, way: str) -> None:
    """8 chunks of Llama-3.1-8B's layout, pinned slots, against one copy of as many bytes."""
    size = LLAMA.chunk_bytes(CHUNK_TOKENS)
    staging = Staging(size, CHUNKS)
    staging.ready.wait()
    records = [array[:size] for array in staging.arrays]
    blocks = np.random.default_rng(0).permutation(CHUNKS * CHUNK_TOKENS // 16).reshape(CHUNKS, -1)
    pages = Pages.of(LLAMA, LLAMA.pages(blocks.size, fill_byte=1, device="cuda"))
    pinned = torch.ones(CHUNKS * size, dtype=torch.uint8).pin_memory()
    device, other = (torch.ones(CHUNKS * size, dtype=torch.uint8, device="cuda") for _ in range(2))
    move = launch.pack if way == "pack" else launch.unpack

    def ours() -> None:
        move(pages, records, blocks=blocks)
        torch.cuda.synchronize()

    def link() -> None:
        target, source = (pinned, device) if way == "pack" else (device, pinned)
        target.copy_(source)
        torch.cuda.synchronize()

    def on_device() -> None:
        other.copy_(device)
        torch.cuda.synchronize()

    benchmark(ours)
    times = interleaved({"ours": ours, "link": link, "device": on_device}, 20 if benchmark.enabled else 1)
    for roof in ("link", "device"):
        found = ratio(times, "ours", roof)
        benchmark.extra_info[roof] = {"ratio_min": found["min"], "ratio_median": found["median"]}
    benchmark.extra_info.update(bytes=CHUNKS * size, against="one copy over the link, and on the device")
    staging.close()
