"""SmolLM2 rewritten with latent attention (MLA): the same answers, and a latent per token as KV.

    python -m benchmarks.research.leaderboard smollm2-latent

No trained model with latent attention is small enough for a CPU. As in TransMLA (Meng et al.,
https://arxiv.org/abs/2502.07864), grouped-query attention is a latent attention: V is the latent, and the K
of all KV heads are the rotary channels, which queries of a head read at their own KV head's place. Channels
that hardly turn within a prompt move from the rotary part to the latent, as keys without a position.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvkit.adapters.huggingface import smollm2
from kvkit.environment import cache_folder
from kvkit.lab.files import load_model

NAME = "smollm2-latent"
SLOW = 0.3
"""Radians that a pair of channels turns at most in `PROMPT_TOKENS`, if it loses its rotation."""
PROMPT_TOKENS = 4096
CONSTANT = 1e4
"""A channel of the latent before its norm, so large that the norm divides by the same number everywhere."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Split of the channels of a Llama's KV heads into a latent and rotary channels.

    Args:
        heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: channels of a head; channel j turns with channel j + head_dim / 2.
        rotated: number of pairs that are rotated, the first of a head.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int

    @property
    def slow(self) -> int:
        """Number of a head's channels without rotation."""
        return self.head_dim - 2 * self.rotated

    @property
    def rank(self) -> int:
        """Channels of the latent: V, keys without rotation, and a constant."""
        return self.kv_heads * (self.head_dim + self.slow) + 1

    @property
    def rotary(self) -> int:
        """Rotary channels of a token: those of all KV heads."""
        return self.kv_heads * 2 * self.rotated

    def split(self, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the rows of a head, [head_dim, E], in those without rotation and rotated pairs, [2, R, E]."""
        pairs = head.unflatten(0, (2, -1))
        return pairs[:, self.rotated :].flatten(0, 1), pairs[:, : self.rotated]


def parts_of(model: Any) -> Parts:
    """Return the parts into which the KV of a model goes."""
    config, frequencies = model.config, model.model.rotary_emb.inv_freq
    rotated = int((frequencies * PROMPT_TOKENS > SLOW).sum())
    return Parts(config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotated)


def latent_attention(attention: Any, parts: Parts) -> dict[str, torch.Tensor]:
    """Return the weights of a latent attention that computes what a Llama's `attention` does."""
    by_head = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (project.weight.unflatten(0, (-1, parts.head_dim)) for project in by_head)
    group, width = parts.heads // parts.kv_heads, q.shape[-1]
    scale = math.sqrt((parts.slow + parts.rotary) / parts.head_dim)
    queries = []
    for head in range(parts.heads):
        slow, rotated = parts.split(q[head])
        placed = torch.zeros(2, parts.kv_heads, parts.rotated, width)
        placed[:, head // group] = rotated
        queries.append(torch.cat([slow, placed.flatten(0, 2)]))
    slow_keys, rotated_keys = zip(*(parts.split(head) for head in k), strict=True)
    down = [*v, *slow_keys, torch.zeros(1, width), torch.stack(rotated_keys, 1).flatten(0, 2)]
    bias = torch.zeros(parts.rank + parts.rotary)
    bias[parts.rank - 1] = CONSTANT
    norm = torch.full([parts.rank], CONSTANT / math.sqrt(parts.rank))
    norm[-1] = 0.0
    up = torch.zeros(parts.heads, parts.slow + parts.head_dim, parts.rank)
    for head in range(parts.heads):
        first = head // group * parts.head_dim
        up[head, parts.slow :, first : first + parts.head_dim] = torch.eye(parts.head_dim)
        first = parts.kv_heads * parts.head_dim + head // group * parts.slow
        up[head, : parts.slow, first : first + parts.slow] = torch.eye(parts.slow)
    return {
        "q_proj.weight": scale * torch.cat(queries),
        "kv_a_proj_with_mqa.weight": torch.cat(down),
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.weight": attention.o_proj.weight,
        "o_proj.bias": torch.zeros(width),
    }


def latent_config(config: Any, parts: Parts, frequencies: torch.Tensor) -> Any:
    """Return the configuration of DeepSeek V3's kind for such a model; all layers are dense."""
    from transformers import DeepseekV3Config

    theta = 10_000.0
    standard = theta ** -(torch.arange(0, parts.rotary, 2).double() / parts.rotary)
    factors = (standard / frequencies[: parts.rotated].double().repeat(parts.kv_heads)).tolist()
    rope = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return DeepseekV3Config(
        **{name: getattr(config, name) for name in same},
        num_key_value_heads=config.num_attention_heads,
        first_k_dense_replace=config.num_hidden_layers,
        q_lora_rank=None,
        kv_lora_rank=parts.rank,
        qk_nope_head_dim=parts.slow,
        qk_rope_head_dim=parts.rotary,
        v_head_dim=parts.head_dim,
        attention_bias=True,
        rope_interleave=False,
        rope_parameters=rope,
    )


@torch.inference_mode()
def with_latents(model: Any) -> Any:
    """Return a model with latent attention that computes what a Llama does, but for the slow channels."""
    from transformers import DeepseekV3ForCausalLM

    parts = parts_of(model)
    made = DeepseekV3ForCausalLM(latent_config(model.config, parts, model.model.rotary_emb.inv_freq)).eval()
    weights: Mapping[str, torch.Tensor] = {
        name: weight for name, weight in model.state_dict().items() if ".self_attn." not in name
    }
    for number, layer in enumerate(model.model.layers):
        attention = latent_attention(layer.self_attn, parts)
        weights |= {f"model.layers.{number}.self_attn.{name}": weight for name, weight in attention.items()}
    made.load_state_dict(weights)
    return made


def fetch() -> Path:
    """Return the folder of SmolLM2 with latent attention and its tokenizer; the first call makes it."""
    folder = cache_folder() / "models" / NAME
    if not folder.exists():
        source = smollm2.fetch()
        _, model = load_model(str(source))
        with TemporaryDirectory(dir=folder.parent) as scratch:
            (made := Path(scratch) / "model").mkdir()
            with_latents(model).save_pretrained(made)
            for file in source.glob("*token*"):
                shutil.copy(file, made)
            made.rename(folder)
    return folder
