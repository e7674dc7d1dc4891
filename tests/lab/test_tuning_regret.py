"""Guesses for problems that were never tuned are judged by the recorded times of what they guess."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from typer.testing import CliRunner

from kvkit import cli
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.source import source_digest
from kvkit.kernels.tuning.tables import Build, Tuned, TunedKey, ranked
from kvkit.lab.tuning.recordings import Recording
from kvkit.lab.tuning.regret import (
    RULES,
    Guess,
    equal_form,
    guesses,
    identified,
    nearest_form,
    nearest_gain,
    no_guess,
    table_of,
)

SMALL, MIDDLE, LARGE = (KernelConfig((("TILE", size),)) for size in (32, 64, 128))


def recorded(
    form: str, size: int, times: Mapping[KernelConfig, float], device: str = "H100", source: str = "5ce"
) -> Recording:
    bucket = ProblemBucket("attend", form, (size,))
    samples = {config: (us,) for config, us in times.items()}
    return Recording(device, f"{form} {size}", bucket, source, samples)


PAGED = "bfloat16 PAGE=16 GROUP=4 CAPPED=False"
SHORT = recorded(PAGED, 1024, {MIDDLE: 4.0, SMALL: 2.0, LARGE: 8.0})
LONG = recorded(PAGED, 8192, {MIDDLE: 4.0, SMALL: 5.0, LARGE: 2.0})
ONE_PAGE = recorded("bfloat16 PAGE=0 GROUP=4 CAPPED=False", 1024, {MIDDLE: 3.0, SMALL: 4.0, LARGE: 2.0})
ELSEWHERE = recorded(PAGED, 1024, {MIDDLE: 4.0, LARGE: 3.0, SMALL: 6.0}, "H200")
HERE = Build("5ce", "")


def made(rule: Any, problem: Recording, *known: Recording) -> Guess:
    (guess,) = guesses(rule, [problem], known)
    return guess


def test_the_problem_itself_is_left_out() -> None:
    for rule in RULES.values():
        assert made(rule, SHORT, SHORT) == Guess(SHORT, MIDDLE, 1.0), "the default"


def test_equal_forms_are_guessed_from() -> None:
    for rule in (equal_form, ranked, nearest_form, nearest_gain):
        assert made(rule, SHORT, SHORT, LONG) == Guess(SHORT, LARGE, 3.0)
        assert made(rule, LONG, SHORT, LONG) == Guess(LONG, SMALL, 1.5)
    assert made(no_guess, LONG, SHORT) == Guess(LONG, MIDDLE, 1.0)


def test_another_form_is_guessed_from_by_its_distance() -> None:
    assert made(equal_form, SHORT, ONE_PAGE).config == MIDDLE
    assert made(nearest_form, SHORT, ONE_PAGE).config == LARGE
    far = recorded("bfloat16 PAGE=16 GROUP=4 CAPPED=True", 1024, {MIDDLE: 4.0, SMALL: 2.0})
    near = recorded("bfloat16 PAGE=16 GROUP=8 CAPPED=False", 1024, {MIDDLE: 4.0, LARGE: 2.0})
    assert made(nearest_form, SHORT, far, near).config == LARGE
    assert made(nearest_form, SHORT, far).config == SMALL
    float32 = recorded("float32 PAGE=16 GROUP=4 CAPPED=False", 1024, {MIDDLE: 4.0, SMALL: 2.0})
    assert made(nearest_form, SHORT, float32, near).config == LARGE


@pytest.mark.parametrize("rule", [equal_form, ranked, nearest_form, nearest_gain])
def test_other_kernels_are_not_guessed_from(rule: Any) -> None:
    assert made(rule, SHORT, recorded(PAGED, 8192, {MIDDLE: 4.0, LARGE: 2.0}, source="0")).config == MIDDLE
    other = Recording("H100", "x", ProblemBucket("weigh", PAGED, (8192,)), "5ce", LONG.samples)
    assert made(rule, SHORT, other).config == MIDDLE


def test_a_default_that_stayed_proves_little() -> None:
    stayed = recorded(PAGED, 1024, {MIDDLE: 1.0, SMALL: 2.0}, "H200")
    hardly = recorded(PAGED, 1024, {MIDDLE: 1.0, SMALL: 0.98}, "H200")
    assert made(nearest_form, SHORT, stayed, LONG).config == MIDDLE
    for known in (stayed, hardly):
        assert made(nearest_gain, SHORT, known, LONG).config == LARGE


def test_another_device_has_the_same_problem() -> None:
    assert made(equal_form, SHORT, SHORT, ELSEWHERE) == Guess(SHORT, LARGE, 3.0)


def test_a_guess_without_a_time_has_no_regret() -> None:
    """What was not recorded, but is in kvkit's space, would be run; what is in neither would not."""
    problem = next(one for one in every_problem() if one.bucket.op == "attend")
    default, other = problem.space[:2]
    one = Recording("H100", problem.name, problem.bucket, "5ce", {default: (1.0,)})
    for config, guess in ((other, Guess(one, other, None)), (SMALL, Guess(one, default, 0.0))):
        known = Recording("H200", problem.name, problem.bucket, "5ce", {default: (1.0,), config: (0.5,)})
        assert made(equal_form, one, known) == guess


def test_the_table_is_what_tuning_would_keep() -> None:
    assert table_of([SHORT, LONG]) == {
        TunedKey(SHORT.bucket or ProblemBucket("", "", ()), HERE): Tuned(SMALL, 2e6, 4e6),
        TunedKey(LONG.bucket or ProblemBucket("", "", ()), HERE): Tuned(LARGE, 2e6, 4e6),
    }


def test_problems_of_kvkit_are_known_by_name() -> None:
    problem = every_problem()[0]
    named = Recording("H100", problem.name, None, "", {SMALL: (1.0,)})
    stranger = Recording("H100", "stranger", None, "", {SMALL: (1.0,)})
    found = identified([named, stranger, SHORT])
    assert [one.bucket for one in found] == [problem.bucket, SHORT.bucket]
    assert found[0].source == source_digest(problem.kernel)


def run(*files: Path) -> Any:
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    return CliRunner().invoke(cli.app, ["tune", "regret", *map(str, files)], env=environment)


def document(path: Path, gpu: str, *recordings: Recording) -> Path:
    entries = [
        {
            "step": "tune",
            "what": one.problem,
            **(one.bucket._asdict() if one.bucket else {}),
            "source": one.source,
            "trials": [{"config": str(config), "us": us} for config, (us,) in one.samples.items()],
        }
        for one in recordings
    ]
    path.write_text(json.dumps({"machine": {"gpu": gpu}, "results": entries}))
    return path


def test_the_command(tmp_path: Path) -> None:
    one = document(tmp_path / "1.json", "H100", SHORT, LONG)
    told = run(one, document(tmp_path / "2.json", "H200", ELSEWHERE))
    assert told.exit_code == 0, told.output
    assert max(map(len, told.stdout.splitlines())) <= 80
    rows = [line.replace("│", " ").split() for line in told.stdout.splitlines() if line.startswith("│")]
    assert rows[0] == ["default", "nothing", "100.0%", "100.0%", "0", "0", "0"]
    assert rows[1] == ["equal", "form", "this", "device", "225.0%", "100.0%", "0", "2", "0"]
    assert rows[2] == ["equal", "form", "others", "150.0%", "100.0%", "1", "1", "0"]
    alone = run(one)
    assert "others" not in alone.stdout
    nothing = run(document(tmp_path / "3.json", "H200", Recording("", "x", None, "", {SMALL: (1.0,)})))
    assert nothing.exit_code == 1
    assert "none of these problems is kvkit's" in nothing.stderr


def test_the_recorded_gpus() -> None:
    told = run(*sorted((ROOT / "benchmarks/results").glob("gpu-*.json")))
    assert told.exit_code == 0, told.output
    for name in RULES:
        assert f"│ {name} " in told.stdout
