"""Threads that never keep a process alive: what hangs in one of them is left behind at exit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Job = Callable[[], None]


class Closed(RuntimeError):
    """Work was given to threads that were told to end."""


class Workers:
    """`count` daemon threads that take jobs in order. Thread-safe.

    (`concurrent.futures` joins its threads at exit: one that hangs in a dead mount would hang the process.)
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, job: Job) -> None:
        """Have `job` run; it must not raise.

        Raises:
            Closed: `close` was called.
        """
        with self._lock:
            if self._closed:
                raise Closed("these threads were told to end")
            self._jobs.put(job)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` run; what it returns or raises is in the future."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.start(job)
        return future

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was given, end the threads; whether all ended within `timeout_s` (None: wait)."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
