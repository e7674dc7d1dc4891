"""Models with latent attention (MLA) are blended: their rows are the model's own, moved latents are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from byte_tokens import encode
from decoder_models import LATENT, make
from random_models import random_model

from kvkit.adapters.huggingface.blended import BlendedModel, HuggingFaceDecoder
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.latent import LatentDecoder, decoder_of
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.blend.plan import BlendError, Selection
from kvkit.config import load_config
from kvkit.format.rope import Rope
from kvkit.kernels.pages import reference
from kvkit.lab.quality.judge import Judge
from kvkit.lab.quality.methods import Method, method_named
from kvkit.lab.quality.tasks.registry import samples

KINDS = ("deepseek_v2", "deepseek_v3", "youtu", "glm4_moe_lite")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def test_its_rows_are_the_models(model: Any) -> None:
    """The constructor compares K, V and logits; all of a prompt's rows give the model's answer."""
    decoder = decoder_of(model)
    assert isinstance(decoder, LatentDecoder)
    judge, everything = Judge(model), {"all": Method(Selection(ratio=1.0))}
    judge.lead = np.array([3], np.int32)
    [sample] = samples("retrieval", encode, 1, 512)
    found = judge.measure(sample, everything | {"naive": method_named("naive")})
    assert abs(found["all"]["kl"]) < 1e-5 < found["naive"]["kl"]
    assert found["all"]["top1"] == 1


def test_latents_that_are_moved_are_those_of_the_new_place(model: Any) -> None:
    """In layer 0 a token's KV depends on nothing but its position."""
    decoder, layout = decoder_of(model), probe_layout(model)
    tokens = np.arange(1, 31, dtype=np.int32)
    caches = []
    for before in (0, 9):
        kv = GrowingCache(layout, 40, torch.device("cpu"))
        ids = np.concatenate([np.full(before, 7, np.int32), tokens])
        with torch.inference_mode():
            model(torch.from_numpy(ids.astype(np.int64))[None], past_key_values=kv, use_cache=True)
        caches.append((kv.layers[0].keys[:, :, before:], kv.layers[0].values[:, :, before:]))
    (k, v), (k_there, v_there) = caches
    moved_k, moved_v = decoder.moved(k, v, np.full(len(tokens), 9))
    assert torch.equal(moved_k, k)
    torch.testing.assert_close(moved_k, k_there, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved_v, v_there, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(v, v_there, atol=1e-3)


def test_records_of_latents_turn_their_rotary_channels_alone() -> None:
    """As engines keep them: latent and rotary channels of a token side by side."""
    decoder = decoder_of(make("deepseek_v3"))
    latent, rotary = torch.randn(1, 1, 12, LATENT["kv_lora_rank"]), torch.randn(1, 1, 12, 8)
    rope = decoder.attention(0).rope
    assert rope.first == LATENT["kv_lora_rank"]
    shifts = np.arange(12)
    k, v = decoder.moved(latent, rotary, shifts)
    table = torch.from_numpy(rope.delta_table(shifts))
    together = reference.rotate(torch.cat([latent, rotary], -1), table, rope)
    torch.testing.assert_close(together, torch.cat([k, v], -1))
    assert isinstance(rope, Rope)


def test_a_model_like_llama_has_the_other_decoder_and_tiers_refuse_latents() -> None:
    assert type(decoder_of(random_model("gqa"))) is HuggingFaceDecoder
    with pytest.raises(BlendError, match="model type 'qwen3': Qwen3Attention lacks kv_a_proj_with_mqa"):
        LatentDecoder(random_model("gqa"))
    config = load_config(chunk_tokens=8, staging="8MiB", tiers={"memory": {"capacity": "4MiB"}})
    with pytest.raises(BlendError, match=r"'deepseek_v3': DeepseekV3Attention lacks .*, not Llama-like"):
        BlendedModel.open(make("deepseek_v3"), config, unchecked=True)
