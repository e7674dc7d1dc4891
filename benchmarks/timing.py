"""Times that can be compared: the functions take turns, so that a noisy moment hits them all."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path


def nothing() -> None: ...


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    before: Callable[[], object] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call, `rounds` of them per function, after `warmup` that are not timed.

    Each round calls every function once, and starts with another one than the round before. `before` each
    call is not timed. `clock` `time.thread_time` leaves out what other processes take.
    """
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            function = functions[name]
            before()
            began = clock()
            function()
            took = clock() - began
            if turn >= 0:
                times[name].append(took)
    return times


def ratio(times: Mapping[str, Sequence[float]], a: str, b: str) -> dict[str, float]:
    """Time of `a` over time of `b`: of their minima and of their medians. Below 1, `a` is faster."""
    return {
        "min": min(times[a]) / min(times[b]),
        "median": statistics.median(times[a]) / statistics.median(times[b]),
    }


def settle(files: Iterable[Path]) -> None:
    """Wait until the contents of files are on the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def forget(files: Iterable[str | os.PathLike[str]]) -> None:
    """Have the page cache drop the files, so that the next read is cold."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def processor_s() -> float:
    """Seconds that processors worked for this process and for those that it started, and that still run."""
    started = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    return sum(_processor_s(pid) for pid in ("self", *started))


def _processor_s(pid: str) -> float:
    behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in behind_name[11:13]) / os.sysconf("SC_CLK_TCK")
