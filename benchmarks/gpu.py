"""Everything that waits for a GPU, in one call: tests, tuning, then benchmarks with what was tuned.

Takes at most 9 minutes. Under $OUT it leaves a log of each step, tuned/<gpu>.json, and <machine>.json with
the benchmarks' results. Needs Python 3.11 or later with torch and Triton, and kvkit's core packages; what is
missing is named.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = (
    *("torch", "triton", "numba", "xxhash", "fsspec", "google_crc32c", "pydantic", "pydantic_settings"),
    *("prometheus_client", "rich", "typer", "pytest", "pytest_benchmark", "hypothesis", "transformers"),
)
TESTS = ("gpu", "end_to_end", "attention_triton", "problems", "search", "pages_numba", "staging")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
KVKIT = (sys.executable, "-c", "from kvkit.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Step:
    """A command with its name, and the seconds after which it is ended."""

    name: str
    command: tuple[str, ...]
    timeout_s: float


STEPS = (
    Step("tests", (*PYTEST, *(f"tests/test_{stem}.py" for stem in TESTS)), 165),
    Step("tune", (*KVKIT, "tune", "--budget-s", "150"), 200),
    Step("benchmarks", (sys.executable, "-m", "benchmarks.run", "benchmarks/bench_gpu.py"), 170),
)


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
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "150"}
    settings |= {"KVKIT_RESULTS": str(out), "KVKIT_TUNED": str(out / "tuned")}
    return run(STEPS, out, os.environ | settings)


def run(steps: Sequence[Step], out: Path, environment: Mapping[str, str]) -> int:
    """Run each step, whatever became of the one before; writes `out`/<name>.log.

    Returns:
        the first status that is not 0; 124 for a step that took too long.
    """
    out.mkdir(parents=True, exist_ok=True)
    first = 0
    for step in steps:
        with open(out / f"{step.name}.log", "w") as log:
            status = _run(step, log.fileno(), environment)
        text = (out / f"{step.name}.log").read_text(errors="replace")
        print(f"--- {step.name}: exit {status}\n{text[-6000:]}", flush=True)
        first = first or status
    return first


def _run(step: Step, log: int, environment: Mapping[str, str]) -> int:
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(step.timeout_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
