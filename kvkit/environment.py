"""The machine: its name in results, versions, cache folders, addresses and CUDA driver."""

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
"""kvkit's name on PyPI, where `kvkit` is another project."""
PACKAGES = ("torch", "triton", "numba", "numpy", "xxhash", "fsspec", "zarr", "transformers")


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Describe the machine and the versions, for results."""
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
    """Return a file name for this kind of machine: its GPU, or its CPU and number of cores."""
    return slug_of(gpu_name() or host_name())


def slug_of(name: str) -> str:
    """Convert a name to a file name: lower case, with hyphens for all but letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_name() -> str:
    """Return the processor's name."""
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def host_name() -> str:
    """Name this machine in CPU results: the processor and its number of cores."""
    return f"{cpu_name()} {os.cpu_count()} cores"


def driver_version() -> str:
    """Return the version of the loaded GPU driver, or "" if the system does not report one."""
    for driver in ("nvidia", "amdgpu"):
        try:
            return Path(f"/sys/module/{driver}/version").read_text().strip()
        except OSError:
            continue
    return ""


def gpu_name() -> str | None:
    """Return the first GPU's name, or None without a GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@functools.cache
def cuda_driver() -> ctypes.CDLL | None:
    """Load NVIDIA's driver library, for calls that torch does not expose; None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@contextmanager
def outside_captures() -> Iterator[None]:
    """Allow this thread to allocate and pin memory while another thread captures a CUDA graph.

    By default, this would fail here and invalidate the capture there: cuThreadExchangeStreamCaptureMode in
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html.
    """
    driver, mode = cuda_driver(), ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # stores the previous mode in `mode`
    try:
        yield
    finally:
        if driver is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def cache_folder() -> Path:
    """Return the folder of this user's kvkit caches: kvkit in $XDG_CACHE_HOME or ~/.cache.
    Raises FileNotFoundError if there is neither $XDG_CACHE_HOME nor a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkit"
    except RuntimeError as error:  # a container's user may have no passwd entry
        raise FileNotFoundError(f"there is no home ({error}); set HOME or XDG_CACHE_HOME") from error


def verdict_path(kind: str, name: str) -> Path:
    """Return the path of a verdict: the stored measurements of a model's weights. Raises as `cache_folder`.

    Args:
        kind: feature that was measured, such as "blend".
        name: the caller's name for the weights.
    """
    return cache_folder() / kind / f"{name}.json"


def prepare_verdicts(kind: str) -> None:
    """Create the folder for a kind of verdict, to fail before a long measurement and not after it.
    Raises OSError if the folder cannot be written, or there is no home folder."""
    folder = cache_folder() / kind
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def keep_verdict(kind: str, names: Iterable[str], content: Mapping[str, Any]) -> list[Path]:
    """Write a verdict under each of the weights' names; return the paths.
    Raises OSError if a file cannot be written, or there is no home folder."""
    paths = [verdict_path(kind, name) for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    return paths


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def printable(text: str) -> str:
    """Escape characters of `text` that a terminal would interpret or not show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
