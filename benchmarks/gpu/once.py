"""What tools look at: the default of some problems, once each."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench import Bench, each
from kvkit.kernels.tuning.cases import Problem


def run(bench: Bench, *names: str) -> None:
    """Records that each ran, of the problems of these names; without any, of small ones what is wrong."""

    def measure(problem: Problem) -> dict[str, Any]:
        case = problem.make(bench.device, True)
        case.poison()
        case.run(problem.space_on(bench.target)[0])
        bench.streams.synchronize()
        return {} if names else {"fault": case.fault()}

    each(bench, [p for p in bench.problems if p.name in names] if names else bench.small(), measure)
