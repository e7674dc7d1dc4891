"""Soaks of vLLM, handoff, the router and shared memory, within a budget: nothing is wrong, and nothing grows.

    make soak MINUTES=120
    python -m benchmarks.soak --minutes 120 --at-once 4

Each gets the same share of the minutes; so many run side by side. What is known is written whenever one has
ended, to benchmarks/results/soak-<machine>.json. SIGINT and SIGTERM have those under way end after their
phase, and no other begin. The exit status is 1 if anything was wrong, or grew (`benchmarks/soak/leaks.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.folders import RESULTS, ROOT
from kvkit.environment import describe, slug
from kvkit.lab.files import about

PARTS = {"vllm": "vLLM", "handoff": "handoff", "router": "the router", "shm": "shared memory"}
TAIL = 3000
"""Characters of the log of one that failed."""
QUIET = {"OMP_WAIT_POLICY": "passive"}
BESIDE = QUIET | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of the environment, where others run beside: vLLM would bind its threads to cores."""


class Parts:
    """Runs some soaks; `run` returns what they found, by part.

    Args:
        minutes: of each.
        path: where what is known is written.
    """

    def __init__(self, parts: list[str], minutes: float, at_once: int, path: Path) -> None:
        self._waiting = list(parts)
        self._minutes = minutes
        self._at_once = at_once
        self._path = path
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._found: dict[str, Any] = {}
        alone = set(parts) != set(PARTS) and path.exists()
        self._before: dict[str, Any] = json.loads(path.read_text()) if alone else {"parts": {}}
        total = f"{minutes * len(parts):g}"
        self._about = about(f"python -m benchmarks.soak --minutes {total} --at-once {at_once}", seed=0)

    def run(self, folder: Path) -> dict[str, Any]:
        """Run all; their files are in `folder`."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._at_once:
                self._start(self._waiting.pop(0), folder)
            time.sleep(0.2)
            for part, process in [*self._running.items()]:
                if process.poll() is not None:
                    del self._running[part]
                    self._found[part] = _read(
                        folder / f"{part}.json", folder / f"{part}.log", process.returncode
                    )
                    self._write()
        return self._found

    def stop(self, _: int, __: FrameType | None) -> None:
        """End early, as a handler of signals."""
        self._waiting.clear()
        for process in self._running.values():
            process.terminate()

    def _start(self, part: str, folder: Path) -> None:
        command = [sys.executable, "-m", f"benchmarks.soak.{part}"]
        command += ["--minutes", f"{self._minutes:g}", "--json", str(folder / f"{part}.json")]
        more = BESIDE if self._at_once > 1 else QUIET
        with open(folder / f"{part}.log", "wb") as log:
            self._running[part] = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's SIGINT would end what a soak has started, too
            )

    def _write(self) -> None:
        known = self._before["parts"] | self._found
        order = {part: known[part] for part in PARTS if part in known}
        document = self._about | self._before | describe() | {"parts": order}
        self._path.write_text(json.dumps(document, indent=1) + "\n")


def _read(path: Path, log: Path, status: int) -> dict[str, Any]:
    """What a part found, or how it failed."""
    if not path.exists():
        said = log.read_text(errors="replace")[-TAIL:]
        return {"seconds": 0.0, "done": {}, "faults": {}, "wrong": [f"status {status}: {said}"], "flat": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return {name: value for name, value in found.items() if name not in describe()}


def is_well(found: dict[str, Any]) -> bool:
    """Whether a part found nothing wrong, and nothing that grows."""
    return not found["wrong"] and not any(flat["not_flat"] for flat in found["flat"].values())


def rows(document: dict[str, Any]) -> list[list[str]]:
    """The table of a result."""
    head = ["soak of", "seconds", "done", "went wrong on purpose", "wrong", "MiB a minute"]
    return [[*head, "descriptors", "threads"], *_rows(document["parts"])]


def _rows(parts: dict[str, Any]) -> list[list[str]]:
    made = []
    for part, found in parts.items():
        cells = [PARTS[part], f"{found['seconds']:,.0f}", _counts(found["done"]), _counts(found["faults"])]
        cells.append(str(len(found["wrong"])))
        for flat in found["flat"].values():
            slope = flat["mib_per_minute"]
            cells.append("" if slope is None else f"{slope:+.2f}, at most {flat['most_mib_per_minute']:g}")
            half = len(flat["rests"]) // 2
            for column in (2, 3):
                before, after = (
                    max((rest[column] for rest in part), default=0)
                    for part in (flat["rests"][:half], flat["rests"][half:])
                )
                cells.append(f"{before}, then {after}")
        made.append(cells)
    return made


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count:,}" for what, count in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="of all together")
    parser.add_argument("--at-once", type=int, default=len(PARTS), help="so many run side by side")
    parser.add_argument(
        "--part", choices=[*PARTS], action="append", help="only this one; others stay as recorded"
    )
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/soak-<machine>.json")
    given = parser.parse_args()
    asked = given.part or [*PARTS]
    path = given.json or RESULTS / f"soak-{slug()}.json"
    parts = Parts(asked, given.minutes / len(asked), given.at_once, path)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, parts.stop)
    with tempfile.TemporaryDirectory(prefix="kvkit-soak-") as folder:
        found = parts.run(Path(folder))
    if found:
        for row in rows(json.loads(path.read_text())):
            print(" | ".join(row))
    for part, one in found.items():
        for what in one["wrong"] + [words for flat in one["flat"].values() for words in flat["not_flat"]]:
            print(f"{PARTS[part]}: {what}")
    return int(len(found) < len(asked) or not all(map(is_well, found.values())))


if __name__ == "__main__":
    sys.exit(main())
