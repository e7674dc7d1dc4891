"""The command `kvkit tune`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvkit.settings import grouped_options

if TYPE_CHECKING:
    from kvkit.kernels.tuning.cases import Problem


HOST_BUDGET_S = 120.0
"""Nobody waits longer for a CPU's kernels without having said so; the next run goes on."""


@dataclass(frozen=True, slots=True)
class TuneLimits:
    """How long tuning may take, and what it does again."""

    budget_s: Annotated[
        float | None, typer.Option(help="end after so many seconds; default: on the host 120")
    ] = None
    problem_s: Annotated[float | None, typer.Option(help="spend at most so many on a problem")] = None
    force: Annotated[bool, typer.Option(help="measure again what is known")] = False


@grouped_options
def tune(
    op: Annotated[
        list[str] | None, typer.Option(help="only this operation or kernel; can be repeated")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="gpu, host, or with --show a device's name; default: the GPU, else the host"),
    ] = None,
    *,
    limits: TuneLimits,
    show: Annotated[bool, typer.Option(help="print what is known, and measure nothing")] = False,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="put this table's results into those that are here; can be repeated"),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="compile every configuration for this target; needs no GPU")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="with --target: write the table to this file")
    ] = None,
) -> None:
    """Find the fastest correct configuration of every kernel on this machine's GPU or CPU, and keep it.

    Results go to $KVKIT_TUNED or ~/.cache/kvkit/tuned, one file per device. A run that was stopped goes on
    where it was.
    """
    if merge:
        _merge(merge)
    elif show:
        _show_tuned(device)
    elif target is not None:
        _compile_all(op, target, json_path)
    else:
        _tune_here(op, _on_host(device), limits)


def _on_host(device: str | None) -> bool:
    from kvkit.environment import gpu_name

    if device not in (None, "gpu", "host"):
        sys.exit(f"--device {device}: want gpu or host")
    return device == "host" or (device is None and gpu_name() is None)


def _merge(files: list[Path]) -> None:
    """Into the user's own tables, one of each device."""
    from kvkit.environment import slug_of
    from kvkit.kernels.tuning.tables import (
        TableError,
        merged,
        read_file,
        read_table,
        tuned_folder,
        write_table,
    )

    try:
        for name, table in map(read_file, files):
            path = tuned_folder() / f"{slug_of(name)}.json"
            before = read_table(path, slug_of(name)) if path.exists() else {}
            after = merged([before, table])
            write_table(path, name, after)
            taken = sum(before.get(key) != tuned for key, tuned in after.items())
            print(f"{path}: {taken} of {len(table)} results are new or faster, {len(after)} in all")
    except (TableError, OSError) as error:
        sys.exit(str(error))


def _show_tuned(device: str | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kvkit.environment import slug_of
    from kvkit.kernels.tuning.tables import device_name, load_table

    named = device if device not in (None, "gpu", "host") else device_name(_on_host(device))
    if (name := named) is None:
        sys.exit("--device gpu: no GPU here; --device NAME shows another one's table")
    table = load_table(slug_of(name))
    if not table:
        Console().print(f"{name}: nothing is tuned", markup=False, highlight=False)
        return
    columns = "operation", "form", "sizes", "compiler", "source", "configuration", "µs", "default µs"
    shown = Table(*columns, title=escape(name))
    for (bucket, build), tuned in sorted(table.items()):
        compiler = f"{build.compiler} {build.driver}".strip()
        words = (
            bucket.op,
            bucket.form,
            " x ".join(map(str, bucket.sizes)),
            compiler,
            build.source,
            str(tuned.config),
        )
        default = "" if tuned.default_us is None else f"{tuned.default_us:.1f}"
        shown.add_row(*map(escape, words), f"{tuned.us:.1f}", default)
    Console().print(shown)


def _compile_all(ops: list[str] | None, target: str, json_path: Path | None) -> None:
    from rich.console import Console
    from rich.progress import track

    from kvkit.kernels.tuning import gate as compiled
    from kvkit.kernels.tuning.gpus import GPUS
    from kvkit.kernels.tuning.problems import every_problem

    if target not in GPUS:
        sys.exit(f"--target {target}: want one of {', '.join(GPUS)}")
    if json_path and not json_path.absolute().parent.is_dir():
        sys.exit(f"--json {json_path}: no folder {json_path.absolute().parent}")
    jobs = [(p.name, c, target) for p in _chosen(every_problem(), ops) for c in p.space_on(target)]
    with compiled.compile_pool(min(8, os.cpu_count() or 1)) as pool:
        reports = list(track(compiled.survey(pool, every_problem, jobs), "compiling", len(jobs)))
    Console().print(compiled.shown(reports))
    flawed = {(report.problem, report.config) for report in reports if report.flaw()}
    print(f"{len(jobs)} configurations, {len(flawed)} of them not worth a run")
    if json_path:
        json_path.write_text(json.dumps(compiled.as_json(reports), indent=1) + "\n")


def _tune_here(ops: list[str] | None, host: bool, limits: TuneLimits) -> None:
    from rich.console import Console
    from rich.progress import track

    from kvkit.kernels.tuning.devices import tools_here
    from kvkit.kernels.tuning.problems import every_problem, host_problems
    from kvkit.kernels.tuning.search import TuningError
    from kvkit.kernels.tuning.search import tune as steps_of
    from kvkit.kernels.tuning.tables import TableError, tuned_folder

    if host and limits.budget_s is None:
        limits = replace(limits, budget_s=HOST_BUDGET_S)
    problems = _chosen(host_problems() if host else every_problem(), ops)
    # what multiplies matrices first: there is most to gain
    problems.sort(key=lambda problem: not problem.work(problem.space[0]).flops)
    console, count = Console(), Counter[str]()
    try:
        with tools_here(host) as tools:
            steps = steps_of(problems, tuned_folder(), tools, **asdict(limits))
            for step in track(steps, "tuning", len(problems), console=console):
                count[step.state] += 1
                console.print(str(step), markup=False, highlight=False, soft_wrap=True)
    except (TuningError, TableError, OSError) as error:
        sys.exit(str(error))
    states = ", ".join(f"{number} {state}" for state, number in count.items())
    console.print(f"{states}; tables are in {tuned_folder()}", markup=False, highlight=False, soft_wrap=True)
    if count["failed"]:
        raise typer.Exit(1)


def _chosen(problems: Sequence[Problem], ops: list[str] | None) -> list[Problem]:
    known = list(dict.fromkeys(name for problem in problems for name in problem.names))
    for op in ops or ():
        if op not in known:
            sys.exit(f"--op {op}: want one of {', '.join(known)}")
    return [problem for problem in problems if not ops or set(ops) & set(problem.names)]
