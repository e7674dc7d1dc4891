"""Compilation of launches for a GPU without one: registers, spills, shared memory, 16-byte loads.

`python -m kvkit.kernels.tuning.gate` is the compile gate: it compiles the default of every problem for every
target of `GATE`, prints a table, and fails if a kernel spills, does not fit or has lost its 16-byte accesses.
With `--compare benchmarks/results/compile.json` it also fails if a kernel is worse than recorded there, and
compiles only kernels that the file does not hold under an equal `compile_key`.
`--json benchmarks/results/compile.json` records the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvkit.environment import version_of
from kvkit.kernels.tuning.assembly import Compiled, read_amd, read_nvidia
from kvkit.kernels.tuning.baseline import known_of, regressions, write
from kvkit.kernels.tuning.cases import Case, Problem
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.gpus import GPUS, Gpu
from kvkit.kernels.tuning.prediction import RATES, Prediction, predict
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.source import source_digest


class CompileError(RuntimeError):
    """A launch that cannot be compiled. Names the kernel, the target and the reason."""


GATE = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Targets that every kernel must compile for without spills."""
POLL_S = 0.1
"""Seconds between checks of `survey` whether the time is over."""


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile a launch for a target as Triton would to run it there; needs no GPU, writes no tensors.

    Args:
        launch: launch with tensors on any device: only their dtype and alignment count.
        target: name in `gpus.GPUS`.

    Raises:
        CompileError: the target is unknown, Triton interprets kernels in this process, or its compiler
            failed.
    """
    with _explained(launch, target):
        gpu = GPUS[target]
        with _driver_for(StandInDriver(_triton_target(gpu))):
            done = launch.compile()
        return _reader(gpu)(done.asm, done.metadata.shared, launch.config.warps, gpu)


def compile_key(launch: Launch, target: str) -> str:
    """Digest everything that the result of `compile_for` depends on, 16 hex digits; compiles nothing.

    These are the kernel's source, the values that Triton specialises it by (dtypes, alignment, compile-time
    values, options), the target, the versions of Triton and its assembler, and the code that reads their
    assembly. Launches with equal keys compile to the same on any machine.

    Args:
        launch: as for `compile_for`.
        target: name in `gpus.GPUS`.

    Raises:
        CompileError: as for `compile_for`, except for failures of its compiler.
    """
    with _explained(launch, target):
        from triton import knobs
        from triton.compiler import make_backend

        gpu, asked = GPUS[target], list[str]()
        backend = make_backend(_triton_target(gpu))

        def note(**about: Any) -> bool:
            asked.extend((about["key"], about["repr"]))  # the second has options that no caller gave
            return True  # do not compile

        # a device of its own for each target: Triton calls no hook for kernels it has compiled for a device
        with _driver_for(StandInDriver(_triton_target(gpu), f"keys of {target}")), knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = note
            launch.compile()
        if not asked:
            raise RuntimeError("Triton does not report what it would compile")
        parts = version_of("triton"), backend.hash(), gpu, source_digest(_reader(gpu))
        texts = [source_digest(launch.kernel), *asked, *map(str, parts)]
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


@contextmanager
def _explained(launch: Launch, target: str) -> Iterator[None]:
    """Raise CompileError for any failure, and for launches that cannot be compiled."""
    if target not in GPUS:
        raise CompileError(f"target {target!r}: want one of {', '.join(GPUS)}")
    import triton

    kernel = launch.kernel
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise CompileError(f"{kernel}: TRITON_INTERPRET is set; kernels are interpreted in this process")
    try:
        yield
    except Exception as error:  # each stage of Triton's compiler raises its own type
        words = " ".join(f"{type(error).__name__}: {error}".split())
        if len(words) > 300:  # Triton quotes the kernel up to the line, ptxas its command
            words = f"{words[:100]} ... {words[-200:]}"
        raise CompileError(f"{kernel.__name__} for {target}, {launch.config}: {words}") from error


def _reader(gpu: Gpu) -> Callable[..., Compiled]:
    return read_amd if gpu.backend == "hip" else read_nvidia


def _triton_target(gpu: Gpu) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(gpu.backend, gpu.arch, gpu.threads)


@dataclass(frozen=True, slots=True)
class StandInDriver:
    """Stand-in for Triton's driver during compilation, for a GPU that need not be there.

    Kernels are compiled in the same way as by a launch, for any version of Triton: a launch on such a GPU
    finds the result in Triton's cache.

    Args:
        target: `triton.backends.compiler.GPUTarget` to compile for.
        device: key of Triton's compiled kernels in this process; None: the target.
    """

    target: Any
    device: Any = None

    def get_current_target(self) -> Any:
        """Return the target to compile for."""
        return self.target

    def get_current_device(self) -> Any:
        """Return `device`; by default, one device per target."""
        return self.device or self.target

    def get_current_stream(self, device: Any) -> int:
        """Return the default stream."""
        return 0


@contextmanager
def _driver_for(stand_in: StandInDriver) -> Iterator[None]:
    from triton.runtime import driver

    try:
        before = driver.active
    except RuntimeError:  # no GPU: the next access looks again
        before = None
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(before)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Result of compiling one kernel of a problem."""

    problem: str  # name of the problem
    kernel: str  # name of the kernel; "" if the launches could not even be made
    config: KernelConfig
    target: str
    compiled: Compiled | None  # None if it failed
    error: str = ""  # why it failed
    prediction: Prediction | None = None  # for the kernel of the problem's bucket, on a target of `RATES`
    key: str = ""  # the launch's `compile_key`

    def rejection(self) -> str:
        """Return why the configuration should not be run, "" if there is no reason."""
        return self.compiled.rejection() if self.compiled else self.error


CompileJob = tuple[str, KernelConfig, str]
"""A problem's name, a configuration, a target."""
ProblemFactory = Callable[[], Sequence[Problem]]
"""A function at the top level of a module, so that other processes can find it."""


@dataclass(frozen=True, slots=True)
class CompilePool:
    """Processes for `survey`; `compile_pool` makes them."""

    processes: ProcessPoolExecutor
    workers: int


@contextmanager
def compile_pool(workers: int, cache_folder: str | None = None) -> Iterator[CompilePool]:
    """Start processes for `survey`, which compile kernels even if this process interprets them.

    They end with the context, even in the middle of a compilation: a large tile takes minutes.

    Args:
        workers: number of processes.
        cache_folder: folder of Triton's cache; None: Triton's own.
    """
    spawn = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    processes = ProcessPoolExecutor(workers, spawn, initializer=_prepare, initargs=(cache_folder,))
    try:
        yield CompilePool(processes, workers)
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        processes.shutdown()


def warm(pool: CompilePool, factory: ProblemFactory) -> None:
    """Wait until a pool's processes have started and imported what `survey` needs."""
    wait([pool.processes.submit(_import_all, factory) for _ in range(pool.workers)])


def _import_all(factory: ProblemFactory) -> None:
    factory()


def _prepare(cache_folder: str | None) -> None:
    """Set a new process up before it imports Triton: it compiles, and sees no GPUs and no tables."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    if cache_folder:
        os.environ["TRITON_CACHE_DIR"] = cache_folder


def survey(
    pool: CompilePool,
    factory: ProblemFactory,
    jobs: Sequence[CompileJob],
    known: Mapping[str, Compiled] = {},
    late: Callable[[], bool] = lambda: False,
) -> Iterator[CompileReport]:
    """Compile every kernel of every job, and yield reports in the order of the jobs.

    Jobs are handed out as processes become free. None is cancelled: that breaks a pool that ends.

    Args:
        pool: pool made by `compile_pool`.
        factory: makes the problems that the jobs name.
        jobs: jobs to compile.
        known: compiled kernels by their `compile_key`; they are not compiled again.
        late: returns whether the time is over; jobs that are not compiled by then are not waited for.
    """
    compile_one, rest = partial(_compile_job, factory, known), iter(jobs)
    running: deque[Future[list[CompileReport]]] = deque()
    while True:
        free = 0 if late() else 2 * pool.workers - len(running)
        running.extend(pool.processes.submit(compile_one, job) for job in islice(rest, free))
        if not running:
            return
        while not running[0].done():
            if late():
                return
            wait([running[0]], POLL_S)
        yield from running.popleft().result()


def _compile_job(
    factory: ProblemFactory, known: Mapping[str, Compiled], job: CompileJob
) -> list[CompileReport]:
    name, config, target = job
    try:
        problem, case = _case(factory, name)
        launches = [one for one in case.launches(config) if isinstance(one, Launch)]  # of Triton kernels
    except Exception as error:  # whatever a kernel's own checks raise
        return [CompileReport(name, "", config, target, None, f"{type(error).__name__}: {error}")]
    reports = []
    for launch in launches:
        kernel, key, prediction = launch.kernel.__name__, "", None
        try:
            key = compile_key(launch, target)
            done = known.get(key) or compile_for(launch, target)
        except CompileError as error:
            reports.append(CompileReport(name, kernel, config, target, None, str(error), key=key))
            continue
        if kernel == problem.bucket.op and (rates := RATES.get(target)):
            prediction = predict(problem.work(config), done, config.warps, prod(launch.grid), rates)
        reports.append(CompileReport(name, kernel, config, target, done, prediction=prediction, key=key))
    return reports


@lru_cache(1)
def _case(factory: ProblemFactory, name: str) -> tuple[Problem, Case]:
    """Make a case on the CPU, without contents: pages that are never touched take no memory."""
    (problem,) = (problem for problem in factory() if problem.name == name)
    return problem, problem.make(torch.device("cpu"), False)


def faults(reports: Sequence[CompileReport], problems: Sequence[Problem]) -> list[str]:
    """Return what the gate rejects: errors, spills, blocks that do not fit, 16-byte accesses lost."""
    wide = {problem.name: problem.wide for problem in problems}
    found = []
    for report in reports:
        rejection, done = report.rejection(), report.compiled
        if done and not rejection:
            loads, stores = wide[report.problem].get(report.kernel, (0, 0))
            if done.loads_16 < loads or done.stores_16 < stores:
                rejection = (
                    f"{done.loads_16} of {done.loads} loads and {done.stores_16} of {done.stores} stores "
                    f"take 16 bytes; the layout allows {loads} and {stores}"
                )
        pipelined = report.config.stages > 2 and GPUS[report.target].backend == "cuda"
        if done and not rejection and done.mma and pipelined and not done.in_flight:
            rejection = f"{report.config.stages} stages, but no copy is in flight while a tile is computed"
        if rejection:
            found.append(f"{report.problem}, {report.kernel}, {report.target}, {report.config}: {rejection}")
    return found


def shown(reports: Sequence[CompileReport], wide: bool = False) -> Table:
    """Build a table with a row per report.

    With `wide`, it also has target, spills, shared memory, 16-byte accesses and mma.
    """
    words = "problem", "kernel", *(["target"] if wide else []), "configuration"
    more = ("spill B", "shared B", "16 B loads", "16 B stores", "mma") if wide else ()
    numbers = "registers", *more, "blocks/SM"
    table = Table(
        *(Column(name, overflow="fold") for name in words),
        *(Column(name, justify="right") for name in numbers),
        Column("rejection", overflow="fold"),
    )
    for report in reports:
        c = report.compiled
        made: tuple[object, ...] = ("",) * len(numbers)
        if c:
            accesses = f"{c.loads_16}/{c.loads}", f"{c.stores_16}/{c.stores}"
            rest = (c.spill_bytes, c.shared_bytes, *accesses, c.mma) if wide else ()
            made = c.registers, *rest, c.blocks_per_sm
        names = report.problem, report.kernel, *([report.target] if wide else []), report.config
        table.add_row(*(escape(str(word)) for word in (*names, *made, report.rejection())))
    return table


def as_json(reports: Sequence[CompileReport]) -> dict[str, Any]:
    """Return reports and Triton's version for a file, with predictions to 3 digits."""
    return {"triton": version_of("triton"), "kernels": [_entry(report) for report in reports]}


def _entry(report: CompileReport) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "problem": report.problem,
        "kernel": report.kernel,
        "target": report.target,
        "config": str(report.config),
        "key": report.key,
    }
    if report.compiled is None:
        return entry | {"error": report.error}
    made, predicted = asdict(report.compiled), asdict(report.prediction) if report.prediction else {}
    entry |= {name: value for name, value in made.items() if name != "digest" and value != ""}
    return entry | {name: float(f"{value:.3g}") for name, value in predicted.items() if value is not None}


def gate(
    pool: CompilePool,
    factory: ProblemFactory,
    names: Sequence[str] = (),
    known: Mapping[str, Compiled] = {},
) -> list[CompileReport]:
    """Compile the default of each gated problem for each target of `GATE`, in the pool's processes.

    Of problems that differ only in sizes, the first is compiled: they compile to the same. With `names`, only
    problems with one of them in their name are compiled. Kernels `known` by their `compile_key` are reused.
    """
    forms: dict[tuple[str, str], Problem] = {}
    for problem in factory():
        if problem.gated:
            forms.setdefault((problem.bucket.op, problem.bucket.form), problem)
    chosen = [p for p in forms.values() if not names or any(name in p.name for name in names)]
    jobs = [(p.name, p.space_on(target)[0], target) for p in chosen for target in GATE]
    return list(survey(pool, factory, jobs, known))


def run(pool: CompilePool, words: Sequence[str]) -> int:
    """Run the gate as the command does, and print its output; return its exit status, 1 if it failed.

    Raises:
        SystemExit: the command's arguments are invalid.
    """
    parser = argparse.ArgumentParser(prog="python -m kvkit.kernels.tuning.gate")
    parser.add_argument("--problem", action="append", default=[], help="only those with this in their name")
    parser.add_argument("--compare", type=Path, help="fail where a kernel is worse than in this file")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args(words)
    complete = not arguments.problem
    try:
        recorded = json.loads(arguments.compare.read_text()) if arguments.compare else None
        known = known_of(recorded) if recorded else {}
        reports = gate(pool, every_problem, arguments.problem, known)
        if not reports:
            raise ValueError(f"--problem: no gated problem has {' or '.join(arguments.problem)} in its name")
        if arguments.json:
            write(arguments.json, as_json(reports), complete)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    Console(width=170).print(shown(reports, wide=True))
    found = faults(reports, every_problem())
    if recorded:
        accept = f"if it is meant: {parser.prog} --json {arguments.compare}"
        found += [f"{worse} ({accept})" for worse in regressions(as_json(reports), recorded, complete)]
    print("\n".join(found))
    return 1 if found else 0


def main() -> int:
    """Run the gate for the command line."""
    with compile_pool(min(2, os.cpu_count() or 1)) as pool:
        return run(pool, sys.argv[1:])


if __name__ == "__main__":
    from kvkit.kernels.tuning import gate as found  # other processes find its functions by its name

    sys.exit(found.main())
