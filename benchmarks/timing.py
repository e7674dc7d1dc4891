"""Times that can be compared: the functions take turns, so that a noisy moment hits them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def nothing() -> None: ...


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    before: Callable[[], object] = nothing,
) -> dict[str, list[float]]:
    """Seconds of every call, `rounds` of them per function, after `warmup` that are not timed.

    Each round calls every function once, and starts with another one than the round before. `before` each
    call is not timed.
    """
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            function = functions[name]
            before()
            began = time.perf_counter()
            function()
            took = time.perf_counter() - began
            if turn >= 0:
                times[name].append(took)
    return times


def ratio(times: Mapping[str, Sequence[float]], a: str, b: str) -> dict[str, float]:
    """Time of `a` over time of `b`: of their minima and of their medians. Below 1, `a` is faster."""
    return {
        "min": min(times[a]) / min(times[b]),
        "median": statistics.median(times[a]) / statistics.median(times[b]),
    }
