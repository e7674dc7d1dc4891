"""kvkit stores nothing for models that vLLM does not cache, logs it once, and the engine works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from small_models import VOCABULARY, save_with_tokenizer
from transformers import AutoTokenizer, BertConfig, BertModel
from vllm_engine import BLOCK, Engine, connector, on_disk
from vllm_engine import prompt as prompt_of

from kvkit.adapters.huggingface import smollm2

PROMPTS = [prompt_of(3 * BLOCK, seed, VOCABULARY) for seed in (1, 2)]
OPTIONS: dict[str, Any] = {"runner": "pooling", "convert": "embed"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as made:
        yield made


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("qwen"))


def records(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]


@pytest.mark.parametrize(("pooling", "cached"), [("MEAN", False), ("CLS", False), ("LAST", True)])
def test_a_prompt_that_comes_twice_has_the_same_vector(
    engine: Engine, qwen: Path, tmp_path: Path, pooling: str, cached: bool
) -> None:
    """What the mean of a prompt's tokens takes, no hit has: the engine ended at the second prompt."""
    options = OPTIONS | {"pooler_config": {"seq_pooling_type": pooling}}
    expected = engine.open(None, qwen, **options).do("embed", PROMPTS)
    engine.open(connector(on_disk(tmp_path / "kv")), qwen, **options)
    for _ in range(3):
        found = engine.do("embed", PROMPTS)
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(found, expected, strict=True))
        engine.flush()
    assert bool(records(tmp_path / "kv")) is cached


def test_a_model_without_a_kv_cache_is_served(engine: Engine, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model, tokenizer = tmp_path / "bert", AutoTokenizer.from_pretrained(smollm2.fetch())
    tokenizer.save_pretrained(model)
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes)).save_pretrained(
        model
    )
    options = {"runner": "pooling", "max_model_len": 512}
    expected = engine.open(None, model, **options).do("embed", PROMPTS)
    engine.open(connector(on_disk(tmp_path / "kv")), model, **options)
    for _ in range(2):
        found = engine.do("embed", PROMPTS)
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(found, expected, strict=True))
    assert not records(tmp_path / "kv")
