"""Documents enter GPU-shaped pages of vLLM with keys rotated by each layer's own rope."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from test_vllm_pages import BLOCKS, CHUNK, FORMS, FULL, views

from kvkit.adapters.vllm.blending.executor import DocumentPages
from kvkit.adapters.vllm.pages import group_pages
from kvkit.format.layout import Namespace
from kvkit.format.rope import Rope
from kvkit.kernels.pages.api import pack
from kvkit.kernels.pages.reference import rotate
from kvkit.transfer.sequence import formats_of

NAMES = ["layers.0", "layers.1", "layers.2"]
ROPE = Rope((1.0, 0.3, 0.1, 0.01))
SAME = dict.fromkeys(NAMES, ROPE)
OWN = dict(zip(NAMES, (ROPE, Rope((0.7, 0.02), interleaved=True, first=2), None), strict=True))
DELTA, PREFIX = 21, 10
"""By how much the document moves, and leading tokens of its record that are none of it."""
STORED, WANTED = [1, 3], [4, 2, 5]
"""Blocks that its KV was computed in, and the request's."""


def token(pages: torch.Tensor, block: int, offset: int) -> torch.Tensor:
    """[H, 2 D] of a token of one of vLLM's blocks: a view; the kernel's blocks may be smaller."""
    tokens = pages.shape[2]
    return pages[block * (FULL.block_size // tokens) + offset // tokens, :, offset % tokens]


@pytest.mark.parametrize("ropes", [SAME, OWN], ids=["one rope", "each its own"])
@pytest.mark.parametrize(("layout", "kernel"), FORMS)
def test_a_document_is_where_the_prompt_has_it(
    layout: str, kernel: int | None, ropes: Mapping[str, Rope | None]
) -> None:
    tensors = views(FULL, NAMES, layout, kernel)
    for i, pages in enumerate(tensors.values()):
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(i)))
    kv, (group,) = group_pages([dict.fromkeys(NAMES, FULL)], tensors, BLOCKS, opaque=False)
    (form,) = formats_of(kv, Namespace("model", kv.fingerprint(), "float32", chunk_tokens=CHUNK))
    record = np.empty(group.pages.group.chunk_bytes(CHUNK), np.uint8)
    pack(group.pages, [record], blocks=group.sequence_pages(STORED, CHUNK).blocks[None])  # type: ignore[index]
    expected = {name: pages.clone() for name, pages in tensors.items()}
    for name, rope in ropes.items():
        for j in range(PREFIX, CHUNK):
            kept, at = token(tensors[name], STORED[j // 32], j % 32), j + DELTA
            k, v = kept.chunk(2, -1)
            turned = (
                k if rope is None else rotate(k, torch.from_numpy(rope.delta_table(np.array([DELTA]))), rope)
            )
            token(expected[name], WANTED[at // 32], at % 32).copy_(torch.cat([turned, v], -1))
    positions, took = np.arange(CHUNK) + DELTA, list[float]()
    positions[:PREFIX] = -1
    (place,) = DocumentPages([group], [None], ropes).pages_at((WANTED,), positions, DELTA, took.append)
    place.fill(form, 0, [record], None, ())
    for name, pages in tensors.items():
        torch.testing.assert_close(pages, expected[name], atol=1e-6, rtol=1e-6)
    assert len(took) == 1
