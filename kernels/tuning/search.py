"""Search for the fastest correct configuration of each problem on this device, as `kvkit tune` does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from kvkit.environment import slug_of
from kvkit.kernels.tuning.cases import Case, Problem, Work
from kvkit.kernels.tuning.compiling import CompileError
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.strategies import (
    FIRST_SAMPLES,
    Strategy,
    StrategyFactory,
    nearest,
    nearest_first,
)
from kvkit.kernels.tuning.tables import Tuned, TunedKey, build_of, read_table, write_table

FINAL_SAMPLES = 15
FINALISTS = 6
FINALIST_FACTOR = 1.25
"""Configurations slower than the fastest by this factor after the first samples are not measured again."""
GAIN = 0.01
"""A configuration replaces the default if it takes less time by more than this share."""
OPTIMISM = 1.25
"""Factor by which a kernel may exceed the measured roofline: kernels that mostly read beat a copy."""

Measure = Callable[[KernelConfig], float]
"""Returns the seconds of one run of a configuration, with cold caches. Raises CompileError if it fails."""
Late = Callable[[], bool]
"""Returns True once the time limit has passed."""


class TuningError(RuntimeError):
    """Nothing can be tuned on this machine. The message names the cause or a remedy."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured peak rates of a device: bytes of memory and flops of matrix products per second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> float:
        """Return the seconds of `work` at the roofline."""
        return max(work.moved_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def bound(self, work: Work) -> float:
        """Return a lower bound of the seconds that a kernel takes for `work`."""
        return self.seconds(work) / OPTIMISM

    def refuted_by(self, work: Work, seconds: float) -> bool:
        """Return whether `work` beat its bound: the machine was busy when the roofline was measured."""
        return seconds < self.bound(work)


NO_ROOFLINE = Roofline(math.inf, math.inf)
"""Roofline to use after the measured one was refuted: every bound is 0."""


@dataclass(frozen=True, slots=True)
class CompileInfo:
    """Compiler's results for a configuration, before it is run."""

    rejection: str = ""  # why it cannot be run
    binary: str = ""  # equal for equal machine code, "" if unknown
    # registers, spills, blocks per multiprocessor and other integers of `assembly.Compiled`
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers that a thread spills; 0 if unknown."""
        return self.numbers.get("spill_bytes", 0)


@dataclass(frozen=True, slots=True)
class Trial:
    """Measured times of a configuration, and the reason for its rank."""

    config: KernelConfig
    us: float | None  # median time in microseconds, None if it was not run
    outcome: str  # "best", "slower", or why it was not run or not taken
    samples: tuple[float, ...] = ()  # microseconds, in the order of the runs that count
    compile_info: CompileInfo = CompileInfo()


UNTRIED = "untried: the time was over"
"""Outcome of a configuration that was left out."""
UNCHECKED = "measured, not checked"
"""Outcome of a trial while its search runs, and for good if the search was stopped."""

OnTrial = Callable[[Problem, Trial], object]
"""Function called with each configuration once it is measured: a stopped search then leaves its trials."""


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Result of `tune` for a problem.

    The problem is "tuned" now, "known" from an earlier run, "left" because the time was over, or "failed": no
    configuration is correct, or there is too little memory.
    """

    problem: Problem
    state: Literal["tuned", "known", "left", "failed"]
    tuned: Tuned | None = None  # present result of its key
    trials: tuple[Trial, ...] = ()  # one per configuration, in the order of the space
    error: str = ""  # why none was tried

    def __str__(self) -> str:
        """Return one line: the result, its comparison with the default, and wrong configurations."""
        clauses = [f"{self.problem.name}: {self.state}", *filter(None, [self.error])]
        if self.tuned is not None:
            clauses.append(f"{self.tuned.us:.1f} µs, {self.tuned.config}")
            if self.tuned.default_us is not None:
                clauses.append(f"the default takes {self.tuned.default_us:.1f} µs")
            if self.tuned.untried:
                clauses.append(f"{self.tuned.untried} configurations untried")
        clauses += [f"{t.config}: {t.outcome}" for t in self.trials if t.outcome.startswith("wrong")]
        return "; ".join(clauses)


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of a machine for tuning; `devices.tools_here` makes them."""

    name: str  # name of the device, as in `tables.device_name`
    device: torch.device  # device of the problems' tensors
    compile_space: Callable[[Problem, Late], Mapping[KernelConfig, CompileInfo]]  # compiles its space
    timer: Callable[[Case], Measure]  # makes the function that measures a case
    roofline: Roofline  # roofline of this device
    clock: Callable[[], float]  # seconds since any start
    target: str = ""  # compile target, a name in `gpus.GPUS`


def tune(
    problems: Sequence[Problem],
    folder: Path,
    tools: Tools,
    *,
    budget_s: float | None = None,
    problem_s: float | None = None,
    force: bool = False,
    on_trial: OnTrial = lambda problem, trial: None,
    strategy: StrategyFactory = nearest,
) -> Iterator[SearchStep]:
    """Tune one problem after another; write `folder`/<device>.json after each, and yield its result.

    Without `force`, a problem is skipped if the file has a result for the kernel's present source, compiler
    and driver, with a configuration that the kernel still has. So a stopped run continues where it was.

    Args:
        budget_s: seconds after which no problem is begun, and the search of the current problem ends with
            the fastest configuration so far. The next run searches that problem again. At most half of a
            problem's time is spent on compiling its configurations.
        problem_s: the same limit for each problem; the next run does not search such a problem again.
        on_trial: see `OnTrial`.
        strategy: makes the strategy of each problem, as those of `strategies.STRATEGIES` do.

    Raises:
        TableError: the file exists and is no table of this device; it was not changed.
        OSError: the file cannot be read or written.
        SourceError: a problem's kernel has no source.
    """
    slug = slug_of(tools.name)
    path = folder / f"{slug}.json"
    try:
        table = read_table(path, slug)
    except FileNotFoundError:
        table = {}
    began, roofline = tools.clock(), tools.roofline
    for problem in problems:
        problem = replace(problem, space=problem.space_on(tools.target))
        key = TunedKey(problem.bucket, build_of(problem.kernel, problem.host))
        known = table.get(key)
        complete = known and known.config in problem.space and not (known.untried and problem_s is None)
        if complete and not force:
            yield SearchStep(problem, "known", known)
            continue
        now = tools.clock()
        ends = min(
            began + (math.inf if budget_s is None else budget_s),
            now + (math.inf if problem_s is None else problem_s),
        )
        step = SearchStep(problem, "left")
        if now < ends:
            step = _step(problem, replace(tools, roofline=roofline), now, ends, on_trial, strategy)
        if step.tuned is not None:
            table[key] = step.tuned
            write_table(path, tools.name, table)
            if roofline.refuted_by(problem.work(step.tuned.config), step.tuned.us * 1e-6):
                roofline = NO_ROOFLINE
        yield step


def _step(
    problem: Problem, tools: Tools, now: float, ends: float, on_trial: OnTrial, strategy: StrategyFactory
) -> SearchStep:
    """Compile and search a problem from `now` to `ends`, in seconds of the clock."""

    def after(time: float) -> Late:
        return lambda: tools.clock() >= time

    try:
        nearest = replace(problem, space=nearest_first(problem.space))
        infos, case = tools.compile_space(nearest, after((now + ends) / 2)), problem.make(tools.device, True)
        measure, late = tools.timer(case), after(ends)
        tuned, trials = search(problem, case, measure, infos, tools.roofline, late, on_trial, strategy)
    except torch.OutOfMemoryError as error:
        return SearchStep(problem, "failed", error=str(error))
    return SearchStep(problem, "tuned" if tuned else "failed", tuned, trials)


def search(
    problem: Problem,
    case: Case,
    measure: Measure,
    compile_infos: Mapping[KernelConfig, CompileInfo],
    roofline: Roofline,
    late: Late = lambda: False,
    on_trial: OnTrial = lambda problem, trial: None,
    strategy: StrategyFactory = nearest,
) -> tuple[Tuned | None, tuple[Trial, ...]]:
    """Find the fastest correct configuration of a problem; mutates the case's tensors.

    1. Configurations that the compiler rejects are not run, nor those that compile to the same as one that
       differs only in stages. The default is always run.
    2. The default and then, in the order of the strategy (by default, nearest to the default first), each
       gets as many runs as the strategy samples (by default FIRST_SAMPLES). Those that spill registers come
       last: a spill mostly costs time, but larger tiles may be worth it. Those with a bound (the roofline's
       time for the bytes and flops of their tiles) above the fastest median so far are left out: they cannot
       win. A configuration that beats its own bound refutes the roofline: then those left out are run too.
    3. The FINALISTS fastest within NEAR of the fastest, and the default, get FINAL_SAMPLES more,
       alternating, so that a noisy moment affects all of them. The median of these counts.
    4. The finalists are ranked by median, and the first correct one is taken. The default ranks as if faster
       by GAIN, and before any that never beat its best run.

    When `late`, no configuration but the default is begun, and the final runs end after FIRST_SAMPLES each.

    Returns:
        result to keep, None if no configuration is correct; and the trial of every configuration.
    """
    default = problem.space[0]
    infos = {config: compile_infos.get(config, CompileInfo()) for config in problem.space}
    first, outcome = _sample_all(problem, measure, infos, roofline, late, on_trial, strategy(problem.space))
    median = {config: statistics.median(times) for config, times in first.items()}
    samples = _sample_again(finalists(median, default), measure, late)
    winner, faults = _fastest_correct(case, default, median, samples)
    outcome |= {config: f"wrong: {fault}" for config, fault in faults.items()}
    if winner is not None:
        outcome[winner] = "best"
    times = first | samples
    trials = tuple(_trial(c, times.get(c, ()), outcome[c] or "slower", infos[c]) for c in problem.space)
    us = {trial.config: trial.us for trial in trials}
    if winner is None:
        return None, trials
    untried = sum(trial.outcome == UNTRIED for trial in trials)
    return Tuned(winner, statistics.median(times[winner]) * 1e6, us[default], untried), trials


def _trial(config: KernelConfig, seconds: Sequence[float], outcome: str, info: CompileInfo) -> Trial:
    us = statistics.median(seconds) * 1e6 if seconds else None
    return Trial(config, us, outcome, tuple(time * 1e6 for time in seconds), info)


def _sample_all(
    problem: Problem,
    measure: Measure,
    infos: Mapping[KernelConfig, CompileInfo],
    roofline: Roofline,
    late: Late,
    on_trial: OnTrial,
    strategy: Strategy,
) -> tuple[dict[KernelConfig, list[float]], dict[KernelConfig, str]]:
    """Run steps 1 and 2 of `search`; mutates the strategy.

    Returns:
        seconds of the first samples of each configuration that ran; and for all configurations why they did
        not run, "" if they did.
    """
    default, outcome = problem.space[0], {config: infos[config].rejection for config in problem.space}
    first: dict[KernelConfig, list[float]] = {}
    compiled: dict[object, KernelConfig] = {}

    def binary(config: KernelConfig) -> object:
        return config._replace(stages=0), infos[config].binary or config

    def median(config: KernelConfig) -> float | None:
        times = first.get(compiled.get(binary(config), config))
        return statistics.median(times) if times else None

    fastest = math.inf
    spills = {config: infos[config].spill_bytes for config in problem.space if config != default}
    pending: Iterable[KernelConfig] = _spilling_last(_asked(strategy, default, median), spills)
    assumed: Roofline | None = None
    while roofline is not assumed:  # again, if the roofline was refuted
        assumed, left = roofline, []
        for config in pending:
            if outcome[config] and config != default:
                continue
            if (twin := compiled.setdefault(binary(config), config)) != config:
                outcome[config] = f"the same binary as {twin}"
                continue
            work = problem.work(config)
            if roofline.bound(work) > fastest:
                left += [] if config in first or config in left else [config]
                continue
            if late() and (config != default or config in first):
                continue
            try:
                times = [measure(config) for _ in range(strategy.samples)]
            except CompileError as error:
                outcome[config] = f"does not run: {error}"
                continue
            first.setdefault(config, []).extend(times)
            on_trial(problem, _trial(config, first[config], UNCHECKED, infos[config]))
            seconds = statistics.median(first[config])
            fastest = min(fastest, seconds)
            if roofline.refuted_by(work, seconds):
                roofline = NO_ROOFLINE
        pending = left
    outcome |= {c: f"takes {roofline.bound(problem.work(c)) * 1e6:.1f} µs at the roofline" for c in pending}
    outcome |= {c: UNTRIED for c, why in outcome.items() if not why and c not in first}
    return first, outcome


def _asked(
    strategy: Strategy, default: KernelConfig, median: Callable[[KernelConfig], float | None]
) -> Iterator[KernelConfig]:
    """Yield the default, then what the strategy asks for; tell it the median of each that was yielded."""
    config: KernelConfig | None = default
    while config is not None:
        yield config
        strategy.tell(config, median(config))
        config = strategy.ask()


def _spilling_last(
    asked: Iterable[KernelConfig], spills: Mapping[KernelConfig, int]
) -> Iterator[KernelConfig]:
    """Yield configurations that spill once, after all others, by the bytes that they spill."""
    spilling: dict[KernelConfig, int] = {}
    for config in asked:
        if spilled := spills.get(config, 0):
            spilling[config] = spilled
        else:
            yield config
    yield from sorted(spilling, key=lambda config: spilling[config])


def _sample_again(
    configs: Sequence[KernelConfig], measure: Measure, late: Late
) -> dict[KernelConfig, list[float]]:
    """Run step 3 of `search`; return the seconds of each sample."""
    samples: dict[KernelConfig, list[float]] = {config: [] for config in configs}
    for round_index in range(FINAL_SAMPLES):
        if round_index >= FIRST_SAMPLES and late():
            break
        start = round_index % max(1, len(configs))
        for config in [*configs[start:], *configs[:start]]:
            samples[config].append(measure(config))
    return samples


def _fastest_correct(
    case: Case,
    default: KernelConfig,
    median: Mapping[KernelConfig, float],
    samples: Mapping[KernelConfig, Sequence[float]],
) -> tuple[KernelConfig | None, dict[KernelConfig, str]]:
    """Run step 4 of `search`; mutates the case's tensors.

    Args:
        median: seconds of all configurations that ran.
        samples: seconds of the finalists.

    Returns:
        fastest correct configuration, None if there is none; and the fault of each wrong one.
    """
    final = {config: statistics.median(times) for config, times in samples.items()}
    faults = {default: _fault(case, default)} if default in final else {}
    best = min(samples[default]) if default in final else math.inf
    order = sorted(
        final, key=lambda c: (min(samples[c]) > best, final[c] * (1 - GAIN if c == default else 1))
    )
    unsampled = sorted(median.keys() - final.keys(), key=lambda c: median[c])
    winner = None
    for config in order + unsampled:
        if config not in faults:
            faults[config] = _fault(case, config)
        if not faults[config]:
            winner = config
            break
    return winner, {config: fault for config, fault in faults.items() if fault}


def finalists(median: Mapping[KernelConfig, float], default: KernelConfig) -> list[KernelConfig]:
    """Return the configurations of step 3 of `search` for the medians of the first samples, in seconds."""
    order = sorted(median, key=lambda config: median[config])
    fastest = [config for config in order if median[config] <= FINALIST_FACTOR * median[order[0]]][:FINALISTS]
    return fastest if default in fastest or default not in median else [*fastest, default]


def _fault(case: Case, config: KernelConfig) -> str:
    """Run `config` over poisoned outputs; return the fault of the results, "" if they are correct."""
    case.poison()
    case.run(config)
    return case.fault()
