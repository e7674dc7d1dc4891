"""Hugging Face models are cached only if their KV depends on the tokens before it alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cached_models import CONFIGS, SIZES, config, random_model
from decoder_models import make

from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.probe import check_fit, probe_layout
from kvkit.format.layout import LayoutError

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
SMALL = SIZES | {"num_hidden_layers": 2}
BERT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


def bart() -> Any:
    sizes = {"d_model": 64, "vocab_size": 300, "max_position_embeddings": 128}
    layers = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 96))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **layers, **heads)
    ).eval()


def of(made: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def training(module: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        model = random_model("gqa")
        module(model).train()
        return model

    return made


def scaled_by_batch() -> Any:
    """Activations of 8 bits whose scale is the largest one's of all tokens that are computed at once."""
    return torch.ao.quantization.quantize_dynamic(random_model("gqa"), {torch.nn.Linear}, dtype=torch.qint8)


class ByPiece(torch.nn.Linear):
    """Scaled by the first token of what is computed at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + x[:, :1].mean(-1, keepdim=True).abs())


def scaled_by_piece() -> Any:
    model = random_model("gqa").bfloat16()
    model.model.layers[0].self_attn.v_proj = ByPiece(64, 48, bias=False).bfloat16().eval()
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an encoder": (
        bart,
        "BartForConditionalGeneration: the KV of its decoder depends on what its encoder read",
    ),
    "both ways": (
        lambda: of(transformers.BertConfig(**BERT)),
        r"BertLMHeadModel: K and V of tokens depend on those behind them, .* want a causal model",
    ),
    "training": (
        training(lambda model: model),
        "Qwen3ForCausalLM: it is in training mode, .* want model.eval",
    ),
    "a layer in training": (
        training(lambda model: model.model.layers[1].mlp),
        r"Qwen3ForCausalLM: model\.layers\.1\.mlp is in training mode",
    ),
    "scales of activations": (
        scaled_by_batch,
        "Qwen3ForCausalLM: K and V of tokens depend on .* or scales of all activations",
    ),
    "scales of a piece": (
        scaled_by_piece,
        "K and V of the first layer computed in pieces, and at once, differ .* want at most 0.01",
    ),
    "a cache of its own": (
        lambda: of(
            transformers.MiniMaxConfig(
                **SMALL, **HEADS, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
            )
        ),
        "MiniMaxForCausalLM: it does not compute a token with .*: MiniMax uses cache of its own",
    ),
    "states that begin anew": (
        lambda: make("zamba"),
        "ZambaForCausalLM: states computed in pieces, and at once, differ .* states that begin anew",
    ),
    "states alone": (
        lambda: make("mamba"),
        "MambaForCausalLM: nothing is kept of all its layers; want K and V of each token",
    ),
    "more than tokens": (
        lambda: of(transformers.XmodConfig(**BERT, languages=["en_XX"], is_decoder=True)),
        "XmodForCausalLM: it does not compute a token with .*: ValueError: Input language unknown",
    ),
    "no cache": (
        lambda: of(transformers.OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=300)),
        "OpenAIGPTLMHeadModel: nothing is kept of all its layers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_kv_fits_no_other_prompt_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    made, words = REFUSED[kind]
    with pytest.raises(LayoutError, match=words):
        CachedModel.open(made(), config(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_rounding_is_no_difference(kind: str, dtype: torch.dtype) -> None:
    model = random_model(kind).to(dtype)
    check_fit(model, probe_layout(model))


def test_weights_of_8_bits_whose_activations_stay_are_cached(tmp_path: Path) -> None:
    model = torch.ao.quantization.quantize_dynamic(
        random_model("gqa"), {torch.nn.Linear}, dtype=torch.float16
    )
    with CachedModel.open(model, config(tmp_path)) as cached:
        first = cached.generate(range(5, 69), 4)
        assert cached.generate(range(5, 69), 4).tokens == first.tokens


def test_a_change_of_later_tokens_alone_is_seen_with_16_bits() -> None:
    """Random weights of which less than rounding shows in any one value."""
    model = of(transformers.BertConfig(**BERT)).bfloat16()
    with pytest.raises(LayoutError, match="bidirectional attention"):
        check_fit(model, probe_layout(model))
