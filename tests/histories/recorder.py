"""What a process notes of what it does: lines that outlive it, each written by one system call."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path


class Recorder:
    """The notes of one process, in a file of its own. Thread-safe."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / f"{process}.jsonl", flags, 0o600)
        self._numbers = itertools.count(1)

    def begin(self, do: str, chunks: Sequence[str], tiers: Sequence[str], **more: object) -> int:
        """Note that an operation is about to begin; its number."""
        op, now = next(self._numbers), time.monotonic_ns()
        self._write({"op": op, "begin": now, "do": do, "chunks": chunks, "tiers": tiers} | more)
        return op

    def end(self, op: int, **came: object) -> None:
        """Note that an operation has ended, and what came of it."""
        self._write({"op": op, "end": time.monotonic_ns()} | came)

    def note(self, op: int | None, when: str, **more: object) -> None:
        """Note that something happened now: `when` names the time."""
        self._write({"op": op, when: time.monotonic_ns()} | more)

    def failed(self, op: int | None, what: str) -> None:
        """Note what must not be."""
        self._write({"op": op, "failed": what})

    def _write(self, note: dict[str, object]) -> None:
        os.write(self._file, (json.dumps(note) + "\n").encode())
