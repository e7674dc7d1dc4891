"""Threads that never keep a process alive: what hangs in one of them is left behind at exit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Job = Callable[[], None]


class Closed(RuntimeError):
    """Work was given to threads that were told to end."""


class Stopped(RuntimeError):
    """Nobody wants the result any more."""


class Workers:
    """`count` daemon threads that take jobs in order, urgent ones first. Thread-safe.

    (`concurrent.futures` joins its threads at exit: one that hangs in a dead mount would hang the process.)
    """

    def __init__(self, count: int, name: str) -> None:
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        with self._changed:
            return len(self._urgent) + len(self._jobs)

    def start(self, *jobs: Job, urgent: bool = False) -> None:
        """Have `jobs` run; they must not raise.

        Raises:
            Closed: `close` was called.
        """
        with self._changed:
            if self._closed:
                raise Closed("these threads were told to end")
            (self._urgent if urgent else self._jobs).extend(jobs)
            self._changed.notify(len(jobs))

    def submit(self, function: Callable[[], T], urgent: bool = False) -> Future[T]:
        """Have `function` run, unless the future is cancelled before; what it returns or raises is in it."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.start(job, urgent=urgent)
        return future

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was given, end the threads; whether all ended within `timeout_s` (None: wait)."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._urgent and not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                job = (self._urgent or self._jobs).popleft()
            job()
