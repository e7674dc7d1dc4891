"""A plugin of pytest: each benchmark that passed is kept at once, in results/<machine>.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folders
from kvkit.environment import slug
from kvkit.lab.files import about, commit

RESULTS = Path(os.environ.get("KVKIT_RESULTS") or folders.RESULTS)
MEASURED = "KVKIT_MEASURED"
"""The variable that names a file: each result is appended to it, too, as a line of JSON."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, Any, Any]:
    """After a benchmark's call, if it passed."""
    report = yield
    benchmark = item.funcargs.get("benchmark") if report.when == "call" and report.passed else None
    if benchmark is not None and benchmark.stats:
        stem = item.path.stem.removeprefix("bench_")
        stats = benchmark.stats.stats
        times = {"min_s": stats.min, "median_s": stats.median}
        entry = {"name": f"{stem}::{item.name.removeprefix('test_')}", **times, **benchmark.extra_info}
        kept = entry | {"commit": commit()}  # others in the file may be of other commits
        replace(lambda known: known["name"] == entry["name"], [kept])
        with open(os.environ[MEASURED], "a") as file:
            file.write(f"{json.dumps(entry)}\n")
    return report


def replace(stale: Callable[[dict[str, Any]], bool], fresh: list[dict[str, Any]]) -> None:
    """Leave out of this machine's results what `stale` says, and add `fresh`; all or nothing is written."""
    path = RESULTS / f"{slug()}.json"
    known = json.loads(path.read_text())["results"] if path.exists() else []
    results = [entry for entry in known if not stale(entry)] + fresh
    document = about("make bench", seed=0) | {"results": sorted(results, key=lambda entry: entry["name"])}
    RESULTS.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)
