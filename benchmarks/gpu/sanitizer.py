"""`make gpu-tests`: compute-sanitizer over small problems: accesses out of bounds, then races."""

from __future__ import annotations

import re

from benchmarks.gpu import tools
from benchmarks.gpu.bench import Bench

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck")
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor gets memory of its own: what lies behind its end is nobody's."""


def run(bench: Bench) -> None:
    """Records of each check how many errors it found, and the end of what it printed."""
    tool = tools.find(TOOL)
    if tool is None:
        bench.results.record(TOOL, found=False)
        return
    for check in CHECKS:
        done = tools.over_once([tool, "--tool", check, "--error-exitcode", "86"], more=UNCACHED)
        errors = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
        bench.results.record(
            check, status=done.returncode, errors=errors and int(errors[1]), printed=done.stdout[-2000:]
        )
