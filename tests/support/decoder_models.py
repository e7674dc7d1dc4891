"""Small models with random weights of every kind of decoder that transformers has."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""As configs name them (`model_type`)."""
LAYERS, VOCABULARY = 4, 300
MOST_PARAMETERS = 30_000_000
SIZES: dict[int, tuple[str, ...]] = {
    64: (
        *("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "lru_width"),
        *("attention_hidden_size", "hidden_dim", "embedding_size", "model_dim"),
    ),
    96: (
        *("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        *("intermediate_size_mlp", "ffn_hidden_size"),
    ),
    LAYERS: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
        *("encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"),
        "moe_num_experts",
    ),
    2: ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_experts_per_tok", "moe_top_k", "moe_k"),
    16: ("head_dim", "rotary_dim"),
    VOCABULARY: ("vocab_size",),
    512: ("max_position_embeddings", "n_positions", "max_seq_len"),
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED = LATENT | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
WINDOWS = ["sliding_attention", "full_attention"] * 2
BY_LAYER = {
    "layer_types": WINDOWS,
    "num_hidden_layers": LAYERS,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
SHORT = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": LAYERS}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
STATES = ["linear_attention", "full_attention"] * 2
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), GROUPED),
    **{kind: {"head_dim": 16} for kind in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron")},
    "cohere_compass_text": {"layer_types": WINDOWS, "num_hidden_layers": LAYERS},
    "gemma3n_text": BY_LAYER | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * LAYERS},
    "gemma4_text": BY_LAYER,
    "lfm2": SHORT,
    "lfm2_moe": SHORT,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "olmo_hybrid"), LINEAR),
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": LAYERS,
        "mamba_dt_rank": 8,
    },
    "bamba": MAMBA2 | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": MAMBA2 | {"layer_types": STATES},
    "kimi_linear": LATENT
    | {
        "layer_types": STATES,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "num_hidden_layers": LAYERS,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_experts_per_token": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_hidden_layers": LAYERS,
        "mamba_headdim": 16,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": LAYERS,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
    },
}
"""Settings of kinds for which those sizes do not go together."""


class NotMade(Exception):
    """A small model of that kind cannot be made here; the message says why."""


def make(kind: str) -> Any:
    """A model of a kind, in eval mode, of float32.

    Raises:
        NotMade: it takes other packages, or settings that nobody has chosen.
    """
    try:
        settings = OTHERS.get(kind, {})
        config = CONFIG_MAPPING[kind](**settings)
        _shrink(config, settings)
        with torch.device("meta"):
            large = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if (count := sum(weight.numel() for weight in large.parameters())) > MOST_PARAMETERS:
            raise NotMade(f"{count} parameters")
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except NotMade:
        raise
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error


def _shrink(config: Any, settings: Collection[str] = ()) -> None:
    """Set sizes, but for `settings`, in a config and those that are part of it."""
    told = config.to_dict()
    for size, names in SIZES.items():
        for name in names:
            if isinstance(told.get(name), int) and name not in settings:
                _set(config, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(told.get(name), (int, list)):
            _set(config, name, 1)
    if isinstance(told.get("layer_types"), list):
        _set(config, "layer_types", (told["layer_types"] * LAYERS)[:LAYERS])
    for name in ("text_config", "decoder"):
        part = getattr(config, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            _shrink(part)


def _set(config: Any, name: str, value: Any) -> None:
    """Set what can be set: some have it made of others."""
    with suppress(AttributeError):
        setattr(config, name, value)
