"""The benchmark of launches' host time runs without a GPU, and its launches are planned ones."""

from __future__ import annotations

import os
import subprocess
import sys

from repository import ROOT


def test_the_benchmark_runs_where_kernels_are_compiled() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    benchmark = "benchmarks/micro/bench_launches.py"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "--benchmark-disable", benchmark]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line for line in ran.stdout.splitlines() if "planned: " in line]
    assert len(lines) == 8, ran.stdout
    assert "skipped" not in ran.stdout
