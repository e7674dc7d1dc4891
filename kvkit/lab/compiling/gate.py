"""The compile gate: the default of every problem, compiled for every target of `GATE`.

`python -m kvkit.lab.compiling.gate` prints a table, and fails if a kernel spills more than its problem
allows, does not fit or has lost its 16-byte accesses. With `--compare benchmarks/results/compile.json` it
also fails if a kernel is worse than recorded there, and compiles only kernels that the file does not hold
under an equal `compile_key`. `--json benchmarks/results/compile.json` records the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

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
from kvkit.lab.compiling.keys import compile_keyed
from kvkit.lab.compiling.report import as_json, shown
from kvkit.lab.files import about

GATE = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Targets that every kernel must compile for without spills."""
SLACK = 1.02
"""Factor above which a figure counts as worse."""

_LESS = ("per_line", "per_mma", "predicted_us")
_MORE = ("blocks_per_sm", "in_flight")
_MORE_ALIKE = ("loads_16", "stores_16")  # with equal tiles

Document = Mapping[str, Any]
"""Reports as made by `report.as_json`."""


def faults(reports: Sequence[CompileReport], problems: Sequence[Problem]) -> list[str]:
    """Return a line per rejected kernel: errors, spills, blocks that do not fit, lost 16-byte accesses."""
    named = {problem.name: problem for problem in problems}
    rejections = []
    for report in reports:
        rejection, compiled = report.rejection(), report.compiled
        problem = named[report.problem]
        if compiled and not rejection and compiled.spill_bytes > problem.spills.get(report.target, 0):
            rejection = f"spills {compiled.spill_bytes} bytes"
        if compiled and not rejection:
            loads, stores = problem.wide.get(report.kernel, (0, 0))
            if compiled.loads_16 < loads or compiled.stores_16 < stores:
                rejection = (
                    f"{compiled.loads_16} of {compiled.loads} loads and "
                    f"{compiled.stores_16} of {compiled.stores} stores "
                    f"take 16 bytes; the layout allows {loads} and {stores}"
                )
        pipelined = report.config.stages > 2 and GPUS[report.target].backend == "cuda"
        if compiled and not rejection and compiled.mma and pipelined and not compiled.in_flight:
            rejection = f"{report.config.stages} stages, but no copy is in flight while a tile is computed"
        if rejection:
            rejections.append(
                f"{report.problem}, {report.kernel}, {report.target}, {report.config}: {rejection}"
            )
    return rejections


def gate(
    pool: CompilePool,
    factory: ProblemFactory,
    names: Sequence[str] = (),
    known: Mapping[str, Compiled] = {},
) -> list[CompileReport]:
    """Compile the default of each gated problem for each target of `GATE`, in the pool's processes.

    If problems differ only in sizes, the first is compiled: the others compile to the same code. With
    `names`, only problems with one of them in their name are compiled. Kernels `known` by `compile_key` are
    reused.
    """
    distinct: dict[tuple[str, str], Problem] = {}
    for problem in factory():
        if problem.gated:
            distinct.setdefault((problem.bucket.op, problem.bucket.form), problem)
    chosen = [p for p in distinct.values() if not names or any(name in p.name for name in names)]
    jobs = [(p.name, p.space_on(target)[0], target) for p in chosen for target in GATE]
    return list(survey(pool, factory, jobs, partial(compile_keyed, known)))


def _listed(document: Document) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {(e["problem"], e["kernel"], e["target"]): e for e in document["kernels"]}


def known_of(recorded: Document) -> dict[str, Compiled]:
    """Return compiled kernels by `keys.compile_key`, without those that failed or have a hazard."""
    names = [field.name for field in fields(Compiled) if field.default is MISSING]
    valid = (entry for entry in recorded["kernels"] if not entry.keys() & {"error", "hazard"})
    return {e["key"]: Compiled(**{name: e[name] for name in names}) for e in valid if "key" in e}


def regressions(found: Document, recorded: Document, complete: bool = True) -> list[str]:
    """Return a line for each figure that is worse than recorded.

    The lines also name kernels that are not recorded and, with `complete`, those that are gone. Figures are
    compared only for equal versions of Triton, because another version makes other instructions of the same
    kernels.
    """
    now, before = _listed(found), _listed(recorded)
    worse = [f"{', '.join(key)}: not recorded" for key in now.keys() - before.keys()]
    worse += [f"{', '.join(key)}: recorded, but gone" for key in before.keys() - now.keys() if complete]
    worse.sort()
    if found["triton"] != recorded["triton"]:
        return worse
    for key in now:
        for description in _worse(now[key], before.get(key, {})):
            worse.append(f"{', '.join(key)}: {description}")
    return worse


def _worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    alike = now["config"] == before.get("config")
    less = _LESS if any(name in before for name in _LESS[:2]) or not alike else (*_LESS, "instructions")
    descriptions = [
        f"{name} is {now[name]:g}, was {before[name]:g}"
        for name in less
        if name in now and name in before and now[name] > SLACK * before[name]
    ]
    for name in (*_MORE, *_MORE_ALIKE) if alike else _MORE:
        if name in now and name in before and now[name] < before[name]:
            detail = f" ({now['registers']} registers, were {before['registers']})"
            descriptions.append(
                f"{name} is {now[name]}, was {before[name]}{detail * (name == 'blocks_per_sm')}"
            )
    return descriptions


def write(path: Path, found: Document, complete: bool = True) -> None:
    """Record a document in a file, one line per kernel. Without `complete`, the file keeps its other kernels.

    Raises:
        ValueError: the document is not complete, and the file is of another version of Triton.
        OSError: the file cannot be read or written.
    """
    kernels, told = _listed(found), about("python -m kvkit.lab.compiling.gate")
    if not complete:
        recorded = json.loads(path.read_text())
        if recorded["triton"] != found["triton"]:
            raise ValueError(
                f"{path} is of Triton {recorded['triton']}, this is {found['triton']}: record all of it"
            )
        kernels = _listed(recorded) | kernels
        told = {name: value for name, value in recorded.items() if name not in found}  # as old as it was
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in kernels.values())
    head = json.dumps(told | {"triton": found["triton"]}, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "kernels": [\n{lines}\n ]\n}}\n')


def run(pool: CompilePool, command_line: Sequence[str]) -> int:
    """Run the gate as the command does, and print its output; return its exit status, 1 if it failed.

    Raises:
        SystemExit: the command's arguments are invalid.
    """
    parser = argparse.ArgumentParser(prog="python -m kvkit.lab.compiling.gate")
    parser.add_argument("--problem", action="append", default=[], help="only those with this in their name")
    parser.add_argument("--compare", type=Path, help="fail where a kernel is worse than in this file")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args(command_line)
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
    failures = faults(reports, every_problem())
    if recorded:
        accept = f"if it is meant: {parser.prog} --json {arguments.compare}"
        failures += [f"{worse} ({accept})" for worse in regressions(document, recorded, complete)]
    print("\n".join(failures))
    return 1 if failures else 0


def main() -> int:
    """Run the gate for the command line."""
    with compile_pool(min(2, os.cpu_count() or 1)) as pool:
        return run(pool, sys.argv[1:])


if __name__ == "__main__":
    from kvkit.lab.compiling import gate as found  # other processes find its functions by its name

    sys.exit(found.main())
