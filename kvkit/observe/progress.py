"""Progress lines with the time elapsed, the same on a terminal and through a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console

from kvkit.environment import printable

T = TypeVar("T")
Report = Callable[[str], None]
"""Function that prints one line of progress."""

EVERY_S = 5.0
"""Time between two lines, in seconds."""


def timed(console: Console) -> Report:
    """Make a function that prints a line, preceded by the seconds since this call."""
    began = time.monotonic()

    def report(text: str) -> None:
        line = f"{time.monotonic() - began:4.0f} s  {printable(text)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return report


def spaced(report: Report, every_s: float = EVERY_S) -> Report:
    """Make a function that passes at most one line per `every_s` seconds to `report`, none at the start."""
    last_s = time.monotonic()

    def report_seldom(text: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= every_s:
            last_s = time.monotonic()
            report(text)

    return report_seldom


def counted(
    work: Iterable[T], label: str, total: int, report: Report, every_s: float = EVERY_S
) -> Iterator[T]:
    """Yield the results of `work`, and report every `every_s` seconds how many of `total` are done."""
    report_seldom = spaced(report, every_s)
    for number, result in enumerate(work, 1):
        (report if number == total else report_seldom)(f"{label}: {number} of {total}")
        yield result
