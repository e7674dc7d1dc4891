"""Daemon threads and the jobs they run; unusable in a fork of their process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Closed(RuntimeError):
    """A job was given to closed workers, or no thread can be started."""


class Stopped(RuntimeError):
    """A wait or job was stopped, because its result is no longer needed."""


class Forked(RuntimeError):
    """An object is used in a fork of its process, which has neither its threads nor its memory."""


class ForkGuard:
    """The process that opened an object, and the object's name in errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True if this is the process that opened the object."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `Forked` in a fork. Call before taking locks, which the parent's threads may have held."""
        if os.getpid() != self._pid:
            raise Forked(
                f"{self._name} was opened in process {self._pid}, and this is process {os.getpid()}, forked "
                "since: open one in each process, after the fork"
            )


class Workers:
    """Up to `count` daemon threads that run jobs in order, urgent ones first. Thread-safe.

    A thread is started when a job finds no idle thread. (`concurrent.futures` joins its threads at exit, so
    one that hangs in a dead mount would hang the process.)

    Attributes:
        count: maximum number of threads.
        name: prefix of the threads' names, followed by a number.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.name = name
        self._fork_guard = ForkGuard(f"the pool of threads {name!r}")
        self._urgent: deque[Callable[[], None]] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._idle = 0
        self._threads: list[threading.Thread] = []

    @property
    def waiting(self) -> int:
        """Number of jobs that no thread has taken yet."""
        return len(self._urgent) + len(self._jobs)

    def start(self, *jobs: Callable[[], None], urgent: bool = False) -> None:
        """Run `jobs`, which must not raise, in the threads.

        Raises:
            Closed: `close` was called, or no thread is running and none can be started.
            Forked: this is a fork.
        """
        self._fork_guard.check()
        with self._changed:
            if self._closed:
                raise Closed("these threads are closed")
            self._start_threads(self.waiting + len(jobs) - self._idle)
            (self._urgent if urgent else self._jobs).extend(jobs)
            self._changed.notify(len(jobs))

    def submit(self, function: Callable[[], T], urgent: bool = False) -> Future[T]:
        """Run `function` in a thread; the future has its result or exception. `cancel` prevents its start."""
        future: Future[T] = Future()
        self.start(partial(_complete, function, future), urgent=urgent)
        return future

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish queued jobs and end the threads; return whether all ended in `timeout_s` (None: wait)."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_threads(self, missing: int) -> None:
        """Start up to `missing` more threads; fewer are enough if at least one is running."""
        for _ in range(min(missing, self.count - len(self._threads))):
            name = f"{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process's thread limit
                if not self._threads:
                    raise Closed(f"{name}: {error}") from error
                return
            self._threads.append(thread)
            self._idle += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.waiting)
                if not self.waiting:
                    return
                self._idle -= 1
                job = (self._urgent or self._jobs).popleft()
            job()
            del job  # or an idle thread would keep the job's objects alive
            with self._changed:
                self._idle += 1


def submit(function: Callable[[], T], name: str) -> Future[T]:
    """Run `function` in a new daemon thread of this name; the future has its result or exception.
    Raises Closed if no thread can be started."""
    future: Future[T] = Future()
    try:
        threading.Thread(target=_complete, args=(function, future), name=name, daemon=True).start()
    except RuntimeError as error:  # the process's thread limit
        raise Closed(f"{name}: {error}") from error
    return future


def within(timeout_s: float, function: Callable[[], T], name: str) -> T:
    """Run `function` in a new thread, and return its result or raise its exception within `timeout_s` s.

    A late call continues in its thread.

    Raises:
        TimeoutError: the call is late.
        Closed: see `submit`.
    """
    return submit(function, name).result(timeout_s)


class Transfer(Future[T]):
    """The future result of a load, a store or a prefetch.

    The engine's pages are in use until it completes. `cancel` asks it to stop; the future then completes
    soon, with what was moved by then. Only a transfer that has not begun is marked as cancelled.

    Attributes:
        pages: lock, held while a store reads the engine's pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stop = threading.Event()
        self.pages = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    @property
    def stopped(self) -> bool:
        """True if `cancel` was called."""
        return self._stop.is_set()

    def cancel(self) -> bool:
        """Ask the transfer to stop; return True if it had not begun, and so moves nothing."""
        self._stop.set()
        self._wake()
        return super().cancel()

    def release_pages(self) -> None:
        """Stop reading the engine's pages; they may change when this returns.

        Waits for a copy in progress, never for a tier or a slot. Chunks already copied are still stored.
        """
        self.cancel()
        with self.pages:
            pass

    def when_stopped(self, wake: Callable[[], None]) -> None:
        """Call `wake` on `cancel`, or at once if already cancelled. Replaces the previous `wake`."""
        self._wake = wake
        if self._stop.is_set():
            wake()

    @staticmethod
    def start(workers: Workers, move: Callable[[Transfer[T]], T], urgent: bool = False) -> Transfer[T]:
        """Run `move` in a thread of `workers`; it checks `stopped`. Raises the errors of `Workers.start`."""
        transfer: Transfer[T] = Transfer()
        workers.start(partial(_complete, partial(move, transfer), transfer), urgent=urgent)
        return transfer


def _complete(function: Callable[[], T], future: Future[T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
