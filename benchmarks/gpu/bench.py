"""What a step works with: a device, problems that suit it, how to time on it, and where results go."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import AGAIN, Results
from kvkit.kernels.tuning.cases import Case, Problem
from kvkit.kernels.tuning.compiling import ProblemFactory
from kvkit.kernels.tuning.devices import cuda_timer, target_name
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.search import Measure
from kvkit.lab.files import commit
from kvkit.lab.testbed.small_problems import SMALL, small_problems

FOREMOST = ("attend", "copy_rows", "encode_rows")
WAYS = ("pages_to_host", "host_to_pages")
LIBCUDA = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is to do."""

    copy_bytes: int  # of a copy
    matrix: int  # rows and columns of a product
    calls: int  # that are timed
    equal_runs: int  # whose results must be equal


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, and all that depends on it.

    Args:
        device: a GPU; the CPU where steps are rehearsed: Triton must interpret kernels there.
        target: what kernels are compiled for, a name of `gpus.GPUS`.
        factory: makes the problems to measure.
        small: makes problems for tools that make a device slow.
        sizes: of everything else.
        seconds: of every call of a function, by the device's clock, with a cold L2 cache.
        timer: makes a case measurable.
        results: where they go.
        libcuda: the library of the driver.
    """

    device: torch.device
    target: str
    factory: ProblemFactory
    small: ProblemFactory
    sizes: Sizes
    seconds: Callable[[Callable[[], object]], list[float]]
    timer: Callable[[Case], Measure]
    results: Results
    libcuda: str = LIBCUDA

    @property
    def problems(self) -> Sequence[Problem]:
        """To measure: attention first, ways between GPU and host last."""
        return sorted(self.factory(), key=lambda p: (p.bucket.op in WAYS, p.bucket.op != "attend"))

    @property
    def streams(self) -> Any:
        """torch.cuda, or torch.cpu, whose streams have the same names and do nothing."""
        return torch.cuda if self.device.type == "cuda" else torch.cpu

    def pinned(self, size: int) -> torch.Tensor:
        """Uninitialised bytes in memory that the device can reach."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def each(bench: Bench, problems: Sequence[Problem], measure: Callable[[Problem], dict[str, Any]]) -> None:
    """Record what is measured of each problem, or what that raised, unless its step has it already.

    Raises:
        SystemExit: with AGAIN: an error has left the GPU unusable for this process.
    """
    known = {line["what"] for line in bench.results.of(bench.results.step)}
    for problem in problems:
        if problem.name in known:
            continue
        try:
            found = measure(problem)
            bench.streams.synchronize()
        except Exception as error:  # whatever a kernel's launch raises
            bench.results.record(problem.name, error=f"{type(error).__name__}: {error}"[:500])
            if not _usable(bench):
                sys.exit(AGAIN)
        else:
            bench.results.record(problem.name, **found)


def _usable(bench: Bench) -> bool:
    try:
        torch.zeros(1, device=bench.device).sum().item()
    except RuntimeError:
        return False
    return True


def bench_on_gpu(step: str, path: Path) -> Bench:
    """For this process's GPU; results are appended to a file."""
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = Sizes(copy_bytes=1 << 30, matrix=8192, calls=10, equal_runs=200)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def seconds(function: Callable[[], object]) -> list[float]:
        function()
        times = []
        for _ in range(sizes.calls):
            flush.zero_()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            function()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) * 1e-3)
        return times

    return Bench(
        device=device,
        target=target_name(device),
        factory=every_problem,
        small=small_problems,
        sizes=sizes,
        seconds=seconds,
        timer=cuda_timer(device),
        results=Results(path, step, torch.cuda.get_device_name(device), commit() or ""),
    )


def three() -> tuple[Problem, ...]:
    """A small problem of each kernel that matters most, with two configurations to choose from."""
    found = {problem.bucket.op: problem for problem in SMALL}
    return tuple(replace(found[op], space=found[op].space[:2]) for op in FOREMOST)


def rehearsal(step: str, path: Path, libcuda: str = LIBCUDA) -> Bench:
    """For a machine without a GPU: a few small problems, few calls, made-up times of kernels."""

    def seconds(function: Callable[[], object]) -> list[float]:
        began = time.perf_counter()
        function()
        return [time.perf_counter() - began]

    return Bench(
        device=torch.device("cpu"),
        target="sm_90",
        factory=three,
        small=three,
        sizes=Sizes(copy_bytes=1 << 16, matrix=64, calls=1, equal_runs=2),
        seconds=seconds,
        timer=lambda case: lambda config: 1e-3,
        results=Results(path, step, "no GPU"),
        libcuda=libcuda,
    )
