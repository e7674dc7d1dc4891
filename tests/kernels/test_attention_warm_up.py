"""After attention's warm-up no batch of an engine compiles anything, with tuned results or without."""

from __future__ import annotations

import pytest
import torch
from run_sizes import examples
from test_compile_gate import in_compiling_process

from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.warm_up import BatchLimits, PagedLayer, launches
from kvkit.kernels.tuning.configs import run_all


@pytest.mark.parametrize("table", ["untuned", pytest.param("tuned", marks=pytest.mark.nightly)])
def test_batches_find_their_kernels(table: str) -> None:
    """Few rows and many, of one request and of several, one block and many, windows, tables of any width."""
    script = f"import attention_batches; attention_batches.report({examples(30)}, {table == 'tuned'})"
    lines = in_compiling_process(script).splitlines()
    assert len(lines) == 5
    assert [line for line in lines if ": 0 of " not in line] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
def test_a_warm_up_changes_no_pages() -> None:
    """It runs every kernel in each of its forms, over pages of NaN."""
    pages = torch.full((2, 16, 2, 24), torch.nan, dtype=torch.float32).transpose(1, 2)
    before = pages.clone()
    layer = PagedLayer(pages[..., :16], pages[..., 16:], 4, Scoring(0.25, window=300))
    found = list(launches([layer, layer], BatchLimits(rows=24, requests=3, keys=400)))
    run_all(found)
    assert torch.equal(pages.view(torch.int32), before.view(torch.int32))
    forms = {(launch.kernel.fn.__name__, launch.arguments.get("SPLIT")) for launch in found}
    assert forms == {("attend", False), ("attend", True), ("merge", None), ("weigh", None)}
    for name in ("attend", "weigh"):
        mine = [launch for launch in found if launch.kernel.fn.__name__ == name]
        assert {launch.arguments["PAGE"] for launch in mine} == {0, 16}
        assert {launch.arguments["VALUES"] for launch in mine} == {False, True}
    constants = [
        (launch.kernel, launch.config, *((k, v) for k, v in launch.arguments.items() if k.isupper()))
        for launch in found
    ]
    assert len(set(constants)) == len(constants), "the same twice"


def test_without_outputs_there_are_scores_alone() -> None:
    pages = torch.zeros(2, 2, 16, 32)
    layer = PagedLayer(pages[..., :16], pages[..., 16:], 4, Scoring(0.25))
    found = list(launches([layer], BatchLimits(rows=8, requests=3, keys=64), output=False))
    attend = [launch for launch in found if "SPLIT" in launch.arguments]
    assert {launch.arguments["VALUES"] for launch in attend} == {False}
    assert len(found) > len(attend)
