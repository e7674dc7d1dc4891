"""An engine that is killed while it stores under vLLM's offloading leaves whole chunks, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, SUPPORT
from run_sizes import NIGHTLY

pytest.importorskip("vllm")

KILLS = 20 if NIGHTLY else 1


def test_kills(tmp_path: Path) -> None:
    """What is found afterwards is right, within the capacity; every turn writes."""
    command = [sys.executable, str(SUPPORT / "offloading_kills.py"), str(tmp_path), str(KILLS), "1"]
    path = [str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["found"]) == KILLS
    assert min(said["found"]) > 0
    assert max(said["bytes"]) <= (4 << 20) + 65536
