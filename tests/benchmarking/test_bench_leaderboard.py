"""The leaderboard's commands, as its page shows them, measure every method, and its tables show that."""

from __future__ import annotations

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
    small |= {"--samples 50": "--samples 1", "--tokens 1024": "--tokens 512"}
    page = on_page("docs/evidence/leaderboard.md", "python -m benchmarks.research.leaderboard smollm2")
    (command,) = leaderboard.commands(words_of(changed(page, small))[3:])
    command.remove("--answered")  # its model answers nothing
    measure(*command)
    (path,) = tmp_path.glob(f"leaderboard-{slug_of(folder.name)}-512-*.json")
    found = json.loads(path.read_text())
    assert found["model"] == folder.name
    assert found["sets"]["needle keys"].keys() == {"full", *leaderboard.methods_at(512)}
    (heads, *rows), (tasks, *_) = leaderboard.methods([found]), leaderboard.tasks([found])
    assert len(rows) == len(leaderboard.methods_at(512))
    assert {len(row) for row in rows} == {len(heads)}
    assert tasks == ["model, tokens", "method", "needle keys"]
    for shown in found["overall"].values():  # as if full recompute had answered
        shown |= {"kept": 0.5, "kept_interval": [0.2, 0.8]}
    leaderboard.draw(found, tmp_path / "board.png")
    assert (tmp_path / "board.png").read_bytes()[:4] == b"\x89PNG"


def test_details_are_measured_as_the_page_has_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sample and task, of one small model."""
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    small = {"smollm2": f"{folder} --tasks 'needle keys' --auxiliary {folder}"}
    small |= {"--samples 20": "--samples 1 --tokens 512"}
    page = on_page("docs/evidence/leaderboard.md", "python -m benchmarks.research.leaderboard --details")
    (command,) = leaderboard.commands(words_of(changed(page, small))[3:])
    command.remove("--answered")
    measure(*command)
    (path,) = tmp_path.glob(f"blend-details-{slug_of(folder.name)}-512-*.json")
    found = json.loads(path.read_text())
    assert found["overall"].keys() == {"full", *leaderboard.details_at(512)}


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_every_method_of_a_paper_is_measured_at_equal_rows(tokens: int) -> None:
    board = [method_named(name) for name in leaderboard.methods_at(tokens)]
    every = [*board, *(method_named(name) for name in leaderboard.details_at(tokens))]
    assert {one.selection.method for one in every} >= registry.METHODS.keys() - {"v_deviation"}
    documents = tokens // 256
    reused = {"prefix": documents - 1, "alone": documents}
    rows = {
        one.selection.ratio * reused[one.context]
        for one in board
        if one.context in reused and one.selection.ratio and not one.imitates
    }
    assert max(rows) == pytest.approx(min(rows), rel=0.01)


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
