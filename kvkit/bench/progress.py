"""Tell what goes on, and how long it has taken, on a terminal and through a pipe alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")
Say = Callable[[str], None]

EVERY_S = 5.0
"""Nobody waits longer for a line."""


def timed(console: Console) -> Say:
    """Make a function that prints a line behind the seconds since this call."""
    began = time.monotonic()

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:4.0f} s  {text}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return say


def counted(work: Iterable[T], what: str, total: int, say: Say, every_s: float = EVERY_S) -> Iterator[T]:
    """Pass on the results of `work`, and tell every `every_s` seconds how many of `total` there are."""
    told = time.monotonic()
    for number, one in enumerate(work, 1):
        if time.monotonic() - told >= every_s or number == total:
            told = time.monotonic()
            say(f"{what}: {number} of {total}")
        yield one
