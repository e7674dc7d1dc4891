"""Option `--target` of `kvkit tune`, which compiles every configuration of chosen problems for a target."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.compiling import ProblemFactory, compile_pool, survey
from kvkit.kernels.tuning.gpus import GPUS
from kvkit.lab.compiling.keys import compile_keyed
from kvkit.lab.compiling.report import as_json, shown
from kvkit.observe.progress import counted, timed
from kvkit.observe.terminal import print_text, show
from kvkit.settings import CommandError


def compile_all(
    factory: ProblemFactory, problems: Sequence[Problem], target: str, json_path: Path | None, wide: bool
) -> None:
    """Compile every configuration of problems for a target, and print a table of the results.

    Args:
        factory: makes the problems again in other processes.
        problems: problems to compile.
        target: name in `gpus.GPUS`.
        json_path: file to write the results to, too.
        wide: whether the table has all columns.

    Raises:
        CommandError: the target or the file's folder does not exist.
    """
    if target not in GPUS:
        raise CommandError(f"--target {target}: want one of {', '.join(GPUS)}")
    if json_path and not json_path.absolute().parent.is_dir():
        raise CommandError(f"--json {json_path}: no folder {json_path.absolute().parent}")
    jobs = [(p.name, config, target) for p in problems for config in p.space_on(target)]
    with compile_pool(min(8, os.cpu_count() or 1)) as pool:
        work = survey(pool, factory, jobs, partial(compile_keyed, {}))
        reports = list(counted(work, "configurations compiled", len(jobs), timed(Console())))
    show(shown(reports, wide))
    flawed = {(report.problem, report.config) for report in reports if report.rejection()}
    print(f"{len(jobs)} configurations, {len(flawed)} of them not worth a run")
    if json_path:
        json_path.write_text(json.dumps(as_json(reports, problems), indent=1) + "\n")
        print_text(f"figures: {json_path}")
