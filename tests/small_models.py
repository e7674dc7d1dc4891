"""Models with random weights: quick, and yet large enough that their answers depend on every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen2Config

from kvkit.adapters.huggingface import smollm2

VOCABULARY = 1000
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
QWEN = Qwen2Config(**COMMON, num_key_value_heads=2)


def save(config: PretrainedConfig, folder: Path) -> Path:
    """Make a model and save it to `folder`, without a tokenizer; returns the folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)  # or the last token alone decides the next
    model.save_pretrained(folder)
    return folder


def save_with_tokenizer(folder: Path) -> Path:
    """As `save`, a model that has SmolLM2's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2.fetch())
    tokenizer.save_pretrained(folder)
    return save(Qwen2Config(**COMMON | {"vocab_size": len(tokenizer)}, num_key_value_heads=2), folder)
