"""The leaderboard's commands, as its page shows them, measure every method, and its tables show that."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from page_blocks import changed, on_page, words_of
from random_models import save_with_bytes
from typer.testing import CliRunner

from benchmarks.research import leaderboard, lost_context
from kvkit import cli
from kvkit.blend.methods import registry
from kvkit.environment import slug_of
from kvkit.lab.quality.methods import method_named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_bytes("gqa", tmp_path_factory.mktemp("model"))


def measure(*arguments: str) -> None:
    """Call kvkit's command line."""
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output


def test_the_leaderboard_has_every_method_of_every_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/evidence/leaderboard.md has it, with one sample and task, of one small model."""
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    small = {"smollm2 qwen-0.5b": f"{folder} --tasks 'needle keys' --auxiliary {folder}"}
    small |= {"--samples 10": "--samples 1", "--tokens 1024": "--tokens 512"}
    page = on_page("docs/evidence/leaderboard.md", "python -m benchmarks.research.leaderboard smollm2")
    (command,) = leaderboard.commands(words_of(changed(page, small))[3:])
    command.remove("--answered")  # its model answers nothing
    measure(*command)
    (path,) = tmp_path.glob(f"leaderboard-{slug_of(folder.name)}-512-*.json")
    found = json.loads(path.read_text())
    assert found["model"] == folder.name
    assert found["sets"]["needle keys"].keys() == {"full", *leaderboard.methods_at(512)}
    methods = {method_named(name).selection.method for name in leaderboard.methods_at(512)}
    assert methods >= registry.METHODS.keys() - {"v_deviation"}
    (heads, *rows), (tasks, *_) = leaderboard.methods([found]), leaderboard.tasks([found])
    assert len(rows) == 1 + len(leaderboard.methods_at(512))
    assert {len(row) for row in rows} == {len(heads)}
    assert tasks == ["model, tokens", "method", "needle keys"]


def test_names_that_stand_together_are_drawn_apart() -> None:
    together = leaderboard.clusters({"c": 1.0, "a": 0.1, "b": 0.12})
    assert [list(names) for names in together] == [["a", "b"], ["c"]]
    places = leaderboard.spread([0.1, 0.11, 0.5, 0.5], 0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(places))
    assert sum(places) == pytest.approx(1.21)


@pytest.mark.nightly
def test_rows_against_answers(folder: Path, tmp_path: Path) -> None:
    """As docs/evidence/leaderboard.md has it, with a sample of a few tokens and a small model."""
    small = {"--tokens 4096": f"--tokens 512 --model {folder}", "--samples 4": "--samples 1"}
    small |= {"--json ": f"--json {tmp_path}/"}
    command = changed(on_page("docs/evidence/leaderboard.md", "kvkit bench blend --tokens 4096"), small)
    measure(*words_of(command)[1:])
    _, *rows = leaderboard.curve(json.loads((tmp_path / "blend-rows-4k.json").read_text()))
    shares = {name: float(rows.removesuffix("%")) for name, rows, *_ in rows}
    assert (
        shares["naive"] < shares["default .15"] == shares["default .15, drift"] < shares["default .80"] < 100
    )
    assert shares["default .15"] < shares["default .90, covering .9"] < shares["full"] == 100


@pytest.mark.nightly
def test_what_is_overpaid(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/evidence/leaderboard.md has it, with a sample of a few tokens and a small model."""
    page = on_page("docs/evidence/leaderboard.md", "python -m benchmarks.research.lost_context")
    words = [*words_of(page)[3:-1], str(tmp_path / "lost.json"), "--model", str(folder), "--samples", "1"]
    monkeypatch.setattr("sys.argv", ["lost_context", *words, "--tokens", "512", "768"])
    lost_context.main()
    (_, *tokens), (_, *exact), *_ = leaderboard.overpaid(json.loads((tmp_path / "lost.json").read_text()))
    assert tokens == ["512", "768"]
    assert all(0 < float(share.removesuffix("%")) <= 100 for share in exact)
