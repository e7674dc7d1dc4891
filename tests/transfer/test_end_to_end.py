"""A conversation gives the same text cold and from disk, on a CPU and on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from vllm_engine import Engine, connector, on_disk, prompt

from kvkit.lab.demo import conversation as demo

ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; `make gpu-tests` runs it there"
)
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder made without a network: random weights, far from degenerate, and bytes as tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=len(alphabet), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("device", DEVICES)
def test_a_conversation_goes_on_from_disk(device: str, model: Path, tmp_path: Path) -> None:
    """The demo's two processes, one after the other."""

    def turns(compare: bool) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        demo.converse(str(model), str(tmp_path), compare, told.append, device)
        return [event["turn"] for event in told if "turn" in event]

    first, second = turns(False), turns(True)
    assert len(first) == len(second) == len(demo.QUESTIONS)
    assert first[0]["hit_tokens"] == {}
    for turn in second:
        assert turn["identical"] is True
        assert set(turn["hit_tokens"]) == {"disk"}
        assert turn["hit_tokens"]["disk"] + turn["computed_tokens"] == turn["prompt_tokens"]
        assert turn["computed_tokens"] <= demo.CHUNK_TOKENS


@ON_GPU
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_says_the_same_from_disk(model: Path, tmp_path: Path) -> None:
    """On a CPU, tests/vllm_adapter/test_vllm_engine.py does this and more."""
    given = prompt(600, vocabulary=256)
    with Engine() as engine:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
        engine.open(None, model, **options)
        (expected,) = engine.text(given)
        for cached in (0, 512):
            engine.open(connector(on_disk(tmp_path)), model, **options)
            (answer,) = engine.generate([given])
            assert (answer["tokens"], answer["cached"]) == (expected, cached)
