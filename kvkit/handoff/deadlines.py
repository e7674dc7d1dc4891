"""A thread that ends what is past its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadlines:
    """Calls `expire` when something changed or is due, from a thread of its own. Thread-safe.

    Args:
        name: of the thread.
        expire: given the time on the monotonic clock, ends what is past its deadline; returns the next one,
            None where there is none.
    """

    def __init__(self, name: str, expire: Callable[[float], float | None]) -> None:
        self._expire = expire
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Look again: a deadline may be nearer than those before."""
        if threading.current_thread() is not self._thread:  # what `expire` changes is in what it returns
            self._changed.set()

    def close(self, timeout_s: float) -> None:
        """Expire nothing more; wait for the thread no longer than `timeout_s`."""
        self._closed = True
        self._changed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        deadline: float | None = None
        while True:
            self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._changed.clear()  # before it looks: what comes after that is heard at the next wait
            if self._closed:
                return
            deadline = self._expire(time.monotonic())
