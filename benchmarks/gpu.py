"""Everything that waits for a GPU, in one call: tests, then benchmarks; results under $OUT.

Needs Python 3.11 or later with torch, and kvkit's core packages; what is missing is named. Takes minutes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = (
    "torch",
    "numba",
    "xxhash",
    "fsspec",
    "google_crc32c",
    "pydantic",
    "pydantic_settings",
    "rich",
    "pytest",
)
TESTS = ("tests/test_gpu.py", "tests/test_pages.py", "tests/test_staging.py")


def main() -> int:
    """Run what there is; the exit status is the first failure's."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}; install them, or put them on PYTHONPATH")
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return 2
    out = Path(os.environ.get("OUT") or ROOT / ".gpu").absolute()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KVKIT_RESULTS": str(out)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    steps = {
        "tests": [*pytest, *TESTS],
        "benchmarks": [sys.executable, "-m", "benchmarks.run", "benchmarks/bench_gpu.py"],
    }
    status = 0
    for name, command in steps.items():
        with open(out / f"{name}.log", "w") as log:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        print(f"--- {name}: exit {done.returncode}\n{(out / f'{name}.log').read_text()[-6000:]}")
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
