"""What tuning gains on this CPU: each kernel's default and what `kvkit tune` finds, as shares of a memcpy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.timing import interleaved, ratio
from kvkit.kernels.pages.host_problems import MOVES, problem_of
from kvkit.kernels.tuning.cases import Case
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.devices import host_roofline, host_timer
from kvkit.kernels.tuning.search import Roofline, search

THREADS = 2
OTHER_BYTES = 64 << 20  # more than the caches hold


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def roofline() -> Roofline:
    return host_roofline()


def found(name: str, roofline: Roofline | None) -> tuple[Case, KernelConfig, KernelConfig, int]:
    """A problem's case, its default, what a search finds (without a roof the last there is), bytes moved."""
    move = next(move for move in MOVES if move.name == name)
    if roofline is None:
        move = replace(move, group=replace(move.group, layers=(0,)), chunks=1)
    problem = problem_of(move)
    case, default = problem.make(torch.device("cpu"), True), problem.space[0]
    moved = problem.work(default).moved_bytes
    if roofline is None:
        return case, default, problem.space[-1], moved
    tuned, _ = search(problem, case, host_timer()(case), {}, roofline)
    assert tuned is not None
    return case, default, tuned.config, moved


@pytest.mark.parametrize("name", [move.name for move in MOVES])
def test_tuned(benchmark: Any, request: pytest.FixtureRequest, name: str) -> None:
    """Searched, then measured again: what was lucky in the search is not in the ratios.

    A pack is timed with a checksum of what it wrote, as in serving. "copy" is torch's, of half the bytes that
    are read and written. Where the tuned one is the default, its ratio shows how noisy the machine is: quote
    none where that is far from 1.
    """
    case, default, tuned, moved = found(
        name, request.getfixturevalue("roofline") if benchmark.enabled else None
    )
    source = torch.ones(moved // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    other_memory = np.zeros(OTHER_BYTES // 8 if benchmark.enabled else 1)

    def rest() -> None:
        np.add(other_memory, 1, out=other_memory)

    functions: dict[str, Callable[[], object]] = {
        "default": partial(case.run, default),
        "tuned": partial(case.run, tuned),
        "copy": partial(target.copy_, source),
    }
    benchmark.pedantic(case.run, (tuned,), setup=rest, rounds=3 if benchmark.enabled else 1)
    times = interleaved(functions, 30 if benchmark.enabled else 1, before=rest)
    case.poison()
    case.run(tuned)
    assert not case.fault()
    benchmark.extra_info |= {"config": str(tuned), "default": str(default), "load": os.getloadavg()[0]}
    for way, against in (("tuned", "default"), ("default", "copy"), ("tuned", "copy")):
        share = ratio(times, way, against)
        shown = {f"ratio_{kind}": value for kind, value in share.items()}
        benchmark.extra_info[f"{way} to {against}"] = shown
        print(f"{name}: {way} to {against}: min {share['min']:.2f}, median {share['median']:.2f}")
