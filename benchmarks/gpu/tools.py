"""NVIDIA's tools, where they are, over a step that runs some kernels once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")


def find(name: str) -> str | None:
    """The path of a tool, None where it is not installed."""
    folders = [str(folder) for pattern in FOLDERS for folder in sorted(Path("/").glob(pattern[1:]))]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def over_once(
    tool: Sequence[str], problems: Sequence[str] = (), more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `benchmarks.gpu.once` of problems under a tool, and return what both printed."""
    command = [*tool, sys.executable, "-m", "benchmarks.gpu.step", "once", *problems]
    with tempfile.TemporaryDirectory() as out:  # its results are none of a GPU at its own speed
        return subprocess.run(
            command,
            env=os.environ | {"OUT": out, **(more or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
