"""Functions called in a process of their own, whose memory is measured or limited."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kvkit.tiers.testing.contract import DEADLINE_S

Function = Callable[..., object]


class Measured:
    """A process in which functions of modules are called, and their memory is measured. A context manager."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def peak_bytes(self, function: Function, *arguments: object, prepare: Function | None = None) -> int:
        """By how much the process grows at most while it calls `function`; raises what that raises.

        `prepare` is called before, with the same arguments: what that imports and warms up does not count.
        """
        return self._call(_measure, function, arguments, prepare)

    def limit(self, room_bytes: int, function: Function, *arguments: object) -> None:
        """Call `function` when the address space may grow by `room_bytes`, and from then on no more."""
        self._call(_limit, room_bytes, function, arguments)

    def _call(self, function: Callable[..., int], *arguments: object) -> int:
        return self._process.submit(function, *arguments).result(4 * DEADLINE_S)

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown(cancel_futures=True)


def _measure(function: Function, arguments: tuple[object, ...], prepare: Function | None) -> int:
    if prepare is not None:
        prepare(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    function(*arguments)
    return _status("VmHWM") - before


def _limit(room_bytes: int, function: Function, arguments: tuple[object, ...]) -> int:
    limit = _status("VmSize") + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    function(*arguments)
    return 0


def _status(field: str) -> int:
    """A size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
