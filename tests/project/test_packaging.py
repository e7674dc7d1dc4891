"""Wheel and source archive contain the tree's files, and shadow no other package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

from kvkit.environment import DISTRIBUTION


def tracked(*folders: str) -> set[str]:
    """Python and data files of the library, as they are called once installed."""
    names = set()
    for folder, installed in (
        (f, {"kernels": "kvkit/kernels", "adapters": "kvkit/adapters"}.get(f, f)) for f in folders
    ):
        for file in (ROOT / folder).rglob("*"):
            inside = file.relative_to(ROOT / folder)
            linked = folder == "kvkit" and inside.parts[0] in ("kernels", "adapters")
            if file.is_file() and not linked and file.suffix in (".py", ".json", ".typed"):
                names.add(f"{installed}/{inside.as_posix()}")
    return names


TABLE = "kernels/tuning/tuned/some-gpu.json"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist of a copy of the tree that has a table of tuned configurations more."""
    out, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source") / "kvkit"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("kvkit", "kernels", "adapters"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    (source / TABLE).parent.mkdir(exist_ok=True)
    (source / TABLE).write_text("{}")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_holds_the_tree(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == tracked("kvkit", "kernels", "adapters") | {f"kvkit/{TABLE}"}


def test_the_sdist_holds_the_tree_and_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = tmp_path.iterdir()
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(tmp_path / "again"),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = (tmp_path / "again").glob("*.whl")
    (wheel,) = built.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_the_installed_wheel_works_away_from_the_tree(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    script = (
        "import kvkit.cache, kvkit.kernels.pages.api;"
        "import kvkit.adapters.huggingface.smollm2 as s; print(s.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(target), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(target))


@pytest.mark.parametrize("folder", [".", "kvkit"])
def test_hugging_face_kernels_imports_beside_kvkit(folder: str) -> None:
    script = (
        "import kvkit.kernels.pages.api, kernels, transformers;"
        "assert 'site-packages' in kernels.__file__, kernels.__file__; print('beside')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / folder, capture_output=True, text=True, check=False
    )
    assert done.stdout == "beside\n", done.stderr


@pytest.mark.parametrize(
    ("modules", "packages"),
    [
        ("kvkit, kvkit.cache, kvkit.config", {"jax", "triton", "vllm", "transformers", "zarr"}),
        ("kvkit.cli, kvkit.tiers.objects, kvkit.lab.watch.top", {"torch", "numba"}),  # they take a second
    ],
)
def test_what_is_imported_leaves_alone(modules: str, packages: set[str]) -> None:
    script = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "kvkit" in done.stdout.split()
    assert not packages & set(done.stdout.split())


def test_what_contributors_install_is_pinned() -> None:
    """`make setup` installs the pins alone, for asking what else is wanted takes pip long."""
    lines = "".join(path.read_text() for path in (ROOT / "constraints").glob("*.txt")).splitlines()
    pinned = dict(line.split("#")[0].strip().lower().split("==") for line in lines if "==" in line)
    pins = {canonicalize_name(name): version for name, version in pinned.items()}
    asked, seen = {"dev", "paper"}, set[str]()
    while asked - seen:
        extra = min(asked - seen)
        seen.add(extra)
        for wanted in map(Requirement, requires(DISTRIBUTION) or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                name = canonicalize_name(wanted.name)
                if name == DISTRIBUTION:
                    asked |= wanted.extras
                else:
                    assert wanted.specifier.contains(pins[name]), wanted
