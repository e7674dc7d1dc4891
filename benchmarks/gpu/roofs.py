"""`make gpu`: rooflines, on random data: copies on the device and to and from pinned memory, a product."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.gpu.bench import Bench
from kvkit.kernels.tuning.cases import fill

COPY, PRODUCT = "device copy", "bfloat16 product"


def run(bench: Bench) -> None:
    """Records a line for each: bytes or flops, seconds of the fastest and of the median call."""
    size = bench.sizes.copy_bytes
    source, target = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    hosts = [bench.pinned(size) for _ in range(2)]
    fill(source)
    hosts[0].copy_(source)
    _record(bench, COPY, lambda: target.copy_(source), moved_bytes=2 * size)
    for part in (size >> shift for shift in (10, 8, 6, 4, 2)):
        _record(
            bench,
            f"{COPY} of {part} bytes",
            lambda part=part: target[:part].copy_(source[:part]),
            moved_bytes=2 * part,
        )
    one = torch.zeros(1, device=bench.device)
    _record(bench, "a kernel with nothing to do", lambda: one.add_(1))
    _record(bench, "to the device", lambda: target.copy_(hosts[0], non_blocking=True), moved_bytes=size)
    _record(bench, "from the device", lambda: hosts[1].copy_(source, non_blocking=True), moved_bytes=size)

    other = bench.streams.Stream()

    def both() -> None:
        other.wait_stream(bench.streams.current_stream())
        with bench.streams.stream(other):
            hosts[1].copy_(source, non_blocking=True)
        target.copy_(hosts[0], non_blocking=True)
        bench.streams.current_stream().wait_stream(other)

    _record(bench, "both ways at once", both, moved_bytes=2 * size)
    side = bench.sizes.matrix
    a, b, c = (torch.empty(side, side, dtype=torch.bfloat16, device=bench.device) for _ in range(3))
    fill(a)
    fill(b)
    _record(bench, PRODUCT, lambda: torch.mm(a, b, out=c), flops=2 * side**3)


def _record(bench: Bench, what: str, function: Callable[[], object], **work: int) -> None:
    times = bench.seconds(function)
    bench.results.record(what, **work, min_s=min(times), median_s=median(times))
