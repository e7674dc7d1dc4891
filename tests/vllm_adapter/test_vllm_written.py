"""Engines whose vLLM writes pages differently from their specification are refused at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from small_models import QWEN, VOCABULARY, save
from vllm_engine import BLOCK as PAGE
from vllm_engine import Engine, connector, on_disk
from vllm_engine import prompt as prompt_of

from kvkit.adapters.vllm.written import check_written
from kvkit.settings import ConfigError

BLOCKS, HEADS, TOKENS, SIZE = 5, 2, 8, 4


class Attention:
    """A layer whose operator writes plain pages, `apart` blocks away from where they should be."""

    def __init__(self, dtype: torch.dtype, pages: torch.Tensor, apart: int = 0, tokens: int = TOKENS) -> None:
        self.dtype, self.kv_cache, self.head_size = dtype, pages, SIZE
        self.impl = SimpleNamespace(do_kv_cache_update=self._write)
        self._apart, self._tokens = apart, tokens

    def _write(
        self, _: Any, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for token, slot in enumerate(slots.tolist()):
            block, at = slot // TOKENS + self._apart, slot % TOKENS
            if at < self._tokens:
                pages[block, :, at, :SIZE], pages[block, :, at, SIZE:] = k[token], v[token]


def pages_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.arange(BLOCKS * HEADS * TOKENS * 2 * SIZE).remainder(7).to(dtype)
    return made.view(BLOCKS, HEADS, TOKENS, 2 * SIZE)


@pytest.mark.parametrize("quantised", [False, True])
def test_what_fills_its_page_is_right(quantised: bool) -> None:
    pages = pages_of(torch.int8 if quantised else torch.float32)
    before = pages.clone()
    check_written({"a": Attention(torch.float32, pages)}, {"a": pages}, quantised)
    assert torch.equal(pages, before)


@pytest.mark.parametrize(
    "layer",
    [
        lambda pages: Attention(torch.float32, pages, apart=1),
        lambda pages: Attention(torch.float32, pages, apart=3),
        lambda pages: Attention(torch.float32, pages, tokens=TOKENS - 1),
    ],
    ids=["into the next block", "far away", "not all of it"],
)
def test_what_is_written_elsewhere_is_refused(layer: Any) -> None:
    pages = pages_of()
    with pytest.raises(ConfigError, match=r"layer b computes torch\.float32.*outside of their.*want 'auto'"):
        check_written({"b": layer(pages)}, {"b": pages}, quantised=False)


def test_another_size_of_elements_is_refused_before_anything_is_written() -> None:
    pages = pages_of(torch.bfloat16)
    before = pages.clone()
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: layer a .*torch\.bfloat16.*writes past them"):
        check_written({"a": Attention(torch.float32, pages)}, {"a": pages}, quantised=False)
    assert torch.equal(pages, before)


def test_layers_without_an_operator_are_not_looked_at() -> None:
    check_written({"a": SimpleNamespace()}, {"a": pages_of(), "b": pages_of()}, quantised=False)


def test_a_model_of_float32_with_pages_of_bfloat16_does_not_start(tmp_path: Path) -> None:
    """vLLM 0.32 serves it, and writes past its pages: kvkit stored zeros. 0.33 refuses it itself."""
    model, transfer = save(QWEN, tmp_path / "model"), connector(on_disk(tmp_path / "kv"))
    prompt = prompt_of(2 * PAGE, 1, VOCABULARY)
    with Engine() as engine:
        with pytest.raises(AssertionError, match=r"kv_cache_dtype.*(want 'auto'|to `auto`)"):
            engine.open(transfer, model, skip_tokenizer_init=True, kv_cache_dtype="bfloat16")
        options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
        engine.open(transfer, model, **options)
        assert [engine.cached(prompt) for _ in range(2)] == [[0], [PAGE]]
