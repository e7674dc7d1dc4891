"""What each test file costs in core seconds, against its budget, and how much memory worker processes take.

CPU time, children's included, is compared, so that a loaded machine changes little. `tests/conftest.py`
registers this plugin of pytest; `pytest --keep-costs` writes `tests/budgets.json`. Where `CI` is set a run
that is over a budget fails; budgets are of runs without the tests marked nightly.
"""

from __future__ import annotations

import json
import os
import resource
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, TESTS

BUDGETS = TESTS / "budgets.json"
LEAST_S, FACTOR = 30.0, 4.0
"""A file is over its budget beyond so many more core seconds, and beyond so many times it: CPUs differ."""
WORKER_GIB = 6.0
"""More of it, and the run fails: with several workers a machine of 16 GiB would be full."""
SHOWN = 10
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Costs:
    """Core seconds by test file, and peaks of resident memory by worker, with the test that reached each."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add what a worker measured. Mutates this one."""
        for file, seconds in other["seconds"].items():
            self.seconds[file] += seconds
        self.peaks |= {name: (gib, test) for name, (gib, test) in other["peaks"].items()}


COSTS = pytest.StashKey[Costs]()


def core_seconds() -> float:
    """CPU time of this process and of all that it started, such as engines that serve several tests."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + _of_descendants(os.getpid())


def _of_descendants(pid: int) -> float:
    """CPU time of the processes below one, and of their children that ended."""
    used = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, path.read_text().split()):
                with suppress(OSError):  # the process has ended
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    used += sum(map(int, fields[11:15])) / TICKS_PER_S
                used += _of_descendants(child)
    return used


def peak_gib() -> float:
    """Resident memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def over_budget(seconds: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """A line for each file that took far more than its budget, or far more than nothing without one."""
    found = []
    for file, took in seconds.items():
        budget = budgets.get(file, 0.0)
        if took > max(FACTOR * budget, budget + LEAST_S):
            found.append(f"{file}: {took:.0f} core seconds, its budget is {budget:.0f}")
    return found


def over_memory(peaks: Mapping[str, tuple[float, str]]) -> list[str]:
    """A line for each worker that took too much memory."""
    return [f"{name}: {gib:.1f} GiB in {test}" for name, (gib, test) in peaks.items() if gib > WORKER_GIB]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COSTS] = Costs()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measure a test with its fixtures."""
    costs, before, peak = item.config.stash[COSTS], core_seconds(), peak_gib()
    outcome = yield
    path = item.path.relative_to(ROOT) if item.path.is_relative_to(ROOT) else item.path
    costs.seconds[str(path)] += max(0.0, core_seconds() - before)  # of a process that nobody waited for, less
    if peak_gib() > peak:
        costs.peaks[_worker(item.config)] = (peak_gib(), item.nodeid)
    return outcome


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's costs to the process that collects them; there, fail a run that is over its budgets."""
    costs = session.config.stash[COSTS]
    costs.peaks.setdefault(_worker(session.config), (peak_gib(), "its imports"))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = {"seconds": dict(costs.seconds), "peaks": costs.peaks}
    elif session.exitstatus == 0 and os.environ.get("CI") and _failures(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker measured; one that died has measured nothing."""
    if costs := (getattr(node, "workeroutput", None) or {}).get("costs"):
        node.config.stash[COSTS].add(costs)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the dearest files, memory, and what is over its budget."""
    costs = config.stash[COSTS]
    if sum(costs.seconds.values()) < LEAST_S:
        return
    budgets = _budgets()
    write = terminalreporter.write_line
    write(f"core seconds of tests: {sum(costs.seconds.values()):.0f}; the dearest files, with their budgets:")
    for file, took in sorted(costs.seconds.items(), key=lambda entry: -entry[1])[:SHOWN]:
        write(f"  {took:6.0f} of {budgets.get(file, 0):4.0f}  {file}")
    for name, (gib, test) in sorted(costs.peaks.items()):
        write(f"memory of {name}: {gib:.1f} GiB at most, in {test}")
    if config.getoption("--keep-costs"):
        kept = budgets | {file: round(took) for file, took in sorted(costs.seconds.items()) if took >= 1}
        kept = {
            file: took
            for file, took in sorted(kept.items())
            if not file.startswith("/") and (ROOT / file).exists()
        }
        BUDGETS.write_text(json.dumps(kept, indent=1) + "\n")
    for line in _failures(config):
        write(f"OVER BUDGET {line}", red=True)


def _failures(config: pytest.Config) -> list[str]:
    costs = config.stash[COSTS]
    is_daily = "not nightly" in config.getoption("-m")
    if config.getoption("--keep-costs") or not is_daily:
        return over_memory(costs.peaks)
    return over_memory(costs.peaks) + over_budget(costs.seconds, _budgets())


def _budgets() -> dict[str, float]:
    found: dict[str, float] = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    return found


def _worker(config: pytest.Config) -> str:
    return str(getattr(config, "workerinput", {}).get("workerid", "the process"))
