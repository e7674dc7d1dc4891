"""Deadlines of transfers and pulls, kept by one thread of each owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadlines:
    """Thread that calls `expire` after every change and at every deadline. Thread-safe.

    Args:
        name: name of the thread.
        expire: takes the monotonic time, ends what is past its deadline, and returns the next deadline, None
            if there is none.
    """

    def __init__(self, name: str, expire: Callable[[float], float | None]) -> None:
        self._expire = expire
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Call `expire` soon: the next deadline may be earlier now."""
        if threading.current_thread() is not self._thread:  # `expire` returns the deadline after its changes
            self._changed.set()

    def close(self, timeout_s: float) -> None:
        """Stop calling `expire`, and wait at most `timeout_s` seconds for the thread."""
        self._closed = True
        self._changed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        deadline: float | None = None
        while True:
            self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._changed.clear()  # before `expire`: a later change ends the next wait
            if self._closed:
                return
            deadline = self._expire(time.monotonic())
