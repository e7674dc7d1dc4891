"""A run says what its files cost, and fails where one is far over its budget or takes too much memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from repository import SUPPORT
from run_costs import WORKER_GIB, core_seconds, over_budget, over_memory

DEAR = """
import time

def test_computes():
    started = time.process_time()
    while time.process_time() - started < 1.0:
        sum(range(10_000))

def test_takes_little():
    pass
"""


def test_a_dear_file_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_dear.py").write_text(DEAR)
    (tmp_path / "conftest.py").write_text(
        "import pytest, run_costs\n"
        "def pytest_addoption(parser): parser.addoption('--keep-costs', action='store_true')\n"
        "run_costs.LEAST_S = 0.2\n"
        "def pytest_configure(config): config.pluginmanager.register(run_costs)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "load", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not nightly", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SUPPORT), "CI": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert "test_dear.py: 1 core seconds" in done.stdout.partition("OVER BUDGET")[2]
    assert done.stdout.count("memory of gw") == 2
    assert done.returncode == 1


def test_time_of_processes_that_run_counts() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass\ninput('ready\\n')"
    before = core_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert core_seconds() - before > 0.4
        process.kill()
    assert core_seconds() - before > 0.4


def test_what_is_over_is_said() -> None:
    assert over_budget({"a": 39.0, "b": 41.0, "c": 29.0, "d": 31.0}, {"a": 10, "b": 10}) == [
        "b: 41 core seconds, its budget is 10",
        "d: 31 core seconds, its budget is 0",
    ]
    found = over_memory({"gw0": (WORKER_GIB + 1, "x.py::y"), "gw1": (1.0, "z")})
    assert found == [f"gw0: {WORKER_GIB + 1:.1f} GiB in x.py::y"]
