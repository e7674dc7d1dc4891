"""Reports of compiled kernels: a table, and entries for a file, with predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from kvkit.environment import version_of
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.compiling import CompileReport
from kvkit.lab.compiling.keys import KeyedCompiled
from kvkit.lab.compiling.prediction import RATES, predict


def shown(reports: Sequence[CompileReport], wide: bool = False) -> Table:
    """Build a table with a row per report.

    With `wide`, it also has target, spills, shared memory, 16-byte accesses and mma.
    """
    text_columns = "problem", "kernel", *(["target"] if wide else []), "configuration"
    more = ("spill B", "shared B", "16 B loads", "16 B stores", "mma") if wide else ()
    numbers = "registers", *more, "blocks/SM"
    table = Table(
        *(Column(name, overflow="fold") for name in text_columns),
        *(Column(name, justify="right") for name in numbers),
        Column("rejection", overflow="fold"),
    )
    for report in reports:
        c = report.compiled
        figures: tuple[object, ...] = ("",) * len(numbers)
        if c:
            accesses = f"{c.loads_16}/{c.loads}", f"{c.stores_16}/{c.stores}"
            rest = (c.spill_bytes, c.shared_bytes, *accesses, c.mma) if wide else ()
            figures = c.registers, *rest, c.blocks_per_sm
        names = report.problem, report.kernel, *([report.target] if wide else []), report.config
        table.add_row(*(escape(str(text)) for text in (*names, *figures, report.rejection())))
    return table


def as_json(reports: Sequence[CompileReport], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return reports of keyed compilations and Triton's version for a file, with predictions to 3 digits.

    Args:
        reports: reports of `compile_keyed`.
        problems: the problems that the reports name.
    """
    named = {problem.name: problem for problem in problems}
    entries = [_entry(report, named) for report in reports]
    return {"triton": version_of("triton"), "kernels": entries}


def _entry(report: CompileReport, problems: Mapping[str, Problem]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "problem": report.problem,
        "kernel": report.kernel,
        "target": report.target,
        "config": str(report.config),
    }
    compiled = report.compiled
    if compiled is None:
        return entry | {"error": report.error}
    assert isinstance(compiled, KeyedCompiled)
    left_out = {"key", "digest", "programs"}
    entry["key"] = compiled.key
    entry |= {n: value for n, value in asdict(compiled).items() if n not in left_out and value != ""}
    problem, rates = problems[report.problem], RATES.get(report.target)
    if rates is None or report.kernel != problem.bucket.op:
        return entry
    prediction = predict(problem.work(report.config), compiled, report.config.warps, compiled.programs, rates)
    return entry | {n: float(f"{value:.3g}") for n, value in asdict(prediction).items() if value is not None}
