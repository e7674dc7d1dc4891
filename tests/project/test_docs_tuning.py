"""The kernel of docs/research/own-kernel.md is tuned on the CPU, checked, and compiled for a GPU."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from page_blocks import ROOT, check_printed, on_page, run_shell
from typer.testing import CliRunner

from kvkit import cli
from kvkit.kernels import tuning

HOST_SIZES = ("rows=4096", "rows=16", "rows=64", "rows=256", "rows=1024")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_kernels.py").write_text(on_page("docs/research/own-kernel.md", '"""my_kernels.py'))
    return tmp_path


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(folder)
    yield import_module("my_kernels")
    del sys.modules["my_kernels"]


@pytest.mark.nightly
def test_the_pages_commands(folder: Path) -> None:
    page, tables = "docs/research/own-kernel.md", {"KVKIT_TUNED": str(folder / "tuned")}
    printed = run_shell(
        on_page("docs/research/own-kernel.md", "kvkit tune --problems my_kernels:problems --device"),
        folder,
        **tables,
    ).stdout
    check_printed(page, "kvkit tune --problems my_kernels:problems --device", printed)
    (line,) = (text for text in printed.splitlines() if text.startswith("largest_host of 4096 rows: tuned"))
    tuned = line.split("; ")[1].partition(", ")[2]
    assert f"largest_host of 4096 rows: {tuned} takes" in printed  # as --explain says it
    assert tuned in HOST_SIZES
    with open(folder / "trials.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["config"] for row in rows] == list(HOST_SIZES)
    used = run_shell(on_page("docs/research/own-kernel.md", "python my_kernels.py"), folder, **tables).stdout
    check_printed(page, "python my_kernels.py", used)
    assert used.splitlines()[-1] == tuned
    compiled = run_shell(
        on_page("docs/research/own-kernel.md", "kvkit tune --problems my_kernels:problems --target"),
        folder,
        **tables,
    ).stdout
    check_printed(page, "kvkit tune --problems my_kernels:problems --target", compiled)


@pytest.mark.nightly
def test_the_first_commands_of_the_page_on_tuning(tmp_path: Path) -> None:
    commands = on_page("docs/research/tuning.md", "kvkit tune --device host")
    done = run_shell(commands, tmp_path, KVKIT_TUNED=str(tmp_path / "tuned"))
    check_printed("docs/research/tuning.md", "kvkit tune --device host", done.stdout)


@pytest.mark.nightly
def test_the_pages_autotuned_kernel_compiles(tmp_path: Path) -> None:
    (tmp_path / "scale_kernel.py").write_text(on_page("docs/research/strategies.md", '"""scale_kernel.py'))
    command = on_page("docs/research/strategies.md", "kvkit tune --problems scale_kernel:problems --target")
    done = run_shell(command, tmp_path)
    check_printed(
        "docs/research/strategies.md",
        "kvkit tune --problems scale_kernel:problems --target",
        done.stdout,
    )


def test_the_pages_autotuned_kernel_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a length that no block divides; on a GPU or in the interpreter."""
    (tmp_path / "scale_kernel.py").write_text(on_page("docs/research/strategies.md", '"""scale_kernel.py'))
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("scale_kernel")
    (problem,) = module.problems()
    assert problem.bucket == tuning.ProblemBucket("scale", "float32 float32", (1 << 24,))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    few = module.scale.problem("few", _few, module.grid, _doubled, work=tuning.Work(1))
    case = few.make(device, True)
    for config in problem.space:
        case.poison()
        assert case.fault()
        case.run(config)
        assert case.fault() == ""


def _few(device: torch.device) -> dict[str, Any]:
    return {name: torch.randn(5001, device=device) for name in "xy"} | {"N": 5001}


def _doubled(given: Any) -> dict[str, torch.Tensor]:
    return {"y": 2 * given["x"]}


@pytest.mark.parametrize("start", ["kvkit tune replay", "kvkit tune regret"])
def test_recorded_trials_are_studied_as_the_page_has_it(tmp_path: Path, start: str) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    pages = {
        "kvkit tune replay": on_page("docs/research/strategies.md", "kvkit tune replay"),
        "kvkit tune regret": on_page("docs/research/strategies.md", "kvkit tune regret"),
    }
    done = run_shell(pages[start], tmp_path)
    check_printed("docs/research/strategies.md", start, done.stdout)


def test_the_pages_problems_are_right_and_notice_what_is_not(mine: Any) -> None:
    for problem in mine.problems():
        device = torch.device("cuda" if torch.cuda.is_available() and not problem.host else "cpu")
        case = mine.case(problem.make.args[0], 37, device, True)  # tiles do not divide it
        for config in problem.space:
            case.poison()
            assert case.fault()
            case.run(config)
            assert case.fault() == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [("[3]", "want Problems"), ("2 * list(my_kernels.problems())", "is the name of two problems")],
)
def test_what_are_no_problems_is_said(
    mine: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (folder / "others.py").write_text(f"import my_kernels\n\ndef mine():\n    return {text}\n")
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(cli.app, ["tune", "--problems", "others:mine"], env={"COLUMNS": "80"})
    del sys.modules["others"]
    assert result.exit_code == 1
    assert "--problems others:mine" in result.stderr
    assert words in result.stderr


def test_what_the_public_module_names() -> None:
    for name in tuning.__all__:
        assert getattr(tuning, name).__name__ == name
        assert name in dir(tuning)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = tuning.nothing


def test_importing_it_imports_nothing_else() -> None:
    script = "import sys, kvkit.kernels.tuning; print({'torch', 'triton', 'msgspec'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
