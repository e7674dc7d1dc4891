"""Keep and print the speed of equal batches by two contenders, and the ratio of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.timing import interleaved, ratio

ROUNDS = 15


def compare_batches(
    benchmark: Any, calls: Mapping[str, Callable[[], object]], before: Callable[[], object], batch_bytes: int
) -> None:
    """Time calls in turn, and add minima, speeds and ratios to pytest-benchmark's `extra_info`. Mutates it.

    Args:
        calls: kvkit's, then the peer's, by name; each moves `batch_bytes`.
        before: called before each of them.
    """
    ours, peer = calls
    benchmark.pedantic(calls[ours], setup=before, rounds=1)
    times = interleaved(calls, ROUNDS if benchmark.enabled else 1, warmup=1, before=before)
    compared = ratio(times, ours, peer)
    benchmark.extra_info.update(ratio_min=compared["min"], ratio_median=compared["median"], against=peer)
    for name, seconds in times.items():
        speed = batch_bytes / min(seconds) / 1e9
        benchmark.extra_info[name] = {"us": 1e6 * min(seconds), "GB/s": speed}
        print(f"{name}: {1e3 * min(seconds):.1f} ms, {speed:.2f} GB/s")
    print(f"ratio of minima {compared['min']:.2f}, of medians {compared['median']:.2f}")
