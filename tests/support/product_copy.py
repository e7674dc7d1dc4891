"""A copy of kvkit that a test may change, and programs that run with it in place of kvkit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from page_blocks import environment
from repository import ROOT, SUPPORT


def copy_product(folder: Path) -> Path:
    """Copy kvkit into a folder; returns the folder."""
    shutil.copytree(ROOT / "kvkit", folder / "kvkit", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run_with(copy: Path, *arguments: str, **more: str) -> str:
    """Run Python with the copy in place of kvkit; returns what it printed.

    Args:
        more: variables of the environment, besides.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment(copy, PYTHONPATH=f"{copy}:{SUPPORT}", **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
