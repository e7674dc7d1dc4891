"""Tuning on several GPUs of one kind at a time: a process for each, with a share of the problems."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvkit.kernels.tuning.tables import merged, read_file, write_table

COMMAND = (sys.executable, "-c", "from kvkit.cli import main; main()", "tune")
"""Command of a process that tunes, without its options."""


def options_of(*chosen: Any) -> list[str]:
    """Return the options of a command that give these dataclasses, without those at their default."""
    words = []
    for group in chosen:
        for field in fields(group):
            value, name = getattr(group, field.name), f"--{field.name.replace('_', '-')}"
            if value == field.default:
                continue
            if value is True:
                words.append(name)
            else:
                words += [word for one in _each(value) for word in (name, str(one))]
    return words


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def tune_side_by_side(gpus: Sequence[str], options: Sequence[str], folder: Path) -> int:
    """Tune on some GPUs at a time, and put all results and trials into a folder.

    Each process begins with the results in the folder, and has one of its own: of equal keys the faster
    result is kept, as by `tables.merged`.

    Args:
        gpus: as in CUDA_VISIBLE_DEVICES, at least one, of one kind.
        options: of the command, without those that name GPUs and shares.

    Returns:
        the first exit status that is not 0, in the order of the GPUs.

    Raises:
        OSError, TableError: a table cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".gpus-") as own:
        parts = [Path(own) / str(index) for index in range(len(gpus))]
        processes = [
            _start(gpu, part, [*options, "--share", f"{index}/{len(gpus)}"], folder)
            for index, (gpu, part) in enumerate(zip(gpus, parts, strict=True))
        ]
        statuses = [process.wait() for process in processes]
        for part in parts:
            _collect(part, folder)
    return next((status for status in statuses if status), 0)


def _start(gpu: str, part: Path, options: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    part.mkdir()
    for table in folder.glob("*.json"):
        shutil.copy(table, part)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "KVKIT_TUNED": str(part)}
    return subprocess.Popen([*COMMAND, *options], env=environment)


def _collect(part: Path, folder: Path) -> None:
    """Merge one process's tables into those of a folder, and append its trials."""
    for path in part.glob("*.json"):
        name, table = read_file(path)
        target = folder / path.name
        known = read_file(target)[1] if target.exists() else {}
        write_table(target, name, merged([known, table]))
    for path in part.glob("*.trials.jsonl"):
        with open(folder / path.name, "a") as file:
            file.write(path.read_text())
