"""The operation that docs/research/own-kernel.md adds runs, compiles and is tuned in a copy of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_blocks import on_page
from product_copy import copy_product, run_with


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of kvkit."""
    return copy_product(tmp_path)


@pytest.mark.nightly
def test_a_new_kernel_is_a_folder_and_a_row(copy: Path) -> None:
    folder = copy / "kvkit/kernels/blocks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, text in {
        "reference": on_page("docs/research/own-kernel.md", '"""What copying blocks means'),
        "checks": on_page("docs/research/own-kernel.md", '"""What copying blocks takes'),
        "api": on_page("docs/research/own-kernel.md", '"""Blocks copied within a pool: picks'),
        "triton": on_page("docs/research/own-kernel.md", '"""Blocks copied within a pool, in Triton'),
        "problems": on_page("docs/research/own-kernel.md", '"""The problems that copying blocks'),
    }.items():
        (folder / f"{name}.py").write_text(text)
    rows = copy / "kvkit/kernels/tuning/problems.py"
    row = on_page("docs/research/own-kernel.md", "FOLDERS = ")
    rows.write_text(re.sub(r"^FOLDERS = .*\n", row, rows.read_text(), flags=re.MULTILINE))

    (copy / "interpret.py").write_text(
        """
import pytest
import torch
from kvkit.kernels.blocks.api import copy_blocks
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.tuning.problems import every_problem

(problem,) = (problem for problem in every_problem() if problem.bucket.op == "copy_blocks")
case = problem.make(torch.device("cpu"), True)
for config in problem.space:
    case.poison()
    assert case.fault()
    case.run(config)
    assert case.fault() == ""
pages, first = torch.arange(6.0).view(3, 2), torch.tensor([0])
copy_blocks(pages, first, first + 2)
assert pages.tolist() == [[0, 1], [2, 3], [0, 1]]
with pytest.raises(LaunchError, match="sources: .* int32"):
    copy_blocks(pages, first.int(), first + 2)
"""
    )
    run_with(copy, "interpret.py", TRITON_INTERPRET="1")

    (copy / "compile.py").write_text(
        """
from kvkit.kernels.blocks.problems import problems
from kvkit.kernels.tuning.compiling import compile_pool
from kvkit.lab.compiling.gate import GATE, faults, gate

if __name__ == "__main__":
    with compile_pool(1) as pool:
        reports = gate(pool, problems)
    assert [report.target for report in reports] == list(GATE)
    assert faults(reports, problems()) == []
"""
    )
    run_with(copy, "compile.py", TRITON_INTERPRET="0")
    tune = "from kvkit.cli import main; main()", "tune", "--op", "copy_blocks", "--target", "sm_90"
    assert "6 configurations, 0 of them not worth a run" in run_with(copy, "-c", *tune, TRITON_INTERPRET="0")
