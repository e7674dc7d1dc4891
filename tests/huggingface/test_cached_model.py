"""Logits and text of Hugging Face models are the same with and without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cached_models import CONFIGS, SIZES, config, prompt, random_model

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.adapters.huggingface.steps import forward
from kvkit.format.layout import LayoutError
from kvkit.transfer.policy import RequestPolicy


@pytest.mark.parametrize("kind", CONFIGS)
def test_cached_and_uncached_logits_agree(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    tokens = prompt(75)
    expected = CachedModel(model, probe_layout(model), None).prefill(tokens)
    assert expected.computed_tokens == 75
    with torch.inference_mode():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    torch.testing.assert_close(expected.logits, theirs, rtol=1e-4, atol=1e-4)
    with CachedModel.open(model, config(tmp_path)) as cached:
        first = cached.prefill(tokens)
        assert first.hit_tokens == {}
        cached.store(tokens, first.kv)
        assert cached.cache is not None
        cached.cache.flush()
        again = cached.prefill(tokens)
        assert sum(again.hit_tokens.values()) == 64
        assert again.computed_tokens == 11
        torch.testing.assert_close(again.logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_text_is_identical_over_turns_and_processes(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    plain = CachedModel(model, probe_layout(model), None)
    history = prompt(40)
    for turn in range(3):
        # opened anew each turn: nothing but the disk carries over
        with CachedModel.open(model, config(tmp_path)) as cached:
            answer = cached.generate(history, 12)
        assert answer.tokens == plain.generate(history, 12).tokens
        if turn:
            assert sum(answer.hit_tokens.values()) >= (len(history) - 9) // 16 * 16 - 16
        history = np.concatenate([history, np.array(answer.tokens, np.int32), prompt(8, turn + 1)])


def test_generated_tokens_are_reused(tmp_path: Path) -> None:
    model = random_model("gqa")
    with CachedModel.open(model, config(tmp_path)) as cached:
        history = prompt(20)
        answer = cached.generate(history, 30)
        full = np.concatenate([history, np.array(answer.tokens, np.int32)])
        # 49 tokens have KV (the last one was only sampled): three whole chunks
        assert sum(cached.generate(full, 1).hit_tokens.values()) == 48


def test_a_whole_prompt_hit_still_computes_the_last_token(tmp_path: Path) -> None:
    model = random_model("mha")
    with CachedModel.open(model, config(tmp_path)) as cached:
        tokens = prompt(32)
        first = cached.generate(tokens, 4)
        again = cached.generate(tokens, 4)
        assert again.computed_tokens == 16
        assert again.tokens == first.tokens


def test_a_request_says_what_it_wants_of_the_cache(tmp_path: Path) -> None:
    with CachedModel.open(random_model("gqa"), config(tmp_path)) as cached:
        tokens = prompt(80)
        cached.generate(tokens, 4, policy=RequestPolicy(store_to=()))
        assert cached.prefill(tokens).hit_tokens == {}
        cached.generate(tokens, 4, policy=RequestPolicy(store_to=("disk",)))
        cached.flush()
        assert cached.prefill(tokens, policy=RequestPolicy(load_from=("memory",))).hit_tokens == {}
        found = cached.generate(tokens, 4, policy=RequestPolicy(max_load_tokens=40, store_to=()))
        assert found.hit_tokens == {"disk": 32}


def test_other_weights_under_the_same_name_share_nothing(tmp_path: Path) -> None:
    one, two = random_model("gqa", 0), random_model("gqa", 1)
    assert model_fingerprint(one) != model_fingerprint(two)
    tokens = prompt(64)
    with CachedModel.open(one, config(tmp_path)) as cached:
        cached.generate(tokens, 1)
    with CachedModel.open(two, config(tmp_path)) as cached:
        assert cached.generate(tokens, 1).hit_tokens == {}


def test_a_folder_is_its_last_part(tmp_path: Path) -> None:
    """So that machines that have the model elsewhere share."""
    spaces = []
    for place in ("here", "there"):
        random_model("gqa").save_pretrained(tmp_path / place / "model")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / place / "model")
        with CachedModel.open(model, config(tmp_path / "kv")) as cached:
            assert cached.cache is not None
            spaces.append(cached.cache.namespace)
    assert spaces[0] == spaces[1]
    assert spaces[0].model == "model"


def test_kv_grows_past_its_room(tmp_path: Path) -> None:
    model = random_model("gqa")
    plain = CachedModel(model, probe_layout(model), None)
    short = plain.prefill(prompt(250))
    room = short.kv.layers[0].room_k.shape[2]
    extra = prompt(room - 250 + 40, 9)
    logits = forward(plain.model, extra, short.kv)
    expected = plain.prefill(np.concatenate([prompt(250), extra])).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope"} | FACTORS], ids=str
)
def test_a_rotation_that_depends_on_the_length_of_the_prompt_is_refused(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    """What a short prompt stored would be wrong for a longer one, by as much as the logits themselves."""
    rotation = {"rope_parameters": rope | {"rope_theta": 1e4}}
    changing = transformers.LlamaConfig(**SIZES, num_attention_heads=4, head_dim=16, **rotation)
    model = transformers.AutoModelForCausalLM.from_config(changing)
    with pytest.raises(LayoutError, match=f"rope_type = '{rope['rope_type']}'"):
        CachedModel.open(model, config(tmp_path))


def test_a_rotation_with_equal_factors_at_every_length_is_kept(tmp_path: Path) -> None:
    factors = {"short_factor": [4.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    rotation = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | factors}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SIZES, num_attention_heads=4, head_dim=16, **rotation)
    ).eval()
    tokens = prompt(150)  # more than `original_max_position_embeddings`
    with CachedModel.open(model, config(tmp_path)) as cached:
        cached.generate(tokens[:60], 1)
        assert cached.cache is not None
        cached.cache.flush()
        answer = cached.prefill(tokens)
        assert sum(answer.hit_tokens.values()) == 48
    expected = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    torch.testing.assert_close(answer.logits, expected, rtol=1e-4, atol=1e-4)


def test_an_empty_prompt_is_an_error(tmp_path: Path) -> None:
    with CachedModel.open(random_model("mha"), config(tmp_path)) as cached:
        with pytest.raises(ValueError, match="the prompt is empty"):
            cached.generate([], 1)
        with pytest.raises(ValueError, match="max_new_tokens=0"):
            cached.generate([1], 0)


@pytest.fixture(scope="module")
def smollm() -> Any:
    folder = smollm2.fetch()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.nightly
def test_smollm2_over_processes(smollm: Any, tmp_path: Path) -> None:
    tokens = np.random.default_rng(3).integers(1000, 40_000, 300, np.int32)
    plain = CachedModel(smollm, probe_layout(smollm), None)
    expected = plain.generate(tokens, 8)
    with CachedModel.open(smollm, config(tmp_path, 64)) as cached:
        assert cached.generate(tokens, 8).tokens == expected.tokens
    with CachedModel.open(smollm, config(tmp_path, 64)) as cached:
        answer = cached.generate(tokens, 8)
        assert answer.hit_tokens == {"disk": 256}
        assert answer.tokens == expected.tokens
        hit = cached.prefill(tokens)
    torch.testing.assert_close(hit.logits, plain.prefill(tokens).logits, rtol=1e-3, atol=1e-3)
