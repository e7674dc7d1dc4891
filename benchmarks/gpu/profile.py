"""`make gpu`: what Nsight Compute counts in one launch each of the kernels that matter most."""

from __future__ import annotations

import csv

from benchmarks.gpu import tools
from benchmarks.gpu.bench import FOREMOST, Bench

TOOL = "ncu"
SECTIONS = (
    *("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats"),
    *("ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "InstructionStats"),
)


def run(bench: Bench) -> None:
    """Records each launch's metrics, as text with their units."""
    tool = tools.find(TOOL)
    if tool is None:
        bench.results.record(TOOL, found=False)
        return
    chosen = {
        p.bucket.op: p.name for p in reversed(bench.problems) if p.bucket.op in FOREMOST
    }  # the first of each
    command = [tool, "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name"]
    command += [f"regex:^({'|'.join(FOREMOST)})$"]
    for section in SECTIONS:
        command += ["--section", section]
    done = tools.over_once(command, tuple(chosen.values()))
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    for row in rows[1:]:  # the first has the units
        metrics = {name: f"{value} {rows[0][name]}".strip() for name, value in row.items() if value}
        bench.results.record(row["Kernel Name"], metrics=metrics)
    bench.results.record(TOOL, status=done.returncode, launches=len(rows[1:]), printed=done.stdout[-1000:])
