"""The zoo: an architecture for each kind of attention and of cache, as small models with random weights."""

from __future__ import annotations

from dataclasses import replace

import transformers
from models.architectures import ARCHITECTURES, GQA, SIZED, SPECIAL, WINDOW, Architecture
from models.hybrids import HYBRIDS
from models.images import IDEFICS3
from small_models import QWEN

LAYERS = {"num_hidden_layers": 4}
ZOO = {
    "Qwen2": Architecture(lambda: QWEN, "grouped queries (GQA)"),
    "GPT-2": replace(
        ARCHITECTURES["GPT-2"], special="as many KV heads as queries (MHA), learned positions", refused=""
    ),
    "Bloom": ARCHITECTURES["Bloom"],
    "Qwen3-MoE": ARCHITECTURES["Qwen3-MoE"],
    "Mistral": ARCHITECTURES["Mistral"],
    "Gemma 2": ARCHITECTURES["Gemma 2"],
    "Gemma 3": ARCHITECTURES["Gemma 3"],
    "gpt-oss": Architecture(
        lambda: transformers.GptOssConfig(
            **SIZED | LAYERS,
            **SPECIAL,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "attention sinks, sliding windows, a mixture of experts",
    ),
    "Llama 4": Architecture(
        lambda: transformers.Llama4TextConfig(
            **SIZED | LAYERS,
            **SPECIAL,
            intermediate_size_mlp=256,
            attention_chunk_size=256,
            num_local_experts=4,
            interleave_moe_layer_step=2,
        ),
        "chunked local attention, layers without a rope",
    ),
    "Gemma 3n": Architecture(
        lambda: transformers.Gemma3nTextConfig(
            **SIZED | LAYERS,
            **SPECIAL,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=GQA["vocab_size"],
            hidden_size_per_layer_input=32,
            laurel_rank=16,
            altup_num_inputs=2,
        ),
        "layers that share the KV of others, sliding windows",
    ),
    "Gemma 4": Architecture(
        lambda: transformers.Gemma4TextConfig(
            **SIZED | {"num_hidden_layers": 6},
            **SPECIAL,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=3,
            global_head_dim=64,
            vocab_size_per_layer_input=GQA["vocab_size"],
            hidden_size_per_layer_input=32,
        ),
        "head sizes by layer, shared KV, sliding windows",
        chunk_tokens=256,
    ),
    "DeepSeek-V2": Architecture(
        lambda: transformers.DeepseekV2Config(
            **GQA | {"num_key_value_heads": 4} | LAYERS,
            **SPECIAL,
            kv_lora_rank=512,  # vLLM's kernel takes this size of latents alone
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=6,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        ),
        "latent attention (MLA)",
        refused="MLAAttentionSpec",
        options={"dtype": "bfloat16"},  # its kernel for CPUs with AMX takes no float32
    ),
    "Mamba 2": Architecture(
        lambda: transformers.Mamba2Config(
            vocab_size=GQA["vocab_size"],
            hidden_size=GQA["hidden_size"],
            num_hidden_layers=2,
            num_heads=8,
            head_dim=32,
            state_size=32,
            n_groups=1,
            chunk_size=64,
            **SPECIAL,
        ),
        "states alone",
        refused="no layer keeps K and V",
    ),
    "Idefics3": IDEFICS3,
} | HYBRIDS
"""By name, as the documentation has it."""
