"""Attention's compiled loop takes no more instructions than FlexAttention's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from repository import ROOT


def test_attention_takes_no_more_instructions_than_flex_attention(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    command = [sys.executable, "-m", "benchmarks.research.compiled_peers", "--json", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stderr
    kernels = json.loads(path.read_text())["kernels"]
    (flex,) = (kernel for kernel in kernels if kernel["kernel"].startswith("FlexAttention"))
    alike = [kernel for kernel in kernels if kernel["tile"] == flex["tile"] and kernel is not flex]
    assert [kernel["kernel"].partition(", ")[2] for kernel in alike] == ["pages of 16", "one block"]
    for kernel in alike:
        assert kernel["spill_bytes"] == 0
        assert kernel["per_mma"] <= flex["per_mma"], kernels
        assert kernel["registers"] <= flex["registers"], kernels
        assert kernel["in_flight"] >= flex["in_flight"] > 0, kernels
