"""The same promises with the engine's pages on a GPU. `make gpu` runs these where there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_transformers import config, prompt, random_model

from kvkit.adapters.transformers import CachedModel, probe_layout
from kvkit.kernels import launch
from kvkit.kernels.launch import Pages
from kvkit.layout import ORDERS, LayerGroup
from kvkit.staging import Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; `make gpu` runs it there")

GROUPS = {
    **{order: LayerGroup((0, 1, 2), 3, 8, 4, "bfloat16", block_tokens=4, order=order) for order in ORDERS},
    "mla": LayerGroup((0, 1), 1, 576, 0, "bfloat16", block_tokens=16),
    "uint8": LayerGroup((0, 1), 2, 132, 0, "uint8", block_tokens=4),
    "opaque": LayerGroup((0, 1), 1, 1, 0, "uint8", block_tokens=4, page_bytes=132),
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_gpu_pages_move_like_cpu_pages(group: LayerGroup) -> None:
    blocks, tokens = 9, 2 * group.block_tokens
    table = np.array([[5, 1], [8, 3]], np.int64)
    host = group.pages(blocks)
    for layer, pages in enumerate(host):
        raw = pages.contiguous().view(torch.uint8)
        noise = torch.randint(
            0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(layer)
        )
        pages.copy_(noise.view(pages.dtype))
    device = group.pages(blocks, device="cuda")
    for source, target in zip(host, device, strict=True):
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    records = [np.full(group.chunk_bytes(tokens), 0xA5, np.uint8) for _ in range(4)]
    launch.pack(Pages.of(group, host), records[:2], blocks=table)
    launch.pack(Pages.of(group, device), records[2:], blocks=table)
    assert all(np.array_equal(a, b) for a, b in zip(records[:2], records[2:], strict=True))
    for pages in (*host, *device):
        pages.view(torch.uint8).fill_(0xA5)
    launch.unpack(Pages.of(group, host), records[:2], blocks=table)
    launch.unpack(Pages.of(group, device), records[2:], blocks=table)
    for source, target in zip(host, device, strict=True):
        assert torch.equal(source.view(torch.uint8), target.view(torch.uint8).cpu())


def test_staging_is_pinned() -> None:
    staging = Staging(1 << 20, 4)
    assert staging.ready.wait(60)
    assert torch.from_numpy(staging.arrays[3]).is_pinned()
    staging.close()


@pytest.mark.parametrize("kind", ["gqa", "mha", "sliding window", "hybrid"])
def test_a_model_on_the_gpu_says_the_same_from_disk(kind: str, tmp_path: Path) -> None:
    model = random_model(kind).cuda()
    plain = CachedModel(model, probe_layout(model), None)
    tokens = prompt(75)
    expected = plain.generate(tokens, 12)
    for hits in (0, 64):
        with CachedModel.open(model, config(tmp_path)) as cached:
            answer = cached.generate(tokens, 12)
        assert sum(answer.hit_tokens.values()) == hits
        assert answer.tokens == expected.tokens
