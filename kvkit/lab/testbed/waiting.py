"""Waiting for a server that offers no event when it begins to serve: it is asked again and again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

START_S = 180.0
"""A server that does not answer so long after its start, in seconds, has failed."""
_PAUSE_S = 0.02


def wait_until(
    answers: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, start_s: float = START_S
) -> None:
    """Return when `answers` is true; `process` is the server's, `log` what it writes.

    Raises:
        AssertionError: it ended, or does not serve within `start_s`; with the end of its log.
    """
    deadline = time.monotonic() + start_s
    while not answers():
        try:
            process.wait(_PAUSE_S)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, f"it did not serve within {start_s} s:\n{_tail(log)}"
        else:
            raise AssertionError(f"it ended:\n{_tail(log)}")


def wait_for(holds: Callable[[], bool]) -> None:
    """Return when `holds` is true.

    Raises:
        AssertionError: it is not within `START_S`.
    """
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {START_S} s"
        time.sleep(_PAUSE_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
