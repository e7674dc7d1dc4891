"""Configurations are compiled ahead for tuning on a GPU: nearest first, in little room, with figures."""

from __future__ import annotations

from pathlib import Path

import kernel_fixtures

from benchmarks.gpu.carried_space import carried, compile_space, fill, jobs_of


def test_every_configuration_is_carried_with_its_figures(tmp_path: Path) -> None:
    """Binaries and what Triton knows of them, without the compiler's other texts."""
    problems = kernel_fixtures.problems()
    count = fill(tmp_path, kernel_fixtures.problems, "sm_90", "another Triton's", 600)
    assert count == len(jobs_of(problems, "sm_90"))
    known = carried(tmp_path)
    for problem in problems:
        infos = compile_space(known, problem, lambda: False)
        assert set(infos) == set(problem.space)
        assert all(info.rejection or info.numbers["registers"] > 0 for info in infos.values())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".cubin"}


def test_without_room_or_time_nothing_is_compiled(tmp_path: Path) -> None:
    assert carried(tmp_path) == {}
    for seconds, limit in ((0, 1 << 30), (600, 0)):
        assert fill(tmp_path, kernel_fixtures.problems, "sm_90", "another Triton's", seconds, limit) == 0
    (problem, *_) = kernel_fixtures.problems()
    infos = compile_space(carried(tmp_path), problem, lambda: False)
    assert {info.rejection for info in infos.values()} == {"not carried"}


def test_the_nearest_of_each_problem_come_first() -> None:
    problems = kernel_fixtures.problems()
    jobs = jobs_of(problems, "sm_90")
    first = jobs[: len(problems)]
    assert [name for name, _, _ in first] == [problem.name for problem in problems]
    assert [config for _, config, _ in first] == [problem.space_on("sm_90")[0] for problem in problems]
