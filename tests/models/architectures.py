"""Architectures that vLLM serves, as small models with random weights: those that blending is tried with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import COMMON, VOCABULARY, save
from transformers import PretrainedConfig

WINDOW = 128
"""Tokens of sliding windows: some times smaller than what stands before a question."""

SMALL = COMMON | {"initializer_range": 0.1}
"""With larger weights answers are chaotic: what is nearly right in the pages says nothing of them."""
GQA = SMALL | {"num_key_value_heads": 2}
SIZED = GQA | {"head_dim": 32}
IMAGE = 99
"""The token that an image stands for."""
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 512,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A small model of an architecture.

    Args:
        config: makes its configuration.
        special: what of it is of interest here, as the documentation says it.
        refused: what is said at start where it cannot be served so, a regular expression; "": it can be.
        no_handoff: the same, of an engine that is to hand off.
        broken: whether vLLM itself fails with it.
        options: of vLLM's `LLM`.
        change: what is done to the saved model's folder.
        chunk_tokens: that fit vLLM's blocks.
        tolerance: of log-probabilities that are to be the same.
        rounds: activations have 8 bits: a difference in the last bit of a float becomes one of a hundredth.
        alone: whether prompts come one after the other: in a batch plain vLLM answers otherwise.
        image: pixels of the side of an image that prompts begin with; None: there is none.
    """

    config: Callable[[], PretrainedConfig]
    special: str
    refused: str = ""
    no_handoff: str = ""
    broken: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Path], None] | None = None
    chunk_tokens: int = 128
    tolerance: float = 1e-3
    rounds: bool = False
    alone: bool = False
    image: int | None = None

    def save(self, folder: Path) -> Path:
        """Make the model; returns the folder."""
        save(self.config(), folder)
        if self.change is not None:
            self.change(folder)
        return folder


def to_int8(folder: Path) -> None:
    """Quantise the linear layers of a saved model: int8 by output channel, activations by token."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, weight in load_file(path).items():
        if ".layers." in name and weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scale
            weight = (weight / scale).round().to(torch.int8)
        tensors[name] = weight
    save_file(tensors, path, {"format": "pt"})
    eight = {"num_bits": 8, "type": "int"}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"symmetric": True, "strategy": "channel", "dynamic": False},
        # symmetric ones go to a kernel that takes no float32 where a CPU has AMX
        "input_activations": eight | {"symmetric": False, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


ARCHITECTURES = {
    "Llama": Architecture(
        lambda: transformers.LlamaConfig(**GQA, **SPECIAL, rope_parameters=dict(YARN)), "a YaRN rope"
    ),
    "Qwen2": Architecture(
        lambda: transformers.Qwen2Config(**GQA, **SPECIAL),
        "biases; weights of 8 bits",
        change=to_int8,
        rounds=True,
    ),
    "Qwen3": Architecture(lambda: transformers.Qwen3Config(**SIZED, **SPECIAL), "queries and keys normed"),
    "Qwen3-MoE": Architecture(
        lambda: transformers.Qwen3MoeConfig(**SIZED, **SPECIAL, **MOE), "a mixture of experts"
    ),
    "Mistral": Architecture(
        lambda: transformers.MistralConfig(**SIZED, **SPECIAL, sliding_window=WINDOW),
        "sliding windows in every layer",
    ),
    "Gemma 2": Architecture(
        lambda: transformers.Gemma2Config(
            **SIZED, **SPECIAL, sliding_window=WINDOW, query_pre_attn_scalar=32
        ),
        "sliding windows in every other layer, scores capped",
    ),
    "Gemma 3": Architecture(
        lambda: transformers.Gemma3TextConfig(
            **SIZED,
            **SPECIAL,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
        ),
        "sliding windows, two ropes",
    ),
    "GLM-4": Architecture(
        lambda: transformers.Glm4Config(**SIZED, **SPECIAL),
        "a rope over half of the channels, interleaved",
    ),
    "Cohere": Architecture(
        lambda: transformers.CohereConfig(**GQA, **SPECIAL, logit_scale=1.0),
        "an interleaved rope, attention beside the MLP",
    ),
    "Cohere 2": Architecture(
        lambda: transformers.Cohere2Config(**GQA, **SPECIAL, logit_scale=1.0, sliding_window=WINDOW),
        "sliding windows, layers without a rope",
    ),
    "OLMo 2": Architecture(
        lambda: transformers.Olmo2Config(**GQA, **SPECIAL),
        "norms behind attention and MLP; vLLM's Transformers backend",
    ),
    "GPT-NeoX": Architecture(
        lambda: transformers.GPTNeoXConfig(**SMALL, **SPECIAL),
        "a rope over a quarter of the channels; vLLM's Transformers backend",
    ),
    "Phi": Architecture(
        lambda: transformers.PhiConfig(**GQA, **SPECIAL),
        "a rope over half of the channels, biases; vLLM's Transformers backend",
    ),
    "Phi-3": Architecture(
        lambda: transformers.Phi3Config(
            **GQA | {"max_position_embeddings": 4096},
            **SPECIAL,
            original_max_position_embeddings=512,
            rope_parameters=dict(LONG),
        ),
        "LongRoPE, which in vLLM is the same for all prompts of an engine",
    ),
    "Bloom": Architecture(
        lambda: transformers.BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=SMALL["hidden_size"],
            n_layer=SMALL["num_hidden_layers"],
            n_head=SMALL["num_attention_heads"],
            initializer_range=SMALL["initializer_range"],
            **SPECIAL,
        ),
        "ALiBi, no rope",
    ),
    "OLMo 2, dynamic rope": Architecture(
        lambda: transformers.Olmo2Config(
            **GQA | {"max_position_embeddings": 512}, **SPECIAL, rope_parameters=dict(DYNAMIC)
        ),
        "a rope that follows the prompt's length; vLLM's Transformers backend",
        refused="rotary",
    ),
    "GPT-2": Architecture(
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=COMMON["hidden_size"],
            n_layer=COMMON["num_hidden_layers"],
            n_head=COMMON["num_attention_heads"],
            n_positions=COMMON["max_position_embeddings"],
            initializer_range=SMALL["initializer_range"],
            **SPECIAL,
        ),
        "learned positions, no rope",
        refused="rotary",
    ),
}
"""By name, as the documentation has it."""
