"""Tuning measures with the CPU's clock and roofline, and reads compilers' reports."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from kernel_fixtures import SPACE, scale_problem, tiled

from kvkit.environment import host_name
from kvkit.kernels.tuning.cases import Case, Problem, Work
from kvkit.kernels.tuning.compiling import CompileError, compile_pool, survey
from kvkit.kernels.tuning.configs import HostLaunch, KernelConfig, ProblemBucket, Runnable, host_config
from kvkit.kernels.tuning.devices import compile_space, host_timer, tools_here
from kvkit.kernels.tuning.search import Roofline, Tools, tune

FEW, MANY, REFUSED = (host_config(times=times) for times in (2000, 1, 0))


def add(x: torch.Tensor, y: torch.Tensor, times: int) -> None:
    """y = x + 1, as often as is said."""
    if not times:
        raise ValueError("times=0: want more")
    for _ in range(times):
        torch.add(x, 1, out=y)


def case(device: torch.device, filled: bool, calls: list[KernelConfig] | None = None) -> Case:
    x, y = torch.arange(1 << 10, dtype=torch.float32), torch.empty(1 << 10)

    def launches(config: KernelConfig | None) -> tuple[HostLaunch, ...]:
        if calls is not None and config is not None:
            calls.append(config)
        return (HostLaunch(add, {"x": x, "y": y}, config or FEW),)

    return Case(launches, lambda: y.fill_(torch.nan), lambda: "" if torch.equal(y, x + 1) else "y differs")


PROBLEM = Problem(
    name="add",
    bucket=ProblemBucket("add", "float32", (1 << 10,)),
    kernel=add,
    space=(FEW, REFUSED, MANY),
    make=case,
    work=lambda config: Work(1),
    host=True,
)


def test_the_host_is_tuned(tmp_path: Path) -> None:
    """What does a two-thousandth of the work wins anywhere; what raises costs its own trial alone."""
    with tools_here(host=True) as tools:
        (step,) = tune([PROBLEM], tmp_path, tools)
    assert step.tuned is not None
    assert step.tuned.config == MANY
    assert step.trials[1].outcome == "does not run: ValueError: times=0: want more"
    assert tools.name == host_name()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_configuration_is_made_once() -> None:
    calls: list[KernelConfig] = []
    measure = host_timer()(case(torch.device("cpu"), True, calls))
    assert all(measure(config) > 0 for config in (FEW, MANY, FEW, MANY))
    assert calls == [FEW, MANY]
    with pytest.raises(CompileError, match="times=0: want more"):
        measure(REFUSED)


STAGES = tuple(KernelConfig(SPACE[0].tiles, stages=stages) for stages in (2, 3))
WARPS = KernelConfig(SPACE[0].tiles, warps=8)
REFUSED_BY_TRITON = tiled(1000)


def looked_at() -> tuple[Problem, ...]:
    return (scale_problem(space=(*STAGES, WARPS, SPACE[1], REFUSED_BY_TRITON)),)


def test_the_compilers_word() -> None:
    """A kernel without a loop has no stages: equal code. What Triton refuses says so."""
    with compile_pool(1) as pool:
        look = partial(compile_space, pool, looked_at, "sm_90", looked_at()[0])
        found, none = look(lambda: False), look(lambda: True)
    two, three = (found[config] for config in STAGES)
    assert two == three
    assert two.binary
    assert two.numbers["registers"] > 0
    assert len({found[config].binary for config in (STAGES[0], WARPS)}) == 2
    assert "power of 2" in found[REFUSED_BY_TRITON].rejection
    assert found[REFUSED_BY_TRITON].binary == ""
    assert not none


def endless() -> tuple[Problem, ...]:
    """The compiler is never done with the last of its configurations; it says when it is there."""
    problem = looked_at()[0]

    def make(device: torch.device, filled: bool) -> Case:
        made = problem.make(device, filled)

        def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
            if config == WARPS:
                there = Path(os.environ["KVKIT_TEST_ENDLESS"])
                there.with_suffix(".part").write_text(str(os.getpid()))
                there.with_suffix(".part").rename(there)  # whoever sees it can read it
                signal.pause()
            return made.launches(config)

        return replace(made, launches=launches)

    return (replace(problem, space=(*STAGES, WARPS), make=make),)


def test_time_and_a_pool_end_amid_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is told, the rest is not waited for; and no process is left."""
    there, told = tmp_path / "process", list[KernelConfig]()
    monkeypatch.setenv("KVKIT_TEST_ENDLESS", str(there))
    (problem,) = endless()
    jobs = [(problem.name, config, "sm_90") for config in problem.space]
    with compile_pool(1) as pool:
        for report in survey(pool, endless, jobs, late=lambda: len(told) == 2 and there.exists()):
            told.append(report.config)
        process = psutil.Process(int(there.read_text()))
    assert told == list(STAGES)
    assert not process.is_running()


def test_a_gpu_has_its_own_default(tmp_path: Path) -> None:
    amd = replace(scale_problem(), space=SPACE[:3], defaults={"gfx942": SPACE[2]})
    cpu, peak = torch.device("cpu"), Roofline(1e30, 1e30)
    tools = Tools(
        "MI300",
        cpu,
        lambda problem, late: {},
        lambda case: lambda config: 1.0,
        peak,
        lambda: 0.0,
        "gfx942",
    )
    (step,) = tune([amd], tmp_path, tools)
    assert [trial.config for trial in step.trials] == [SPACE[2], SPACE[0], SPACE[1]]
