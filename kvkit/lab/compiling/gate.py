"""The compile gate: the default of every problem, compiled for every target of `GATE`.

`python -m kvkit.lab.compiling.gate` prints a table, and fails if a kernel spills, does not fit or has lost
its 16-byte accesses. With `--compare benchmarks/results/compile.json` it also fails if a kernel is worse than
recorded there, and compiles only kernels that the file does not hold under an equal `compile_key`.
`--json benchmarks/results/compile.json` records the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from kvkit.kernels.tuning.assembly import Compiled
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.compiling import (
    CompilePool,
    CompileReport,
    ProblemFactory,
    compile_pool,
    survey,
)
from kvkit.kernels.tuning.gpus import GPUS
from kvkit.kernels.tuning.problems import every_problem
from kvkit.lab.compiling.baseline import known_of, regressions, write
from kvkit.lab.compiling.keys import compile_keyed
from kvkit.lab.compiling.report import as_json, shown

GATE = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Targets that every kernel must compile for without spills."""


def faults(reports: Sequence[CompileReport], problems: Sequence[Problem]) -> list[str]:
    """Return what the gate rejects: errors, spills, blocks that do not fit, 16-byte accesses lost."""
    wide = {problem.name: problem.wide for problem in problems}
    found = []
    for report in reports:
        rejection, done = report.rejection(), report.compiled
        if done and not rejection:
            loads, stores = wide[report.problem].get(report.kernel, (0, 0))
            if done.loads_16 < loads or done.stores_16 < stores:
                rejection = (
                    f"{done.loads_16} of {done.loads} loads and {done.stores_16} of {done.stores} stores "
                    f"take 16 bytes; the layout allows {loads} and {stores}"
                )
        pipelined = report.config.stages > 2 and GPUS[report.target].backend == "cuda"
        if done and not rejection and done.mma and pipelined and not done.in_flight:
            rejection = f"{report.config.stages} stages, but no copy is in flight while a tile is computed"
        if rejection:
            found.append(f"{report.problem}, {report.kernel}, {report.target}, {report.config}: {rejection}")
    return found


def gate(
    pool: CompilePool,
    factory: ProblemFactory,
    names: Sequence[str] = (),
    known: Mapping[str, Compiled] = {},
) -> list[CompileReport]:
    """Compile the default of each gated problem for each target of `GATE`, in the pool's processes.

    Of problems that differ only in sizes, the first is compiled: they compile to the same. With `names`, only
    problems with one of them in their name are compiled. Kernels `known` by their `compile_key` are reused.
    """
    forms: dict[tuple[str, str], Problem] = {}
    for problem in factory():
        if problem.gated:
            forms.setdefault((problem.bucket.op, problem.bucket.form), problem)
    chosen = [p for p in forms.values() if not names or any(name in p.name for name in names)]
    jobs = [(p.name, p.space_on(target)[0], target) for p in chosen for target in GATE]
    return list(survey(pool, factory, jobs, partial(compile_keyed, known)))


def run(pool: CompilePool, words: Sequence[str]) -> int:
    """Run the gate as the command does, and print its output; return its exit status, 1 if it failed.

    Raises:
        SystemExit: the command's arguments are invalid.
    """
    parser = argparse.ArgumentParser(prog="python -m kvkit.lab.compiling.gate")
    parser.add_argument("--problem", action="append", default=[], help="only those with this in their name")
    parser.add_argument("--compare", type=Path, help="fail where a kernel is worse than in this file")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args(words)
    complete = not arguments.problem
    try:
        recorded = json.loads(arguments.compare.read_text()) if arguments.compare else None
        known = known_of(recorded) if recorded else {}
        reports = gate(pool, every_problem, arguments.problem, known)
        if not reports:
            raise ValueError(f"--problem: no gated problem has {' or '.join(arguments.problem)} in its name")
        document = as_json(reports, every_problem())
        if arguments.json:
            write(arguments.json, document, complete)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    Console(width=170).print(shown(reports, wide=True))
    found = faults(reports, every_problem())
    if recorded:
        accept = f"if it is meant: {parser.prog} --json {arguments.compare}"
        found += [f"{worse} ({accept})" for worse in regressions(document, recorded, complete)]
    print("\n".join(found))
    return 1 if found else 0


def main() -> int:
    """Run the gate for the command line."""
    with compile_pool(min(2, os.cpu_count() or 1)) as pool:
        return run(pool, sys.argv[1:])


if __name__ == "__main__":
    from kvkit.lab.compiling import gate as found  # other processes find its functions by its name

    sys.exit(found.main())
