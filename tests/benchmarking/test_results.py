"""Every result says what measured it, and `make results` counts the commits that changed its code since."""

from __future__ import annotations

import io
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from rich.console import Console

from benchmarks.folders import RESULTS
from benchmarks.report import results
from benchmarks.report.registry import REGISTERED, Result
from kvkit.lab.files import about

ABOUT = ("command", "seed", "commit", "machine", "versions")
FILES = sorted(RESULTS.glob("*.json"))


def test_every_file_is_registered() -> None:
    assert {result.path() for result in REGISTERED.values()} == set(FILES)
    parts = {result.part for result in REGISTERED.values() if result.part}
    (file,) = {result.path() for result in REGISTERED.values() if result.part}
    assert {entry["name"].partition("::")[0] for entry in json.loads(file.read_text())["results"]} == parts


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_says_what_it_is_of(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document.keys() >= set(ABOUT)
    assert document["command"]
    assert document["commit"]
    absent = {name for name in ("machine", "versions") if document[name] is None}
    assert absent <= document.get("not_recorded", {}).keys(), "why it is not known"


def test_what_writers_say_of_a_result() -> None:
    found = about("make it", [0, 1], vllm="9")
    assert found.keys() == set(ABOUT)
    assert (found["command"], found["seed"], found["versions"]["vllm"]) == ("make it", [0, 1], "9")
    assert found["commit"] == git(ROOT, "rev-parse", "--short", "HEAD")


@pytest.mark.parametrize("name", REGISTERED)
def test_what_is_measured_and_what_makes_it_exist(name: str) -> None:
    result = REGISTERED[name]
    assert result.measures
    assert all(git(ROOT, "ls-files", path) for path in result.measures)
    words = result.command.split()
    if "-m" in words:
        assert find_spec(words[words.index("-m") + 1])
    for word in words:
        if word.startswith(("tests/", "benchmarks/")) and word.endswith(".py"):
            assert (ROOT / word).exists()


def test_a_seed_is_that_of_the_entries() -> None:
    for name in ("frontier", "simulate", "routing"):
        document = json.loads(REGISTERED[name].path().read_text())
        assert document["seed"] == sorted({run["seed"] for run in document["runs"]})


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: two change code/, the second of these after "measured", and one changes other/."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    for number, (folder, tag) in enumerate((("code", "measured"), ("other", ""), ("code", ""))):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "file").write_text(str(number))
        git(root, "add", ".")
        git(root, "commit", "-qm", folder)
        if tag:
            git(root, "tag", tag)
    return root


def test_commits_that_changed_the_measured_code_are_counted(repository: Path) -> None:
    measured = git(repository, "rev-parse", "--short", "measured")
    head = git(repository, "rev-parse", "--short", "HEAD")

    def since(document: dict[str, Any], part: str = "", measures: str = "code") -> tuple[str, int | None]:
        found = results.age(Result("x.json", 1, "", (measures,), part), document, repository)
        return found.commit, found.since

    assert since({"commit": measured}) == (measured, 1)
    assert since({"commit": head}) == (head, 0)
    assert since({"commit": measured}, measures="other") == (measured, 1)
    assert since({"commit": measured}, measures="none") == (measured, 0)
    assert since({"commit": head, "rows": [{"commit": measured}]}) == (measured, 1), "the oldest counts"
    entries = [{"name": "a::x", "commit": measured}, {"name": "b::y", "commit": head}]
    assert since({"commit": head, "results": entries}, "a") == (measured, 1)
    assert since({"commit": measured, "results": entries}, "b") == (head, 0)


def test_what_history_does_not_say_is_unknown(repository: Path, tmp_path: Path) -> None:
    result = Result("x.json", 1, "", ("code",))
    measured = git(repository, "rev-parse", "--short", "measured")
    assert results.age(result, {"commit": "0123abc"}, repository) == results.Age()
    assert (
        results.age(result, {"commit": measured, "row": {"commit": "0123abc"}}, repository) == results.Age()
    )
    assert results.age(result, {}, repository) == results.Age()
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    for commit in (measured, git(repository, "rev-parse", "HEAD")):
        assert results.age(result, {"commit": commit}, tmp_path / "shallow") == results.Age()
    assert results.age(result, {"commit": measured}, tmp_path) == results.Age(), "no repository"


def test_the_table_fits_a_terminal_and_tells_own_times_from_estimates(
    repository: Path, tmp_path: Path
) -> None:
    name = "a-result-with-a-long-name-of-a-connector"
    command = "python -m benchmarks.research.something --with [these] --and 'those; of them' {json}"
    known = {name: Result("x.json", 5, command, ("code",)), "y": Result("y.json", 7, "", ("code",))}
    measured = git(repository, "rev-parse", "--short", "measured")
    (repository / "x.json").write_text(json.dumps({"commit": measured, "wall_s": 120.0}))
    out = io.StringIO()
    Console(file=out, width=80).print(results.table(known, repository, repository))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(measured in line and line.split()[-2:] == ["1", "2"] for line in lines)
    assert any("not measured" in line and line.endswith("~7  ") for line in lines)
    assert "".join(command.removesuffix(" {json}").split()) in "".join(
        line[:38].replace(" ", "") for line in lines
    )


def test_a_run_makes_what_is_asked_for_and_nothing_else(tmp_path: Path) -> None:
    known = {
        "made": Result("made.json", 1, "touch made", ()),
        "failed": Result("failed.json", 1, "exit 3", ()),
        "told": Result("told.json", 1, "touch told --model FOLDER", ()),
        "gone": Result("gone.json", 1, "", ()),
    }
    assert results.run(known, tmp_path) == [
        "failed: exit 3",
        "told: fill in and run: touch told --model FOLDER",
        "gone: no command makes it",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
