"""`make gpu`: its steps end in time, and none stops the next."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpu
import pytest
import torch
from gpu import ROOT, STEPS, Step, run


def python(script: str) -> tuple[str, ...]:
    return sys.executable, "-c", script


def test_it_takes_less_than_9_minutes() -> None:
    assert sum(step.timeout_s for step in STEPS) < 9 * 60


def test_every_file_that_it_runs_is_there() -> None:
    named = [word for step in STEPS for word in step.command if word.endswith(".py")]
    assert len(named) > len(gpu.TESTS)
    assert all((ROOT / name).is_file() for name in named)


def test_a_failed_step_does_not_stop_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        Step("one", python("print('first'); raise SystemExit(3)"), 60),
        Step("two", python("import sys; print('second', file=sys.stderr); sys.exit(4)"), 60),
        Step("three", python("import os; print(os.environ['WORD'])"), 60),
    ]
    assert run(steps, tmp_path / "out", os.environ | {"WORD": "third"}) == 3
    logs = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert logs == {"one.log": "first\n", "two.log": "second\n", "three.log": "third\n"}
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
    assert (tmp_path / "next.log").read_text() == "next\n"
    os.set_blocking(reader, True)
    assert os.read(reader, 100) == b"started"
    assert os.read(reader, 100) == b""  # nobody holds the other end any more
    os.close(reader)


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert gpu.main() == 2
    assert "missing: no_such_package" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main() == 2
    assert "no GPU here" in capsys.readouterr().out
