"""This machine: what results name it by, its versions, caches of its user, its addresses, its CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DISTRIBUTION = "kvkit-llm"
"""The name that pip knows kvkit by: `kvkit` on PyPI is another project."""
PACKAGES = ("torch", "triton", "numba", "numpy", "xxhash", "fsspec", "zarr", "transformers")


def version_of(package: str) -> str | None:
    """The installed version of a package, None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Machine and versions, as results carry them."""
    packages = {"kvkit": DISTRIBUTION} | {package: package for package in PACKAGES}
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "gpu": gpu_name(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": f"{platform.system()} {platform.release().split('-')[0]}",
        },
        "versions": {"python": platform.python_version()}
        | {name: version for name, package in packages.items() if (version := version_of(package))},
    }


def slug() -> str:
    """A file name for this kind of machine: its GPU, or its CPU and cores."""
    return slug_of(gpu_name() or host_name())


def slug_of(name: str) -> str:
    """A name as a file name: lower case, and hyphens for what is neither letter nor digit."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_name() -> str:
    """The processor's name."""
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def host_name() -> str:
    """What results on the CPU are named by: its name and cores."""
    return f"{cpu_name()} {os.cpu_count()} cores"


def driver_version() -> str:
    """The version of the GPU driver that is loaded, "" where the system does not say."""
    for driver in ("nvidia", "amdgpu"):
        try:
            return Path(f"/sys/module/{driver}/version").read_text().strip()
        except OSError:
            continue
    return ""


def gpu_name() -> str | None:
    """The first GPU's name, None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@functools.cache
def cuda_driver() -> ctypes.CDLL | None:
    """The library of NVIDIA's driver, for the calls that torch has no name for; None without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@contextmanager
def outside_captures() -> Iterator[None]:
    """While within, this thread may allocate and pin though another thread captures a CUDA graph.

    By default that would fail here, and spoil the capture there: cuThreadExchangeStreamCaptureMode in
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html.
    """
    driver, mode = cuda_driver(), ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # leaves the former mode in `mode`
    try:
        yield
    finally:
        if driver is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def cache_folder() -> Path:
    """Where this user's caches of kvkit are: kvkit below $XDG_CACHE_HOME or ~/.cache.

    Raises:
        FileNotFoundError: there is neither that nor a home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkit"
    except RuntimeError as error:  # a container's user may be in no table of users
        raise FileNotFoundError(f"there is no home ({error}); set HOME or XDG_CACHE_HOME") from error


def verdict_path(kind: str, name: str) -> Path:
    """Where what was measured of a model's weights is kept, for who wants to know whether they are fit.

    Args:
        kind: what for, such as "blend".
        name: what that one calls the weights.

    Raises:
        FileNotFoundError: as `cache_folder`.
    """
    return cache_folder() / kind / f"{name}.json"


def prepare_verdicts(kind: str) -> None:
    """Make the folder of verdicts of a kind, so that nothing is measured for minutes that cannot be kept.

    Raises:
        OSError: it cannot be written, or there is no home.
    """
    folder = cache_folder() / kind
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def keep_verdict(kind: str, names: Iterable[str], content: Mapping[str, Any]) -> list[Path]:
    """Write a verdict down under each name of the weights; returns where.

    Raises:
        OSError: it cannot be written, or there is no home.
    """
    paths = [verdict_path(kind, name) for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    return paths


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`: an address that says so, or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def printable(text: str) -> str:
    """`text` with what a terminal would obey, or show as nothing, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
