"""The command `kvkit tune`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvkit.kernels.tuning.cases import Problem


def tune(
    op: Annotated[list[str] | None, typer.Option(help="only this operation; can be repeated")] = None,
    budget_s: Annotated[float | None, typer.Option(help="begin no problem after so many seconds")] = None,
    force: Annotated[bool, typer.Option(help="measure again what is known")] = False,
    show: Annotated[bool, typer.Option(help="print what is known, and measure nothing")] = False,
    gpu: Annotated[str | None, typer.Option(help="with --show: of this GPU; default: the one here")] = None,
    target: Annotated[
        str | None, typer.Option(help="compile every configuration for this target; needs no GPU")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="with --target: write the table to this file")
    ] = None,
) -> None:
    """Find the fastest correct configuration of every kernel on this machine's GPU, and keep it.

    Results go to $KVKIT_TUNED or ~/.cache/kvkit/tuned, one file per GPU. A run that was stopped goes on
    where it was.
    """
    if show:
        _show_tuned(gpu)
    elif target is not None:
        _compile_all(op, target, json_path)
    else:
        _tune_here(op, budget_s, force)


def _show_tuned(gpu: str | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kvkit.environment import gpu_name, slug_of
    from kvkit.kernels.tuning.configs import load_table

    name = gpu or gpu_name()
    if name is None:
        sys.exit("no GPU here; --gpu NAME shows another one's table")
    table = load_table(slug_of(name))
    if not table:
        Console().print(f"{name}: nothing is tuned", markup=False, highlight=False)
        return
    shown = Table("operation", "form", "sizes", "configuration", "µs", "default µs", title=escape(name))
    for bucket, tuned in sorted(table.items(), key=lambda item: (item[0].op, item[0].form, item[0].sizes)):
        words = bucket.op, bucket.form, " x ".join(map(str, bucket.sizes)), str(tuned.config)
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


def _tune_here(ops: list[str] | None, budget_s: float | None, force: bool) -> None:
    from rich.console import Console
    from rich.progress import track

    from kvkit.kernels.tuning import search
    from kvkit.kernels.tuning.configs import TableError, tuned_folder
    from kvkit.kernels.tuning.problems import every_problem

    problems = _chosen(every_problem(), ops)
    console, count = Console(), Counter[str]()
    try:
        with search.tools_here() as tools:
            steps = search.tune(problems, tuned_folder(), tools, budget_s=budget_s, force=force)
            for step in track(steps, "tuning", len(problems), console=console):
                count[step.state] += 1
                console.print(str(step), markup=False, highlight=False, soft_wrap=True)
    except (search.TuningError, TableError, OSError) as error:
        sys.exit(str(error))
    states = ", ".join(f"{number} {state}" for state, number in count.items())
    console.print(f"{states}; tables are in {tuned_folder()}", markup=False, highlight=False, soft_wrap=True)
    if count["failed"]:
        raise typer.Exit(1)


def _chosen(problems: Sequence[Problem], ops: list[str] | None) -> list[Problem]:
    known = sorted({problem.bucket.op for problem in problems})
    for op in ops or ():
        if op not in known:
            sys.exit(f"--op {op}: want one of {', '.join(known)}")
    return [problem for problem in problems if not ops or problem.bucket.op in ops]
