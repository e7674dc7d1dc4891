"""The benchmark of transfers beside products walks every way to move, and needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks import beside
from kvkit.kernels.pages.device import PROGRAM_CHOICES
from kvkit.kernels.pages.problems import TRANSFERS

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the numbers mean something, and take long")
def test_it_walks_every_way() -> None:
    """Its steps, on a CPU: each way once each direction, ratios of positive times."""
    beside_products = list(beside.grids(CPU, 60))
    assert len(beside_products) == 2 * len(beside.GRIDS)
    assert len({(found["move"], found["way"]) for found in beside_products}) == len(beside_products)
    assert all(found["product_time"] > 0 and found["move_rate"] > 0 for found in beside_products)
    alone = list(beside.pieces(CPU, 60))
    assert len(alone) == len(TRANSFERS) * len(PROGRAM_CHOICES)
    assert all(found["of_engine_time"] == 1 for found in alone if found["way"] == "copy engine")
    assert not list(beside.pieces(CPU, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run([sys.executable, beside.__file__], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs a GPU" in done.stderr
