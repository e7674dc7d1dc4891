"""`make gpu`: what a GPU is asked in its first nine minutes, each step in a process of its own.

python -m benchmarks.gpu [tests | vllm]: the steps of `STEPS`, of `TESTS` or of `VLLM`. Under $OUT, or .gpu/,
they leave results.jsonl, which every result is appended to at once, steps.log and tuned/<gpu>.json. What is
missing is named, and nothing is begun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import packages
from benchmarks.gpu.results import AGAIN, Results

ROOT = packages.ROOT
PRINTED = 6000
"""So many characters of a step's log are printed."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command with its name, and the seconds after which it is ended."""

    name: str
    command: tuple[str, ...]
    timeout_s: float


def measuring(name: str, timeout_s: float) -> Step:
    """The step that is in the file of its name."""
    return Step(name, (sys.executable, "-m", "benchmarks.gpu.step", name), timeout_s)


STEPS = (
    measuring("driver", 20),
    measuring("roofs", 25),
    measuring("compare", 100),
    measuring("defaults", 60),
    measuring("moving", 40),
    measuring("engine", 45),
    measuring("tune", 95),
    measuring("profile", 30),
    measuring("peers", 70),
    measuring("blend_rows", 25),
    measuring("with_jax", 25),
)
"""What is not known of any GPU first, then what takes longer."""

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
FILES = (
    *(f"kernels/test_{stem}.py" for stem in ("gpu", "attention_triton", "tuning_problems", "tuning_search")),
    *("kernels/test_pages_numba.py", "transfer/test_end_to_end.py", "transfer/test_staging.py"),
)
TESTS = (
    measuring("determinism", 50),
    measuring("sanitizer", 90),
    Step("tests", (*PYTEST, *(f"tests/{file}" for file in FILES)), 260),
    Step("benchmarks", (sys.executable, "-m", "benchmarks.report.run", "benchmarks/gpu/bench_gpu.py"), 130),
)
"""`make gpu-tests`."""
VLLM = (measuring("vllm_engine", 400),)
"""`make gpu-vllm`."""


def main() -> int:
    """Run the steps; the exit status is the first failure's."""
    if packages.fits_here():
        packages.unpack(packages.FOLDER, packages.SITE)
        sys.path.insert(0, str(packages.SITE))
    missing = packages.missing()
    if missing:
        print(
            f"missing: {', '.join(missing)}; `make gpu-packages` where packages can be had lays them into "
            f"{packages.FOLDER.name}/: copy it here"
        )
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return 2
    out = Path(os.environ.get("OUT") or ROOT / ".gpu").absolute()
    steps = {"tests": TESTS, "vllm": VLLM}.get(" ".join(sys.argv[1:]), STEPS)
    return run(steps, out, environment(out))


def environment(out: Path) -> dict[str, str]:
    """That of the steps: carried packages before others, and a carried Triton cache."""
    paths = [ROOT, *([packages.SITE] if packages.fits_here() else [])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1", "COLUMNS": "150"}
    settings |= {"OUT": str(out), "KVKIT_RESULTS": str(out), "KVKIT_TUNED": str(out / "tuned")}
    if packages.fits_here():
        settings["TRITON_CACHE_DIR"] = str(packages.TRITON_CACHE)
    return os.environ | settings


def run(steps: Sequence[Step], out: Path, environment: Mapping[str, str]) -> int:
    """Run each step, whatever became of the one before; appends to steps.log and results.jsonl in `out`.

    Returns:
        the first status that is not 0; 124 for a step that took too long.
    """
    out.mkdir(parents=True, exist_ok=True)
    first = 0
    for step in steps:
        began = time.monotonic()
        with open(out / "steps.log", "a") as log:
            print(f"--- {step.name}", file=log, flush=True)
            start = log.tell()
            status = AGAIN
            while status == AGAIN:
                left_s = step.timeout_s - (time.monotonic() - began)
                status = _run(step.command, left_s, log.fileno(), environment) if left_s > 0 else 124
        took_s = round(time.monotonic() - began, 1)
        Results(out / "results.jsonl", step.name).record("ended", status=status, seconds=took_s)
        with open(out / "steps.log", errors="replace") as log:
            log.seek(start)
            print(f"--- {step.name}: exit {status}\n{log.read()[-PRINTED:]}", flush=True)
        first = first or status
    return first


def _run(command: Sequence[str], timeout_s: float, log: int, environment: Mapping[str, str]) -> int:
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
