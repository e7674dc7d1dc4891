"""A Triton cache for a GPU that is not here: the defaults of all problems and of small ones.

python -m benchmarks.gpu.triton_cache TARGET TRITON [MINUTES]: TARGET is a name of `gpus.GPUS`, TRITON the
folder of the other machine's build of Triton, of the version of this environment's, whose key the cache is
found by. With MINUTES, configurations to tune are compiled, too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from triton.runtime import cache

from benchmarks.gpu import carried_space
from benchmarks.gpu.packages import TRITON_CACHE
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.compiling import compile_for
from kvkit.kernels.tuning.configs import Launch
from kvkit.kernels.tuning.problems import every_problem
from kvkit.lab.testbed.small_problems import SMALL

KEY = "triton-key"
"""The file that says whose cache it is."""
KEPT = {".json", ".cubin", ".ptx", ".ttgir"}
"""What launches and the gate read of a compiled kernel."""


def key_of(triton: Path) -> str:
    """What a build of Triton distinguishes its cached kernels by; runs the function that it has for that."""
    spec = importlib.util.spec_from_file_location("triton_cache_elsewhere", triton / "runtime" / "cache.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.triton_key())


def fill_cache(folder: Path, problems: Sequence[Problem], target: str, key: str) -> None:
    """Compile the default of each problem for a target into an empty folder, as the Triton of a key would.

    Raises:
        CompileError: one cannot be compiled.
    """
    environment = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder))
    with environment, mock.patch.object(cache, "triton_key", return_value=key):
        for problem in problems:
            case = problem.make(torch.device("cpu"), False)
            for launch in case.launches(problem.space_on(target)[0]):
                if isinstance(launch, Launch):
                    compile_for(launch, target)
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix not in KEPT:
            file.unlink()
    (folder / KEY).write_text(key)


def main(target: str, triton: str, minutes: str = "0") -> None:
    """Replace the cache that is carried."""
    shutil.rmtree(TRITON_CACHE, ignore_errors=True)
    TRITON_CACHE.mkdir(parents=True)
    key = key_of(Path(triton))
    fill_cache(TRITON_CACHE, (*every_problem(), *SMALL), target, key)
    if seconds := 60 * float(minutes):
        count = carried_space.fill(TRITON_CACHE, every_problem, target, key, seconds)
        print(f"{count} configurations to tune are compiled")


if __name__ == "__main__":
    main(*sys.argv[1:])
