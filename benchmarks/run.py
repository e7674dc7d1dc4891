"""Run every benchmark, print the ratios side by side, keep them in results/<machine>.json.

python -m benchmarks.run [files, or file::test]; KVKIT_RESULTS names another folder than results/.
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

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkit.environment import describe, slug

HERE = Path(__file__).parent
RESULTS = Path(os.environ.get("KVKIT_RESULTS") or HERE / "results")


def main() -> None:
    """Measure, then keep what was measured beside what earlier runs of other benchmarks found."""
    files = sys.argv[1:] or sorted(str(file) for file in HERE.glob("bench_*.py"))
    measured = [entry for file in files for entry in measure(file)]
    if not measured:
        sys.exit("no benchmark ran")
    Console(width=150).print(table(copy.deepcopy(measured)))
    path = RESULTS / f"{slug()}.json"
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    same = _name if any("::" in file for file in files) else _file
    renewed = {same(entry) for entry in measured}
    results = [entry for entry in kept if same(entry) not in renewed] + measured
    document = describe() | {
        "command": "make bench",
        "results": sorted(results, key=lambda entry: entry["name"]),
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"kept in {path}")


def measure(argument: str) -> list[dict[str, Any]]:
    """One file's benchmarks, in a process of its own: no other's leavings in the allocator count."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-enable", f"--benchmark-json={report}"]
        status = subprocess.run([*command, "--benchmark-quiet", argument], check=False).returncode
        if status:
            sys.exit(status)
        if not report.exists():
            return []
        return [condensed(entry) for entry in json.loads(report.read_text())["benchmarks"]]


def condensed(entry: dict[str, Any]) -> dict[str, Any]:
    """One benchmark: its name, its times in seconds and what it compared itself to."""
    file = Path(entry["fullname"].split("::")[0]).stem.removeprefix("bench_")
    stats = entry["stats"]
    return {
        "name": f"{file}::{entry['name'].removeprefix('test_')}",
        "min_s": stats["min"],
        "median_s": stats["median"],
        **entry["extra_info"],
    }


def _name(entry: dict[str, Any]) -> str:
    name: str = entry["name"]
    return name


def _file(entry: dict[str, Any]) -> str:
    return _name(entry).partition("::")[0]


def table(measured: list[dict[str, Any]]) -> Table:
    """Benchmarks as rows, and what each compared as rows below it."""
    shown = Table("benchmark", "µs, min", "ratio of minima", "ratio of medians", "against", "more")
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
