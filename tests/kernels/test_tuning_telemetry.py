"""Trials tell the clock, power and temperature of the device, and the commit of the sources."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_fixtures import scale_problem
from typer.testing import CliRunner

from kvkit import cli
from kvkit.kernels.tuning import devices, telemetry, trials
from kvkit.kernels.tuning.problems import host_problems
from kvkit.kernels.tuning.search import NO_ROOFLINE, SearchStep, Tools, Trial
from kvkit.kernels.tuning.telemetry import UNKNOWN, DeviceState, cpu_state, source_commit, state_reader

UUID = "GPU-1b2c"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of NVIDIA with a UUID, which only torch knows of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    properties = {1: SimpleNamespace(uuid=UUID.removeprefix("GPU-"))}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setitem(sys.modules, "pynvml", None)


class NVMLError(Exception):
    """What NVML raises."""


def nvml(power_fails: bool = False, init_fails: bool = False) -> ModuleType:
    """Stand in for NVML; each reading is hotter than the last."""
    readings = iter(range(40, 99))

    def power(handle: str) -> int:
        if power_fails:
            raise NVMLError
        return {UUID: 612_345}[handle]

    def init() -> None:
        if init_fails:
            raise NVMLError

    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=init,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: {(UUID, 1): 1755}[handle, kind],
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda handle, kind: {(UUID, 0): next(readings)}[handle, kind],
    )
    return module


@pytest.mark.usefixtures("gpu")
def test_nvml_is_read_for_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    read = state_reader(host=False)
    assert [read("a"), read("a")] == [DeviceState(1755, 612.345, 40), DeviceState(1755, 612.345, 41)]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(power_fails=True))
    assert state_reader(host=False)("a") == DeviceState(1755, None, 40)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in for nvidia-smi, which counts its calls and prints the file `answer`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("broken", [False, True])
def test_nvidia_smi_is_asked_once_a_problem(smi: Path, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Without the package, and where NVML does not start."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(init_fails=True) if broken else None)
    (smi / "answer").write_text("1980, 699.12, 61\n")
    read = state_reader(host=False)
    assert [read(problem) for problem in "aabba"] == [DeviceState(1980, 699.12, 61)] * 5
    calls = (smi / "calls").read_text().splitlines()
    assert len(calls) == 3
    assert f"--id={UUID}" in calls[0]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("1980, [N/A], 61", DeviceState(1980, None, 61)),
        ("No devices were found", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_what_nvidia_smi_does_not_say_is_unknown(smi: Path, answer: str, state: DeviceState) -> None:
    (smi / "answer").write_text(answer)
    assert state_reader(host=False)("a") == state


@pytest.mark.usefixtures("gpu")
def test_no_nvidia_smi_and_other_gpus_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state_reader(host=False)("a") == UNKNOWN
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert state_reader(host=False)("a") == UNKNOWN
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert state_reader(host=False)("a") == UNKNOWN


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_cpu_is_read_from_sysfs(tmp_path: Path) -> None:
    assert cpu_state(tmp_path) == UNKNOWN
    for core, kilohertz in enumerate(("3000000\n", "2000000\n", "busy")):
        write(tmp_path / f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", kilohertz)
    for number, (name, millidegrees) in enumerate((("nvme", "90000"), ("k10temp", "55500"))):
        write(tmp_path / f"class/hwmon/hwmon{number}/name", f"{name}\n")
        write(tmp_path / f"class/hwmon/hwmon{number}/temp1_input", millidegrees)
    write(tmp_path / "class/hwmon/hwmon1/temp2_input", "61250\n")
    assert cpu_state(tmp_path) == DeviceState(2500, None, 61.25)
    assert isinstance(state_reader(host=True)("a"), DeviceState)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_of_a_checkout_alone(tmp_path: Path) -> None:
    assert source_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "telemetry.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    git(tmp_path, "add", "other.py")
    git(tmp_path, "commit", "-qm", "x")
    telemetry.source_commit.cache_clear()
    assert source_commit(tmp_path) is None, "another project's"
    git(tmp_path, "add", "telemetry.py")
    git(tmp_path, "commit", "-qm", "x")
    git(tmp_path, "tag", "v1")
    telemetry.source_commit.cache_clear()
    commit = source_commit(tmp_path)
    assert commit == git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "telemetry.py").write_text("2")
    telemetry.source_commit.cache_clear()
    assert source_commit(tmp_path) == f"{commit}-dirty"
    telemetry.source_commit.cache_clear()


def test_lines_have_the_state_and_older_lines_are_read(tmp_path: Path) -> None:
    problem = scale_problem()
    first, second = (Trial(config, 1.0, "slower", (1.0,)) for config in problem.space[:2])
    step = SearchStep(problem, "tuned", None, (first, second))
    states = {second.config: DeviceState(1980, 600.5, 55)}
    found = list(trials.lines(step, "H200", NO_ROOFLINE, states))
    names = *DeviceState._fields, "commit"
    assert [[line[name] for name in names] for line in found] == [
        [None, None, None, source_commit()],
        [1980, 600.5, 55, source_commit()],
    ]
    path = tmp_path / "trials.jsonl"
    older = {name: value for name, value in found[0].items() if name not in names}
    trials.append(path, [older, found[1]])
    assert trials.read(path) == json.loads(json.dumps([older, found[1]]))
    trials.write_csv(tmp_path / "x.csv", trials.read(path))
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["power_w"] for row in rows] == ["", "600.5"]


def test_the_command_keeps_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each trial's first runs, also in the lines that are written when the search ends."""
    states = (DeviceState(float(number)) for number in range(1, 99))
    monkeypatch.setattr(telemetry, "state_reader", lambda host: lambda problem: next(states))
    tools = Tools(
        "CPU", torch.device("cpu"), lambda *_: {}, lambda case: lambda config: 1.0, NO_ROOFLINE, float
    )
    monkeypatch.setattr(devices, "tools_here", lambda *_: nullcontext(tools))
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    problem = host_problems()[0]
    monkeypatch.setattr("kvkit.kernels.tuning.problems.host_problems", lambda: (problem,))
    told = CliRunner().invoke(cli.app, ["tune", "--device", "host"])
    assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in (tmp_path / "cpu.trials.jsonl").read_text().splitlines()]
    count = len(problem.space)
    assert [line["clock_mhz"] for line in lines[:count]] == list(range(1, count + 1))
    assert {line["config"]: line["clock_mhz"] for line in lines[count:]} == {
        line["config"]: line["clock_mhz"] for line in lines[:count]
    }
