"""Problems that strategies are compared on are right, and what is recorded of them can be replayed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.research import tuning_problems, tuning_trials
from kvkit.kernels.tuning.search import SearchStep, Trial
from kvkit.kernels.tuning.tables import Tuned
from kvkit.lab.tuning.recordings import read_recordings

CPU = torch.device("cpu")
PROBLEMS = list(tuning_problems.problems())


@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[-1]], ids=lambda problem: problem.bucket.op)
def test_every_configuration_is_right(problem: tuning_problems.Problem) -> None:
    """For a side that no tile divides; nothing is right before it has run."""
    case = problem.make.func(37, CPU, True)  # type: ignore[attr-defined]
    assert len(problem.space) == len(set(problem.space)) > 90
    for config in problem.space:
        case.poison()
        assert case.fault()
        case.run(config)
        assert case.fault() == ""


def test_a_recording_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[0]
    ran = tuple(
        Trial(config, us, outcome, (us, 2 * us))
        for config, us, outcome in zip(problem.space, (20.12345, 1.5), ("slower", "best"), strict=False)
    )
    left = Trial(problem.space[2], None, "untried: the time was over")
    step = SearchStep(problem, "tuned", Tuned(problem.space[1], 1.5, 20.12345), (*ran, left))
    monkeypatch.setattr(tuning_trials, "entries", lambda: iter([tuning_trials.recorded(step)]))
    path = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["tuning_trials", "--json", str(path)])
    tuning_trials.main()
    assert json.loads(path.read_text())["command"] == "python -m benchmarks.research.tuning_trials"
    (one,) = read_recordings(path)
    assert (one.problem, one.bucket) == (problem.name, problem.bucket)
    assert one.samples == {
        problem.space[0]: pytest.approx((20.12e-6, 40.25e-6)),
        problem.space[1]: pytest.approx((1.5e-6, 3e-6)),
    }
