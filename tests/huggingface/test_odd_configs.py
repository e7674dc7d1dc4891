"""Commands report in one sentence a model whose config transformers refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import QWEN, save_with_tokenizer
from typer.testing import CliRunner

from kvkit.cli import app

COMMANDS = (
    "doctor --blend {model}",
    "doctor --precision int8 {model}",
    "bench blend --model {model} --samples 1",
    "demo --model {model}",
    "tune --model {model}",
)


@pytest.mark.parametrize(
    ("command", "field", "value"),
    [
        pytest.param(
            command,
            field,
            value,
            # the demo begins with a process of its own, which takes long
            marks=[pytest.mark.nightly] if command.startswith("demo") else [],
        )
        for command in COMMANDS
        for field, value in (
            ("num_hidden_layers", "four"),
            ("layer_types", ["full_attention"]),
            ("vocab_size", None),
        )
    ],
)
def test_a_config_that_is_refused_ends_in_a_sentence(
    command: str, field: str, value: object, tmp_path: Path
) -> None:
    config = QWEN.to_dict() | {field: value, "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, [word.format(model=tmp_path) for word in command.split()])
    assert done.exit_code != 0
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    words = " ".join(done.output.split())
    assert "Traceback" not in words
    assert tmp_path.name in words.replace(" ", "")
    assert field in words


NO_ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}
FOUR_BITS = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


@pytest.mark.parametrize(
    ("command", "change", "words"),
    [
        ("doctor --blend {model}", NO_ROTATION, "cannot be measured: inv_freq: 16 values"),
        ("doctor --blend {model}", None, "cannot be measured: the text has 0 tokens"),
        ("doctor --precision int8 {model}", None, "cannot be measured: the text has 0 tokens"),
        ("bench blend --model {model} --samples 1", None, "cannot be measured: the text has 0 tokens"),
        ("doctor --blend {model}", FOUR_BITS, "cannot be loaded: ImportError: Using `bitsandbytes`"),
    ],
)
def test_a_model_that_loads_and_cannot_be_measured_ends_in_a_sentence(
    command: str,
    change: dict[str, object] | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another config, or (None) without a tokenizer."""
    model = save_with_tokenizer(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = model / "config.json"
    if change is None:
        for file in model.glob("tokenizer*"):
            file.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    done = CliRunner().invoke(app, [word.format(model=model) for word in command.split()])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), done.exception
    assert words in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_nothing_is_measured_that_cannot_be_kept(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    done = CliRunner().invoke(app, [word.format(model=tmp_path) for word in command.split()])
    assert done.exit_code == 1
    assert "a verdict could not be kept: [Errno 20] Not a directory: '/dev/null/kvkit" in done.stderr
    assert "set XDG_CACHE_HOME" in done.stderr
