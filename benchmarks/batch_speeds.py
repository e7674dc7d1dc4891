"""Keep and print the speed of equal batches by two contenders, and the ratio of their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.timing import ratio


def report_speeds(
    benchmark: Any, times: Mapping[str, Sequence[float]], ours: str, peer: str, batch_bytes: int
) -> None:
    """Add minima, speeds and ratios to pytest-benchmark's `extra_info`, and print them. Mutates it.

    Args:
        times: seconds of each call, by contender; every call moves `batch_bytes`.
    """
    compared = ratio(times, ours, peer)
    benchmark.extra_info.update(ratio_min=compared["min"], ratio_median=compared["median"], against=peer)
    for name, seconds in times.items():
        speed = batch_bytes / min(seconds) / 1e9
        benchmark.extra_info[name] = {"us": 1e6 * min(seconds), "GB/s": speed}
        print(f"{name}: {1e3 * min(seconds):.1f} ms, {speed:.2f} GB/s")
    print(f"ratio of minima {compared['min']:.2f}, of medians {compared['median']:.2f}")
