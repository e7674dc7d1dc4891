"""Strategies replayed over recorded trials: what they find, and the files that tell of it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_fixtures import scale_problem, tiled
from repository import ROOT
from typer.testing import CliRunner

from kvkit import cli
from kvkit.kernels.tuning import trials
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config
from kvkit.kernels.tuning.search import NO_ROOFLINE, SearchStep, search
from kvkit.kernels.tuning.strategies import nearest, strategy_named
from kvkit.lab.tuning import replay_report
from kvkit.lab.tuning.recordings import Recording, RecordingError, read_recordings
from kvkit.lab.tuning.replay import replay, replay_all

DEFAULT, SMALL, LARGE = (host_config(rows=rows) for rows in (16, 4, 64))
RECORDING = Recording(
    "CPU",
    "copy",
    ProblemBucket("copy", "float32", (64,)),
    "5ce",
    {DEFAULT: (3.0, 3.0, 3.0), SMALL: (4.0, 1.0, 2.0, 2.5), LARGE: (2.0, 2.5, 8.0, 8.0)},
)
"""Medians of 3, 2.25 and 5.25 seconds; by the first three runs, LARGE takes 2.5 and SMALL 2."""


class Script:
    """A strategy that asks for what is written down."""

    def __init__(self, order: Sequence[KernelConfig], samples: int) -> None:
        self.order, self.samples, self.told = list(order), samples, list[tuple[KernelConfig, float | None]]()

    def ask(self) -> KernelConfig | None:
        return self.order.pop(0) if self.order else None

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        self.told.append((config, seconds))


@pytest.mark.parametrize("config", [DEFAULT, tiled(16, 1, 8), KernelConfig((), 4, 3), KernelConfig((), 0, 0)])
def test_a_configuration_is_parsed_from_its_text(config: KernelConfig) -> None:
    assert KernelConfig.parse(str(config)) == config


@pytest.mark.parametrize("text", ["rows", "rows=x", "rows=1=2", "a = 1"])
def test_other_texts_are_no_configurations(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        KernelConfig.parse(text)


def test_each_answer_is_the_next_recorded_run() -> None:
    """And after the last the first. What was drawn chooses finalists, all that is known the best of them."""
    script = Script([LARGE, SMALL, SMALL, LARGE, LARGE, LARGE], 1)
    found = replay(RECORDING, "script", lambda space: script, 0)
    assert script.told == [
        (DEFAULT, 3.0),
        (LARGE, 2.0),
        (SMALL, 4.0),
        (SMALL, 2.5),
        (LARGE, 2.25),
        (LARGE, 2.5),
        (LARGE, 5.25),
    ]
    assert [trial.runs for trial in found.trials] == [1, 2, 3, 4, 5, 6, 7]
    assert [trial.seconds for trial in found.trials] == [3, 5, 9, 10, 12.5, 20.5, 28.5]
    assert [trial.best for trial in found.trials] == [*[DEFAULT] * 3, *[SMALL] * 4]
    assert found.trials[-1].regret == 0
    assert found.trials[0].regret == pytest.approx(3 / 2.25 - 1)
    again = Script([SMALL] * 4, 1)
    replay(RECORDING, "script", lambda space: again, 0)
    assert again.told[-1] == (SMALL, 2.25)
    round_again = Script([SMALL, SMALL], 3)
    replay(RECORDING, "script", lambda space: round_again, 0)
    assert round_again.told[1:] == [(SMALL, 2.0), (SMALL, (2.0 + 2.5) / 2)]


def test_regrets_of_budgets() -> None:
    found = replay(RECORDING, "nearest", nearest, 0)
    assert [(trial.config, trial.runs, trial.seconds) for trial in found.trials] == [
        (DEFAULT, 3, 9),
        (SMALL, 6, 16),
        (LARGE, 9, 28.5),
    ]
    third = pytest.approx(3 / 2.25 - 1)
    assert [found.after_runs(runs) for runs in (0, 3, 5, 6, 99)] == [third, third, third, 0, 0]
    assert [found.after_seconds(seconds) for seconds in (0.1, 15.9, 16, 1e9)] == [third, third, 0, 0]
    assert [found.until(regret).runs for regret in (0.05, 0.5)] == [6, 3]
    short = replay(RECORDING, "script", lambda space: Script([LARGE], 3), 0)
    assert short.until(0.05) == short.trials[-1], "never"
    misled = replay(RECORDING, "script", lambda space: Script([SMALL, LARGE, LARGE], 1), 0)
    assert [trial.best for trial in misled.trials] == [DEFAULT] * 4, "by its first run, SMALL takes 4"


def written(folder: Path) -> Path:
    """Write what `kvkit tune` writes of a search with made-up times."""
    problem = scale_problem()
    times = {config: 1e-6 * (5 - i) for i, config in enumerate(problem.space)}
    tuned, found = search(
        problem, problem.make(torch.device("cpu"), True), times.__getitem__, {}, NO_ROOFLINE
    )
    path = folder / "h200.trials.jsonl"
    trials.append(path, trials.lines(SearchStep(problem, "tuned", tuned, found), "NVIDIA H200", NO_ROOFLINE))
    return path


def test_lines_of_the_tuner_are_read(tmp_path: Path) -> None:
    (one,) = read_recordings(written(tmp_path))
    problem = scale_problem()
    assert (one.device, one.problem, one.bucket) == ("NVIDIA H200", problem.name, problem.bucket)
    assert one.space == problem.space
    assert one.best == problem.space[-1]
    assert [one.regret(config) for config in one.space] == pytest.approx([4, 3, 2, 1, 0])
    line = written(tmp_path / "one").read_text().splitlines()[0]
    (tmp_path / "line").write_text(line)
    assert [one.space for one in read_recordings(tmp_path / "line")] == [problem.space[:1]]


def document(**entry: Any) -> dict[str, Any]:
    trials = [{"config": "rows=16", "us": 3.0}, {"config": "rows=4", "us": 2.0, "samples_us": [2.0, 2.5]}]
    about = {"step": "tune", "what": "copy", "default_us": 3.0, "trials": trials}
    machine = {"gpu": None, "cpu": "Xeon", "cores": 2}
    return {"machine": machine, "results": [{"step": "roofs"}, about | entry]}


def test_a_document_of_results_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document(), indent=1))
    (one,) = read_recordings(path)
    assert one.device == "Xeon 2 cores"
    assert one.bucket is None
    samples = {DEFAULT: (3e-6,), SMALL: (2e-6, 2.5e-6)}
    assert {config: pytest.approx(times) for config, times in samples.items()} == one.samples
    path.write_text(json.dumps(document(op="copy", form="x", sizes=[1], source="5ce")))
    (one,) = read_recordings(path)
    assert (one.bucket, one.source) == (ProblemBucket("copy", "x", (1,)), "5ce")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no trials that ran"),
        (json.dumps(document(default_us=None)), "has no trials that ran"),
        (json.dumps(document(trials=[])), "has no trials that ran"),
        ('{"results": [], "machine": {"gpu": "H200"}}', "has no trials that ran"),
        ('{"results": []}', "no trials of kvkit tune: KeyError: 'machine'"),
        ('{"x": 1}\n{"x": 2}', "no trials of kvkit tune: KeyError: 'default'"),
        ("[1]", "no trials of kvkit tune: TypeError"),
        (json.dumps(document(trials=[{"config": "rows", "us": 3.0}])), "no trials of kvkit tune: ValueError"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RecordingError, match=words) as told:
        read_recordings(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"No such file.*nowhere"):
        read_recordings(tmp_path / "nowhere")


def run(*arguments: object, columns: int = 80) -> Any:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(cli.app, ["tune", *map(str, arguments)], env=environment)


def test_the_command_compares_and_writes(tmp_path: Path) -> None:
    path = written(tmp_path)
    files = [tmp_path / name for name in ("x.csv", "x.svg", "x.json")]
    options = (part for pair in zip(("--csv", "--plot", "--json"), files, strict=True) for part in pair)
    told = run("replay", path, *options, "--seeds", 2)
    assert told.exit_code == 0, told.output
    assert "NVIDIA H200: 1 problems, 5 configurations" in told.stdout
    for name in ("nearest", "random", "halving", "tpe"):
        assert f"│ {name} " in told.stdout
    assert max(map(len, told.stdout.split("written:")[0].splitlines())) <= 80
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(replay_report.COLUMNS)
    of_random = [row for row in rows if (row["strategy"], row["seed"]) == ("random", "1")]
    assert [row["trial"] for row in of_random] == ["1", "2", "3", "4", "5"]
    assert of_random[0]["config"] == str(scale_problem().space[0])
    assert float(of_random[-1]["regret"]) == 0
    assert "<svg" in files[1].read_text()
    again = run("replay", path, "--csv", tmp_path / "y.csv", "--seeds", 2)
    assert again.exit_code == 0
    assert (tmp_path / "y.csv").read_text() == files[0].read_text(), "deterministic"


def test_pytest_benchmark_reads_it(tmp_path: Path) -> None:
    chosen = {name: strategy_named(name) for name in ("nearest", "random")}
    replays = replay_all([RECORDING], chosen, 3)
    replay_report.write_json(tmp_path / "0001_replay.json", replays)
    command = (
        "-m",
        "pytest_benchmark",
        "compare",
        tmp_path / "0001_replay.json",
        "--columns",
        "min,mean,rounds",
    )
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "nearest[copy]" in done.stdout
    found = {one["param"]: one for one in replay_report.as_benchmarks(replays)["benchmarks"]}
    assert found["nearest"]["stats"]["data"] == [16, 16, 16]
    assert found["nearest"]["stats"]["stddev"] == 0
    assert found["random"]["stats"]["rounds"] == 3
    assert found["nearest"]["extra_info"]["regret_after_runs"][12] == [0, 0, 0]


def test_wrong_arguments(tmp_path: Path) -> None:
    path = written(tmp_path)
    for arguments, words in (
        (("replay", path, "--strategies", "nearest,best"), "--strategies 'best': want one of nearest"),
        (("replay", tmp_path / "none"), "No such file"),
        (("replay", path, "--csv", tmp_path / "none" / "x.csv"), "there is no folder"),
        (("replay", path, "--plot", tmp_path / "x.doc", "--strategies", "nearest"), "doc"),
    ):
        told = run(*arguments)
        assert told.exit_code == 1, arguments
        assert words in told.stderr
    assert run("replay").exit_code == 2, "no file"
