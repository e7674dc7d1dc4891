"""Results of several runs on a GPU are merged into one file, its tables, and valid tuned tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.keep import merged
from benchmarks.gpu.results import Results
from benchmarks.report.spec import GPU
from benchmarks.report.tables import render
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.tables import SHIPPED, build_of, read_table

MACHINE = {"machine": {"gpu": "Imaginary 9"}, "versions": {"torch": "9"}, "nvidia_smi": "", "target": "sm_90"}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"gpu": "Imaginary 9"} | line) + "\n" for line in lines))
    return path


def test_of_several_runs_the_later_counts(tmp_path: Path) -> None:
    before = write(
        tmp_path / "1",
        {"step": "driver", "what": "machine", **MACHINE},
        {"step": "defaults", "what": "pack", "us": 1.23456},
        {"step": "moving", "what": "by size", "way": "a"},
        {"step": "moving", "what": "by size", "way": "b"},
        {"step": "defaults", "what": "ended", "status": 124},
        {"step": "tune", "what": "pack", "state": "left"},
    )
    trials = [{"config": "a", "us": 2.0}, {"config": "b", "us": None}]
    after = write(
        tmp_path / "2",
        {"step": "moving", "what": "by size", "way": "c"},
        {"step": "tune", "what": "pack", "config": "a", "us": 2.0, "outcome": "measured, not checked"},
        {"step": "tune", "what": "pack", "state": "tuned", "trials": trials},
    )
    document = merged([before, after])
    assert document["machine"] == {"gpu": "Imaginary 9"}
    assert document["results"] == [
        {"step": "defaults", "what": "pack", "us": 1.235},
        {"step": "moving", "what": "by size", "way": "c"},
        {"step": "tune", "what": "pack", "state": "tuned", "trials": trials[:1]},
    ]


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """A traceback or a compiler's output may have other characters that end lines elsewhere."""
    path = tmp_path / "1"
    results = Results(path, "driver", "Imaginary 9")
    results.record("machine", **MACHINE, printed="a\u2028b\x85c")
    assert [line["printed"] for line in results.of("driver")] == ["a\u2028b\x85c"]
    assert merged([path])["machine"] == MACHINE["machine"]


def test_two_gpus_are_no_one_document(tmp_path: Path) -> None:
    path = tmp_path / "1"
    path.write_text(
        '{"gpu": "A", "step": "roofs", "what": "x"}\n{"gpu": "B", "step": "roofs", "what": "x"}\n'
    )
    with pytest.raises(ValueError, match=r"results of \['A', 'B'\]: want those of one GPU"):
        merged([path])


def test_a_document_has_its_machine(tmp_path: Path) -> None:
    path = write(tmp_path / "1", {"step": "roofs", "what": "x"})
    with pytest.raises(ValueError, match=r'no "machine" of the step "driver"'):
        merged([path])


def test_the_tables_reckon_from_the_tuned_time(tmp_path: Path) -> None:
    path = tmp_path / f"gpu-{GPU}.json"
    default = {"config": "TILE=1 warps=4", "us": 200.0, "of_copy": 0.4, "predicted_us": 50.0}
    lines = [
        {"step": "defaults", "what": "pack fp8", **default},
        {"step": "tune", "what": "pack fp8", "config": "TILE=2 warps=4", "us": 110.0, "default_us": 220.0},
    ]
    path.write_text(json.dumps({"results": lines}))
    *_, row, _ = render("<!-- table: gpu_kernels -->\n<!-- end -->", tmp_path).splitlines()
    assert row == "| pack fp8 | TILE=2 warps=4 | 100.0 | 0.80 |  | 200.0 | 50.0 |"


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_what_comes_with_kvkit_is_of_its_kernels(path: Path) -> None:
    """An entry of a kernel's former source is never used: take it out, or tune on that GPU."""
    sources, spaces = {}, {}
    for problem in (replace(p, space=p.space_on("sm_90")) for p in every_problem()):
        sources[problem.bucket.op] = build_of(problem.kernel, problem.host).source
        spaces[problem.bucket] = problem.space
    table = read_table(path, path.stem)
    assert table
    for key, tuned in table.items():
        assert key.build.source == sources[key.bucket.op], key
        assert tuned.config in spaces[key.bucket], key
