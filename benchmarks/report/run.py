"""Run every benchmark, print the ratios side by side, keep them in results/<machine>.json.

python -m benchmarks.report.run [files, or file::test]; KVKIT_RESULTS names another folder than results/.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from benchmarks.folders import ROOT
from benchmarks.report.kept import MEASURED, RESULTS, replace
from kvkit.environment import slug
from kvkit.observe.terminal import show


def main() -> None:
    """Measure, and print what was found; what earlier runs found of other benchmarks stays."""
    files = sys.argv[1:] or sorted(str(file) for file in (ROOT / "benchmarks").rglob("bench_*.py"))
    measured: list[dict[str, Any]] = []
    failed = []
    for file in files:
        found, status = measure(file)
        measured += found
        if status:
            failed.append(f"{file}: exit {status}")
        elif "::" not in file:  # benchmarks that it no longer has
            _forget(f"{Path(file).stem.removeprefix('bench_')}::", {entry["name"] for entry in found})
    if measured:
        show(table(copy.deepcopy(measured)))
        print(f"kept in {RESULTS / slug()}.json")
    if failed or not measured:
        sys.exit("; ".join(failed) or "no benchmark ran")


def _forget(prefix: str, names: set[str]) -> None:
    replace(lambda entry: entry["name"].startswith(prefix) and entry["name"] not in names, [])


def measure(argument: str) -> tuple[list[dict[str, Any]], int]:
    """One file's benchmarks that passed, in a process of its own: no other's leavings in the allocator count.

    Returns:
        them, each kept as soon as it had passed; and pytest's exit status.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.report.kept", "--benchmark-enable"]
        environment = os.environ | {MEASURED: str(lines)}
        done = subprocess.run([*command, "--benchmark-quiet", argument], env=environment, check=False)
        return [json.loads(line) for line in lines.read_text().splitlines()], done.returncode


def table(measured: list[dict[str, Any]]) -> Table:
    """Benchmarks as rows, and what each compared as rows below it."""
    numbers = (Column(name, justify="right") for name in ("µs, min", "ratio of minima", "ratio of medians"))
    shown = Table("benchmark", *numbers, "against", "more")
    for entry in measured:
        rest = {k: v for k, v in entry.items() if k not in ("name", "min_s", "median_s", "against")}
        compared = {k: rest.pop(k) for k in list(rest) if isinstance(rest[k], dict)}
        us = f"{entry['min_s'] * 1e6:.1f}"
        shown.add_row(escape(entry["name"]), us, *_ratios(rest), entry.get("against", ""), _plain(rest))
        for name, found in compared.items():
            flat = {"us": found.pop("us", None), **found.pop("of copy_", {}), **found}
            us = f"{flat['us']:.1f}" if flat["us"] is not None else ""
            del flat["us"]
            shown.add_row(f"    {escape(name)}", us, *_ratios(flat), "", _plain(flat))
    return shown


def _ratios(values: dict[str, Any]) -> list[str]:
    """Ratio of minima and of medians, taken out of `values`."""
    found = [values.pop(f"ratio_{kind}", values.pop(kind, None)) for kind in ("min", "median")]
    return ["" if ratio is None else f"{ratio:.2f}" for ratio in found]


def _plain(values: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())


if __name__ == "__main__":
    main()
