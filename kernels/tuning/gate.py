"""What a launch becomes on a named GPU, without one: registers, spills, shared memory, 16-byte loads.

`python -m kvkit.kernels.tuning.gate` is the compile gate: it compiles the default of every problem for every
target of `GATE`, prints a table and fails if something spills, does not fit or has lost its 16-byte loads.
With `--json benchmarks/results/compile.json` it refreshes the table that the tests compare with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvkit.environment import version_of
from kvkit.kernels.tuning.cases import Case, Problem
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.problems import every_problem


class CompileError(RuntimeError):
    """A launch cannot be compiled. Names the kernel, the target and the reason."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to compile for, and what one of its multiprocessors (compute units) has.

    From NVIDIA's compute capabilities table (https://docs.nvidia.com/cuda/cuda-c-programming-guide) and AMD's
    CDNA 3 instruction set guide.
    """

    backend: str
    arch: int | str
    threads: int  # of a warp
    registers: int  # of 32 bits for one lane of one of its 4 schedulers
    step: int  # registers of a lane that are handed out together
    warps: int  # at most so many at a time
    blocks: int  # likewise
    shared_bytes: int
    block_shared_bytes: int  # of one block, at most
    reserved_bytes: int  # of shared memory that each block costs beside its own
    most_registers: int  # of a lane

    def blocks_per_sm(self, registers: int, shared_bytes: int, warps: int) -> int:
        """Blocks that fit a multiprocessor at a time; 0 if not even one does."""
        if registers > self.most_registers or shared_bytes > self.block_shared_bytes:
            return 0
        each = max(1, -(-registers // self.step)) * self.step
        by_registers = min(self.warps, self.registers // each * 4) // warps
        by_shared = self.shared_bytes // max(1, shared_bytes + self.reserved_bytes)
        return min(self.blocks, by_registers, by_shared)


def _nvidia(capability: int, warps: int, blocks: int, shared_kib: int) -> Gpu:
    shared = shared_kib << 10
    return Gpu("cuda", capability, 32, 512, 8, warps, blocks, shared, shared - 1024, 1024, 255)


GPUS: Mapping[str, Gpu] = {
    "sm_80": _nvidia(80, 64, 32, 164),
    "sm_86": _nvidia(86, 48, 16, 100),
    "sm_89": _nvidia(89, 48, 24, 100),
    "sm_90": _nvidia(90, 64, 32, 228),
    "sm_100": _nvidia(100, 64, 32, 228),
    "sm_120": _nvidia(120, 48, 24, 100),
    "gfx942": Gpu("hip", "gfx942", 64, 512, 8, 32, 32, 64 << 10, 64 << 10, 0, 512),
}
"""By name: A100; A10 and RTX 30; L4, L40 and RTX 40; H100 and H200; B200; RTX 50; MI300."""

GATE = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What every kernel must compile for without spills."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler made of a launch."""

    registers: int  # of one thread; on AMD vector registers
    spill_bytes: int  # of one thread: NVIDIA's stack frame, AMD's spilled vector registers
    shared_bytes: int  # of one block
    loads: int  # instructions that read global memory, copies into shared memory among them
    loads_16: int  # those of 16 bytes or more per thread
    stores: int
    stores_16: int
    mma: int  # matrix instructions
    instructions: int  # of the loop with the largest share of these; of the whole kernel where none has any
    in_flight: int  # copies into shared memory that a wait of the loop leaves under way, at most (NVIDIA)
    blocks_per_sm: int  # an estimate from registers, shared memory and warps

    def flaw(self) -> str:
        """Why this cannot or should not run, "" if nothing speaks against it."""
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes"
        return "" if self.blocks_per_sm else "does not fit a multiprocessor"


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile a launch for a target as Triton would to run it there; needs no GPU, writes no tensors.

    Args:
        launch: its tensors may be on any device: their dtype and alignment count.
        target: a name of `GPUS`.

    Raises:
        CompileError: the target is unknown, Triton interprets kernels in this process, or its compiler
            failed.
    """
    if target not in GPUS:
        raise CompileError(f"target {target!r}: want one of {', '.join(GPUS)}")
    import triton
    from triton.backends.compiler import GPUTarget

    kernel, gpu = launch.kernel, GPUS[target]
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise CompileError(f"{kernel}: TRITON_INTERPRET is set; kernels are interpreted in this process")
    try:
        with _driver_for(GPUTarget(gpu.backend, gpu.arch, gpu.threads)):
            done = launch.compile()
    except Exception as error:  # each stage of Triton's compiler raises its own kind
        words = " ".join(f"{type(error).__name__}: {error}".split())
        if len(words) > 300:  # Triton quotes the kernel up to the line, ptxas its command
            words = f"{words[:100]} ... {words[-200:]}"
        raise CompileError(f"{kernel.__name__} for {target}, {launch.config}: {words}") from error
    read = _read_amd if gpu.backend == "hip" else _read_nvidia
    return read(done.asm, done.metadata.shared, launch.config.warps, gpu)


@dataclass(frozen=True, slots=True)
class StandInDriver:
    """What Triton asks its driver before it compiles, answered for a GPU that need not be there.

    Kernels are compiled by the way that a launch takes, whatever Triton's version: a launch on such a GPU
    finds the result in Triton's cache.

    Args:
        target: a `triton.backends.compiler.GPUTarget`.
    """

    target: Any

    def get_current_target(self) -> Any:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> Any:
        """What Triton keeps compiled kernels by in this process: one device per target."""
        return self.target

    def get_current_stream(self, device: Any) -> int:
        """The default one."""
        return 0


@contextmanager
def _driver_for(target: Any) -> Iterator[None]:
    from triton.runtime import driver

    try:
        before = driver.active
    except RuntimeError:  # no GPU: who asks next looks again
        before = None
    driver.set_active(StandInDriver(target))
    try:
        yield
    finally:
        driver.set_active(before)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What became of one kernel of a problem."""

    problem: str  # its name
    kernel: str  # its name; "" if the launches could not even be made
    config: KernelConfig
    target: str
    compiled: Compiled | None  # None where it failed
    error: str = ""  # why

    def flaw(self) -> str:
        """Why the configuration should not be run, "" if nothing speaks against it."""
        return self.compiled.flaw() if self.compiled else self.error


CompileJob = tuple[str, KernelConfig, str]
"""A problem's name, a configuration, a target."""
ProblemFactory = Callable[[], Sequence[Problem]]
"""A function at the top of a module, so that other processes can find it."""


def compile_pool(workers: int, cache_folder: str | None = None) -> ProcessPoolExecutor:
    """Processes for `survey`, in which kernels are compiled even where this one interprets them.

    Args:
        workers: how many.
        cache_folder: where Triton keeps what it compiled; None: where it always does.
    """
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, initializer=_prepare, initargs=(cache_folder,))


def _prepare(cache_folder: str | None) -> None:
    """Set a new process up before it imports Triton: it compiles, leaves GPUs alone and knows no tables."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    if cache_folder:
        os.environ["TRITON_CACHE_DIR"] = cache_folder


def survey(
    pool: ProcessPoolExecutor, factory: ProblemFactory, jobs: Sequence[CompileJob]
) -> Iterator[CompileReport]:
    """Compile every kernel of every job, and report in the order of the jobs."""
    for reports in pool.map(_compile_job, [factory] * len(jobs), jobs):
        yield from reports


def _compile_job(factory: ProblemFactory, job: CompileJob) -> list[CompileReport]:
    name, config, target = job
    try:
        launches = _case(factory, name).launches(config)
    except Exception as error:  # whatever a kernel's own checks raise
        return [CompileReport(name, "", config, target, None, f"{type(error).__name__}: {error}")]
    reports = []
    for launch in launches:
        kernel = launch.kernel.__name__
        try:
            reports.append(CompileReport(name, kernel, config, target, compile_for(launch, target)))
        except CompileError as error:
            reports.append(CompileReport(name, kernel, config, target, None, str(error)))
    return reports


@lru_cache(1)
def _case(factory: ProblemFactory, name: str) -> Case:
    """On the CPU, without contents: pages that are never touched take no memory."""
    (problem,) = (problem for problem in factory() if problem.name == name)
    return problem.make(torch.device("cpu"), False)


_PTX_ACCESS = re.compile(
    r"\b(?:(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\s"
    r"|cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)[,;\s])"
)
_PTX_MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


def _read_nvidia(assembly: Mapping[str, Any], shared_bytes: int, warps: int, gpu: Gpu) -> Compiled:
    """From PTX what it loads and stores, from the binary what ptxas made of it."""
    from triton import knobs

    ptx: str = assembly["ptx"]
    accesses = [
        (kind == "st", int(copied, 0) if copied else int(vector or 1) * int(bits) // 8)
        for kind, vector, bits, copied in _PTX_ACCESS.findall(ptx)
    ]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(_field(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    return Compiled(
        registers=registers,
        spill_bytes=stack,
        shared_bytes=shared_bytes,
        **_counts(accesses),
        mma=len(_PTX_MMA.findall(ptx)),
        instructions=_main_loop(usage),
        in_flight=max(
            (int(n) for n in re.findall(r"async_wait .*num = (\d+)", assembly["ttgir"])), default=0
        ),
        blocks_per_sm=gpu.blocks_per_sm(registers, shared_bytes, warps),
    )


_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def _read_amd(assembly: Mapping[str, Any], shared_bytes: int, warps: int, gpu: Gpu) -> Compiled:
    """From the assembly text, whose metadata says the rest."""
    text: str = assembly["amdgcn"]
    accesses = [(kind == "store", _AMD_BYTES.get(width, 2)) for kind, width in _AMD_ACCESS.findall(text)]
    registers = int(_field(r"\.vgpr_count:\s*(\d+)", text))  # accumulation registers included
    return Compiled(
        registers=registers,
        spill_bytes=4 * int(_field(r"\.vgpr_spill_count:\s*(\d+)", text)),
        shared_bytes=shared_bytes,
        **_counts(accesses),
        mma=len(re.findall(r"\bv_s?mfmac?_", text)),
        instructions=len(re.findall(r"^\t[a-z]+_\w+", text, re.MULTILINE)),
        in_flight=0,
        blocks_per_sm=gpu.blocks_per_sm(registers, shared_bytes, warps),
    )


_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+)(.*?);", re.MULTILINE)
_SASS_MMA = re.compile(r"(?:H|Q|I|D|O|UTC\w*)G?MMA\b")


def _main_loop(sass: str) -> int:
    """Instructions of the loop with the largest share of matrix products, else of the whole kernel.

    A jump back from waits that stand after the kernel's end looks like a loop, too, of few products.
    """
    found = [(int(at, 16), name, rest) for at, name, rest in _SASS.findall(sass)]
    lines = {at: i for i, (at, _, _) in enumerate(found)}
    products = [0]
    for _, name, _ in found:
        products.append(products[-1] + bool(_SASS_MMA.match(name)))
    best = 0.0, len(found)
    for i, (_, name, rest) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        first = lines.get(int(target[1], 16), i + 1) if target else i + 1
        if first <= i:
            best = max(best, ((products[i + 1] - products[first]) / (i + 1 - first), i + 1 - first))
    return best[1]


def _counts(accesses: list[tuple[bool, int]]) -> dict[str, int]:
    """Loads and stores, and those of 16 bytes, among (is a store, bytes)."""
    found: dict[str, int] = {}
    for name, stores in (("loads", False), ("stores", True)):
        sizes = [size for store, size in accesses if store == stores]
        found |= {name: len(sizes), f"{name}_16": sum(size >= 16 for size in sizes)}
    return found


def _field(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise CompileError(f"the compiler's report has no {pattern}: {text[:200]}")
    return found[1]


def faults(reports: Sequence[CompileReport], problems: Sequence[Problem]) -> list[str]:
    """What the gate does not let through: errors, spills, blocks that do not fit, 16-byte accesses lost."""
    wide = {problem.name: problem.wide for problem in problems}
    found = []
    for report in reports:
        flaw, done = report.flaw(), report.compiled
        if done and not flaw:
            loads, stores = wide[report.problem].get(report.kernel, (0, 0))
            if done.loads_16 < loads or done.stores_16 < stores:
                flaw = (
                    f"{done.loads_16} of {done.loads} loads and {done.stores_16} of {done.stores} stores "
                    f"take 16 bytes; the layout allows {loads} and {stores}"
                )
        pipelined = report.config.stages > 2 and GPUS[report.target].backend == "cuda"
        if done and not flaw and done.mma and pipelined and not done.in_flight:
            flaw = f"{report.config.stages} stages, but no copy is under way while a tile is computed"
        if flaw:
            found.append(f"{report.problem}, {report.kernel}, {report.target}, {report.config}: {flaw}")
    return found


def shown(reports: Sequence[CompileReport]) -> Table:
    """Reports as a table."""
    words = "problem", "kernel", "target", "configuration"
    numbers = "registers", "spill B", "shared B", "16 B loads", "16 B stores", "mma", "blocks/SM"
    table = Table(
        *(Column(name, overflow="fold") for name in words),
        *(Column(name, justify="right") for name in numbers),
        Column("flaw", overflow="fold"),
    )
    for report in reports:
        c = report.compiled
        made: tuple[object, ...] = ("",) * len(numbers)
        if c:
            wide = f"{c.loads_16}/{c.loads}", f"{c.stores_16}/{c.stores}"
            made = c.registers, c.spill_bytes, c.shared_bytes, *wide, c.mma, c.blocks_per_sm
        row = report.problem, report.kernel, report.target, report.config, *made, report.flaw()
        table.add_row(*(escape(str(word)) for word in row))
    return table


def as_json(reports: Sequence[CompileReport]) -> dict[str, Any]:
    """Reports and Triton's version, for a file."""
    return {
        "triton": version_of("triton"),
        "kernels": [
            {
                "problem": report.problem,
                "kernel": report.kernel,
                "target": report.target,
                "config": str(report.config),
                **(asdict(report.compiled) if report.compiled else {"error": report.error}),
            }
            for report in reports
        ],
    }


def gate(factory: ProblemFactory, workers: int) -> list[CompileReport]:
    """Compile the default of each gated problem for each target of `GATE`, by at most `workers` processes.

    Of problems that differ in their sizes alone, the first: they compile to the same.
    """
    forms: dict[tuple[str, str], Problem] = {}
    for problem in factory():
        if problem.gated:
            forms.setdefault((problem.bucket.op, problem.bucket.form), problem)
    jobs = [(p.name, p.space_on(target)[0], target) for p in forms.values() for target in GATE]
    with (
        tempfile.TemporaryDirectory(prefix="kvkit-compile-") as folder,
        compile_pool(workers, folder) as pool,
    ):
        return list(survey(pool, factory, jobs))


def main() -> int:
    """Run the gate; the exit status is 1 if it is shut."""
    parser = argparse.ArgumentParser(prog="python -m kvkit.kernels.tuning.gate")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    reports = gate(every_problem, min(2, os.cpu_count() or 1))
    Console(width=170).print(shown(reports))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(reports), indent=1) + "\n")
    found = faults(reports, every_problem())
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    from kvkit.kernels.tuning import gate as found  # other processes find its functions by its name

    sys.exit(found.main())
