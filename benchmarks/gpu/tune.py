"""`make gpu`: `kvkit tune`, attention first, as far as the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu import carried_space
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.driver import carried_cache
from benchmarks.gpu.packages import TRITON_CACHE
from kvkit.kernels.tuning import search
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.devices import tools_here
from kvkit.kernels.tuning.search import CompileInfo, Roofline, Tools, Trial
from kvkit.kernels.tuning.tables import tuned_folder
from kvkit.kernels.tuning.telemetry import UNKNOWN, DeviceState, state_reader

BUDGET_S, PROBLEM_S = 65, 5


def run(bench: Bench) -> None:
    """Records each trial, then what each problem's bucket has now; tables are in $KVKIT_TUNED."""
    read_state = state_reader(host=bench.device.type != "cuda")
    states: dict[tuple[str, KernelConfig], DeviceState] = {}

    def keep(problem: Problem, trial: Trial) -> None:
        states[problem.name, trial.config] = read_state(problem.name)
        bench.results.record(problem.name, **kept(problem, trial))

    def kept(problem: Problem, trial: Trial) -> dict[str, Any]:
        state = states.get((problem.name, trial.config), UNKNOWN)
        return {
            "config": str(trial.config),
            "us": trial.us,
            "samples_us": trial.samples,
            "outcome": trial.outcome,
            **state._asdict(),
        }

    with _tools(bench) as tools:
        for step in search.tune(
            bench.problems, tuned_folder(), tools, budget_s=BUDGET_S, problem_s=PROBLEM_S, on_trial=keep
        ):
            found = {} if step.tuned is None else step.tuned._asdict() | {"config": str(step.tuned.config)}
            trials = [kept(step.problem, trial) for trial in step.trials]
            bench.results.record(step.problem.name, state=step.state, **found, trials=trials)


@contextmanager
def _tools(bench: Bench) -> Iterator[Tools]:
    if bench.device.type == "cuda":
        known = carried_space.carried(TRITON_CACHE) if carried_cache()["fits"] else {}
        with tools_here() as tools:
            look = partial(carried_space.compile_space, known) if known else tools.compile_space
            yield replace(tools, compile_space=look)
    else:
        roof, look = Roofline(1e30, 1e30), dict[KernelConfig, CompileInfo]()
        yield Tools(bench.results.gpu, bench.device, lambda *_: look, bench.timer, roof, time.monotonic)
