"""Hybrids: layers that keep states beside layers of attention, as small models with random weights."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers
from models.architectures import GQA, SPECIAL, Architecture
from vllm_engine import BLOCK

HYBRID = GQA | SPECIAL | {"num_hidden_layers": 4, "num_key_value_heads": 4}
CACHING = {"enable_prefix_caching": True, "max_num_batched_tokens": BLOCK + 8}
"""A block of a prompt beside the tokens of those that decode: snapshots at the ends of all chunks."""
RIGHT_ROPE = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""In place of vLLM 0.32's for a CPU, which is wrong where queries have a dimension of heads, as in LFM2."""
ROUNDED = 0.1 if torch.cpu._is_amx_tile_supported() else 0.05
"""Of bfloat16. Where a CPU has AMX, plain vLLM differs by 0.06 after preemption."""
WITH_PREFIX_CACHE = {
    "Qwen3-Next": Architecture(
        lambda: transformers.Qwen3NextConfig(
            **HYBRID | {"num_hidden_layers": 3},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=2,
            num_experts_per_tok=2,  # all: which of several are chosen may change with the last bit
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        "gated delta nets beside attention",
        options=CACHING | {"dtype": "bfloat16"},  # its kernel takes nothing else, and rounds by pieces
        tolerance=ROUNDED,
    ),
    "LFM2": Architecture(
        lambda: transformers.Lfm2Config(
            **HYBRID,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            conv_dim=128,
            block_dim=128,
        ),
        "short convolutions beside attention",
        options=CACHING | RIGHT_ROPE,
        tolerance=1e-4,
    ),
    "Granite 4": Architecture(
        lambda: transformers.GraniteMoeHybridConfig(
            **HYBRID,
            layer_types=["mamba", "mamba", "mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=32,
            mamba_n_groups=1,
            mamba_chunk_size=64,
            shared_intermediate_size=256,
            num_local_experts=0,
            num_experts_per_tok=0,
        ),
        "Mamba 2 beside attention",
        options=CACHING,
    ),
}
HYBRIDS = (
    WITH_PREFIX_CACHE
    | {
        f"{name}, no prefix cache": replace(
            one,
            options=one.options | {"enable_prefix_caching": False, "max_num_batched_tokens": BLOCK},
            special="the same without vLLM's own prefix caching, a request at a time",
            alone=True,
            no_handoff="want enable_prefix_caching",
        )
        for name, one in WITH_PREFIX_CACHE.items()
    }
    | {
        "Jamba": Architecture(
            lambda: transformers.JambaConfig(
                **HYBRID,
                attn_layer_period=4,
                attn_layer_offset=3,
                num_experts=1,
                num_experts_per_tok=1,
                mamba_d_state=16,
                use_mamba_kernels=False,
            ),
            "Mamba 1 beside attention",
            broken=True,
        ),
    }
)
"""By name, as the documentation has it."""
