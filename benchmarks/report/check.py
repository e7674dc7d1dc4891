"""What has become slower on the paths that every request takes: `make bench-check`.

python -m benchmarks.report.check [--against COMMIT] [--rounds N] times this tree, COMMIT and COMMIT
once more, which take turns: what the two of one commit differ by is noise. It exits with 1 where a path is
slower beyond that. With --python PROGRAM it is this tree with another Python, and with this one twice.

python -m benchmarks.report.check --counts compares what does not depend on the hour with
results/counts.json, and --keep writes it: calls of functions, memory held at most, system calls that move
bytes, and those bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS, ROOT
from kvkit.lab.files import about

HOT_PATHS = Path(__file__).parent / "hot_paths.py"
CASES = ROOT / "benchmarks" / "micro"
"""What paths are measured with, the same for every tree."""
RECORDED = RESULTS / "counts.json"
SLACK = {"calls": 1.1, "allocated_kib": 1.05, "reads_and_writes": 1.0, "bytes_read_and_written": 1.02}
"""More than so many times the recorded count is worse; threads of a busy machine share reads otherwise."""
LEAST = {"calls": 4, "allocated_kib": 16}
"""And by more than this."""
LEAST_NOISE = 0.03
CALLS_S = 0.02
"""So long each tree has its turn at a path."""

Counts = Mapping[str, Mapping[str, int]]


def worse_counts(found: Counts, recorded: Counts) -> list[str]:
    """What is more than is recorded, and paths that are in one of the two alone; a line each."""
    lines = [f"{path}: not recorded" for path in sorted(found.keys() - recorded.keys())]
    lines += [f"{path}: recorded, but gone" for path in sorted(recorded.keys() - found.keys())]
    for path in sorted(found.keys() & recorded.keys()):
        for kind, slack in SLACK.items():
            now, before = found[path][kind], recorded[path][kind]
            if now > before * slack and now - before > LEAST.get(kind, 0):
                lines.append(f"{path}: {kind} {now}, recorded {before}")
    return lines


def slower(times: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """What to say of a path, and whether it is slower than noise explains.

    Args:
        times: seconds of calls of "new", "old" and "old again".
    """
    least = {name: min(seconds) for name, seconds in times.items()}
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = [each["new"] / each["old"] for each in (least, middle)]
    noise = [abs(each["old again"] / each["old"] - 1) for each in (least, middle)]
    is_slower = all(
        ratio > 1 + max(LEAST_NOISE, 2 * around) for ratio, around in zip(ratios, noise, strict=True)
    )
    said = f"{ratios[0]:.3f} (minima), {ratios[1]:.3f} (medians); noise {noise[0]:.3f}, {noise[1]:.3f}"
    return said, is_slower


class Tree:
    """A process that runs the paths with the kvkit of one tree, with a Python and its packages."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, str(HOT_PATHS), "times"],
            env=environment_of(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def heard(self) -> Any:
        """Its next answer.

        Raises:
            SystemExit: it ended; what it said is on standard error.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the paths do not run there: exit {self._process.wait()}")
        return json.loads(line)

    def times(self, path: str, calls: int) -> list[float]:
        """Seconds of so many calls."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls} {path}\n")
        self._process.stdin.flush()
        seconds: list[float] = self.heard()
        return seconds


def environment_of(root: Path) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    return os.environ | threads | {"PYTHONPATH": f"{root}:{CASES}", "PYTHONHASHSEED": "0"}


def counts(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Those of the kvkit in `root`, from a process of its own.

    Raises:
        CalledProcessError: the paths do not run.
    """
    command = [sys.executable, str(HOT_PATHS), "counts"]
    done = subprocess.run(command, env=environment_of(root), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def recorded_for(python: str) -> Counts | None:
    """What is recorded for a Python, "3.11"; None where nothing is: another calls other functions."""
    document = json.loads(RECORDED.read_text())
    return document["paths"] if document["python_minor"] == python else None


def python() -> str:
    """This one's version, without the last number."""
    return ".".join(platform.python_version_tuple()[:2])


def _check_counts(keep: bool) -> list[str]:
    found = counts()
    if keep:
        document = about("python -m benchmarks.report.check --counts --keep", seed=0)
        document |= {"python_minor": python(), "paths": found}
        RECORDED.write_text(json.dumps(document, indent=1) + "\n")
    recorded = recorded_for(python())
    if recorded is None:
        sys.exit(f"nothing is recorded for Python {python()}: --keep records it")
    for path, kinds in found.items():
        print(f"{path:16} " + "  ".join(f"{kind} {count}" for kind, count in kinds.items()))
    return worse_counts(found, recorded)


def _check_times(against: str, rounds: int) -> list[str]:
    worktree = ["git", "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run([*worktree, "add", "--quiet", "--detach", str(old), against], cwd=ROOT, check=True)
        try:
            with Tree(ROOT) as new, Tree(old) as one, Tree(old) as another:
                lines = [f"{path}: slower than at {against}" for path in _compare(new, one, another, rounds)]
        finally:
            subprocess.run([*worktree, "remove", "--force", str(old)], cwd=ROOT, check=True)
    return lines


def _check_python(python: str, rounds: int) -> list[str]:
    with Tree(ROOT, python) as new, Tree(ROOT) as one, Tree(ROOT) as another:
        return [f"{path}: slower with {python}" for path in _compare(new, one, another, rounds)]


def _compare(new: Tree, old: Tree, old_again: Tree, rounds: int) -> list[str]:
    """Print how the trees' times compare; return the paths that are slower."""
    trees, found = {"new": new, "old": old, "old again": old_again}, []
    paths, *_ = [tree.heard() for tree in trees.values()]
    for path in paths:
        said, is_slower = slower(_take_turns(trees, path, rounds))
        print(f"{path:16} {said}{'  SLOWER' if is_slower else ''}", flush=True)
        if is_slower:
            found.append(path)
    return found


def _take_turns(trees: Mapping[str, Tree], path: str, rounds: int) -> dict[str, list[float]]:
    calls = max(1, int(CALLS_S / min(trees["old"].times(path, 3))))
    times: dict[str, list[float]] = {name: [] for name in trees}
    names = list(trees)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name] += trees[name].times(path, calls)
    return times


def main() -> None:
    """Exit with what is worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--python", help="another Python to compare with, instead of a commit")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each tree at each path")
    parser.add_argument("--counts", action="store_true", help="compare counts with those on record")
    parser.add_argument("--keep", action="store_true", help="with --counts: record them")
    asked = parser.parse_args()
    if asked.counts:
        lines = _check_counts(asked.keep)
    elif asked.python:
        lines = _check_python(asked.python, asked.rounds)
    else:
        lines = _check_times(asked.against, asked.rounds)
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
