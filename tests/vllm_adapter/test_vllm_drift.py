"""Tokens of blended prompts that are not recomputed are corrected in vLLM's pages as the library does it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from kvkit.adapters.vllm.blending.blender import BlendedPrompt, Blender
from kvkit.adapters.vllm.blending.drift import PromptDrift
from kvkit.adapters.vllm.blending.rows import RequestRows
from kvkit.blend.drift import Drift
from kvkit.blend.plan import Selection, Span, plan_blend
from kvkit.format.rope import Rope

N, LAYERS, HEADS, SIZE, BLOCK, PAGE = 90, 3, 2, 8, 16, 8
PLAN = plan_blend(N, 10, [Span(20, 50, 10), Span(52, 80, 10)])
SELECTION = Selection(first_n=4, drift=0.5)
POSITIONS = np.union1d(PLAN.computed, [27, 33, 34, 60, 61, 79])[:-1]
ROPES = [Rope((1.0, 0.3, 0.1, 0.01), False), None, Rope((1.0, 0.2), True)]
TABLE = [5, 2, 9, 1, 7, 3]
"""Blocks of the prompt."""


class Pages:
    """Plain pages of a rank's layers, which are of two block tables, as `LayerPages`."""

    orders = (None,) * LAYERS

    def __init__(self) -> None:
        self.kv = [torch.randn(24, HEADS, PAGE, 2 * SIZE) for _ in range(LAYERS)]
        self.layers = [SimpleNamespace(table=i % 2, block_tokens=BLOCK) for i in range(LAYERS)]

    def read(self, index: int, blocks: Any, length: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        ids = np.maximum(blocks[self.layers[index].table], 0)[:, None] * (BLOCK // PAGE)
        k, v = self.kv[index].split(SIZE, -1)
        return k, v, (ids + np.arange(BLOCK // PAGE)).reshape(-1)


def as_sequence(pages: Pages, index: int) -> list[torch.Tensor]:
    """K and V of the prompt's tokens in a block of their own."""
    k, v, table = pages.read(index, ([*TABLE], [*TABLE]), N)
    return [x[table].transpose(0, 1).flatten(1, 2)[None, :, :N].clone() for x in (k, v)]


@pytest.mark.parametrize("missing", [0, 2], ids=["all blocks", "a window has left two"])
def test_layers_in_turn_are_corrected_as_by_the_library(missing: int) -> None:
    torch.manual_seed(0)
    pages: Any = Pages()
    blocks = [*TABLE], [*[-1] * missing, *TABLE[missing:]]
    present = [np.ones(N, bool), np.arange(N) >= missing * BLOCK]
    before = [as_sequence(pages, index) for index in range(LAYERS)]
    rows = RequestRows(np.zeros(len(POSITIONS), np.int32), POSITIONS, blocks)
    drift = PromptDrift(pages, ROPES, SELECTION, PLAN, rows)
    for index in range(LAYERS):
        k, v, table = pages.read(index, ([*TABLE], [*TABLE]), N)
        places = table[POSITIONS // PAGE], POSITIONS % PAGE
        for x in (k, v):  # the run writes its rows
            x[places[0], :, places[1]] = torch.randn(len(POSITIONS), HEADS, SIZE)
        expected, untouched = as_sequence(pages, index), pages.kv[index].clone()
        of = Drift.of(SELECTION, PLAN, POSITIONS, torch.arange(N), present[index % 2])
        assert of is not None
        kept = of.read_sources((before[index][0], before[index][1]))
        of.correct((expected[0], expected[1]), kept, ROPES[index])
        drift.correct(index)
        torch.testing.assert_close(as_sequence(pages, index), expected)
        targets = of.targets[0]
        same = torch.ones(24, PAGE, dtype=torch.bool)
        same[table[targets // PAGE], targets % PAGE] = False
        assert len(targets) > 20
        assert torch.equal(pages.kv[index].transpose(1, 2)[same], untouched.transpose(1, 2)[same])


class Runner:
    """Runs nothing; cuts rows as `RowRunner` does, without a limit of runs."""

    writes_kv_first, max_rows, stages, count, device = True, 40, 1, LAYERS, torch.device("cpu")

    def __init__(self) -> None:
        self.ran: list[list[tuple[int, bool]]] = []  # rows of each prompt of each run, if they are corrected

    def wait_for_sends(self) -> None:
        """There are none."""

    def batches(self, rows: Sequence[RequestRows], limit: int) -> Any:
        batch, free = [], min(limit, self.max_rows)
        for index, request in enumerate(rows):
            if free and len(request.ids):
                batch.append((index, request.slice(0, free)))
                free -= len(batch[-1][1].ids)
        yield batch

    def run(self, batch: Sequence[RequestRows], on_kv: Any = None, hidden: bool = True) -> None:
        corrected = [] if on_kv is None else [id(drift._rows) for drift in on_kv.args[0]]
        self.ran.append([(len(rows.ids), id(rows) in corrected) for rows in batch])


def blended(rows: int) -> BlendedPrompt:
    """A prompt of which so many rows are to be computed."""
    plan = plan_blend(200, 0, [Span(0, 100, 50), Span(100, 199, 0)])
    chosen = np.arange(rows, dtype=np.int32) + 90
    blocks = ([*range(13)], [*range(13)])
    return BlendedPrompt(np.zeros(200, np.int32), plan, SELECTION, blocks, selected=chosen)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([30], [[(30, True)]]),
        ([30, 30], [[(30, True)], [(30, True)]]),
        ([30, 10, 5], [[(30, True), (10, True)], [(5, True)]]),
        ([41], [[(40, False)], [(1, False)]]),
        ([10, 41], [[(10, True)], [(40, False)], [(1, False)]]),
    ],
)
def test_a_prompt_is_corrected_if_its_rows_fit_in_a_run_whatever_is_beside_it(
    rows: list[int], expected: list[list[tuple[int, bool]]]
) -> None:
    runner: Any = Runner()
    blender = Blender(runner, Pages(), ROPES)  # type: ignore[arg-type]
    prompts = [blended(count) for count in rows]
    for prompt in prompts:
        blender.begin_prompt(prompt)
    for _ in range(5):
        blender.advance(prompts)
    assert all(prompt.is_complete for prompt in prompts)
    assert runner.ran == expected


def test_nothing_is_corrected_where_nothing_can_be_estimated() -> None:
    """First tokens alone give no estimate."""
    runner: Any = Runner()
    blender = Blender(runner, Pages(), ROPES)  # type: ignore[arg-type]
    prompt = blended(1)
    prompt.selected = np.array([0, 1, 101], np.int32)
    blender.begin_prompt(prompt)
    blender.advance([prompt])
    assert runner.ran == [[(3, False)]]
