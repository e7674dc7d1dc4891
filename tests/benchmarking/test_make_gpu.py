"""The steps of `make gpu` end in time, keep their results whatever fails, and name missing packages."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.utils import canonicalize_name

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import packages
from benchmarks.gpu.__main__ import STEPS, TESTS, Step, main, run
from benchmarks.gpu.packages import OWN, ROOT, closure, needed
from benchmarks.gpu.results import AGAIN, Results
from kvkit.environment import DISTRIBUTION


def python(script: str) -> tuple[str, ...]:
    return sys.executable, "-c", script


@pytest.mark.parametrize("steps", [STEPS, TESTS])
def test_it_takes_less_than_9_minutes(steps: tuple[Step, ...]) -> None:
    assert sum(step.timeout_s for step in steps) < 9 * 60


def test_every_file_that_it_runs_is_there() -> None:
    named = [word for step in TESTS for word in step.command if word.endswith(".py")]
    assert len(named) > len(gpu.FILES)
    named += [f"benchmarks/gpu/{step.name}.py" for step in (*STEPS, *TESTS[:2])]
    assert all((ROOT / name).is_file() for name in named)


def test_a_failed_step_does_not_stop_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        Step("one", python("print('first'); raise SystemExit(3)"), 60),
        Step("two", python("import sys; print('second', file=sys.stderr); sys.exit(4)"), 60),
        Step("three", python("import os; print(os.environ['WORD'])"), 60),
    ]
    assert run(steps, tmp_path / "out", os.environ | {"WORD": "third"}) == 3
    log = (tmp_path / "out" / "steps.log").read_text()
    assert log == "--- one\nfirst\n--- two\nsecond\n--- three\nthird\n"
    ends = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(end["step"], end["what"], end["status"]) for end in ends] == [
        ("one", "ended", 3),
        ("two", "ended", 4),
        ("three", "ended", 0),
    ]
    printed = capsys.readouterr().out
    for words in ("one: exit 3", "two: exit 4", "three: exit 0", "third"):
        assert words in printed


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    held = tmp_path / "pipe"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    child = f"f = open({str(held)!r}, 'w'); f.write('started'); f.flush(); import time; time.sleep(600)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    steps = [Step("hangs", python(script), 10), Step("next", python("print('next')"), 60)]
    assert run(steps, tmp_path, os.environ) == 124
    assert (tmp_path / "steps.log").read_text().endswith("--- next\nnext\n")
    os.set_blocking(reader, True)
    assert os.read(reader, 100) == b"started"
    assert os.read(reader, 100) == b""  # nobody holds the other end any more
    os.close(reader)


RECORDS = """
import sys, time
from pathlib import Path
from benchmarks.gpu.results import Results
results = Results(Path(sys.argv[1]), "slow", "NVIDIA H200")
for i in range(3):
    results.record(f"result {i}", number=i)
time.sleep(600)
"""


def test_what_a_step_found_before_it_was_ended_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file, "earlier").record("kept")
    assert run([Step("slow", (*python(RECORDS), str(file)), 5)], tmp_path, os.environ) == 124
    earlier, *found, end = map(json.loads, file.read_text().splitlines())
    assert earlier == {"step": "earlier", "what": "kept"}
    expected = {"gpu": "NVIDIA H200", "step": "slow"}
    assert found == [{**expected, "what": f"result {i}", "number": i} for i in range(3)]
    assert (end["what"], end["status"]) == ("ended", 124)


def test_a_step_that_asks_for_it_goes_on_in_a_new_process(tmp_path: Path) -> None:
    script = f"""
import os, sys
first = not os.path.exists({str(tmp_path / "seen")!r})
open({str(tmp_path / "seen")!r}, "w").close()
print("first" if first else "second", flush=True)
sys.exit({AGAIN} if first else 0)
"""
    assert run([Step("twice", python(script), 60)], tmp_path, os.environ) == 0
    assert (tmp_path / "steps.log").read_text() == "--- twice\nfirst\nsecond\n"


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "needed", lambda: ["torch>=2", "no-such-package>=3"])
    assert main() == 2
    assert "missing: no-such-package; `make gpu-packages`" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    assert "no GPU here" in capsys.readouterr().out


def test_all_that_the_steps_import_is_carried_or_the_machines_own() -> None:
    """Whatever is imported at the top of a file of ours that is loaded with the steps and the commands."""
    script = f"""
import sys, kvkit.cli, {", ".join(f"benchmarks.gpu.{step.name}" for step in STEPS)}
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
print(*(file for file in files if file.endswith(".py")))
"""
    done = subprocess.run(python(script), cwd=ROOT, capture_output=True, text=True, check=True)
    files = [
        path
        for path in map(Path, done.stdout.split())
        if path.is_relative_to(ROOT) and ".venv" not in path.parts
    ]
    assert len(files) > 50
    words = {word for file in files for word in imported(file)}
    distributions = importlib.metadata.packages_distributions()
    names = {canonicalize_name(name) for word in words for name in distributions.get(word, ())}
    carried = set(closure(needed(), OWN))
    assert {"torch", "triton", "msgspec", "pydantic"} <= names
    assert names <= carried | set(OWN) | {DISTRIBUTION}
    assert {"msgspec", "pydantic-core", "google-crc32c", "pytest"} <= carried
    assert not carried & set(OWN)


def imported(file: Path) -> Iterator[str]:
    """First words of what is imported at the top of a file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_a_package_is_wanted_where_its_marker_says_so() -> None:
    found = closure(["pytest", "no-such-package; python_version < '3'", "numpy", "no-such-other"], ["numpy"])
    assert found["pytest"] == importlib.metadata.version("pytest")
    assert found["pluggy"] == importlib.metadata.version("pluggy")
    assert found["no-such-other"] is None
    assert not {"numpy", "no-such-package"} & set(found)


def test_wheels_are_unpacked_once(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name in ("one", "two"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", f"word = {name!r}")
    packages.unpack(tmp_path, site)
    (site / "one.py").unlink()
    packages.unpack(tmp_path, site)
    assert [file.name for file in site.iterdir()] == ["two.py"]
    assert {file.name for file in tmp_path.iterdir()} >= {"site", "one-1-py3-none-any.whl"}
