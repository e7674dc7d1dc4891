"""Trials of a tuning search are written line by line, exported, drawn and explained."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_fixtures import scale_problem, tiled
from page_blocks import on_page
from typer.testing import CliRunner

from kvkit import cli
from kvkit.environment import host_name
from kvkit.kernels.tuning import trials
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.search import (
    UNCHECKED,
    CompileInfo,
    Roofline,
    SearchStep,
    Trial,
    nearest_first,
    search,
)
from kvkit.kernels.tuning.tables import Tuned, build_of

DEFAULT, SMALL, FLAWED, WRONG, TWIN = (tiled(n) for n in (1024, 256, 512, 2048, 128))
SPACE = DEFAULT, SMALL, FLAWED, WRONG, TWIN
PROBLEM = scale_problem(space=SPACE)  # moves 32768 bytes; of the flops that are its BLOCK
ROOF = Roofline(bytes_per_s=32768e6, flops_per_s=1e15)  # which is 1 µs
TRIALS = (
    Trial(
        DEFAULT, 4.0, "slower", (4.0, 5.0, 3.5), CompileInfo("", "a", {"registers": 40, "blocks_per_sm": 8})
    ),
    Trial(SMALL, 2.0, "best", (2.0, 1.5), CompileInfo("", "b", {"registers": 24, "blocks_per_sm": 8})),
    Trial(FLAWED, None, "spills 8 bytes"),
    Trial(WRONG, 1.0, "wrong: 3 elements differ", (1.0,)),
    Trial(TWIN, None, f"the same binary as {SMALL}"),
)


def lines(found: tuple[Trial, ...] = TRIALS) -> list[trials.Line]:
    step = SearchStep(PROBLEM, "tuned", Tuned(SMALL, 2.0, 4.0), found)
    return list(trials.lines(step, "NVIDIA H200", ROOF))


def test_a_line_has_everything() -> None:
    line = lines()[1]
    expected = {
        "device": "NVIDIA H200",
        "problem": "scale float32 4096",
        "operation": "scale",
        "op": "scale",
        "form": "float32",
        "sizes": (4096,),
        "config": str(SMALL),
        "default": False,
        "outcome": "best",
        "us": 2.0,
        "samples_us": (2.0, 1.5),
        "roof_us": pytest.approx(1),
        "moved_bytes": 32768,
        "flops": 256,
        "compiled": {"registers": 24, "blocks_per_sm": 8},
        **dict(zip(("source", "compiler", "driver"), build_of(PROBLEM.kernel, False), strict=True)),
    }
    assert {name: line[name] for name in expected} == expected
    assert line["versions"]["torch"]


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """Other programs write characters as they are that end lines elsewhere."""
    path = tmp_path / "trials.jsonl"
    line = lines()[0] | {"versions": {"driver": "1\u2028\x85"}}
    path.write_text(json.dumps(line, ensure_ascii=False) + "\n")
    assert trials.read(path) == [json.loads(json.dumps(line))]


def test_lines_are_added_and_the_last_search_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trials.jsonl"
    trials.append(path, iter(lines()))
    again = lines((TRIALS[0], *(trial for trial in TRIALS[1:] if trial.config != WRONG)))
    trials.append(path, iter(again))
    with open(path, "a") as file:
        file.write('{"problem": "scale')  # the process was killed
    assert len(path.read_text().splitlines()) == 10
    assert trials.read(path) == json.loads(json.dumps(again))


def test_a_search_that_is_ended_leaves_what_it_measured(tmp_path: Path) -> None:
    """And one that goes on replaces it."""
    path = tmp_path / "trials.jsonl"

    def measure(config: KernelConfig) -> float:
        if config == TWIN:
            raise KeyboardInterrupt
        return 1e-6

    def keep(problem: Problem, trial: Trial) -> None:
        trials.append(path, [trials.line(problem, trial, "H200", ROOF)])

    case = PROBLEM.make(torch.device("cpu"), True)
    with pytest.raises(KeyboardInterrupt):
        search(PROBLEM, case, measure, {}, ROOF, on_trial=keep)
    found = trials.read(path)
    before = itertools.takewhile(lambda config: config != TWIN, nearest_first(PROBLEM.space))
    assert [line["config"] for line in found] == [str(config) for config in before] != []
    assert {line["outcome"] for line in found} == {UNCHECKED}
    assert "the search was ended" in trials.explain(found)
    trials.append(path, lines())
    assert [line["outcome"] for line in trials.read(path)] == [trial.outcome for trial in TRIALS]


def test_csv_has_a_row_for_each_trial(tmp_path: Path) -> None:
    trials.write_csv(tmp_path / "x.csv", lines())
    with open(tmp_path / "x.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["config"] for row in rows] == [str(config) for config in SPACE]
    assert list(rows[0]) == [*trials.COLUMNS, "registers", "blocks_per_sm"]
    assert [rows[1][name] for name in ("us", "least_us", "registers")] == ["2.0", "1.5", "24"]
    assert [rows[2][name] for name in ("us", "least_us", "outcome")] == ["", "", "spills 8 bytes"]


def test_the_pages_picture(tmp_path: Path) -> None:
    trials.write_csv(tmp_path / "trials.csv", lines())
    script = on_page("docs/research/tuning.md", "import csv")
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"MPLBACKEND": "agg"}, check=True
    )
    assert "<svg" in (tmp_path / "trials.svg").read_text()


def test_an_explanation() -> None:
    words = " ".join(trials.explain(lines()).split())
    assert words == (
        f"scale float32 4096: {SMALL} takes 2.0 µs, 50% less than the default. "
        "It reaches 16.4 GB/s and 0.000128 TFLOP/s. By its bytes and flops memory would limit it; it is "
        "at 50% of the measured roofline. "
        f"Unlike the default ({DEFAULT}) it has registers 24 instead of 40. "
        "The others: 1 slower; 1 spills; 1 wrong; 1 the same binary as another."
    )
    assert ", and is the default" in trials.explain(lines((Trial(DEFAULT, 2.0, "best"),)))
    nothing = trials.explain(lines((Trial(DEFAULT, None, "does not run: x"),)))
    assert nothing == "scale float32 4096: no configuration is correct: 1 does not run."
    failed = lines((Trial(DEFAULT, None, "does not run: x"), Trial(SMALL, 2.0, "best")))
    assert "; the default does not count: does not run: x." in trials.explain(failed)


def test_a_winner_above_the_roof_voids_it() -> None:
    """It is said that the roof was measured too low, and nothing is said to be impossible by it."""
    left_out = Trial(WRONG, None, "takes 9.0 µs at the roofline")
    step = SearchStep(PROBLEM, "tuned", Tuned(SMALL, 2.0, 4.0), (*TRIALS[:2], left_out))
    busy = " ".join(trials.explain(list(trials.lines(step, "H200", Roofline(7e9, 1e30)))).split())
    assert "it is at 234% of the measured roofline. No kernel exceeds a roofline by so much" in busy
    assert "run kvkit tune --force on an idle machine" in busy
    assert "1 left out by a refuted roofline" in busy
    assert "cannot be faster" not in busy
    idle = " ".join(trials.explain(list(trials.lines(step, "H200", Roofline(14e9, 1e30)))).split())
    assert "it is at 117% of the measured roofline. Unlike" in idle
    assert "The others: 1 slower; 1 cannot be faster by the roofline." in idle


def test_matrix_products_can_be_the_limit() -> None:
    step = SearchStep(PROBLEM, "tuned", Tuned(SMALL, 2.0, 4.0), TRIALS)
    found = list(trials.lines(step, "H200", Roofline(1e15, flops_per_s=256e6)))  # 256 flops take 1 µs
    assert "matrix products would limit it; it is at 50%" in trials.explain(found)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_the_command_tells_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    trials.append(tmp_path / "nvidia-h200.trials.jsonl", iter(lines()))
    told = run("--device", "NVIDIA H200", "--explain", "--csv", str(tmp_path / "x.csv"))
    assert told.exit_code == 0
    assert f"{SMALL} takes 2.0 µs" in told.stdout
    assert (tmp_path / "x.csv").exists()
    assert f"trials: {tmp_path / 'x.csv'}\n" in told.stdout
    here = host_name()
    for arguments, words in (
        (
            ("--device", "NVIDIA H200", "--explain", "--op", "other"),
            "--op other: no trials; want one of scale",
        ),
        (("--device", "NVIDIA A100", "--explain"), "NVIDIA A100: no trials are kept in"),
        (
            ("--device", "NVIDIA A100", "--explain"),
            "nvidia-a100.trials.jsonl. To make them run kvkit tune on that",
        ),
        (
            ("--device", "NVIDIA A100", "--csv", "x.csv"),
            "on that machine; kept are nvidia-h200.trials.jsonl\n",
        ),
        (("--device", "host", "--explain"), f"{here}: no trials are kept in {tmp_path}"),
        (("--device", "host", "--explain"), "To make them run kvkit tune --device host;"),
    ):
        told = run(*arguments)
        assert told.exit_code == 1
        assert words in told.stderr
