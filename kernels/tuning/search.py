"""Find the fastest correct configuration of each problem on the device at hand: what `kvkit tune` does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from kvkit.environment import slug_of
from kvkit.kernels.tuning.cases import Case, Problem, Work
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.gate import CompileError
from kvkit.kernels.tuning.tables import Tuned, TunedKey, build_of, read_table, write_table

FIRST_SAMPLES = 3
FINAL_SAMPLES = 15
FINALISTS = 6
NEAR = 1.25
"""What is slower than the fastest by this factor after its first samples is not measured again."""
GAIN = 0.01
"""A configuration replaces the default if it takes less time by more than this share."""
OPTIMISM = 1.25
"""How far a kernel may exceed the measured roof: a copy is no bound for what mostly reads, say."""

Measure = Callable[[KernelConfig], float]
"""Seconds of one run of a configuration, with cold caches. Raises CompileError where it cannot run."""
Late = Callable[[], bool]
"""Whether the time is over."""


class TuningError(RuntimeError):
    """Nothing can be tuned. Says what to do."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the device does at best, measured: bytes of memory and flops of matrix products, a second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> float:
        """What `work` takes at the roof."""
        return max(work.moved_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def bound(self, work: Work) -> float:
        """Seconds that no kernel beats."""
        return self.seconds(work) / OPTIMISM

    def refuted_by(self, work: Work, seconds: float) -> bool:
        """Tell whether `work` took less than it can: then the machine was busy when the roof was measured."""
        return seconds < self.bound(work)


NO_ROOF = Roofline(math.inf, math.inf)
"""What is known where the measured one was refuted: every bound is 0."""


@dataclass(frozen=True, slots=True)
class CompileInfo:
    """What the compiler made of a configuration, before it is run."""

    rejection: str = ""  # why it should not be run
    binary: str = ""  # of equal machine code equal, "" where it is not known
    numbers: Mapping[str, int] = field(
        default_factory=dict
    )  # registers, spills, blocks per multiprocessor ...


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a configuration."""

    config: KernelConfig
    us: float | None  # its median time in microseconds, None if it was not run
    outcome: str  # "best", "slower", or why it was not run or not taken
    samples: tuple[float, ...] = ()  # microseconds, in the order of the runs that count
    look: CompileInfo = CompileInfo()


UNCHECKED = "measured, not checked"
"""The fate of a trial while its search goes on, and for good where that was ended."""

OnTrial = Callable[[Problem, Trial], object]
"""Hears of each configuration as soon as it was measured: what a search that is ended leaves."""


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What `tune` did with a problem.

    It is "tuned" now, "known" from an earlier run, "left" because the time was over, or "failed": no
    configuration is correct, or there is too little memory.
    """

    problem: Problem
    state: Literal["tuned", "known", "left", "failed"]
    tuned: Tuned | None = None  # what its key has now
    trials: tuple[Trial, ...] = ()  # of every configuration, in the order of the space
    error: str = ""  # why none was tried

    def __str__(self) -> str:
        """One line: what was kept and how it compares, and the configurations that were wrong."""
        words = [f"{self.problem.name}: {self.state}", *filter(None, [self.error])]
        if self.tuned is not None:
            words.append(f"{self.tuned.us:.1f} µs, {self.tuned.config}")
            if self.tuned.default_us is not None:
                words.append(f"the default takes {self.tuned.default_us:.1f} µs")
            if self.tuned.untried:
                words.append(f"{self.tuned.untried} configurations untried")
        words += [f"{t.config}: {t.outcome}" for t in self.trials if t.outcome.startswith("wrong")]
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class Tools:
    """What tuning needs of the machine; `devices.tools_here` has them."""

    name: str  # of the device, as `tables.device_name` says it
    device: torch.device  # where the problems' tensors go
    look: Callable[
        [Problem, Late], Mapping[KernelConfig, CompileInfo]
    ]  # at what the compiler makes of its space
    timer: Callable[[Case], Measure]  # makes a case measurable
    roof: Roofline  # of this device
    clock: Callable[[], float]  # seconds, from any beginning
    target: str = ""  # what is compiled for, as `gpus.GPUS` names it


def tune(
    problems: Sequence[Problem],
    folder: Path,
    tools: Tools,
    *,
    budget_s: float | None = None,
    problem_s: float | None = None,
    force: bool = False,
    on_trial: OnTrial = lambda problem, trial: None,
) -> Iterator[SearchStep]:
    """Tune one problem after another; writes `folder`/<device>.json after each, and yields what it did.

    A problem that the file has a result for, of the kernel's present source, compiler and driver and with a
    configuration that the kernel still has, is left as it is without `force`: a run that was stopped goes
    on where it was.

    Args:
        budget_s: no problem is begun after so many seconds, and the search within one ends, with the
            fastest of what it had measured. The next run searches it again. Half of a problem's time at
            most goes into the look at what the compiler makes of it.
        problem_s: the same for each problem; here what was measured is enough for the next run.
        on_trial: see `OnTrial`.

    Raises:
        TableError: the file is there and no table of this device; it was not changed.
        OSError: the file cannot be read or written.
        SourceError: a problem's kernel has no source.
    """
    slug = slug_of(tools.name)
    path = folder / f"{slug}.json"
    try:
        table = read_table(path, slug)
    except FileNotFoundError:
        table = {}
    began, roof = tools.clock(), tools.roof
    for problem in problems:
        problem = replace(problem, space=problem.space_on(tools.target))
        key = TunedKey(problem.bucket, build_of(problem.kernel, problem.host))
        known = table.get(key)
        if (
            known
            and known.config in problem.space
            and not force
            and not (known.untried and problem_s is None)
        ):
            yield SearchStep(problem, "known", known)
            continue
        now = tools.clock()
        ends = min(
            began + (float("inf") if budget_s is None else budget_s),
            now + (float("inf") if problem_s is None else problem_s),
        )
        if now >= ends:
            yield SearchStep(problem, "left")
            continue

        def after(time: float) -> Late:
            return lambda: tools.clock() >= time

        try:
            nearest = replace(problem, space=nearest_first(problem.space))
            look, case = tools.look(nearest, after((now + ends) / 2)), problem.make(tools.device, True)
            tuned, trials = search(problem, case, tools.timer(case), look, roof, after(ends), on_trial)
        except torch.OutOfMemoryError as error:
            yield SearchStep(problem, "failed", error=str(error))
            continue
        if tuned is not None:
            table[key] = tuned
            write_table(path, tools.name, table)
            if roof.refuted_by(problem.work(tuned.config), tuned.us * 1e-6):
                roof = NO_ROOF
        yield SearchStep(problem, "tuned" if tuned else "failed", tuned, trials)


def nearest_first(space: Sequence[KernelConfig]) -> tuple[KernelConfig, ...]:
    """Configurations by how many doublings they are from the first: little time goes to the nearest."""

    def doublings(config: KernelConfig) -> float:
        pairs = zip(_sizes(config), _sizes(space[0]), strict=False)  # a way may have none
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)

    return tuple(sorted(space, key=doublings))


def _sizes(config: KernelConfig) -> tuple[int, ...]:
    return *(size for _, size in config.tiles), config.warps, config.stages


def search(
    problem: Problem,
    case: Case,
    measure: Measure,
    look: Mapping[KernelConfig, CompileInfo],
    roof: Roofline,
    late: Late = lambda: False,
    on_trial: OnTrial = lambda problem, trial: None,
) -> tuple[Tuned | None, tuple[Trial, ...]]:
    """The fastest configuration of a problem whose results are right; mutates the case's tensors.

    1. What the compiler found a flaw in is not run, nor what compiled to the same as one that has other
       stages alone; the default always is.
    2. The nearest to the default first, each gets FIRST_SAMPLES runs, except those whose bound (the roof's
       time for the bytes and flops of their tiles) is above the fastest median so far: they cannot win. One
       that beats its own bound refutes the roof: then these get their runs, too.
    3. The FINALISTS fastest within NEAR of the fastest, and the default, get FINAL_SAMPLES more, in turns,
       so that a noisy moment hits them all; the median of these counts.
    4. From the fastest on, the first whose results are right is taken; the default counts as faster by GAIN,
       and than what never ran faster than it did at its best.

    When `late`, configurations beside the default are not begun, and turns end after FIRST_SAMPLES.

    Returns:
        what to keep, None if none is right; and every configuration's fate.
    """
    default, looks = problem.space[0], {config: look.get(config, CompileInfo()) for config in problem.space}

    def trial(config: KernelConfig, seconds: float | None, outcome: str, times: Sequence[float]) -> Trial:
        us = None if seconds is None else seconds * 1e6
        return Trial(config, us, outcome, tuple(time * 1e6 for time in times), looks[config])

    outcome = {config: looks[config].rejection for config in problem.space}
    first: dict[KernelConfig, list[float]] = {}
    median: dict[KernelConfig, float] = {}
    compiled: dict[object, KernelConfig] = {}
    untried = 0
    pending: Sequence[KernelConfig] = nearest_first(problem.space)
    assumed: Roofline | None = None
    while roof is not assumed:  # again, where it was refuted
        assumed, left = roof, []
        for config in pending:
            fastest = min(median.values(), default=float("inf"))
            if outcome[config] and config != default:
                continue
            binary = config._replace(stages=0), looks[config].binary or config
            if (twin := compiled.setdefault(binary, config)) != config:
                outcome[config] = f"the same binary as {twin}"
                continue
            work = problem.work(config)
            if roof.bound(work) > fastest:
                left.append(config)
                continue
            if config != default and late():
                outcome[config] = "untried: the time was over"
                untried += 1
                continue
            try:
                first[config] = [measure(config) for _ in range(FIRST_SAMPLES)]
                median[config] = statistics.median(first[config])
                on_trial(problem, trial(config, median[config], UNCHECKED, first[config]))
            except CompileError as error:
                outcome[config] = f"does not run: {error}"
                continue
            if roof.refuted_by(work, median[config]):
                roof = NO_ROOF
        pending = left
    outcome |= {c: f"takes {roof.bound(problem.work(c)) * 1e6:.1f} µs at the roof" for c in pending}
    samples: dict[KernelConfig, list[float]] = {config: [] for config in _finalists(median, default)}
    names = list(samples)
    for turn in range(FINAL_SAMPLES):
        if turn >= FIRST_SAMPLES and late():
            break
        start = turn % max(1, len(names))
        for config in names[start:] + names[:start]:
            samples[config].append(measure(config))
    final = {config: statistics.median(times) for config, times in samples.items()}
    if default in final and (fault := _fault(case, default)):
        outcome[default] = f"wrong: {fault}"
    best = min(samples[default]) if default in final else float("inf")
    winner = None
    order = sorted(
        final, key=lambda c: (min(samples[c]) > best, final[c] * (1 - GAIN if c == default else 1))
    )
    rest = [config for config in median if config not in final]
    for config in order + sorted(rest, key=lambda c: median[c]):
        if config != default and (fault := _fault(case, config)):
            outcome[config] = f"wrong: {fault}"
        if not outcome[config].startswith("wrong"):
            winner = config
            break
    seconds, times = median | final, first | samples
    trials = tuple(
        trial(c, seconds.get(c), "best" if c == winner else outcome[c] or "slower", times.get(c, ()))
        for c in problem.space
    )
    if winner is None:
        return None, trials
    us = {trial.config: trial.us for trial in trials}
    return Tuned(winner, seconds[winner] * 1e6, us[default], untried), trials


def _finalists(median: Mapping[KernelConfig, float], default: KernelConfig) -> list[KernelConfig]:
    order = sorted(median, key=lambda config: median[config])
    near = [config for config in order if median[config] <= NEAR * median[order[0]]][:FINALISTS]
    return near if default in near or default not in median else [*near, default]


def _fault(case: Case, config: KernelConfig) -> str:
    """What is wrong with the results of `config`, over poisoned outputs."""
    case.poison()
    case.run(config)
    return case.fault()
