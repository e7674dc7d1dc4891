"""transformers' `generate` continues from the cache that a prefill ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import CONFIGS, config, prompt, random_model

from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.growing import ROUND_TOKENS, GrowingCache
from kvkit.adapters.huggingface.probe import probe_layout

TOKENS, NEW = 80, 12
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"num_return_sequences": 2, "do_sample": True, "seed": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "do_sample": False},
    "an assistant": {"assistant": True, "do_sample": False},
}

ASSISTED = ("prompt lookup", "an assistant")


def generated(model: Any, ids: torch.Tensor, kv: GrowingCache | None, way: str) -> list[list[int]]:
    options = dict(WAYS[way])
    torch.manual_seed(options.pop("seed", 0))
    if options.pop("assistant", False):
        options["assistant_model"] = random_model("gqa", 1)
    found = model.generate(
        ids,
        past_key_values=kv,
        max_new_tokens=NEW,
        pad_token_id=0,
        attention_mask=torch.ones_like(ids),
        **options,
    )
    return [list(map(int, row)) for row in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_goes_on_from_a_prefill(kind: str, way: str, tmp_path: Path) -> None:
    model, tokens = random_model(kind), prompt(TOKENS)
    ids = torch.from_numpy(tokens).long()[None]
    with CachedModel.open(model, config(tmp_path)) as cached:
        cached.generate(tokens, 1)
        cached.flush()
        prefill = cached.prefill(tokens)
    assert prefill.hit_tokens == {"memory": 64}
    if way in ASSISTED:
        prefill.kv.reset()  # transformers computes the whole prompt, whatever it is given
    prefill.kv.crop(-1)  # the last token is computed again: generate wants one to begin with
    assert generated(model, ids, prefill.kv, way) == generated(model, ids, None, way)


def filled(batch: int = 1) -> GrowingCache:
    layout = probe_layout(random_model("gqa"))
    kv = GrowingCache(layout, 8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for layer in kv.layers:
        layer.update(*torch.randn(2, 1, 2, 5, 24, generator=generator))
    kv.batch_repeat_interleave(batch)
    return kv


@pytest.mark.parametrize(("by", "left"), [(-2, 3), (-9, 0), (0, 5), (2, 2), (9, 5)])
def test_crop(by: int, left: int) -> None:
    kv, before = filled(), filled()
    kv.crop(by)
    assert kv.length == kv.get_seq_length() == left
    for layer, whole in zip(kv.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, whole.keys[:, :, :left])
        assert torch.equal(layer.values, whole.values[:, :, :left])
    more = torch.full((1, 2, 1, 24), 7.0)
    keys, values = kv.update(more, -more, 0)
    assert keys.shape == values.shape == (1, 2, left + 1, 24)
    assert keys[0, 0, -1, 0] == 7.0
    assert values[0, 1, -1, 23] == -7.0


def test_reset_leaves_nothing() -> None:
    kv = filled()
    kv.reset()
    assert kv.length == kv.get_seq_length() == 0
    assert kv.layers[0].keys.shape == (1, 2, 0, 24)


def test_sequences_are_repeated_chosen_and_grow() -> None:
    kv = filled(3)
    for row, layer in enumerate(kv.layers):
        layer.room_k[:, 0, 0, 0] = torch.arange(3.0) + row
    kv.reorder_cache(torch.tensor([2, 0, 0]))
    kv.batch_select_indices(torch.tensor([0, 2]))
    for row, layer in enumerate(kv.layers):
        assert layer.keys[:, 0, 0, 0].tolist() == [2.0 + row, float(row)]
    before = kv.layers[0].keys.clone()
    keys, _ = kv.update(*torch.randn(2, 2, 2, ROUND_TOKENS, 24), 0)
    assert keys.shape == (2, 2, 5 + ROUND_TOKENS, 24)
    assert torch.equal(keys[:, :, :5], before)


def test_what_is_prefilled_may_be_written_to(tmp_path: Path) -> None:
    """Outside of inference mode, as transformers does."""
    with CachedModel.open(random_model("gqa"), config(tmp_path)) as cached:
        prefill = cached.prefill(prompt(TOKENS))
    with torch.no_grad():
        prefill.kv.layers[0].keys.mul_(2.0)
    assert not prefill.logits.is_inference()
