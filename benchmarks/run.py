"""Run every benchmark, print the ratios side by side, keep them in results/<machine>.json.

python -m benchmarks.run [pytest arguments]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvkit.environment import describe, slug

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def main() -> None:
    """Measure, then keep what was measured beside what earlier runs of other benchmarks found."""
    arguments = sys.argv[1:] or [str(HERE)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-enable", f"--benchmark-json={report}"]
        status = subprocess.run([*command, "--benchmark-quiet", *arguments], check=False).returncode
        if status or not report.exists():
            sys.exit(status or "no benchmark ran")
        measured = [condensed(entry) for entry in json.loads(report.read_text())["benchmarks"]]
    Console(width=150).print(table(measured))
    path = RESULTS / f"{slug()}.json"
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    merged = {entry["name"]: entry for entry in kept} | {entry["name"]: entry for entry in measured}
    document = describe() | {
        "command": "make bench",
        "results": sorted(merged.values(), key=lambda e: e["name"]),
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"kept in {path.relative_to(HERE.parent)}")


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


def table(measured: list[dict[str, Any]]) -> Table:
    """Benchmarks as rows."""
    shown = Table("benchmark", "min", "ratio of minima", "ratio of medians", "against", "more")
    for entry in measured:
        more = {
            k: v
            for k, v in entry.items()
            if k not in ("name", "min_s", "median_s", "against", "ratio_min", "ratio_median")
        }
        shown.add_row(
            entry["name"],
            f"{entry['min_s'] * 1e6:.1f} µs",
            *(f"{entry[k]:.2f}" if k in entry else "" for k in ("ratio_min", "ratio_median")),
            str(entry.get("against", "")),
            ", ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in more.items()),
        )
    return shown


if __name__ == "__main__":
    main()
