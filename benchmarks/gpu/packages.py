"""The packages that the steps need: which a machine lacks, and how they are carried there.

python -m benchmarks.gpu.packages lays wheels of what a GPU machine may lack into .gpu-packages/, for its
version of Python, in the versions that this environment has.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".gpu-packages"
"""What is carried: wheels, and a Triton cache."""
TRITON_CACHE = FOLDER / "triton-cache"
SITE = FOLDER / "site"
"""Where the wheels are unpacked."""
PYTHON = "3.12"
"""Of the machine that packages are carried to."""
GLIBC = range(39, 4, -1)
"""Minor versions of the C library that it can have wheels for, the newest first."""
TOOLS = ("packaging", "pytest", "pytest-benchmark", "hypothesis")
"""What tests and benchmarks need beside the core dependencies."""
OWN = ("torch", "numpy", "numba", "triton", "transformers")
"""What a GPU machine must have of its own: too large, or built for its driver."""


def needed() -> list[str]:
    """Requirements: the core dependencies of pyproject.toml, `TOOLS` and `OWN`."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [*core, *TOOLS, *OWN]


def closure(requirements: Iterable[str], without: Collection[str] = ()) -> dict[str, str | None]:
    """Versions of the packages that requirements bring on this machine, by name; None if one is missing.

    Args:
        without: names that are left out, with what only they bring.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions: dict[str, str | None] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in versions or name in without or not wanted:
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
        else:
            versions[name] = found.version
            waiting += map(Requirement, found.requires or ())
    return versions


def missing() -> list[str]:
    """Names of the packages that the steps need and this machine lacks."""
    try:
        return sorted(name for name, version in closure(needed()).items() if version is None)
    except ModuleNotFoundError as error:  # without `packaging` nothing more is known
        return [str(error.name).partition(".")[0]]


def carry(folder: Path) -> None:
    """Put wheels of what is needed but for `OWN` into a folder, for `PYTHON` on Linux, x86-64.

    Raises:
        SystemExit: this environment lacks one itself, or no wheel is to be had; says which.
    """
    versions = closure(needed(), OWN)
    if lacking := [name for name, version in versions.items() if version is None]:
        sys.exit(f"missing here: {', '.join(lacking)}; run this with the environment of `make setup`")
    download(versions, folder)


def download(versions: Mapping[str, str | None], folder: Path) -> None:
    """Put wheels of packages, by name and version, into a folder, for `PYTHON` on Linux, x86-64.

    Raises:
        SystemExit: no wheel is to be had; pip says of which.
    """
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", *platforms, f"--dest={folder}"]
    status = subprocess.run([*command, *(f"{name}=={v}" for name, v in versions.items())], check=False)
    if status.returncode:
        sys.exit(status.returncode)


def fits_here() -> bool:
    """Whether what is carried is there, and for this version of Python."""
    return FOLDER.is_dir() and f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON


def unpack(folder: Path, site: Path) -> None:
    """Unpack the wheels of a folder into another one, unless that is there; all of them or none."""
    if not site.exists():
        draft = site.with_name(f".{site.name}.{os.getpid()}")
        draft.mkdir()
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(draft)
        draft.rename(site)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    carry(FOLDER)
