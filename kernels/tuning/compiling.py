"""Compilation of launches for a GPU that need not be present, with the properties of the compiled kernels."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch

from kvkit.kernels.tuning.assembly import Compiled, reader_of
from kvkit.kernels.tuning.cases import Case, Problem
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.gpus import GPUS, Gpu


class CompileError(RuntimeError):
    """A launch that cannot be compiled. Names the kernel, the target and the reason."""


POLL_S = 0.1
"""Seconds between two checks in `survey` of whether the time is over."""


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile a launch for a target as Triton would to run it there; needs no GPU, writes no tensors.

    Args:
        launch: launch with tensors on any device: only their dtype and alignment count.
        target: name in `gpus.GPUS`.

    Raises:
        CompileError: the target is unknown, Triton interprets kernels in this process, or its compiler
            failed.
    """
    with compiling_for(launch, target) as gpu:
        compiled = launch.compile()
        return reader_of(gpu)(compiled.asm, compiled.metadata.shared, launch.config.warps, gpu)


@contextmanager
def compiling_for(launch: Launch, target: str, device: Any = None) -> Iterator[Gpu]:
    """Let Triton compile a launch for a target within this context; yield the GPU.

    Args:
        launch, target: as for `compile_for`.
        device: see `StandInDriver`.

    Raises:
        CompileError: as for `compile_for`, and for any failure within the context.
    """
    if target not in GPUS:
        raise CompileError(f"target {target!r}: want one of {', '.join(GPUS)}")
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = launch.kernel
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise CompileError(f"{kernel}: TRITON_INTERPRET is set; kernels are interpreted in this process")
    gpu = GPUS[target]
    try:
        with driver_for(StandInDriver(GPUTarget(gpu.backend, gpu.arch, gpu.threads), device)):
            yield gpu
    except Exception as error:  # each stage of Triton's compiler raises its own type
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if len(message) > 300:  # Triton quotes the kernel up to the line, ptxas its command
            message = f"{message[:100]} ... {message[-200:]}"
        raise CompileError(f"{kernel.__name__} for {target}, {launch.config}: {message}") from error


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
def driver_for(stand_in: StandInDriver) -> Iterator[None]:
    """Make a stand-in Triton's active driver within this context."""
    from triton.runtime import driver

    try:
        previous = driver.active
    except RuntimeError:  # no GPU: the next access tries again
        previous = None
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(previous)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Result of compiling one kernel of a problem."""

    problem: str  # name of the problem
    kernel: str  # name of the kernel; "" if the launches could not even be made
    config: KernelConfig
    target: str
    compiled: Compiled | None  # None if it failed
    error: str = ""  # why it failed

    def rejection(self) -> str:
        """Return why the configuration cannot be run or would be wrong, "" if there is no reason."""
        return self.compiled.rejection() if self.compiled else self.error


CompileJob = tuple[str, KernelConfig, str]
"""A problem's name, a configuration, a target."""
ProblemFactory = Callable[[], Sequence[Problem]]
"""A function at the top level of a module, so that other processes can import it."""
Compiler = Callable[[Launch, str], Compiled]
"""Compiles a launch for a target, or raises CompileError; at the top level of a module, too."""


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
    earlier = set(multiprocessing.active_children())
    processes = ProcessPoolExecutor(workers, spawn, initializer=_prepare, initargs=(cache_folder,))
    try:
        yield CompilePool(processes, workers)
    finally:
        for process in set(multiprocessing.active_children()) - earlier:
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
    compile_one: Compiler = compile_for,
    late: Callable[[], bool] = lambda: False,
) -> Iterator[CompileReport]:
    """Compile every kernel of every job, and yield reports in the order of the jobs.

    Jobs are handed out as processes become free. None is cancelled: that breaks a pool that ends.

    Args:
        pool: pool made by `compile_pool`.
        factory: makes the problems that the jobs name.
        jobs: jobs to compile.
        compile_one: compiles a launch in the pool's processes, as `compile_for` does.
        late: returns whether the time is over; jobs that are not compiled by then are not waited for.
    """
    compile_job, pending = partial(_compile_job, factory, compile_one), iter(jobs)
    running: deque[Future[list[CompileReport]]] = deque()
    while True:
        free = 0 if late() else 2 * pool.workers - len(running)
        running.extend(pool.processes.submit(compile_job, job) for job in islice(pending, free))
        if not running:
            return
        while not running[0].done():
            if late():
                return
            wait([running[0]], POLL_S)
        yield from running.popleft().result()


def _compile_job(factory: ProblemFactory, compile_one: Compiler, job: CompileJob) -> list[CompileReport]:
    name, config, target = job
    try:
        launches = _case(factory, name).launches(config)
    except Exception as error:  # whatever a kernel's own checks raise
        return [CompileReport(name, "", config, target, None, f"{type(error).__name__}: {error}")]
    reports = []
    for launch in launches:
        if not isinstance(launch, Launch):  # no Triton kernel
            continue
        kernel = launch.kernel.__name__
        try:
            reports.append(CompileReport(name, kernel, config, target, compile_one(launch, target)))
        except CompileError as error:
            reports.append(CompileReport(name, kernel, config, target, None, str(error)))
    return reports


@lru_cache(1)
def _case(factory: ProblemFactory, name: str) -> Case:
    """Make a case on the CPU, without contents: pages that are never touched take no memory."""
    (problem,) = (problem for problem in factory() if problem.name == name)
    return problem.make(torch.device("cpu"), False)
