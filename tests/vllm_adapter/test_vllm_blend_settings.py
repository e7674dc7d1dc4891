"""A request's blend settings are read, and only a model that passed `kvkit doctor --blend` is blended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from small_models import QWEN
from test_vllm_identity import flip, name_commit, vllm_config
from transformers import AutoModelForCausalLM
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_engine import BLOCK

from kvkit.adapters.vllm.blending.requests import BlendRequest, read
from kvkit.adapters.vllm.connector import KVKitConnector
from kvkit.adapters.vllm.gate import check_model, check_precision
from kvkit.adapters.vllm.marks import Marks
from kvkit.adapters.vllm.scheduler_side import _check_models
from kvkit.adapters.vllm.settings import BlendSettings, Settings
from kvkit.blend import gate
from kvkit.blend.gate import Context
from kvkit.blend.plan import BlendError, Selection, split
from kvkit.config import load_config
from kvkit.lab.quality.verdicts import served_names
from kvkit.settings import ConfigError
from kvkit.transfer import precision

PROMPT = list(range(10, 50))
MARKS = Marks.of(("<d>", "</d>"), {"<d>": [1, 2], "</d>": [3]}.__getitem__)


def request(blend: Any = None, prompt: list[int] | None = None, **fields: Any) -> SimpleNamespace:
    """What vLLM's request has of it."""
    plain = {
        "kv_transfer_params": None if blend is None else {"blend": blend},
        "prompt_token_ids": prompt or PROMPT,
        "prompt_embeds": None,
        "mm_features": [],
        "pooling_params": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**plain | fields)


def test_a_request_says_where_its_documents_stand_and_what_is_computed_again() -> None:
    asked = {"documents": [[4, 9], [9, 20]], "prefix": 4, "ratio": 0.3, "method": "first_n"}
    found = read(request(asked), BlendSettings())
    assert found == BlendRequest(((4, 9), (9, 20)), 4, Selection("first_n", 0.3))
    found = read(request(asked | {"joints": [[], [7, 8]]}), BlendSettings())
    assert found == BlendRequest(((4, 9), (9, 20)), 4, Selection("first_n", 0.3), ((), (7, 8)))


def test_what_it_leaves_out_is_as_the_settings_say() -> None:
    settings = BlendSettings(ratio=0.25, methods=("first_n",), coverage=0.8, drift=0.25)
    for asked, drift in (({}, 0.25), ({"drift": 0.0}, 0.0)):
        selection = Selection("first_n", 0.25, coverage=0.8, drift=drift)
        expected = BlendRequest(((0, 9),), 0, selection)
        assert read(request({"documents": [[0, 9]], **asked}), settings) == expected


@pytest.mark.parametrize(
    ("asked", "first_n"),
    [({}, 8), ({"ratio": 0.0}, 0), ({"first_n": 3}, 3), ({"ratio": 0.0, "first_n": 3}, 3)],
)
def test_of_a_ratio_of_nothing_no_token_is_computed_again_that_is_not_asked_for(
    asked: dict[str, Any], first_n: int
) -> None:
    found = read(request({"documents": [[0, 9]], **asked}), BlendSettings())
    assert found is not None
    assert (found.selection.ratio, found.selection.first_n) == (asked.get("ratio", 0.15), first_n)


@pytest.mark.parametrize(
    ("blend", "told"),
    [
        (3, r"blend = 3: want false, or an object of documents, joints, prefix, ratio, method"),
        ({"document": [[0, 9]]}, r"blend\.document: unknown setting; did you mean 'documents'\?"),
        ({}, r"blend\.documents: want \[\[start, stop\], \.\.\.\]: .* has no marks"),
        ({"documents": [[0, 9, 11]]}, r"blend\.documents: \[0, 9, 11\]: want \[start, stop\]"),
        ({"documents": [[0, 9.5]]}, r"blend\.documents\.0\.1 = 9\.5: .*integer"),
        ({"documents": [[0, True]]}, r"blend\.documents\.0\.1 = True: .*integer"),
        ({"documents": [[9, 9]]}, r"\[9, 9\]: want \[start, stop\] in order, apart, not empty"),
        ({"documents": [[4, 9], [8, 12]]}, r"\[8, 12\]: want \[start, stop\] in order"),
        ({"documents": [[4, 41]]}, r"\[4, 41\]: want .* within 40 tokens"),
        ({"documents": [[4, 9]], "prefix": 5}, r"\[4, 9\]: want .* after the prefix of 5"),
        ({"documents": [[4, 9]], "prefix": -1}, r"blend\.prefix = -1: .*greater than or equal to 0"),
        ({"documents": [[4, 9]], "ratio": 2}, r"blend\.ratio = 2: .*less than or equal to 1"),
        ({"documents": [[4, 9]], "ratio": 0.05}, r"blend\.ratio = 0\.05: want at least 0\.1"),
        ({"joints": [[1]]}, r"blend\.joints: want kv_transfer_params\.blend\.documents with them"),
        ({"documents": [[4, 9]], "joints": [[1], [2]]}, r"blend\.joints: 2, want one for each of 1 docum"),
        (
            {"documents": [[4, 9]], "joints": [[-1]]},
            r"blend\.joints\.0\.0 = -1: .*greater than or equal to 0",
        ),
        ({"documents": [[4, 9]], "joints": [[1] * 41]}, r"blend\.joints: want fewer tokens than the 40 of"),
        (
            {"documents": [[i, i + 1] for i in range(4)]},
            r"blend: 4 documents: want at most kv_connector_extra_config\.blend\.max_documents = 3",
        ),
        (
            {"documents": [[4, 9]], "method": "k_deviation"},
            r"method = 'k_deviation': want one of prophetkv",
        ),
    ],
)
def test_every_mistake_is_named(blend: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(request(blend), BlendSettings(least_ratio=0.1, max_documents=3))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mm_features": [object()]}, "media"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streamed"),
        ({"skip_reading_prefix_cache": True}, "logprobs of the prompt"),
        ({"kv_transfer_params": {"blend": {}, "do_remote_decode": True}}, "a handoff"),
    ],
)
def test_what_cannot_be_blended_is_refused_only_if_it_asks(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"blend: not with .*{told}"):
        read(request(**{"blend": {}} | fields), BlendSettings())
    params = {
        "kv_transfer_params": {k: v for k, v in fields.get("kv_transfer_params", {}).items() if k != "blend"}
    }
    assert read(request(**fields | params), BlendSettings(split=True), MARKS) is None


def test_documents_are_what_stands_between_marks() -> None:
    prompt = [9, 1, 2, 50, 51, 3, 7, 1, 2, 60, 3, 1, 2, 70]
    found = read(request(prompt=prompt), BlendSettings(), MARKS)
    assert found is not None
    assert [prompt[start:stop] for start, stop in found.documents] == [[50, 51], [60]]
    assert found.prefix == 3, "what stands before the first"
    after = read(request({"prefix": 4}, prompt), BlendSettings(), MARKS)
    assert after is not None
    assert (after.documents, after.prefix) == (((9, 10),), 4)
    assert read(request(False, prompt), BlendSettings(), MARKS) is None
    assert read(request(prompt=[5, 6, 7]), BlendSettings(), MARKS) is None


def test_documents_between_marks_may_have_been_computed_alone() -> None:
    """Behind what the tokenizer puts before every text; a request may say otherwise."""
    prompt = [9, 1, 2, 50, 51, 3]
    for lead, prefix in (([9], 1), ([], 0), ([8], 0), ([9, 2], 0), (None, 3)):
        found = read(request(prompt=prompt), BlendSettings(), MARKS, lead)
        assert found is not None
        assert (found.documents, found.prefix) == (((3, 5),), prefix)
    found = read(request({"prefix": 2}, prompt), BlendSettings(), MARKS, [9])
    assert found is not None
    assert found.prefix == 2


def test_marks_are_whole_tokens() -> None:
    """No part of an id, or of two, is taken for one."""
    assert not list(MARKS.documents([1 << 8, 2 << 8, 3 << 8, 1, 2 << 16, 3]))
    with pytest.raises(ConfigError, match=r"marks = \('a', ''\): want texts that have tokens"):
        Marks.of(("a", ""), lambda text: [5] * len(text))


def test_without_marks_a_prompt_is_cut_by_its_content_where_the_settings_say_so() -> None:
    prompt = np.random.default_rng(0).integers(0, 1000, 700).tolist()
    found = read(request(prompt=prompt), BlendSettings(split=True))
    assert found is not None
    assert [start for start, _ in found.documents] == split(prompt).tolist()[:-1]
    assert read(request(prompt=prompt), BlendSettings()) is None


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
