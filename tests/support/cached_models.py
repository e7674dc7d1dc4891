"""Models with random weights for `CachedModel`, prompts for them, and a configuration of memory and disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import random_models
import transformers
from random_models import SIZES

from kvkit.config import Config, load_config

CONFIGS: dict[str, Any] = {
    "gqa": lambda: transformers.Qwen3Config(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=24, eos_token_id=None
    ),
    "mha": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=300, n_positions=512, eos_token_id=None, bos_token_id=None
    ),
    "sliding window": lambda: transformers.MistralConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=20, eos_token_id=None
    ),
    "hybrid": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"] * 2,
        eos_token_id=None,
    ),
}


def random_model(kind: str, seed: int = 0) -> Any:
    """The model of `CONFIGS[kind]`."""
    return random_models.random_model(kind, seed, CONFIGS)


def config(folder: Path, chunk_tokens: int = 16) -> Config:
    tiers = {"memory": {"capacity": "64MiB"}, "disk": {"url": f"file://{folder}"}}
    return load_config(chunk_tokens=chunk_tokens, staging="64MiB", tiers=tiers)


def prompt(length: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(5, 290, length, np.int32)
