"""What the README and docs quote is what results/ holds, and what they show works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import MACHINE, PAGES, ROOT, render


@pytest.mark.parametrize("page", PAGES)
def test_tables_come_from_the_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- table:" in text
    assert render(text) == text, "run: python -m benchmarks.tables"


def test_kernels_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    def table(name: str, results: list[dict[str, Any]]) -> list[str]:
        (tmp_path / f"{MACHINE}.json").write_text(json.dumps({"results": results}))
        (tmp_path / f"demo-{MACHINE}.json").write_text('{"turns": []}')
        return render(f"<!-- table: {name} -->\n<!-- end -->", tmp_path).splitlines()[1:-1]

    assert table("kernels", []) == table("blend_4k", []) == ["*Not measured yet.*"]
    prefill = {"name": "prefill::blended_prefill[4k]", "ratio_min": 0.2, "ratio_median": 0.25}
    speed = {"unpack rotated": {"of copy_": {"min": 0.5, "median": 0.4}}}
    *_, unpack, blended = table("kernels", [prefill, {"name": "pages::conversions[llama-bfloat16]"} | speed])
    assert unpack.startswith("| unpack rotated, Llama")
    assert unpack.endswith("| 2.00 | 2.50 |"), "time over time, where the benchmark gives speed over speed"
    assert blended.startswith("| blended prefill")
    assert blended.endswith("| 0.20 | 0.25 |")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(
        r"`((?:kvkit|tests|benchmarks|examples|docs)/[\w./-]+)`", text
    )
    assert named
    for path in named:
        assert (ROOT / path).exists() or (ROOT / page).parent.joinpath(path).exists(), path


def test_the_readme_example_reuses_what_it_stored(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) <= 20
    script = code[1].replace("/tmp/kvkit", str(tmp_path))
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout.startswith("{} ")
    assert runs[1].stdout.startswith("{'disk': ")
