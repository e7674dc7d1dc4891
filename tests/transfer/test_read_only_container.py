"""A process in a read-only container without a home folder caches KV all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

import kvkit.environment
from kvkit.blend import gate
from kvkit.blend.plan import BlendError, Selection
from kvkit.kernels.caches import temporary_cache
from kvkit.kernels.tuning.tables import load_table
from kvkit.settings import ConfigError
from kvkit.transfer import precision

STORE_AND_LOAD = """
import logging, sys
logging.basicConfig(format="%(message)s")
import numpy as np
from kvkit.config import load_config, open_cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace

layout = small_layout()
engine = Engine(layout, small_namespace(layout, 8))
tokens = np.arange(16, dtype=np.int32)
config = load_config(chunk_tokens=8, staging="1MiB", tiers={"memory": {"capacity": "1MiB"}})
with open_cache(config, layout, engine.namespace) as cache:
    table = engine.table(16)
    engine.compute(tokens, table)
    cache.store(tokens, engine.places(table))
    print("hit", cache.lookup(tokens).tokens)
"""
TRITON = """
import logging
logging.basicConfig(format="%(message)s")
from kvkit.kernels.caches import use_triton_cache
from triton.runtime.cache import get_cache_manager
use_triton_cache()
use_triton_cache()
print(get_cache_manager("AB").put(b"x", "compiled"))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of kvkit in whose folders not even root can cache: a file is where each cache would be."""
    house = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "kvkit", house / "kvkit", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [house / "kvkit", *(p for p in (house / "kvkit").rglob("*") if p.is_dir())]:
        (folder / "__pycache__").write_text("")
    return house


def run(
    script: str, house: Path, temporary: Path, *before: str, after: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process, whose home is no folder."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.run(
        [*before, sys.executable, "-c", script, *after],
        env=kept | {"PYTHONPATH": str(house), "HOME": "/dev/null", "TMPDIR": str(temporary)},
        cwd=house,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )


def test_kernels_are_kept_in_the_temporary_folder(package: Path, tmp_path: Path) -> None:
    done = run(STORE_AND_LOAD, package, tmp_path)
    folder = tmp_path / f"kvkit-{os.geteuid()}" / "numba"
    assert done.stdout == "hit 16\n"
    assert done.stderr.count("no folder for compiled kernels can be written") == 1
    assert f"they are kept in {folder}; to choose one, set NUMBA_CACHE_DIR" in done.stderr
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    assert kept
    assert run(STORE_AND_LOAD, package, tmp_path).stdout == "hit 16\n"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == kept, "compiled anew"


def test_nothing_is_kept_where_nothing_can_be_written(package: Path, tmp_path: Path) -> None:
    (tmp_path / f"kvkit-{os.geteuid()}").write_text("in the way")
    done = run(STORE_AND_LOAD, package, tmp_path)
    assert done.stdout == "hit 16\n"
    assert done.stderr.count("each process compiles them anew") == 1


@cache
def namespaces() -> tuple[str, ...] | None:
    """The command that gives a process mounts of its own; None: this system lets nobody have them."""
    for command in (("unshare", "-m"), ("unshare", "-Urm")):
        try:
            tried = subprocess.run([*command, "mount", "--bind", "/tmp", "/tmp"], capture_output=True)
        except OSError:
            return None
        if tried.returncode == 0:
            return command
    return None


@pytest.mark.nightly
def test_a_read_only_file_system(tmp_path: Path) -> None:
    """The package itself lies on one."""
    own = namespaces()
    if own is None:
        pytest.skip("no mounts of its own: wants root, or user namespaces; the tests above need neither")
    mounts = 'mount --rbind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && ! touch x && exec "$@"'
    done = run(STORE_AND_LOAD, ROOT, tmp_path, *own, "sh", "-c", mounts, str(ROOT))
    assert done.stdout == "hit 16\n"
    assert f"they are kept in {tmp_path}" in done.stderr


def test_triton_keeps_kernels_in_the_temporary_folder(package: Path, tmp_path: Path) -> None:
    done = run(TRITON, package, tmp_path)
    folder = tmp_path / f"kvkit-{os.geteuid()}" / "triton"
    assert Path(done.stdout.strip()).is_relative_to(folder)
    assert done.stderr.count("set TRITON_CACHE_DIR") == 1


def test_a_temporary_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is loaded from it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = temporary_cache("numba")
    assert own is not None
    assert own.parent.stat().st_mode & 0o777 == 0o700
    own.parent.chmod(0o722)
    assert temporary_cache("numba") is None
    own.parent.chmod(0o700)
    own.parent.rename(tmp_path / "elsewhere")
    (tmp_path / f"kvkit-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert temporary_cache("numba") is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor a row in the table of users: nothing is known, and what must be kept says so."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "KVKIT_TUNED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert load_table("nobody-s-gpu") == {}
    with pytest.raises(BlendError, match=r"not been measured with these weights .there is no home"):
        gate.check("weights", Selection(), "blend_unchecked")
    with pytest.raises(ConfigError, match=r"not been measured with these weights .there is no home"):
        precision.check("weights", "fp8", "unchecked_precision = true")
    with pytest.raises(OSError, match="set HOME or XDG_CACHE_HOME"):
        kvkit.environment.keep_verdict("blend", ["weights"], {})


@pytest.mark.nightly
def test_doctor_says_that_nothing_can_be_written(package: Path, tmp_path: Path) -> None:
    done = run("from kvkit.cli import main; main()", package, tmp_path, after=("doctor",))
    assert "kernels on the CPU: ok" in done.stdout
    assert "no folder for compiled kernels can be written" in done.stdout
    assert "set NUMBA_CACHE_DIR" in done.stdout
