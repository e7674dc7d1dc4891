"""A Llama that is rewritten with latent attention answers as before, and is blended as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from byte_tokens import encode
from decoder_models import make

from benchmarks.research import latent_model
from kvkit.adapters.huggingface.latent import LatentDecoder, decoder_of
from kvkit.lab.quality.judge import Judge
from kvkit.lab.quality.methods import method_named
from kvkit.lab.quality.tasks.registry import samples


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("llama").eval()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the rotation of every channel."""
    monkeypatch.setattr(latent_model, "SLOW", 0.0)


@pytest.mark.usefixtures("exact")
def test_it_computes_the_same(llama: Any, tmp_path: Path) -> None:
    latent_model.with_latents(llama).save_pretrained(tmp_path)
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(1, 300)[None]
    with torch.inference_mode():
        expected, actual = (model(tokens).logits for model in (llama, made))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("exact")
def test_it_is_blended_as_the_model_is(llama: Any) -> None:
    """Documents move by their rotary channels alone, and lose as much as the model's own K and V do."""
    methods = {name: method_named(name) for name in ("default .2", "naive")}
    found = []
    for model in (llama, latent_model.with_latents(llama)):
        judge = Judge(model)
        judge.lead = np.array([3], np.int32)
        [sample] = samples("retrieval", encode, 1, 512)
        found.append(judge.measure(sample, methods))
    of_llama, of_latents = found
    for name in ("default .2", "naive"):
        assert of_latents[name]["kl"] == pytest.approx(of_llama[name]["kl"], rel=0.01)
    assert of_llama["naive"]["kl"] > 1e-4


def test_channels_that_hardly_turn_are_in_the_latent(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_model, "SLOW", 10.0)
    parts = latent_model.parts_of(llama)
    kept = llama.model.rotary_emb.inv_freq[: parts.rotated] * latent_model.PROMPT_TOKENS
    assert 0 < parts.rotated < parts.head_dim // 2
    assert kept.min() > latent_model.SLOW
    made = latent_model.with_latents(llama)
    decoder = decoder_of(made)
    assert isinstance(decoder, LatentDecoder)
    assert decoder.rope.channels == parts.rotary
    assert (parts.rank - 1, parts.slow) == (
        parts.kv_heads * (parts.head_dim + parts.slow),
        made.config.qk_nope_head_dim,
    )
