"""What the README and docs quote is what results/ holds, and what they show works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import PAGES, ROOT, render


@pytest.mark.parametrize("page", PAGES)
def test_tables_come_from_the_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- table:" in text
    assert render(text) == text, "run: python -m benchmarks.tables"


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
