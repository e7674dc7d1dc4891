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


def save(config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Make a model and save it to `folder`, without a tokenizer; returns the folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(-5.0)  # or states forget all but the last few tokens
        embedding = model.get_input_embeddings().weight
        embedding.mul_(0.1)  # or the last token alone decides the next
        if model.get_output_embeddings().weight is embedding:
            norms = [
                module
                for name, module in model.named_modules()
                if name.endswith((".norm", ".ln_f", ".embedding_norm"))
            ]
            norms[-1].weight.add_(9.0)  # the logits are as large as without the factor
    model.save_pretrained(folder)
    return folder


def save_with_tokenizer(folder: Path, config: type[PretrainedConfig] = Qwen2Config) -> Path:
    """As `save`, a model of this kind that has SmolLM2's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2.fetch())
    tokenizer.save_pretrained(folder)
    return save(config(**COMMON | {"vocab_size": len(tokenizer)}, num_key_value_heads=2), folder)
