"""Run one step: python -m benchmarks.gpu.step NAME [arguments]; appends to $OUT/results.jsonl."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench


def main(name: str, *arguments: str) -> None:
    """Run the step on this machine's GPU, or rehearse it without one."""
    import torch  # not above: processes that compile import this file, and set themselves up first

    from benchmarks.gpu.bench import bench_on_gpu, rehearsal

    make = bench_on_gpu if torch.cuda.is_available() else rehearsal
    perform(make(name, Path(os.environ["OUT"]) / "results.jsonl"), *arguments)


def perform(bench: Bench, *arguments: str) -> None:
    """Run the step that is in the file of its name; what it raises is recorded, too.

    It runs on a stream of its own: CUDA takes no batches of copies on the default one.
    """
    try:
        with bench.streams.stream(bench.streams.Stream()):
            importlib.import_module(f"benchmarks.gpu.{bench.results.step}").run(bench, *arguments)
    except Exception:
        bench.results.record("failed", traceback=traceback.format_exc())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
