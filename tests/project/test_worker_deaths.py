"""A test run ends at once when one of its worker processes dies, and names the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from repository import SUPPORT

# A run takes two to four seconds; a machine that stands still for a minute is no fault of the plug-in.
LIMIT_S = 200

DIES = """
import os, signal

def test_passes():
    pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_follows():
    pass
"""


def test_the_run_ends_with_the_name_of_the_test(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(DIES)
    python = [sys.executable, "-X", "faulthandler", "-m", "pytest"]
    options = ["-n", "1", "--dist", "loadfile", "--max-worker-restart=0", "-p", "worker_deaths"]
    process = subprocess.Popen(
        [*python, *options, "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler says where each thread stands
        pytest.fail(f"the run did not end in {LIMIT_S} s:\n{process.communicate()[0]}")
    assert process.returncode == 1, printed
    assert "worker died while running test_dies.py::test_dies" in printed
    assert "1 failed, 1 passed" in printed, "what follows the test was run"
