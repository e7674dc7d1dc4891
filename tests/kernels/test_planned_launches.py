"""Planned launches start the kernel that Triton would start, with equal arguments, and call its hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import planned_launches
import pytest
import torch
from repository import SUPPORT

from kvkit.kernels.attention import rows, triton
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages import triton as pages_kernels
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.moves import SMOLLM


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    """The fault of each check; all run in one process, which does not interpret kernels."""
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUPPORT / "planned_launches.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment | {"PYTHONPATH": path}
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", planned_launches.CHECKS)
def test_in_a_compiling_process(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]


def test_layers_of_one_form_share_a_plan() -> None:
    """Another form has one of its own, and so has another batch."""
    batch, other = (
        Rows.of(np.array([3, 9]), np.array([0, 2]), np.array([12]), np.arange(3)[None], 4) for _ in range(2)
    )
    k, v = torch.zeros(2, 3, 1, 4, 8)
    q, lse = torch.zeros(2, 2, 8), torch.zeros(2, 2)

    def plan(batch: Rows, q: torch.Tensor) -> object:
        return triton.attention(q, k, v, batch, Scoring(1.0), torch.empty_like(q), lse)[0].arguments.plan  # type: ignore[attr-defined]

    strided = torch.zeros(2, 3, 8)[:, :2]
    assert plan(batch, q) is plan(batch, q.clone())
    assert plan(batch, q) is not plan(batch, strided)
    assert plan(batch, q) is not plan(other, q)


def test_a_batch_is_uploaded_once_and_each_plan_of_its_tiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, upload = [], rows.upload

    def counted(arrays: tuple[np.ndarray, ...], device: torch.device) -> list[torch.Tensor]:
        uploads.append(len(arrays))
        return upload(arrays, device)

    monkeypatch.setattr(rows, "upload", counted)
    batch = Rows.of(np.array([3, 9]), np.array([0, 2]), np.array([12]), np.arange(3)[None], 4)
    assert uploads == [3]
    batch.tiles(16)
    batch.tiles(16)
    assert uploads == [3, 2]
    batch.tiles(16, 4)
    assert uploads == [3, 2, 2]


def test_moves_of_the_same_pages_choose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as alignment, direction, rotation or kind of ids are new; other pages choose anew."""
    chosen, choose = [], pages_kernels._choose

    def counted(pages: Pages, alignment: int, *more: object) -> object:
        chosen.append(alignment)
        return choose(pages, alignment, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(pages_kernels, "_choose", counted)
    pages = Pages.of(SMOLLM, SMOLLM.pages(2))
    ids = np.array([[0, 1]])

    def plan(pages: Pages, address: int, to_records: bool = True, chunks: int = 1, **more: int) -> object:
        addresses = [address] * chunks
        launch = pages_kernels.move(pages, addresses, ids.repeat(chunks, 0), to_records, **more)  # type: ignore[arg-type]
        return launch.arguments.plan  # type: ignore[attr-defined]

    first = plan(pages, 4096)
    assert plan(pages, 8192) is first
    assert chosen == [16]
    assert plan(pages, 4096, chunks=64) is not first  # another bucket
    assert plan(pages, 4096, programs=2) is not first
    assert chosen == [16]
    assert plan(pages, 4104) is not first
    assert plan(pages, 4096, to_records=False) is not first
    assert chosen == [16, 8, 16]
    assert plan(pages.layer(1), 4096) is plan(pages.layer(1), 4096)
    assert plan(pages.layer(0), 4096) is not plan(pages.layer(1), 4096)
    assert chosen == [16, 8, 16, 16, 16]
