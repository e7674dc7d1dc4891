"""Find the fastest correct configuration of each problem on the GPU at hand: what `kvkit tune` does."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from kvkit.environment import PACKAGES, slug_of, version_of
from kvkit.kernels.tuning.cases import Case, Problem, Work
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Tuned, read_table, write_table
from kvkit.kernels.tuning.gate import CompileError, compile_pool, survey
from kvkit.kernels.tuning.gpus import GPUS
from kvkit.kernels.tuning.problems import every_problem

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
"""Seconds of one run of a configuration, with a cold L2 cache. Raises CompileError where it cannot run."""


class TuningError(RuntimeError):
    """Nothing can be tuned. Says what to do."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What the GPU does at best, measured: bytes of memory and flops of bfloat16 products, a second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> float:
        """Less than any kernel takes for `work`."""
        return max(work.moved_bytes / self.bytes_per_s, work.flops / self.flops_per_s) / OPTIMISM


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a configuration."""

    config: KernelConfig
    us: float | None  # its median time in microseconds, None if it was not run
    fate: str  # "best", "slower", or why it was not run or not taken


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What `tune` did with a problem.

    It is "tuned" now, "known" from an earlier run, "left" because the time was over, or "failed": no
    configuration is correct.
    """

    problem: Problem
    state: Literal["tuned", "known", "left", "failed"]
    tuned: Tuned | None = None  # what its bucket has now
    trials: tuple[Trial, ...] = ()  # of every configuration, in the order of the space

    def __str__(self) -> str:
        """One line: what was kept and how it compares, and the configurations that were wrong."""
        words = [f"{self.problem.name}: {self.state}"]
        if self.tuned is not None:
            words.append(f"{self.tuned.us:.1f} µs, {self.tuned.config}")
            if self.tuned.default_us is not None:
                words.append(f"the default takes {self.tuned.default_us:.1f} µs")
        words += [f"{t.config}: {t.fate}" for t in self.trials if t.fate.startswith("wrong")]
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class Tools:
    """What tuning needs of the machine."""

    gpu_name: str  # as torch calls it
    device: torch.device  # where the problems' tensors go
    flaws: Callable[[Problem], Mapping[KernelConfig, str]]  # why each should not be run, "" where nothing is
    timer: Callable[[Case], Measure]  # makes a case measurable
    roof: Roof  # of this GPU
    clock: Callable[[], float]  # seconds, from any beginning


def tune(
    problems: Sequence[Problem],
    folder: Path,
    tools: Tools,
    *,
    budget_s: float | None = None,
    force: bool = False,
) -> Iterator[SearchStep]:
    """Tune one problem after another; writes `folder`/<gpu>.json after each, and yields what it did.

    A bucket that the file holds already, with a configuration that its kernel still has, is left as it is
    without `force`: a run that was stopped goes on where it was. No problem is begun after `budget_s`.

    Raises:
        TableError: the file is there and no table of this GPU; it was not changed.
        OSError: the file cannot be read or written.
    """
    path = folder / f"{slug_of(tools.gpu_name)}.json"
    try:
        table = read_table(path, slug_of(tools.gpu_name))
    except FileNotFoundError:
        table = {}
    versions = {package: version_of(package) for package in PACKAGES}
    began = tools.clock()
    for problem in problems:
        known = table.get(problem.bucket)
        if known is not None and known.config in problem.space and not force:
            yield SearchStep(problem, "known", known)
        elif budget_s is not None and tools.clock() - began >= budget_s:
            yield SearchStep(problem, "left")
        else:
            case = problem.make(tools.device, True)
            tuned, trials = search(problem, case, tools.timer(case), tools.flaws(problem), tools.roof)
            if tuned is not None:
                table[problem.bucket] = tuned
                write_table(path, tools.gpu_name, table, versions)
            yield SearchStep(problem, "tuned" if tuned else "failed", tuned, trials)


def search(
    problem: Problem, case: Case, measure: Measure, flaws: Mapping[KernelConfig, str], roof: Roof
) -> tuple[Tuned | None, tuple[Trial, ...]]:
    """The fastest configuration of a problem whose results are right; mutates the case's tensors.

    1. What the compiler found a flaw in is not run; the default always is.
    2. In the order of their bounds (the roof's time for the bytes and flops of their tiles) each gets
       FIRST_SAMPLES runs, except those whose bound is above the fastest median so far: they cannot win.
    3. The FINALISTS fastest within NEAR of the fastest, and the default, get FINAL_SAMPLES more, in turns,
       so that a noisy moment hits them all; the median of these counts.
    4. From the fastest on, the first whose results are right is taken; the default counts as faster by GAIN.

    Returns:
        what to keep, None if none is right; and every configuration's fate.
    """
    default = problem.space[0]
    fate = {config: flaws.get(config, "") for config in problem.space}
    median: dict[KernelConfig, float] = {}
    bound = {config: roof.seconds(problem.work(config)) for config in problem.space}
    for config in sorted(problem.space, key=lambda c: (c != default, bound[c])):
        fastest = min(median.values(), default=float("inf"))
        if fate[config] and config != default:
            continue
        if bound[config] > fastest:
            fate[config] = f"takes {bound[config] * 1e6:.1f} µs at the roof"
            continue
        try:
            median[config] = statistics.median(measure(config) for _ in range(FIRST_SAMPLES))
        except CompileError as error:
            fate[config] = f"does not run: {error}"
    samples: dict[KernelConfig, list[float]] = {config: [] for config in _finalists(median, default)}
    names = list(samples)
    for turn in range(FINAL_SAMPLES):
        first = turn % max(1, len(names))
        for config in names[first:] + names[:first]:
            samples[config].append(measure(config))
    final = {config: statistics.median(times) for config, times in samples.items()}
    if default in final and (fault := _fault(case, default)):
        fate[default] = f"wrong: {fault}"
    winner = None
    order = sorted(final, key=lambda c: final[c] * (1 - GAIN if c == default else 1))
    rest = [config for config in median if config not in final]
    for config in order + sorted(rest, key=lambda c: median[c]):
        if config != default and (fault := _fault(case, config)):
            fate[config] = f"wrong: {fault}"
        if not fate[config].startswith("wrong"):
            winner = config
            break
    us = {config: seconds * 1e6 for config, seconds in (median | final).items()}
    trials = tuple(Trial(c, us.get(c), "best" if c == winner else fate[c] or "slower") for c in problem.space)
    return None if winner is None else Tuned(winner, us[winner], us.get(default)), trials


def _finalists(median: Mapping[KernelConfig, float], default: KernelConfig) -> list[KernelConfig]:
    order = sorted(median, key=lambda config: median[config])
    near = [config for config in order if median[config] <= NEAR * median[order[0]]][:FINALISTS]
    return near if default in near or default not in median else [*near, default]


def _fault(case: Case, config: KernelConfig) -> str:
    """What is wrong with the results of `config`, over poisoned outputs."""
    case.poison()
    case.run(config)
    return case.fault()


@contextmanager
def tools_here() -> Iterator[Tools]:
    """The tools for this machine's GPU: compilers in processes beside this one, and a roof measured now.

    Raises:
        TuningError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise TuningError(
            f"no GPU here; --target compiles for one without it: {', '.join(GPUS)} (registers, spills, "
            "shared memory)"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_name(device)
    with compile_pool(min(8, os.cpu_count() or 1)) as pool:

        def flaws(problem: Problem) -> Mapping[KernelConfig, str]:
            found: dict[KernelConfig, str] = dict.fromkeys(problem.space, "")
            if target in GPUS:
                for report in survey(pool, every_problem, [(problem.name, c, target) for c in problem.space]):
                    found[report.config] = found[report.config] or report.flaw()
            return found

        yield Tools(
            gpu_name=torch.cuda.get_device_name(device),
            device=device,
            flaws=flaws,
            timer=cuda_timer(device),
            roof=measured_roof(device),
            clock=time.monotonic,
        )


def target_name(device: torch.device) -> str:
    """What Triton compiles for on a GPU; one that `GPUS` lacks is tuned without a look at the compiler."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def cuda_timer(device: torch.device) -> Callable[[Case], Measure]:
    """Times runs on a GPU by events around a CUDA graph, after a write that leaves nothing of use in L2.

    The graph makes launches of several kernels follow one another without waiting for Python.
    """
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    flush = torch.empty(max(4 * l2_bytes, 256 << 20), dtype=torch.uint8, device=device)

    def timer(case: Case) -> Measure:
        captured = cache(lambda config: _captured(case.launches(config)))

        def measure(config: KernelConfig) -> float:
            graph, _ = captured(config)
            flush.zero_()
            return _seconds(graph.replay)

        return measure

    return timer


def _captured(launches: tuple[Launch, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Launch, ...]]:
    """A graph of these launches, and themselves: they own the memory that it works on."""
    from triton.runtime.errors import OutOfResources

    try:
        for launch in launches:  # compiles, which a capture cannot
            launch.run()
    except OutOfResources as error:
        raise CompileError(str(error)) from error
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph.capture_begin()
        for launch in launches:
            launch.run()
        graph.capture_end()
    return graph, launches


def measured_roof(device: torch.device) -> Roof:
    """Rates of a copy of 1 GiB and of a product of bfloat16 matrices of 8192 x 8192: the best of ten each."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(a)
    copy_s = min(_seconds(lambda: target.copy_(source)) for _ in range(10))
    product_s = min(_seconds(lambda: torch.mm(a, a, out=product)) for _ in range(10))
    return Roof(bytes_per_s=2 * source.numel() / copy_s, flops_per_s=2 * 8192**3 / product_s)


def _seconds(run: Callable[[], object]) -> float:
    """Between two events on the current stream."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3
