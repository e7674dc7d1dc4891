"""The fingerprint of a Hugging Face model changes with whatever decides its KV."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached_models import CONFIGS, random_model

from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.settings import ConfigError


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_value_of_the_weights_and_of_the_buffers_counts(kind: str) -> None:
    """Wherever it is in its tensor."""
    model = random_model(kind)
    before, generator = model_fingerprint(model), random.Random(1)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        flat = tensor.detach().view(-1)
        for at in {len(flat) // 2, generator.randrange(len(flat))}:
            held = flat[at].item()
            flat[at] = held + 1.0
            assert model_fingerprint(model) != before, f"{name}[{at}]"
            flat[at] = held
    assert model_fingerprint(model) == before == model_fingerprint(random_model(kind))


def test_a_tensor_in_pieces_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("gqa")
    whole = model_fingerprint(model)
    monkeypatch.setattr("kvkit.adapters.huggingface.fingerprint._PIECE_ELEMENTS", 7)
    assert model_fingerprint(model) == whole


def test_a_config_counts_where_the_weights_are_the_same() -> None:
    model = random_model("gqa")
    before = model_fingerprint(model)
    model.config.rms_norm_eps *= 2
    assert model_fingerprint(model) != before


def test_a_config_may_have_keys_of_any_type() -> None:
    model = random_model("gqa")
    found = set()
    for factors in ({1: 0.5, "1": 2.0}, {1: 2.0, "1": 0.5}, {None: 0.5, (1, 2): 2.0}, {2: 1, 10: 2}):
        model.config.factors = factors
        found.add(model_fingerprint(model))
        model.config.factors = dict(reversed(factors.items()))
        found.add(model_fingerprint(model))
    assert len(found) == 4


def test_adapters_of_peft_are_refused_as_their_scales_are_not_known() -> None:
    """They are in no parameter and not in the config."""
    model = random_model("gqa")
    adapted = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[1].self_attn.q_proj = adapted(64, 96, bias=False)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj is a Linear of PEFT"):
        model_fingerprint(model)


def quantised(seed: int, dtype: torch.dtype) -> Any:
    """With packed weights, which are no parameters."""
    model = random_model("gqa", 0)
    torch.manual_seed(seed)
    with torch.no_grad():  # as merging an adapter does
        model.model.layers[2].self_attn.k_proj.weight.add_(torch.randn(48, 64))
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_packed_weights_count(dtype: torch.dtype) -> None:
    prints = [model_fingerprint(quantised(seed, dtype)) for seed in (1, 2, 1)]
    assert prints[0] != prints[1]
    assert prints[0] == prints[2]


class Halves(torch.Tensor):
    """A tensor that is made of two others, as those of torchao are: it has no bytes of its own."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)
        return made

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(given[0].high, given[0].low)
        raise NotImplementedError(function)


def test_a_tensor_counts_by_those_that_it_is_made_of() -> None:
    def of(low: float) -> str:
        model = random_model("gqa")
        held = model.model.layers[0].mlp.up_proj.weight
        made = Halves(held.detach().clone(), torch.full_like(held, low))
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(made, requires_grad=False)
        return model_fingerprint(model)

    assert of(1.0) == of(1.0) != of(2.0)


@pytest.mark.parametrize(
    "place", [lambda held: held, lambda held: {"scales": [held]}, lambda held: held.numpy()]
)
def test_tensors_among_a_modules_attributes_count(place: Callable[[torch.Tensor], Any]) -> None:
    def of(value: float) -> str:
        model = random_model("gqa")
        model.model.layers[1].mlp.kept = place(torch.full((3,), value))
        return model_fingerprint(model)

    assert of(1.0) == of(1.0) != of(2.0)


def test_a_state_that_a_module_adds_counts() -> None:
    class Scaled(torch.nn.Linear):
        scale = 1.0

        def get_extra_state(self) -> Any:
            return {"scale": self.scale}

        def set_extra_state(self, state: Any) -> None:
            self.scale = state["scale"]

    model = random_model("gqa")
    model.model.layers[0].mlp.up_proj = scaled = Scaled(64, 96)
    before = model_fingerprint(model)
    scaled.scale = 2.0
    assert model_fingerprint(model) != before


class Opaque(torch.nn.Module):
    """Weights that nobody can look into."""

    def get_extra_state(self) -> Any:
        return self.forward


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
            r"layers\.1\.mlp has a forward hook \(.*lambda",
        ),
        (
            lambda layer: layer.mlp.up_proj.register_forward_pre_hook(lambda *_: None),
            r"layers\.1\.mlp\.up_proj has a forward hook",
        ),
        (lambda layer: layer.to("meta"), r"layers\.1\..* is offloaded .*want a model that is in memory"),
        (
            lambda layer: layer.add_module("odd", Opaque()),
            r"layers\.1\.odd\._extra_state .*is a method, whose weights cannot be seen",
        ),
        (
            lambda layer: setattr(layer.mlp.up_proj, "weight", torch.nn.Parameter(torch.eye(4).to_sparse())),
            r"layers\.1\.mlp\.up_proj\.weight is a Parameter, whose weights cannot be seen",
        ),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(change: Callable[[Any], Any], words: str) -> None:
    model = random_model("gqa")
    change(model.model.layers[1])
    with pytest.raises(ConfigError, match=words):
        model_fingerprint(model)
