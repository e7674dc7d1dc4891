"""A small model whose next token rests mostly on the last one, and drafts for it that often guess it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from small_models import COMMON
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config
from vllm.config.speculative import SpeculativeMethod

LAYERS = 3
SIZES: dict[str, Any] = COMMON | {
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
DRAFTED = 3
"""Tokens that are drafted each time."""

Tensors = dict[str, torch.Tensor]


def target(folder: Path, config: type[PretrainedConfig] = LlamaConfig, **fields: Any) -> Path:
    """Make the model that answers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES | fields), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(24.0)
    model.save_pretrained(folder)
    return folder


def draft_model(answers: Path, folder: Path) -> Path:
    """Make a model that drafts by itself: the first layer of the one that answers."""
    model = AutoModelForCausalLM.from_pretrained(answers)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder)
    return folder


def eagle(answers: Path, folder: Path) -> Path:
    """Make an EAGLE head: one layer over the next token's embedding and a little of what was computed."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(folder)
    held = load_file(answers / "model.safetensors")
    made = {name.removeprefix("model."): tensor for name, tensor in held.items() if ".layers.0." in name}
    del made["layers.0.input_layernorm.weight"]  # an EAGLE head has none
    made["embed_tokens.weight"] = held["model.embed_tokens.weight"]
    made["fc.weight"] = torch.cat(_mixed(), dim=1)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def eagle3(answers: Path, folder: Path) -> Path:
    """Make an EAGLE-3 head: one layer over the next token's embedding and what three layers computed."""
    sizes = SIZES | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    LlamaConfig(**sizes, draft_vocab_size=SIZES["vocab_size"]).save_pretrained(folder)
    held, layer, size = load_file(answers / "model.safetensors"), "model.layers.0.", SIZES["hidden_size"]
    made = {n.replace(layer, "midlayer."): tensor for n, tensor in held.items() if n.startswith(layer)}
    for name in (f"midlayer.self_attn.{kind}_proj.weight" for kind in "qkv"):
        made[name] = torch.cat([made[name]] * 2, dim=1)
    made["midlayer.hidden_norm.weight"], made["norm.weight"] = torch.ones(size), torch.ones(size)
    made["fc.weight"], made["lm_head.weight"] = torch.eye(size).repeat(1, 3), held["lm_head.weight"]
    save_file({n: t.clone() for n, t in made.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def medusa(answers: Path, folder: Path) -> Path:
    """Make Medusa heads, which have no KV: each guesses what the model says next."""
    size, words = SIZES["hidden_size"], SIZES["vocab_size"]
    fields = {"hidden_size": size, "vocab_size": words, "num_heads": DRAFTED, "num_hidden_layers": 1}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", **fields}))
    head = load_file(answers / "model.safetensors")["lm_head.weight"]
    made = {f"{i}.0.linear.weight": torch.zeros(size, size) for i in range(DRAFTED)}
    made |= {f"{i}.1.weight": head.clone() for i in range(DRAFTED)}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_mtp(folder: Path) -> Path:
    """Make a MiMo: a model that answers, with a layer for multi-token prediction."""
    target(folder, Qwen2Config, num_nextn_predict_layers=1, architectures=["MiMoForCausalLM"])
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen2ForCausalLM", "MiMoForCausalLM"))
    path = folder / "model.safetensors"
    held = load_file(path)
    layer, ones = "model.mtp_layers.0.", torch.ones(SIZES["hidden_size"])
    made = {n.replace("model.layers.0.", layer): t.clone() for n, t in held.items() if ".layers.0." in n}
    made |= {f"{layer}{name}_layernorm.weight": ones.clone() for name in ("token", "hidden", "final")}
    made[f"{layer}input_proj.weight"] = torch.cat(_mixed()[::-1], dim=1)
    save_file(held | made, path, {"format": "pt"})
    return folder


def _mixed() -> tuple[torch.Tensor, torch.Tensor]:
    """What is taken of the next token's embedding, and of what the model computed of the one before."""
    size = SIZES["hidden_size"]
    return torch.eye(size), 0.1 * torch.eye(size)


def _speculation(method: str, **fields: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": DRAFTED} | fields


def made(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model that answers, and vLLM's `speculative_config` with a draft of a kind of `KINDS`."""
    return KINDS[kind](folder)


def _ngram(folder: Path) -> tuple[Path, dict[str, Any]]:
    return target(folder / "model"), _speculation("ngram", prompt_lookup_min=1, prompt_lookup_max=3)


def _draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    answers = target(folder / "model")
    return answers, _speculation("draft_model", model=str(draft_model(answers, folder / "draft")))


def _eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    answers = target(folder / "model")
    return answers, _speculation("eagle", model=str(eagle(answers, folder / "draft")))


def _eagle3(folder: Path) -> tuple[Path, dict[str, Any]]:
    answers = target(folder / "model")
    return answers, _speculation("eagle3", model=str(eagle3(answers, folder / "draft")))


def _medusa(folder: Path) -> tuple[Path, dict[str, Any]]:
    answers = target(folder / "model")
    return answers, _speculation("medusa", model=str(medusa(answers, folder / "draft")))


def _mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    return with_mtp(folder / "model"), _speculation("mtp", num_speculative_tokens=1)


KINDS: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "ngram": _ngram,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mtp": _mtp,
}
"""By vLLM's name of the method."""
if "medusa" not in get_args(SpeculativeMethod):  # vLLM 0.33 has none
    del KINDS["medusa"]


def layer_numbers(runner: Any) -> dict[str, int]:
    """Which layer of kvkit's layout is which of vLLM's: for an engine's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found: dict[str, int] = get_kv_transfer_group()._worker._context.layers
    return found
