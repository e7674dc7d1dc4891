"""Say which results are older than the code that they measure, and make them again: `make results`.

    python -m benchmarks.report.results [--run NAME...]

Prints for each result the commit and day that it was measured at, how many commits since then changed the
code that it measures, and the minutes that it takes to make again; ~ marks an estimate. --run runs the
commands of the named results, or of all, one after the other, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from benchmarks.folders import RESULTS, ROOT
from benchmarks.report.registry import REGISTERED, Result

UNKNOWN = "unknown"
TO_FILL_IN = re.compile(r"\b(FILE|FOLDER|MODEL|TRACES|URL)\b")


class Age(NamedTuple):
    """The oldest commit that a result was measured at, its day, and commits since that changed the code."""

    commit: str = UNKNOWN
    day: str = ""
    since: int | None = None


def commits(found: Any) -> Iterator[str]:
    """Every commit that a document names: its own, and those of entries that were measured apart."""
    if isinstance(found, Mapping):
        if isinstance(commit := found.get("commit"), str):
            yield commit
        for value in found.values():
            yield from commits(value)
    elif isinstance(found, list):
        for value in found:
            yield from commits(value)


def age(result: Result, document: Mapping[str, Any], root: Path = ROOT) -> Age:
    """Return a result's age by the history of `root`, unknown where that is too short."""
    part: Any = document
    if result.part:
        part = [one for one in document["results"] if one["name"].startswith(f"{result.part}::")]
    ages = [_age(commit, result.measures, root) for commit in sorted(set(commits(part)))]
    if not ages or any(one.since is None for one in ages):
        return Age()
    return max(ages, key=lambda one: (one.since, one.day))


def _age(commit: str, paths: tuple[str, ...], root: Path) -> Age:
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return Age()
    day = _git(root, "show", "--no-patch", "--format=%cs", commit)
    since = _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    return Age() if day is None or since is None else Age(commit, day, int(since))


def _git(root: Path, *arguments: str) -> str | None:
    """Return git's output, None where it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def minutes(result: Result, document: Mapping[str, Any]) -> str:
    """Minutes to make a result again: its own wall time, or the estimate with a ~."""
    seconds = document.get("wall_s", document.get("seconds"))
    return f"~{result.minutes:g}" if seconds is None else f"{seconds / 60:.0f}"


def table(results: Mapping[str, Result], folder: Path = RESULTS, root: Path = ROOT) -> Table:
    """A row for each result; one without a file is "not measured"."""
    numbers = (Column(name, justify="right") for name in ("commits\nsince", "minutes"))
    wide = (Column(name, overflow="fold") for name in ("result, and what makes it", "measured at"))
    shown = Table(*wide, *numbers, box=None, padding=(0, 2, 0, 0))
    for name, result in results.items():
        path = result.path(folder)
        document = json.loads(path.read_text()) if path.exists() else {}
        found = age(result, document, root) if document else Age("not measured")
        since = "" if found.since is None else str(found.since)
        command = Padding(escape(result.command.removesuffix(" {json}") or "nothing does"), (0, 0, 0, 2))
        at = f"{found.commit} {found.day}"
        shown.add_row(Group(escape(name), command), at, since, minutes(result, document))
    return shown


def run(results: Mapping[str, Result], root: Path = ROOT) -> list[str]:
    """Run the commands of results, one after the other; a line for each that was not or failed."""
    failed = []
    for name, result in results.items():
        command = result.command_for(result.path().relative_to(ROOT))
        if not command:
            failed.append(f"{name}: no command makes it")
        elif TO_FILL_IN.search(command):
            failed.append(f"{name}: fill in and run: {command}")
        else:
            print(f"{name}: {command}", flush=True)
            if status := subprocess.run(command, shell=True, cwd=root, check=False).returncode:
                failed.append(f"{name}: exit {status}")
    return failed


def main() -> None:
    """Print the table, or run what is asked for; the exit status is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", nargs="+", metavar="NAME", default=[], help="make these again, or all")
    asked = parser.parse_args().run
    if unknown := set(asked) - REGISTERED.keys() - {"all"}:
        parser.error(f"no result is called {', '.join(sorted(unknown))}")
    if not asked:
        Console().print(table(REGISTERED))
        return
    chosen = {name: result for name, result in REGISTERED.items() if name in asked or "all" in asked}
    if failed := run(chosen):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
