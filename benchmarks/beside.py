"""Moves between a GPU and the host beside matrix products: what each takes from the other, by either way.

Needs a GPU. `python benchmarks/beside.py` prints a line for each way, then one for each size of records. On a
CPU `grids` and `pieces` walk the same steps over small records, and their numbers mean nothing.

Run them on another than the default stream, on which the copy engine gets no batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import torch

from kvkit.kernels.pages.copies import Copies, can_batch
from kvkit.kernels.pages.device import COPY_ENGINE, KERNEL, PROGRAM_CHOICES, programs_config
from kvkit.kernels.pages.moves import MoveSpec
from kvkit.kernels.pages.problems import TRANSFERS, transfer_problem
from kvkit.kernels.tuning.cases import Case
from kvkit.kernels.tuning.configs import HostLaunch, Runnable, host_config

WINDOW_S = 0.1
"""Of products, beside which moves run."""
GRIDS = (*PROGRAM_CHOICES, 64, 1 << 20)
"""The last has a program for every tile."""


def grids(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """Each way beside products of bfloat16 matrices, moving 256 MiB both ways; stops after `seconds`.

    Yields for each its rate alone and beside them, in GB/s, and the ratios to alone: `move_rate`, and
    `product_time`, what a product takes.
    """
    ends = time.monotonic() + seconds
    side = 4096 if device.type == "cuda" else 64
    a, product = torch.randn(2, side, side, device=device).to(torch.bfloat16)

    def multiply() -> None:
        torch.mm(a, a, out=product)

    largest = max(spec.chunks * spec.record_bytes for spec in TRANSFERS)
    for spec in (spec for spec in TRANSFERS if spec.chunks * spec.record_bytes == largest):
        spec = _sized(spec, device)
        case = transfer_problem(spec).make(device, True)
        for way in GRIDS:
            if time.monotonic() >= ends:
                return
            yield _named(spec, way) | _beside(device, multiply, case.launches(programs_config(way)), spec)


SINGLY = -1
"""The copy engine by a call of torch for each record, whatever the driver can."""

THREE_WAYS = (COPY_ENGINE, SINGLY, KERNEL)

FEW_MIB = tuple(
    replace(spec, chunks=records)
    for records, record_bytes in ((32, 128 << 10), (8, 1 << 20), (64, 16 << 10))
    for to_records in (True, False)
    for spec in [s for s in TRANSFERS if (s.record_bytes, s.to_records) == (record_bytes, to_records)][:1]
)
"""Moves of 1 to 8 MiB, where calls take most of the time."""


def pieces(
    device: torch.device,
    seconds: float,
    specs: Sequence[MoveSpec] = TRANSFERS,
    ways: Sequence[int] = (COPY_ENGINE, SINGLY, *PROGRAM_CHOICES[1:]),
) -> Iterator[dict[str, Any]]:
    """Each way alone, by size and number of records, the ways by turns; stops after `seconds`.

    Yields for each its rate in GB/s, and the ratio of its time to that of the first way.
    """
    ends = time.monotonic() + seconds
    for spec in specs:
        if time.monotonic() >= ends:
            return
        spec = _sized(spec, device)
        case = transfer_problem(spec).make(device, True)
        launches = {way: _launches(case, way) for way in ways}
        times: dict[int, list[float]] = {way: [] for way in ways}
        for turn in range(11 if device.type == "cuda" else 2):
            for way, each in launches.items():
                took = _span(device, lambda each=each: _run(each))
                if turn:  # the first compiles
                    times[way].append(took)
        first = median(times[ways[0]])
        for way, found in times.items():
            rate = spec.chunks * spec.record_bytes / median(found) / 1e9
            yield _named(spec, way) | {"GB/s": rate, "of_engine_time": median(found) / first}


def _launches(case: Case, way: int) -> Sequence[Runnable]:
    if way != SINGLY:
        return case.launches(programs_config(way))
    engine = case.launches(programs_config(COPY_ENGINE))
    return [HostLaunch(x.run_singly, {}, host_config()) if isinstance(x, Copies) else x for x in engine]


def _named(spec: MoveSpec, way: int) -> dict[str, Any]:
    """Describe a move and its way; "batched": whether the copy engine gets its copies in batches."""
    names = {COPY_ENGINE: "copy engine", SINGLY: "copy engine, one by one"}
    every = "a program for each tile" if way > 1 << 10 else f"{way} programs"
    return {
        "move": "pages to host" if spec.to_records else "host to pages",
        "records": spec.chunks,
        "record_bytes": spec.record_bytes,
        "way": names.get(way, every),
    } | ({"batched": can_batch()} if way == COPY_ENGINE else {})


def _sized(spec: MoveSpec, device: torch.device) -> MoveSpec:
    """Itself; for a CPU, which interprets, one of few tokens and layers."""
    if device.type == "cuda":
        return spec
    return replace(spec, group=replace(spec.group, layers=(0,), kv_heads=1), chunks=2, tokens=16)


def _beside(
    device: torch.device, multiply: Callable[[], None], move: Sequence[Runnable], spec: MoveSpec
) -> dict[str, float]:
    """Moves on a stream of their own that last longer than the products which are timed."""
    _run(move)
    multiply()
    move_s = median(_span(device, lambda: _run(move)) for _ in range(3))
    product_s = _span(device, multiply)
    products = max(1, int((WINDOW_S if device.type == "cuda" else 0) / product_s))
    alone_s = _span(device, lambda: [multiply() for _ in range(products)])
    moves = 1 + int(4 * alone_s / move_s) if device.type == "cuda" else 2
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        marks = [(_mark(device), _run(move), _mark(device)) for _ in range(moves)]
    began = _mark(device)
    for _ in range(products):
        multiply()
    ended = _mark(device)
    _wait(device)
    whole = _seconds(began, ended)
    spans = [(_seconds(began, first), _seconds(began, last)) for first, _, last in marks]
    within = [last - first for first, last in spans if first >= 0 and last <= whole]
    beside_s = median(within or [last - first for first, last in spans])
    size = spec.chunks * spec.record_bytes
    return {
        "GB/s alone": size / move_s / 1e9,
        "GB/s": size / beside_s / 1e9,
        "move_rate": move_s / beside_s,
        "product_time": whole / alone_s,
        "moves_within": len(within),
    }


def _run(launches: Sequence[Runnable]) -> None:
    for launch in launches:
        launch.run()


def _mark(device: torch.device) -> Any:
    """This moment on the current stream; on a CPU, now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(first: Any, last: Any) -> float:
    """From one mark to another, both of which have passed."""
    return float(last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3)


def _span(device: torch.device, work: Callable[[], object]) -> float:
    _wait(device)
    first, _, last = _mark(device), work(), _mark(device)
    _wait(device)
    return _seconds(first, last)


def main() -> None:
    """Print both, each result as soon as it is there."""
    if not torch.cuda.is_available():
        sys.exit("benchmarks/beside.py needs a GPU: there is none here, nothing was measured")
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for found in chain(grids(device, 60), pieces(device, 60)):
            print(in_words(found), flush=True)


def in_words(found: Mapping[str, Any]) -> str:
    """Return a line for a result."""
    return ", ".join(
        f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in found.items()
    )


if __name__ == "__main__":
    main()
