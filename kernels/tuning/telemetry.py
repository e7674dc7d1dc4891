"""State of the machine during a trial of tuning: the device's clock, power and temperature; the commit."""

from __future__ import annotations

import functools
import statistics
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

SMI_S = 5
"""Seconds that nvidia-smi and git may take."""


class DeviceState(NamedTuple):
    """State of a GPU or CPU; None for what the system does not report."""

    clock_mhz: float | None = None  # of a GPU's multiprocessors; of a CPU, the mean of its cores
    power_w: float | None = None
    temperature_c: float | None = None


UNKNOWN = DeviceState()
"""State of a device that reports nothing."""

ReadState = Callable[[str], DeviceState]
"""Returns the state of the device during the trials of a problem, by the problem's name."""


def state_reader(host: bool) -> ReadState:
    """Return a function that reads the state of the CPU, or of this process's GPU.

    An NVIDIA GPU is read by NVML for each trial where the package nvidia-ml-py is installed, else by
    nvidia-smi once for each problem, as a call takes tens of milliseconds.
    """
    if host:
        return lambda problem: cpu_state()
    if not torch.cuda.is_available() or torch.version.hip:
        return lambda problem: UNKNOWN
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no package, or an NVMLError: no library, no permission, a slice of a GPU
        return functools.lru_cache(1)(lambda problem: smi_state(uuid))
    return lambda problem: nvml_state(pynvml, handle)


def nvml_state(nvml: Any, handle: Any) -> DeviceState:
    """Return the state of a GPU by NVML.

    Args:
        nvml: module `pynvml`.
        handle: its handle of the GPU.
    """

    def read(function: Callable[..., int], *arguments: int) -> float | None:
        try:
            return float(function(handle, *arguments))
        except nvml.NVMLError:
            return None

    milliwatts = read(nvml.nvmlDeviceGetPowerUsage)
    return DeviceState(
        read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        None if milliwatts is None else milliwatts / 1e3,
        read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    )


def smi_state(uuid: str) -> DeviceState:
    """Return the state of the GPU of this UUID by nvidia-smi."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    text = _printed("nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits")
    cells = [_number(cell) for cell in (text or "").split(",")]
    return DeviceState(*cells) if len(cells) == len(DeviceState._fields) else UNKNOWN


def cpu_state(system: Path = Path("/sys")) -> DeviceState:
    """Return the mean frequency of the CPU's cores and the temperature of its hottest sensor.

    Args:
        system: where sysfs is mounted.
    """
    kilohertz = list(_numbers(system.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")))
    sensors = (
        path.parent.glob("temp*_input")
        for path in system.glob("class/hwmon/hwmon*/name")
        if path.read_text().strip() in ("coretemp", "k10temp", "zenpower", "cpu_thermal")
    )
    millidegrees = [number for paths in sensors for number in _numbers(paths)]
    return DeviceState(
        clock_mhz=statistics.mean(kilohertz) / 1e3 if kilohertz else None,
        temperature_c=max(millidegrees) / 1e3 if millidegrees else None,
    )


@functools.cache
def source_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the checkout that kvkit runs from, with "-dirty" if files differ from it.

    None for an installed package, also one that lies within another project's checkout.

    Args:
        folder: folder of this file.
    """
    in_git = _printed("git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name)
    if in_git is None:
        return None
    return _printed("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")


def _printed(*command: str) -> str | None:
    """Return what a command prints, None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _numbers(paths: Iterable[Path]) -> Iterable[float]:
    """Yield the numbers in files, without those that cannot be read: a sensor may be off."""
    for path in paths:
        try:
            yield float(path.read_text())
        except (OSError, ValueError):
            continue
