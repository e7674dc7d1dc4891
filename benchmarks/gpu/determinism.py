"""`make gpu-tests`: whether equal inputs give equal bits, run after run."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.bench import Bench, each
from kvkit.kernels.tuning.cases import Problem


def run(bench: Bench) -> None:
    """Records of each problem how many runs of its default differed from the first."""

    def measure(problem: Problem) -> dict[str, Any]:
        config = problem.space_on(bench.target)[0]
        case = problem.make(bench.device, True)
        if not case.outputs:
            return {"runs": 0}
        on_host = any(output.device.type == "cpu" for output in case.outputs)

        def again() -> None:
            case.poison()
            case.run(config)
            if on_host:  # what reads there does not wait for the GPU
                bench.streams.synchronize()

        again()
        first = [_bits(output).clone() for output in case.outputs]
        count = torch.zeros((), dtype=torch.int64, device=bench.device)
        for _ in range(bench.sizes.equal_runs - 1):
            again()
            pairs = zip(first, case.outputs, strict=True)
            count += torch.stack([(bits != _bits(output)).any() for bits, output in pairs]).any()
        return {"runs": bench.sizes.equal_runs, "differ": int(count)}

    each(bench, bench.problems, measure)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
