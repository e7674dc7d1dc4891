"""`make gpu`: `kvkit tune`, attention first, as far as the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.bench import Bench
from kvkit.kernels.tuning import search
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.devices import tools_here
from kvkit.kernels.tuning.search import CompileInfo, Roofline, Tools, Trial
from kvkit.kernels.tuning.tables import tuned_folder

BUDGET_S, PROBLEM_S = 75, 5


def run(bench: Bench) -> None:
    """Records each trial, then what each problem's bucket has now; tables are in $KVKIT_TUNED."""

    def keep(problem: Problem, trial: Trial) -> None:
        bench.results.record(problem.name, config=str(trial.config), us=trial.us, outcome=trial.outcome)

    with _tools(bench) as tools:
        for step in search.tune(
            bench.problems, tuned_folder(), tools, budget_s=BUDGET_S, problem_s=PROBLEM_S, on_trial=keep
        ):
            found = {} if step.tuned is None else step.tuned._asdict() | {"config": str(step.tuned.config)}
            trials = [
                {"config": str(trial.config), "us": trial.us, "outcome": trial.outcome}
                for trial in step.trials
            ]
            bench.results.record(step.problem.name, state=step.state, **found, trials=trials)


@contextmanager
def _tools(bench: Bench) -> Iterator[Tools]:
    if bench.device.type == "cuda":
        with tools_here() as tools:
            yield tools
    else:
        roof, look = Roofline(1e30, 1e30), dict[KernelConfig, CompileInfo]()
        yield Tools(bench.results.gpu, bench.device, lambda *_: look, bench.timer, roof, time.monotonic)
