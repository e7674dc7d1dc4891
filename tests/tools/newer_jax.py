"""Run the tests of JAX arrays with another version of JAX, and compare results: `make test-jax`.

python tests/tools/newer_jax.py VERSION JAX_TRITON TRITON, versions of JAX, jax-triton and Triton. It takes
Python 3.12 or later: this environment's, else one of this machine. Where it has none, a later release of
Debian has: its packages are unpacked into the user's cache, and run on their own C library. Where that cannot
be, it says so and passes.

No GPU is needed: kernels are lowered for one, for which jax-triton needs a module of JAX's CUDA plugin. The
plugin is installed without CUDA's libraries.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kvkit.environment import cache_folder

ROOT = Path(__file__).parent.parent.parent
RELEASE, PYTHON = "trixie", "python3.13"
TOOLS = ("pytest", "pytest-benchmark", "pytest-timeout")
FILES = (
    "kernels/test_jax_transforms.py",
    "kernels/test_attention_pallas_tpu.py",
    "support/jax_triton_program.py",
)
LIMIT_S = 900.0
LAUNCHER = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
libraries=$(echo "$here"/usr/lib/*-linux-gnu*)
export PYTHONHOME="$here/usr"
loader=$(echo "$libraries"/ld-linux-*.so.*)
exec "$loader" --library-path "$libraries" --argv0 "$here/{python}" "$here/usr/bin/{python}" "$@"
"""
"""It is `sys.executable`, too: what the tests start runs on the same library."""


class Missing(RuntimeError):
    """What this machine lacks."""


def interpreter() -> Path:
    """A Python that is new enough, fetched if it must be.

    Raises:
        Missing: there is none, and none to be had.
    """
    if sys.version_info >= (3, 12):
        return Path(sys.executable)
    if found := find_python(PYTHON, "python3.12"):
        return found
    folder = cache_folder() / PYTHON
    if not folder.exists():
        draft = folder.with_name(f".{PYTHON}.{os.getpid()}")
        try:
            _unpack(draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder / PYTHON


def find_python(*names: str) -> Path | None:
    """The first of these Pythons, such as "python3.13", that is on the path or among pyenv's, and runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for name in names:
        version = name.removeprefix("python")
        for path in (shutil.which(name), *sorted(pyenv.glob(f"{version}.*/bin/{name}"))):
            if path and not subprocess.run([path, "-c", "import ctypes"], capture_output=True).returncode:
                return Path(path)
    return None


def mirror() -> str:
    """The address of the Debian archive that this machine uses, for its own release.

    Raises:
        Missing: it is no Debian, or has no such archive.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing("apt-get and dpkg, which have a newer Python on Debian")
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    found = _output("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages")
    addresses = [line.partition(" ")[2] for line in found.splitlines() if line.split()[0] == release]
    debian = [address for address in addresses if address.rstrip("/").endswith("/debian")]
    if not debian:
        raise Missing("a Debian archive among apt's sources")
    return debian[0]


def _unpack(folder: Path) -> None:
    """The packages of `RELEASE` that a Python needs, down to its C library."""
    apt = folder / "apt"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={keyring}] {mirror()} {RELEASE} main\n")
    (apt / "status").touch()  # as if nothing was installed
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Acquire::Languages": "none",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _output(*command, "update")
    _output(*command, "-y", "--no-install-recommends", "--download-only", "install", PYTHON, "libstdc++6")
    for package in (apt / "cache" / "archives").glob("*.deb"):
        _output("dpkg", "-x", str(package), str(folder))
    shutil.rmtree(apt)
    (folder / PYTHON).write_text(LAUNCHER.format(python=PYTHON))
    (folder / PYTHON).chmod(0o755)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(
            f"what {' '.join(command[:1] + command[-2:])} was to bring: {done.stderr.strip()[-300:]}"
        )
    return done.stdout


def packages(python: Path, jax: str, jax_triton: str, triton: str) -> Path:
    """A folder with these versions and pytest, installed if it must be.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    folder = cache_folder() / f"jax-{jax}-triton-{jax_triton}-{triton}-{python.name}"
    if not folder.exists():
        draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        pip = find_spec("pip")
        assert pip is not None
        assert pip.submodule_search_locations is not None
        try:
            (draft / "pip").mkdir(parents=True)
            (draft / "pip" / "pip").symlink_to(pip.submodule_search_locations[0])
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
            command += [f"--target={draft / 'site'}"]
            pins = f"jax=={jax}", f"jax-triton=={jax_triton}", f"triton=={triton}"
            for wanted in ((*pins, *TOOLS), ("--no-deps", f"jax-cuda13-plugin=={jax}")):
                subprocess.run(
                    [*command, *wanted], env=os.environ | {"PYTHONPATH": str(draft / "pip")}, check=True
                )
            (draft / "site").rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def main(jax: str, jax_triton: str, triton: str) -> int:
    """Run the tests that need neither torch nor conftest.py, and compare results with those here."""
    try:
        python = interpreter()
    except Missing as error:
        print(f"JAX {jax} is not tested here: it takes Python 3.12 or later, or {error}")
        return 0
    site = packages(python, jax, jax_triton, triton)
    tests = ROOT / "tests"
    run = partial(subprocess.run, cwd=ROOT, check=False, timeout=LIMIT_S)
    command = [str(python), "-m", "pytest", "-q", "--noconftest", "-oaddopts=", "-p", "no:cacheprovider"]
    with TemporaryDirectory() as folder:
        plans, results = Path(folder) / "plans", Path(folder) / "results.npz"
        run([sys.executable, tests / "support" / "jax_plans.py", plans], check=True)
        script = tests / "support" / "jax_results.py", results
        run([sys.executable, *script], check=True)
        paths = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "JAX_PLANS": str(plans)}
        environment = os.environ | paths | {"JAX_PLATFORMS": "cpu"}
        status = run([*command, *(tests / name for name in FILES)], env=environment).returncode
        return run([python, *script], env=environment).returncode or status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
