"""Progress lines appear in time, on a terminal and through a pipe."""

from __future__ import annotations

import io
import re

from rich.console import Console

from kvkit.observe.progress import counted, spaced, timed


def test_a_line_has_the_seconds_and_is_not_cut_in_a_pipe() -> None:
    pipe = io.StringIO()
    timed(Console(file=pipe, width=40))("starting [an engine]\x1b " + 10 * "at length ")
    assert re.fullmatch(r"   0 s  starting \[an engine\]\\x1b (at length ){10}\n", pipe.getvalue())


def test_what_takes_long_is_counted() -> None:
    said: list[str] = []
    assert list(counted("abc", "letters", 3, said.append, every_s=0.0)) == ["a", "b", "c"]
    assert said == [f"letters: {n} of 3" for n in (1, 2, 3)]
    said.clear()
    assert list(counted("abc", "letters", 3, said.append, every_s=1e9)) == ["a", "b", "c"]
    assert said == ["letters: 3 of 3"]


def test_what_comes_often_is_told_seldom() -> None:
    said: list[str] = []
    every, never = spaced(said.append, every_s=0.0), spaced(said.append, every_s=1e9)
    for text in "abc":
        every(text)
        never(text.upper())
    assert said == ["a", "b", "c"]
