"""`make gpu`: ways between the GPU and pinned memory: beside matrix products, and by size of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.beside import grids, pieces
from benchmarks.gpu.bench import Bench

SECONDS = 40
"""Of each of the two."""


def run(bench: Bench) -> None:
    """Records each way's rate, beside products what they take then, alone its share of the engine's time."""
    ways: dict[str, Callable[[torch.device, float], Iterator[dict[str, Any]]]]
    ways = {"beside products": grids, "by size": pieces}
    for what, measured in ways.items():
        for found in measured(bench.device, SECONDS):
            bench.results.record(what, **found)
