"""Configurations that are compiled where there is time, for the tuning on a GPU where there is little.

Their binaries are in the Triton cache that is carried, what the compiler said of them in a file beside these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from unittest import mock

from triton.runtime import cache

from kvkit.kernels.tuning.assembly import Compiled
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.compiling import CompileJob, ProblemFactory, compile_for, compile_pool, survey
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.devices import with_report
from kvkit.kernels.tuning.search import CompileInfo, Late
from kvkit.kernels.tuning.strategies import nearest_first

FILE = "space.json"
KEPT = {".json", ".cubin"}
"""Suffixes of what a launch reads of a compiled kernel."""
LIMIT_BYTES = 20 << 20
"""Most bytes of the cache with these."""

Infos = Mapping[str, Mapping[str, CompileInfo]]
"""Compiler's results by a problem's name and a configuration as text."""


def fill(
    folder: Path,
    factory: ProblemFactory,
    target: str,
    key: str,
    seconds: float,
    limit_bytes: int = LIMIT_BYTES,
) -> int:
    """Compile configurations into a folder of Triton's cache until time or room is over; return their number.

    Each problem's nearest configurations to the default come first. Writes FILE, too.

    Args:
        key: what the other machine's build of Triton distinguishes its cached kernels by.
    """
    problems = {problem.name: problem for problem in factory()}
    before = set(folder.iterdir())
    found: dict[str, dict[KernelConfig, CompileInfo]] = {name: {} for name in problems}
    ends = time.monotonic() + seconds

    def full() -> bool:
        return time.monotonic() >= ends or _bytes_with(folder, before) >= limit_bytes

    with compile_pool(os.cpu_count() or 1, str(folder)) as pool:
        for report in survey(pool, factory, jobs_of(problems.values(), target), partial(_compile, key), full):
            infos = found[report.problem]
            infos[report.config] = with_report(infos.get(report.config), report, problems[report.problem])
    for made in set(folder.iterdir()) - before:
        for file in made.iterdir():
            if file.suffix not in KEPT:
                file.unlink()
    texts = {
        name: {str(config): asdict(info) for config, info in infos.items()} for name, infos in found.items()
    }
    (folder / FILE).write_text(json.dumps(texts))
    return sum(map(len, found.values()))


def jobs_of(problems: Iterable[Problem], target: str) -> list[CompileJob]:
    """Return the configurations of Triton's problems: the nearest of each, the next nearest of each, ..."""
    spaces = [
        [(problem.name, config, target) for config in nearest_first(problem.space_on(target))]
        for problem in problems
        if problem.space[0].warps
    ]
    return [job for turn in zip_longest(*spaces) for job in turn if job is not None]


def carried(folder: Path) -> Infos:
    """Return what `fill` found for a folder; nothing where it was not filled."""
    try:
        document = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return {}
    return {
        name: {config: CompileInfo(**info) for config, info in infos.items()}
        for name, infos in document.items()
    }


def compile_space(known: Infos, problem: Problem, late: Late) -> Mapping[KernelConfig, CompileInfo]:
    """Return the compiler's results that were carried; configurations without one are not to be run."""
    infos = known.get(problem.name, {})
    return {config: infos.get(str(config), CompileInfo("not carried")) for config in problem.space}


def _compile(key: str, launch: Launch, target: str) -> Compiled:
    with mock.patch.object(cache, "triton_key", return_value=key):
        return compile_for(launch, target)


def _bytes_with(folder: Path, before: set[Path]) -> int:
    """Return the bytes that will be kept of what is new in a folder."""
    new = (file for made in set(folder.iterdir()) - before for file in made.iterdir())
    return sum(file.stat().st_size for file in new if file.suffix in KEPT and file.exists())
