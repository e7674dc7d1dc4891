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
    assert len(alone) == len(TRANSFERS) * (len(PROGRAM_CHOICES) + 1)
    assert all(found["of_engine_time"] == 1 for found in alone if found["way"] == "copy engine")
    assert not list(beside.pieces(CPU, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="bench_gpu prints them there")
def test_three_ways_stand_beside_each_other_for_small_records() -> None:
    assert [(spec.chunks, spec.record_bytes >> 10) for spec in beside.FEW_MIB[::2]] == [
        (32, 128),
        (8, 1024),
        (64, 16),
    ]
    assert [spec.to_records for spec in beside.FEW_MIB] == [True, False] * 3
    lines = [beside.in_words(x) for x in beside.pieces(CPU, 60, beside.FEW_MIB, beside.THREE_WAYS)]
    assert len(lines) == 3 * len(beside.FEW_MIB)
    assert "way copy engine, batched " in lines[0]
    assert "way copy engine, one by one, GB/s " in lines[1]
    assert "way 16 programs, GB/s " in lines[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run([sys.executable, beside.__file__], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs a GPU" in done.stderr
