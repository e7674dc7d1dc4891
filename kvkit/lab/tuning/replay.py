"""Replay of tuning strategies over recorded trials: what each finds, after which runs and seconds."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.search import finalists
from kvkit.kernels.tuning.strategies import Strategy, StrategyFactory
from kvkit.lab.tuning.recordings import Recording


class Trial(NamedTuple):
    """One answer to a strategy's question, and the best configuration so far."""

    config: KernelConfig
    runs: int  # runs so far
    seconds: float  # seconds of all runs so far; those of the compiler are not recorded
    best: KernelConfig  # configuration that a search which ended here would find in its final runs
    regret: float  # share by which `best` takes longer than the fastest of the recording


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay of one strategy with one seed over one recording."""

    recording: Recording
    strategy: str
    seed: int
    trials: tuple[Trial, ...]

    def after_runs(self, runs: float) -> float:
        """Return the regret after so many runs; that of the default, the first trial, before its end."""
        return self.trials[max(0, bisect_right([trial.runs for trial in self.trials], runs) - 1)].regret

    def after_seconds(self, seconds: float) -> float:
        """Return the regret after so many seconds of runs; as `after_runs`."""
        ends = [trial.seconds for trial in self.trials]
        return self.trials[max(0, bisect_right(ends, seconds) - 1)].regret

    def until(self, regret: float) -> Trial:
        """Return the trial since which the best so far stays within a regret; the last if none does."""
        reached = self.trials[-1]
        for trial in reversed(self.trials):
            if trial.regret > regret:
                break
            reached = trial
        return reached


def replay(recording: Recording, name: str, make: StrategyFactory, seed: int) -> Replay:
    """Replay a strategy over a recording.

    Each question is answered with the next recorded runs of its configuration, which begin again after the
    last, and the strategy is told their median. So a noisy moment misleads the strategy as it would have in
    the search. The best so far is, by all recorded runs, the fastest of the configurations that `search`
    would measure in its final runs, which are not counted: see `search.finalists`.

    Args:
        recording: recorded times of the problem's configurations.
        name: name of the strategy.
        make: makes the strategy from the recording's space.
        seed: seed that `make` uses, for the result.
    """
    strategy: Strategy = make(recording.space)
    drawn: dict[KernelConfig, list[float]] = {}
    medians: dict[KernelConfig, float] = {}
    asked: list[KernelConfig] = []
    costs: list[float] = []
    best: list[KernelConfig] = []
    config: KernelConfig | None = recording.space[0]
    while config is not None:
        known, times = recording.samples[config], drawn.setdefault(config, [])
        new = [known[(len(times) + i) % len(known)] for i in range(strategy.samples)]
        times += new
        medians[config] = statistics.median(times)
        asked.append(config)
        costs.append(sum(new))
        best.append(min(finalists(medians, recording.space[0]), key=recording.seconds))
        strategy.tell(config, medians[config])
        config = strategy.ask()
    rows = zip(asked, accumulate(costs), best, strict=True)
    found = (
        Trial(one, strategy.samples * number, seconds, kept, recording.regret(kept))
        for number, (one, seconds, kept) in enumerate(rows, 1)
    )
    return Replay(recording, name, seed, tuple(found))


def replay_all(recordings: Sequence[Recording], strategies: dict[str, Any], seeds: int) -> list[Replay]:
    """Replay each strategy over each recording with the seeds 0, 1, ..., `seeds` - 1.

    Args:
        recordings: recordings.
        strategies: functions of a space and a `seed` that make a strategy, by name.
        seeds: number of seeds.
    """
    return [
        replay(recording, name, partial(make, seed=seed), seed)
        for recording in recordings
        for name, make in strategies.items()
        for seed in range(seeds)
    ]
