"""Several GPUs are tuned side by side: each process has its share, and no result or trial is lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kernel_fixtures import SPACE, scale_problem
from typer.testing import CliRunner

from kvkit import cli, environment
from kvkit.kernels.tuning import side_by_side
from kvkit.kernels.tuning.commands import StrategyChoice, TuneChoice, TuneLimits
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.side_by_side import options_of, tune_side_by_side
from kvkit.kernels.tuning.tables import Build, Tuned, TunedKey, read_table, write_table

GPU, FILE = "NVIDIA H100 PCIe", "nvidia-h100-pcie.json"
BUILD = Build("source", "triton 3.9.0", "driver")
CHILD = f"""
import os, sys, pathlib
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.tables import Build, Tuned, TunedKey, read_table, write_table
def key(op):
    return TunedKey(ProblemBucket(op, "", ()), Build{tuple(BUILD)})
folder = pathlib.Path(os.environ["KVKIT_TUNED"])
gpu, share = os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[sys.argv.index("--share") + 1]
path = folder / "{FILE}"
table = read_table(path, path.stem) if path.exists() else {{}}
table[key(share)] = table[key("both")] = Tuned(KernelConfig((("TILE", 1),)), float(gpu) + 1, 10.0)
write_table(path, "{GPU}", table)
(folder / (path.stem + ".trials.jsonl")).write_text(gpu + " " + " ".join(sys.argv[1:]) + chr(10))
sys.exit(int(gpu) if "--fail" in sys.argv else 0)
"""


def key(op: str) -> TunedKey:
    return TunedKey(ProblemBucket(op, "", ()), BUILD)


def result(us: float) -> Tuned:
    return Tuned(KernelConfig((("TILE", 1),)), us, 10.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results; processes are stand-ins that find what they are given."""
    monkeypatch.setattr(side_by_side, "COMMAND", (sys.executable, "-c", CHILD))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return tmp_path / "tuned"


def test_results_and_trials_of_all_are_kept(folder: Path) -> None:
    """Those known before, each process's own, and of equal keys the faster."""
    write_table(folder / FILE, GPU, {key("known"): result(3.0)})
    (folder / "nvidia-h100-pcie.trials.jsonl").write_text("earlier\n")
    assert tune_side_by_side(["2", "0"], ["--op", "attend"], folder) == 0
    table = read_table(folder / FILE, "nvidia-h100-pcie")
    times = {each.bucket.op: tuned.us for each, tuned in table.items()}
    assert times == {"known": 3.0, "0/2": 3.0, "1/2": 1.0, "both": 1.0}
    earlier, *trials = (folder / "nvidia-h100-pcie.trials.jsonl").read_text().splitlines()
    assert earlier == "earlier"
    assert sorted(trials) == [
        "0 --op attend --share 1/2",
        "2 --op attend --share 0/2",
    ]
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "nvidia-h100-pcie.trials.jsonl"]


def test_a_failure_is_reported_and_costs_no_results(folder: Path) -> None:
    assert tune_side_by_side(["0", "5", "7"], ["--fail"], folder) == 5
    assert {each.bucket.op for each in read_table(folder / FILE, "nvidia-h100-pcie")} == {
        "0/3",
        "1/3",
        "2/3",
        "both",
    }


def test_options_are_passed_on() -> None:
    choice = TuneChoice(op=["attend", "pack"], shape="heads=8", gpus=None)
    words = options_of(choice, TuneLimits(budget_s=30.0, force=True), StrategyChoice())
    assert words == ["--op", "attend", "--op", "pack", "--shape", "heads=8", "--budget-s", "30.0", "--force"]
    assert options_of(TuneChoice(), TuneLimits(), StrategyChoice()) == []


def test_shares_are_all_problems_each_once() -> None:
    problems = [scale_problem(space=SPACE) for _ in range(7)]
    shares = [TuneChoice(share=f"{index}/3").shared(problems) for index in range(3)]
    assert sorted(map(len, shares)) == [2, 2, 3]
    assert {id(problem) for share in shares for problem in share} == set(map(id, problems))
    for wrong in ("3/3", "0", "a/2", "1/"):
        with pytest.raises(SystemExit, match=f"--share {wrong}: want INDEX/COUNT"):
            TuneChoice(share=wrong).shared(problems)


@pytest.mark.parametrize("gpus", ["", "0,", "1,1", "0,1"])
def test_wrong_gpus_are_named(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_name", lambda: None)
    ran = CliRunner().invoke(cli.app, ["tune", "--gpus", gpus])
    assert ran.exit_code == 1
    assert f"--gpus {gpus}: " in ran.output + str(ran.exception)
