"""Models whose config transformers refuses: every command that reads one says so in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import QWEN
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
    ("field", "value"),
    [("num_hidden_layers", "four"), ("layer_types", ["full_attention"]), ("vocab_size", None)],
)
@pytest.mark.parametrize("command", COMMANDS)
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
