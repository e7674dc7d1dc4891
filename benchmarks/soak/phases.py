"""The time of a soak, in phases of work with a rest after each, and what all soaks report."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

from kvkit.lab.files import about

LONGEST_S, FEWEST = 90.0, 4
"""A phase, at most; and the number of them, at least."""


class Phases:
    """Iterates over the phases; each goes on while `goes_on` says so.

    SIGINT and SIGTERM have the one under way end, and be the last: what was done is reported.

    Args:
        seconds: of all phases. 0: they take as long as it takes to do `least`.
        least: things that are done in all of them, whatever time it takes.
    """

    def __init__(self, seconds: float, least: int = 0) -> None:
        self.seconds = seconds
        self._least = least
        self._count = max(FEWEST, ceil(seconds / LONGEST_S))
        self._number = 0
        self._until = 0.0
        self._stopped = threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            self._number = number + 1
            self._until = time.monotonic() + self.seconds / self._count
            yield number
            if self.stopped:
                return

    @property
    def stopped(self) -> bool:
        """Whether a signal came."""
        return self._stopped.is_set()

    def goes_on(self, done: int) -> bool:
        """Whether there is work to do in this phase, of which so much was done in all."""
        if self.stopped:
            return False
        return time.monotonic() < self._until or done * self._count < self._least * self._number

    def listen(self) -> None:
        """End early at a signal. Only of a main thread."""

        def stop(_: int, __: FrameType | None) -> None:
            self._stopped.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)


def options(about: str | None) -> argparse.ArgumentParser:
    """What every soak can be told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="a few seconds of it, at another pace")
    parser.add_argument("--json", type=Path, help="where the result is written")
    return parser


def phases_of(given: argparse.Namespace, quick: int) -> Phases:
    """The phases that the command line asks for; so many things are done where it says `--quick`."""
    phases = Phases(0, quick) if given.quick else Phases(60 * given.minutes)
    phases.listen()
    return phases


def report(given: argparse.Namespace, name: str, found: dict[str, Any]) -> int:
    """Write and print what a soak found; the exit status: 1 where something was wrong or not flat."""
    time = "--quick" if given.quick else f"--minutes {given.minutes:g}"
    if given.json is not None:
        document = about(f"python -m benchmarks.{name} {time}", seed=0) | found
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    shown = {key: value for key, value in found.items() if key != "flat"}
    print(json.dumps(shown, indent=1))
    for process, flat in found["flat"].items():
        print(f"{process}: {flat['mib_per_minute']} MiB a minute; not flat: {flat['not_flat']}")
    return int(bool(found["wrong"]) or any(flat["not_flat"] for flat in found["flat"].values()))
