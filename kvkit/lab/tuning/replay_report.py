"""Reports on replays of tuning strategies: a table, CSV, pytest-benchmark's JSON and a picture."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from kvkit.environment import describe
from kvkit.lab.tuning.replay import Replay
from kvkit.settings import ConfigError

RUNS = (12, 24, 48, 96)
"""Runs after which the table has the regret."""
WITHIN = 0.05
"""Regret within which a strategy is said to have found the best configuration."""


def by_device(replays: Sequence[Replay]) -> Mapping[str, Mapping[str, list[Replay]]]:
    """Group replays by device, then by strategy."""
    found: dict[str, dict[str, list[Replay]]] = {}
    for one in replays:
        found.setdefault(one.recording.device, {}).setdefault(one.strategy, []).append(one)
    return found


def tables(replays: Sequence[Replay]) -> list[Table]:
    """Return a table for each device; a row is the mean of a strategy over its problems and seeds."""
    found = []
    for device, strategies in by_device(replays).items():
        recordings = {id(one.recording): one.recording for ones in strategies.values() for one in ones}
        trials = sum(len(recording.samples) for recording in recordings.values())
        heads = (*(f"after {runs}" for runs in RUNS), "runs", "ms")
        table = Table(
            "strategy",
            *(Column(head, justify="right") for head in heads),
            title=escape(f"{device}: {len(recordings)} problems, {trials} configurations"),
            caption=f"mean regret after runs; runs and their ms until within {WITHIN:.0%} of the best",
        )
        for strategy, ones in strategies.items():
            regrets = (statistics.mean(one.after_runs(runs) for one in ones) for runs in RUNS)
            until = [one.until(WITHIN) for one in ones]
            table.add_row(
                escape(strategy),
                *(f"{regret:.1%}" for regret in regrets),
                f"{statistics.mean(trial.runs for trial in until):.1f}",
                f"{statistics.mean(trial.seconds for trial in until) * 1e3:.3g}",
            )
        found.append(table)
    return found


COLUMNS = (
    *("device", "problem", "strategy", "seed", "trial", "runs", "seconds", "config", "us"),
    *("best_config", "best_us", "regret"),
)


def write_csv(path: Path, replays: Sequence[Replay]) -> None:
    """Write a row for each trial of each replay: COLUMNS. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for one in replays:
            kept = one.recording
            about = kept.device, kept.problem, one.strategy, one.seed
            for number, trial in enumerate(one.trials, 1):
                us = (kept.seconds(config) * 1e6 for config in (trial.config, trial.best))
                tried, best = (f"{number:.6g}" for number in us)
                cost = number, trial.runs, f"{trial.seconds:.6g}"
                rows.writerow([*about, *cost, trial.config, tried, trial.best, best, f"{trial.regret:.6g}"])


def as_benchmarks(replays: Sequence[Replay]) -> dict[str, Any]:
    """Return replays as a document that `pytest-benchmark compare` reads.

    A benchmark is a strategy on a problem. Its data are, for each seed, the seconds of the runs until the
    best so far stays within WITHIN of the best; `extra_info` has the number of these runs and the regrets
    after RUNS.
    """
    machine = describe()
    benchmarks = []
    for (device, problem, strategy), group in groupby(
        replays, key=lambda one: (one.recording.device, one.recording.problem, one.strategy)
    ):
        ones = list(group)
        until = [one.until(WITHIN) for one in ones]
        benchmarks.append(
            {
                "group": f"{device}: {problem}",
                "name": f"{strategy}[{problem}]",
                "fullname": f"{device}::{problem}[{strategy}]",
                "params": {"strategy": strategy},
                "param": strategy,
                "extra_info": {
                    "runs": [trial.runs for trial in until],
                    "regret_after_runs": {runs: [one.after_runs(runs) for one in ones] for runs in RUNS},
                },
                "options": {},
                "stats": _statistics([trial.seconds for trial in until]),
            }
        )
    return {
        "machine_info": {
            "node": "",
            "cpu": {"brand_raw": machine["machine"]["cpu"], "count": machine["machine"]["cores"]},
            "system": machine["machine"]["system"],
            "python_version": machine["versions"]["python"],
        },
        "commit_info": {},
        "benchmarks": benchmarks,
        "datetime": datetime.now(UTC).isoformat(),
        "version": "5.0.0",
    }


def _statistics(data: Sequence[float]) -> dict[str, Any]:
    """Return the statistics that pytest-benchmark has of each benchmark."""
    low, middle, high = np.percentile(data, (25, 50, 75)).tolist()
    mean, spread = statistics.mean(data), statistics.stdev(data) if len(data) > 1 else 0.0
    fence = 1.5 * (high - low)
    inner = [one for one in data if low - fence <= one <= high + fence]
    deviating = sum(abs(one - mean) > spread for one in data)
    outliers = len(data) - len(inner)
    return {
        "min": min(data),
        "max": max(data),
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": middle,
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": outliers,
        "stddev_outliers": deviating,
        "outliers": f"{deviating};{outliers}",
        "ld15iqr": min(inner),
        "hd15iqr": max(inner),
        "ops": 1 / mean,
        "total": sum(data),
        "iterations": 1,
        "data": list(data),
    }


def write_json(path: Path, replays: Sequence[Replay]) -> None:
    """Write `as_benchmarks` to a file. Raises OSError."""
    path.write_text(json.dumps(as_benchmarks(replays), indent=1) + "\n", encoding="utf-8")


def plot(path: Path, replays: Sequence[Replay]) -> None:
    """Plot mean regret against runs and against seconds of runs, a row for each device.

    Args:
        path: file to write; its suffix is the format: .png, .svg or .pdf.
        replays: replays.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or matplotlib does not know its suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'kvkit-llm[tuning]'") from error
    devices = by_device(replays)
    figure = Figure(figsize=(9.2, 3.4 * len(devices)), layout="constrained")
    for (device, strategies), axes in zip(
        devices.items(), figure.subplots(len(devices), 2, squeeze=False), strict=True
    ):
        ones = [one for group in strategies.values() for one in group]
        first, last = (one.trials[0] for one in ones), (one.trials[-1] for one in ones)
        runs = range(1, max(one.trials[-1].runs for one in ones) + 1)
        seconds = np.geomspace(min(t.seconds for t in first), max(t.seconds for t in last), 200).tolist()
        for strategy, group in strategies.items():
            for panel, budgets, regret in (
                (axes[0], runs, Replay.after_runs),
                (axes[1], seconds, Replay.after_seconds),
            ):
                means = [100 * statistics.mean(regret(one, budget) for one in group) for budget in budgets]
                panel.plot(budgets, means, label=strategy)
        axes[0].set(title=device, xlabel="runs of a problem", ylabel="mean regret, %")
        axes[1].set(xlabel="seconds of a problem's runs")
        axes[1].legend()
        for panel in axes:
            panel.set(xscale="log")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
