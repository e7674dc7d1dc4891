"""A test run ends at once when one of its worker processes dies, and names the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from repository import SUPPORT

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
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "--max-worker-restart=0"]
    done = subprocess.run(
        [*command, "-p", "worker_deaths", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "worker died while running test_dies.py::test_dies" in done.stdout
    assert "1 failed, 1 passed" in done.stdout, "what follows the test was run"
