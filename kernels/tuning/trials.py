"""Trials of tuning as lines of JSON, and reports on them as CSV and as text."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvkit.environment import PACKAGES, version_of
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.search import OPTIMISM, UNCHECKED, Roofline, SearchStep, Trial
from kvkit.kernels.tuning.tables import build_of
from kvkit.kernels.tuning.telemetry import UNKNOWN, DeviceState, source_commit

Line = Mapping[str, Any]
"""A trial as a JSON object, made by `line`."""


def lines(
    step: SearchStep,
    device: str,
    roofline: Roofline,
    states: Mapping[KernelConfig, DeviceState] = MappingProxyType({}),
) -> Iterator[Line]:
    """Return a line for each configuration that a search tried or skipped; see `line`.

    Args:
        states: state of the device in the trials of the step's problem.
    """
    return (
        line(step.problem, trial, device, roofline, states.get(trial.config, UNKNOWN))
        for trial in step.trials
    )


def line(
    problem: Problem, trial: Trial, device: str, roofline: Roofline, state: DeviceState = UNKNOWN
) -> Line:
    """Return the line to keep of a trial.

    Args:
        problem: problem as in `search.SearchStep`.
        device: name of the device.
        roofline: roofline of the device: `Tools.roofline`.
        state: state of the device after the trial's first runs.
    """
    work = problem.work(trial.config)
    return {
        "time": time.time(),
        "device": device,
        "problem": problem.name,
        "operation": problem.names[0],
        **problem.bucket._asdict(),
        "config": str(trial.config),
        "default": trial.config == problem.space[0],
        "outcome": trial.outcome,
        "us": trial.us,
        "samples_us": trial.samples,
        "roof_us": roofline.seconds(work) * 1e6,
        "moved_bytes": work.moved_bytes,
        "flops": work.flops,
        "bytes_per_s": roofline.bytes_per_s,
        "flops_per_s": roofline.flops_per_s,
        "compiled": dict(trial.compile_info.numbers),
        **state._asdict(),
        "commit": source_commit(),
        **build_of(problem.kernel, problem.host)._asdict(),
        "versions": {package: version_of(package) for package in PACKAGES},
    }


def append(path: Path, new_lines: Iterable[Line]) -> None:
    """Add lines to a file, each flushed before the next; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        for line in new_lines:
            file.write(json.dumps(line) + "\n")
            file.flush()


def read(path: Path) -> list[Line]:
    """Read the lines of each problem's last search from a file. A line cut off by a crash is left out.

    Raises:
        OSError: the file cannot be read.
    """
    last: dict[str, dict[str, Line]] = {}
    with path.open() as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["default"]:  # it is the first of a search
                last[line["problem"]] = {}
            last.setdefault(line["problem"], {})[line["config"]] = line
    return [line for configs in last.values() for line in configs.values()]


COLUMNS = (
    *("device", "problem", "operation", "form", "config", "default", "outcome", "us", "least_us", "roof_us"),
    *("moved_bytes", "flops", "source", "compiler", "driver", *DeviceState._fields, "commit"),
)


def write_csv(path: Path, found: Sequence[Line]) -> None:
    """Write a row for each trial: COLUMNS, then the compiler's numbers."""
    numbers = list(dict.fromkeys(name for line in found for name in line["compiled"]))
    with open(path, "w", newline="") as file:
        rows = csv.DictWriter(file, [*COLUMNS, *numbers], extrasaction="ignore")
        rows.writeheader()
        for line in found:
            rows.writerow({**line, "least_us": min(line["samples_us"], default=None), **line["compiled"]})


def explain(found: Sequence[Line]) -> str:
    """Describe each problem in a paragraph: winner, gain, share of the roofline, compiler's numbers."""
    problems: dict[str, list[Line]] = {}
    for line in found:
        problems.setdefault(line["problem"], []).append(line)
    return "\n\n".join(_explained(name, trials) for name, trials in problems.items())


def _explained(name: str, trials: Sequence[Line]) -> str:
    best = next((line for line in trials if line["outcome"] == "best"), None)
    share = best["roof_us"] / best["us"] if best else 0.0
    refuted = share > OPTIMISM
    outcomes = Counter(_kind(line["outcome"], refuted) for line in trials if line is not best)
    rest = "; ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    if best is None:
        stopped = any(line["outcome"] == UNCHECKED for line in trials)
        return f"{name}: {'the search was ended' if stopped else 'no configuration is correct'}: {rest}."
    default = next(line for line in trials if line["default"])
    gain = ", and is the default"
    if default["us"] is None:
        gain = f"; the default does not count: {default['outcome']}"
    elif best is not default:
        gain = f", {1 - best['us'] / default['us']:.0%} less than the default"
    memory, products = best["moved_bytes"] / best["bytes_per_s"], best["flops"] / best["flops_per_s"]
    reached = f"{best['moved_bytes'] / best['us'] / 1e3:.3g} GB/s"
    if best["flops"]:
        reached += f" and {best['flops'] / best['us'] / 1e6:.3g} TFLOP/s"
    bound = "memory" if memory >= products else "matrix products"
    sentences = [
        f"{name}: {best['config']} takes {best['us']:.1f} µs{gain}.",
        f"It reaches {reached}. By its bytes and flops {bound} would limit it; it is at {share:.0%} of the "
        "measured roofline.",
    ]
    if refuted:
        sentences.append(
            "No kernel exceeds a roofline by so much: the machine was busy when it was measured. "
            "To measure again run kvkit tune --force on an idle machine."
        )
    differences = [
        f"{number.replace('_', ' ')} {value} instead of {default['compiled'][number]}"
        for number, value in best["compiled"].items()
        if default["compiled"].get(number, value) != value
    ]
    if differences:
        sentences.append(f"Unlike the default ({default['config']}) it has {', '.join(differences)}.")
    return "\n  ".join([*sentences, f"The others: {rest}."] if rest else sentences)


def _kind(outcome: str, refuted: bool) -> str:
    """Return an outcome without its numbers, so that equal ones can be counted."""
    for kind in ("spills", "wrong", "does not run", "untried", "the same binary as another"):
        if outcome.startswith(kind.removesuffix(" another")):
            return kind
    if "at the roof" in outcome:
        return "left out by a refuted roofline" if refuted else "cannot be faster by the roofline"
    return outcome
