"""Run the tests of every day with other Pythons and the newest packages: `make test-pythons`.

python tests/tools/other_pythons.py VERSION..., such as 3.12 3.13. Each gets an environment in the user's
cache, with what the extra `dev` asks for and no pins, so that newer releases of zarr, numpy and JAX are met,
which this Python cannot have. Then the hot paths are timed beside this environment's. A Python that this
machine lacks is named, and passes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from newer_jax import ROOT, find_python

from kvkit.environment import cache_folder

SHOWN = "zarr", "numpy", "jax", "torch", "triton", "numba", "pydantic"
LIMIT_S = 1800.0


def environment(python: Path, version: str) -> Path:
    """The Python of an environment with the newest packages, made if it must be.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    asked = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()[:8]
    folder = cache_folder() / f"python-{version}-{asked}"
    program = folder / "bin" / "python"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([program, "-m", "pip", "install", "--quiet", f"{ROOT}[dev]"], check=True)
        (folder / "done").touch()
    return program


def main(*versions: str) -> int:
    """Return 1 if tests fail with one of the versions."""
    failed = 0
    for version in versions:
        python = find_python(f"python{version}")
        if python is None:
            print(f"Python {version} is not tested here: it is neither on PATH nor among pyenv's")
            continue
        program = environment(python, version)
        listed = "import sys; from importlib.metadata import version; print(sys.version.split()[0], *("
        listed += f"f'{{name}} {{version(name)}}' for name in {SHOWN!r}), sep=', ')"
        subprocess.run([program, "-c", listed], check=True)
        tests = [program, "-m", "pytest", "-q", "--quick", "-m", "not nightly", "-p", "no:cacheprovider"]
        tests += ["--benchmark-disable", "tests"]
        here = os.environ | {"OMP_NUM_THREADS": "1"}
        failed |= subprocess.run(tests, cwd=ROOT, env=here, timeout=LIMIT_S, check=False).returncode
        times = [sys.executable, "-m", "benchmarks.report.check", "--python", str(program), "--rounds", "10"]
        subprocess.run(times, cwd=ROOT, timeout=LIMIT_S, check=False)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
