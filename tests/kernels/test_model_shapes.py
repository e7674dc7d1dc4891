"""Shapes of models come from options and configs, and give the problems to tune."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvkit import cli
from kvkit.kernels.tuning.problems import ModelProblems
from kvkit.kernels.tuning.shapes import ModelShape, ShapeError, shapes_of, with_settings

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 42,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
PHI = LLAMA | {"model_type": "phi3", "hidden_size": 3072, "partial_rotary_factor": 0.75}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (LLAMA, [ModelShape(v_head=128, rotary=128)]),
        (
            GEMMA,
            [
                ModelShape(16, 8, 256, 256, layers=21, window=4096, softcap=50.0, rotary=256),
                ModelShape(16, 8, 256, 256, layers=21, softcap=50.0, rotary=256),
            ],
        ),
        (DEEPSEEK, [ModelShape(128, 1, 576, latent=512, layers=61)]),
        (PHI, [ModelShape(32, 8, 96, 96, rotary=72)]),
        (LLAMA | {"torch_dtype": "float16"}, [ModelShape(v_head=128, rotary=128, dtype="float16")]),
    ],
)
def test_a_config_says_its_shapes(tmp_path: Path, config: dict[str, Any], shapes: list[ModelShape]) -> None:
    folder = write(tmp_path, config)
    expected = tuple(replace(shape, name=tmp_path.name) for shape in shapes)
    assert shapes_of(folder) == shapes_of(f"{folder}/config.json") == expected


def test_a_model_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's client lays it out."""
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(snapshot, LLAMA)
    refs = tmp_path / "models--some--llama" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (shape,) = shapes_of("some/llama")
    assert (shape.name, shape.heads) == ("llama", 32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows=3", ("rows=3", "kv_heads", "dtype")),
        ("heads=many", ("heads=many", "int")),
        ("heads=30,kv_heads=7", ("heads=30", "kv_heads=7")),
        ("heads=0", ("heads=0", "at least 1")),
        ("window=-1", ("window=-1", "at least 0")),
        ("dtype=int4", ("dtype=int4", "bfloat16")),
        ("latent=512", ("latent=512", "head=128")),
        ("rotary=130", ("rotary=130", "128")),
    ],
)
def test_a_wrong_setting_is_named(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ShapeError) as error:
        with_settings(ModelShape(), text)
    for word in words:
        assert word in str(error.value)


def test_settings_replace_those_that_are_named() -> None:
    shape = with_settings(ModelShape(name="x", softcap=50.0), "heads=28, kv_heads=4,dtype=float16,softcap=30")
    assert shape == ModelShape(28, 4, dtype="float16", softcap=30.0, name="x")
    assert str(shape) == "x heads=28 kv_heads=4 dtype=float16 softcap=30.0"
    assert str(ModelShape()) == "Llama-3.1-8B"


ODD = ModelShape(heads=14, kv_heads=2, head=96, layers=2, block=64, dtype="float16", window=512, name="odd")


def test_the_problems_of_a_shape() -> None:
    problems = ModelProblems((ODD,))()
    assert len({problem.name for problem in problems}) == len(problems)
    assert {problem.names[0] for problem in problems} == {
        *("pack", "unpack", "blend_attention", "query_scores", "rope_scatter", "token_deviation")
    }
    for problem in problems:
        launches = problem.make(torch.device("cpu"), False).launches(problem.space[0])
        given = {}
        for launch in launches:
            given |= launch.arguments  # type: ignore[attr-defined]
        if problem.bucket.op == "attend":
            assert (given["GROUP"], given["SIZE"], given["PAGE"], given["WINDOWED"]) == (7, 96, 64, True)
        for name in ("q", "new", "k"):
            assert name not in given or given[name].dtype == torch.float16


def test_the_problems_of_a_latent() -> None:
    shape = ModelShape(heads=16, kv_heads=1, head=576, latent=512, layers=2)
    problems = ModelProblems((shape,))()
    (moved,) = (p for p in problems if p.name == f"rotate {shape}, 1 chunks")
    rope = moved.make(torch.device("cpu"), False).launches(None)[0].arguments  # type: ignore[attr-defined]
    assert rope is not None
    attention = [problem for problem in problems if problem.bucket.op == "attend"]
    assert all("SIZE=576" in problem.bucket.form for problem in attention)


def test_problems_can_be_sent_to_other_processes() -> None:
    """And are made once there, however often they are asked for."""
    factory = ModelProblems((ODD,))
    assert pickle.loads(pickle.dumps(factory))() is factory()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "head=0"), ("--shape head=0", "at least 1")),
        (("--model", "/nowhere"), ("--model /nowhere", "config.json")),
        (("--problems", "nowhere:f"), ("--problems nowhere:f", "module:function")),
        (("--problems", "json"), ("--problems json", "module:function")),
        (("--problems", "json:loads", "--shape", "head=64"), ("--problems", "--shape")),
    ],
)
def test_the_command_names_what_is_wrong(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, ["tune", "--target", "sm_90", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [({"model_type": "mamba"}, "num_attention_heads"), ({"model_type": "nothing"}, "want a config.json")],
)
def test_a_config_that_tells_too_little_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder = write(tmp_path, config)
    result = CliRunner().invoke(cli.app, ["tune", "--model", folder], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    assert words in result.stderr
