"""Small models of many architectures with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
CONFIGS: dict[str, Any] = {
    "mha": lambda: transformers.LlamaConfig(**SIZES, num_attention_heads=4, eos_token_id=None),
    "gqa": lambda: transformers.Qwen3Config(**SIZES, **HEADS, head_dim=24),
    "deep": lambda: transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 12}, **HEADS),
    "bias": lambda: transformers.Qwen2Config(**SIZES, **HEADS),
    "sliding window": lambda: transformers.MistralConfig(**SIZES, **HEADS, sliding_window=20),
    "interleaved": lambda: transformers.Ernie4_5Config(**SIZES, **HEADS, head_dim=16),
    "llama3 rope": lambda: transformers.LlamaConfig(
        **SIZES,
        **HEADS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


def random_model(kind: str, seed: int = 0, configs: Mapping[str, Any] = CONFIGS) -> Any:
    """The model of `configs[kind]`, ready for inference."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # far from degenerate, so that wrong KV shows in the logits
            parameter.mul_(3.0)
    return model.eval()


def save_with_bytes(kind: str, folder: Path) -> Path:
    """Save `random_model(kind)` with a tokenizer that has a token per byte. Returns the folder."""
    random_model(kind).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
