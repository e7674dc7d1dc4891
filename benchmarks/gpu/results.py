"""Results as lines of JSON, each in the file before the next is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AGAIN = 75
"""Exit status of a step that is to go on in a new process: in its own the GPU has become unusable."""


@dataclass(frozen=True, slots=True)
class Results:
    """A file that lines are appended to by one step.

    Args:
        path: of the file; its folder is there.
        step: its name, in every line.
        gpu: its name, likewise; "" leaves it out.
        commit: what was measured, likewise.
    """

    path: Path
    step: str
    gpu: str = ""
    commit: str = ""

    def record(self, what: str, **fields: Any) -> None:
        """Append a line and print it; mutates the file by one write, so that no line is ever broken."""
        about = {name: value for name in ("gpu", "commit") if (value := getattr(self, name))}
        line = {**about, "step": self.step, "what": what, **fields}
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, f"{json.dumps(line, ensure_ascii=False, default=str)}\n".encode())
        finally:
            os.close(file)
        print(f"{what}: {', '.join(f'{name} {_plain(value)}' for name, value in fields.items())}", flush=True)

    def of(self, step: str) -> Iterator[dict[str, Any]]:
        """What a step has recorded, in order."""
        if self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
            yield from (line for line in lines if line["step"] == step)


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]
