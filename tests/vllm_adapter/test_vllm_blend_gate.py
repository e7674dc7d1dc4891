"""Blending in vLLM is enabled only by a `kvkit doctor --blend` verdict on the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from small_models import QWEN
from test_vllm_identity import flip, name_commit, vllm_config
from transformers import AutoModelForCausalLM
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_engine import BLOCK

from kvkit.adapters.vllm.connector import KVKitConnector
from kvkit.adapters.vllm.gate import check_model, check_precision
from kvkit.adapters.vllm.scheduler_side import _check_models
from kvkit.adapters.vllm.settings import BlendSettings, Settings
from kvkit.blend import gate
from kvkit.blend.gate import Context
from kvkit.blend.plan import BlendError, Selection
from kvkit.config import load_config
from kvkit.lab.quality.verdicts import served_names
from kvkit.settings import ConfigError
from kvkit.transfer import precision

UNLESS = "blend.unchecked = true"
COMMIT = "a" * 40
HUB = SimpleNamespace(_commit_hash=COMMIT)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a folder, which was measured and passed."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(QWEN).save_pretrained(folder)
    gate.keep(served_names(str(folder), None), Selection(), "prefix", {"passed": True})
    return folder


def starts(model: Path, **blend: Any) -> None:
    """Make the scheduler's connector of an engine that blends."""
    config = vllm_config(model)
    config.kv_transfer_config.kv_connector_extra_config["blend"] = blend
    make_scheduler(config)


def make_scheduler(config: Any) -> None:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)]
    )
    KVKitConnector(config, KVConnectorRole.SCHEDULER, caches)


def check(model: Path, ratio: float = 0.15) -> None:
    check_model(vllm_config(model), Selection(ratio=ratio), UNLESS)


def test_a_model_that_passed_is_blended_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    check(model)
    check(model, ratio=0.3)
    check(Path(shutil.copytree(model, tmp_path / "elsewhere")))
    (model / "tokenizer_config.json").write_text("{}")
    check(model)


def test_other_weights_and_another_config_were_not_measured(model: Path) -> None:
    weights, config = model / "model.safetensors", model / "config.json"
    flip(weights, weights.stat().st_size // 2)
    with pytest.raises(BlendError, match=r"not been measured.*kvkit doctor --blend MODEL.*blend\.unchecked"):
        check(model)
    flip(weights, weights.stat().st_size // 2)
    check(model)
    told = json.loads(config.read_text())
    config.write_text(json.dumps(told | {"transformers_version": "0"}))
    check(model)
    config.write_text(json.dumps(told | {"rms_norm_eps": 1e-3}))
    with pytest.raises(BlendError, match="not been measured"):
        check(model)


def test_an_engine_that_blends_starts_with_a_model_that_passed(model: Path) -> None:
    starts(model)
    starts(model, ratio=0.5, least_ratio=0.1)
    with pytest.raises(BlendError, match="measured with"):
        starts(model, ratio=0.1)
    with pytest.raises(BlendError, match="measured with"):
        starts(model, methods=["first_n", "question_attention"])
    gate.keep(served_names(str(model), None), Selection(), "alone", {"passed": False})
    with pytest.raises(BlendError, match=r"too much .*blend\.unchecked = true"):
        starts(model)
    starts(model, unchecked=True)


@pytest.mark.parametrize("context", ["prefix", "alone"])
def test_documents_have_the_context_that_was_found_better_unless_the_settings_say_otherwise(
    model: Path, context: Context
) -> None:
    gate.keep(served_names(str(model), None), Selection(), context, {"passed": True})
    assert check_model(vllm_config(model), Selection(), UNLESS) == context
    config = load_config(chunk_tokens=8, staging="8MiB", tiers={"memory": {"capacity": "4MiB"}})

    def context_of(**blend: Any) -> Context:
        return _check_models(vllm_config(model), Settings(blend=BlendSettings(**blend)), config)

    assert context_of() == context
    assert context_of(unchecked=True) == "prefix"
    assert context_of(context="alone") == context_of(context="alone", unchecked=True) == "alone"
    assert context_of(context="prefix") == "prefix"


def test_less_than_was_measured_is_refused(model: Path) -> None:
    with pytest.raises(BlendError, match=r"measured with .*0\.15.*, not .*0\.1,"):
        check(model, ratio=0.1)


def test_a_config_that_the_engine_changes_was_not_measured(model: Path) -> None:
    config = vllm_config(model, hf_overrides={"rms_norm_eps": 1e-3})
    with pytest.raises(BlendError, match=r"hf_overrides = \{'rms_norm_eps': 0\.001\}: .*blend\.unchecked"):
        check_model(config, Selection(), UNLESS)


def test_kv_of_fewer_bits_is_gated_by_the_same_weights(model: Path) -> None:
    config = vllm_config(model)
    kvkit = config.kv_transfer_config.kv_connector_extra_config["kvkit"]
    kvkit |= {"precision": "fp8", "unchecked_precision": True}
    make_scheduler(config)
    kvkit["unchecked_precision"] = False
    with pytest.raises(ConfigError, match=r"'fp8' has not been measured.*or set unchecked_precision = true"):
        make_scheduler(config)
    with pytest.raises(ConfigError, match=r"precision = 'fp8' has not been measured.*or set it"):
        check_precision(config, "fp8", "it")
    precision.keep(served_names(str(model), None), "fp8", {"passed": True})
    check_precision(config, "fp8", "it")
    with pytest.raises(ConfigError, match=r"hf_overrides = .*kvkit doctor --precision fp8 MODEL"):
        check_precision(vllm_config(model, hf_overrides={"rms_norm_eps": 1e-3}), "fp8", "it")
    latents = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    with pytest.raises(ConfigError, match=r"precision = 'fp8': this engine stores latents"):
        check_precision(latents, "fp8", "it")


def test_a_model_of_the_hub_is_its_commit(model: Path) -> None:
    config = vllm_config(model)
    name_commit(config, COMMIT)
    with pytest.raises(BlendError, match="not been measured"):
        check_model(config, Selection(), UNLESS)
    gate.keep(served_names("org/name", HUB), Selection(), "alone", {"passed": True})
    check_model(config, Selection(), UNLESS)
    name_commit(config, "b" * 40)
    with pytest.raises(BlendError, match="not been measured"):
        check_model(config, Selection(), UNLESS)
