"""Tools for tuning on this machine: its GPU, timed by events around CUDA graphs, or its CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from kvkit.environment import host_name
from kvkit.kernels.tuning.cases import Case, Problem, fill
from kvkit.kernels.tuning.compiling import (
    CompileError,
    CompilePool,
    CompileReport,
    ProblemFactory,
    compile_pool,
    survey,
    warm,
)
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Runnable, run_all
from kvkit.kernels.tuning.gpus import GPUS
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.search import CompileInfo, Late, Measure, Roofline, Tools, TuningError


@contextmanager
def tools_here(host: bool = False, factory: ProblemFactory = every_problem) -> Iterator[Tools]:
    """Yield the tools for this machine's GPU or CPU; measures the roofline, and compiles in processes.

    A GPU is used on a stream of its own, which is the current one meanwhile.

    Args:
        host: whether the tools are for the CPU.
        factory: makes the problems again in the processes that compile for a GPU.

    Raises:
        TuningError: there is no GPU.
    """
    if host:
        cpu = torch.device("cpu")
        yield Tools(host_name(), cpu, lambda problem, late: {}, host_timer(), host_roofline(), time.monotonic)
        return
    if not torch.cuda.is_available():
        raise TuningError(
            f"no GPU here; --target compiles without a GPU for: {', '.join(GPUS)} (registers, spills, "
            "shared memory)"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_name(device)
    workers = min(32, os.cpu_count() or 1)
    # not the default stream, on which CUDA takes no batches of copies
    with compile_pool(workers) as pool, torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        warm(pool, factory)
        yield Tools(
            torch.cuda.get_device_name(device),
            device,
            partial(compile_space, pool, factory, target) if target in GPUS else lambda problem, late: {},
            cuda_timer(device),
            gpu_roofline(device),
            time.monotonic,
            target,
        )


def compile_space(
    pool: CompilePool, factory: ProblemFactory, target: str, problem: Problem, late: Late
) -> Mapping[KernelConfig, CompileInfo]:
    """Compile a problem's configurations for `target` until time is over; return the compiler's results."""
    infos: dict[KernelConfig, CompileInfo] = {}
    jobs = [(problem.name, config, target) for config in problem.space]
    for report in survey(pool, factory, jobs, late=late):
        infos[report.config] = with_report(infos.get(report.config), report, problem)
    return infos


def with_report(earlier: CompileInfo | None, report: CompileReport, problem: Problem) -> CompileInfo:
    """Return what is known of a configuration with another of its kernels compiled; None: it is the first."""
    compiled, known = report.compiled, earlier or CompileInfo()
    # the size of shared memory is not part of the code
    binary = f"{compiled.digest} {compiled.shared_bytes} " if compiled and compiled.digest else ""
    numbers = known.numbers
    if compiled and report.kernel == problem.kernel.__name__:
        numbers = {name: value for name, value in asdict(compiled).items() if isinstance(value, int)}
    is_known = binary and (known.binary or earlier is None)
    return CompileInfo(
        known.rejection or report.rejection(), known.binary + binary if is_known else "", numbers
    )


def target_name(device: torch.device) -> str:
    """Return Triton's target for a GPU; one that `GPUS` lacks is tuned without compiler results."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def cuda_timer(device: torch.device) -> Callable[[Case], Measure]:
    """Return a timer of runs on a GPU, by events, after a write that evicts useful data from L2.

    Triton kernels are captured in a CUDA graph, so that several run in sequence without waiting for Python;
    other launches are timed as they run.
    """
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    flush = torch.empty(max(4 * l2_bytes, 256 << 20), dtype=torch.uint8, device=device)

    def timer(case: Case) -> Measure:
        ready = cache(lambda config: _ready(case, config))

        def measure(config: KernelConfig) -> float:
            run, _ = ready(config)
            flush.zero_()
            return _seconds(run)

        return measure

    return timer


def _ready(case: Case, config: KernelConfig) -> tuple[Callable[[], None], tuple[Runnable, ...]]:
    """Return a function that runs a configuration, and its launches, which own the memory it works on.

    Raises:
        CompileError: the configuration cannot be made, compiled or started.
    """
    try:
        launches = case.launches(config)
        run_all(launches)  # compiles, which is not possible in a capture
    except Exception as error:  # each stage of Triton's compiler raises its own type, the driver RuntimeError
        raise CompileError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # this process cannot run anything on this GPU any more
        raise TuningError(f"{config} broke the GPU's context: {error}") from error
    if not all(isinstance(launch, Launch) for launch in launches):
        return lambda: run_all(launches), launches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph.capture_begin()
        run_all(launches)
        graph.capture_end()
    return graph.replay, launches


def gpu_roofline(device: torch.device) -> Roofline:
    """Measure a copy of 1 GiB and a product of bfloat16 matrices of 8192 x 8192: the best of ten each."""
    return _measure_roofline(device, 1 << 30, 8192, torch.bfloat16, _seconds)


def _measure_roofline(
    device: torch.device,
    size: int,
    side: int,
    dtype: torch.dtype,
    seconds: Callable[[Callable[[], object]], float],
) -> Roofline:
    """Measure with random numbers: ones take less power, so that a GPU multiplies them faster."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    a = torch.empty(side, side, dtype=dtype, device=device)
    target, product = torch.zeros_like(source), torch.empty_like(a)
    fill(source)
    fill(a)
    copy_s = min(seconds(lambda: target.copy_(source)) for _ in range(10))
    product_s = min(seconds(lambda: torch.mm(a, a, out=product)) for _ in range(10))
    return Roofline(bytes_per_s=2 * size / copy_s, flops_per_s=2 * side**3 / product_s)


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a run between two events on the current stream."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3


def host_timer() -> Callable[[Case], Measure]:
    """Return a timer of runs on the CPU, after a write of twice its largest cache, which evicts all data.

    One thread writes: torch's threads would continue to spin beside the timed run. A configuration runs once
    before it is timed, so that its compilation does not count.
    """
    flush = np.zeros(2 * _cache_bytes(), np.uint8)

    def timer(case: Case) -> Measure:
        @cache
        def ready(config: KernelConfig) -> tuple[Runnable, ...]:
            try:
                launches = case.launches(config)
                run_all(launches)
            except Exception as error:  # numba's compiler raises many types
                raise CompileError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
            return launches

        def measure(config: KernelConfig) -> float:
            launches = ready(config)
            np.add(flush, 1, out=flush)
            return _host_seconds(lambda: run_all(launches))

        return measure

    return timer


def host_roofline() -> Roofline:
    """Measure torch's copy of 256 MiB and product of float32 matrices of 1024 x 1024, on all threads."""
    return _measure_roofline(torch.device("cpu"), 256 << 20, 1024, torch.float32, _host_seconds)


def _host_seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - began) * 1e-9


def _cache_bytes() -> int:
    """Return the size of the CPU's largest cache, at least 64 MiB, also if the system reports none."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max([64 << 20, *(int(path.read_text().strip().removesuffix("K")) << 10 for path in files)])
