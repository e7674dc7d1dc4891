"""Threads that never keep a process alive, and what they carry out; of no use to a fork of their process."""

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
    """Work was given to threads that were told to end, or that cannot be started."""


class Stopped(RuntimeError):
    """Nobody wants the result any more."""


class Forked(RuntimeError):
    """What one process opened is used in a fork of it, which has neither its threads nor its memory."""


class ForkGuard:
    """The process that opened something, and what that is called in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `Forked` in a fork: before it takes a lock that a thread of its parent may have held."""
        if not self.is_here:
            raise Forked(
                f"{self._what} was opened in process {self._pid}, and this is process {os.getpid()}, forked "
                "since: open one in each process, after the fork"
            )


class Workers:
    """Up to `count` daemon threads that take jobs in order, urgent ones first. Thread-safe.

    A thread is started when there is a job that no other is free for. (`concurrent.futures` joins its threads
    at exit: one that hangs in a dead mount would hang the process.)

    Attributes:
        count: threads, at most.
        name: of each of them, with a number.
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
        """Jobs that no thread has taken yet."""
        return len(self._urgent) + len(self._jobs)

    def start(self, *jobs: Callable[[], None], urgent: bool = False) -> None:
        """Have `jobs` run; they must not raise.

        Raises:
            Closed: `close` was called, or there is no thread and none can be started.
            Forked: this is another process.
        """
        self._fork_guard.check()
        with self._changed:
            if self._closed:
                raise Closed("these threads were told to end")
            self._grow(self.waiting + len(jobs) - self._idle)
            (self._urgent if urgent else self._jobs).extend(jobs)
            self._changed.notify(len(jobs))

    def submit(self, function: Callable[[], T], urgent: bool = False) -> Future[T]:
        """Have `function` run, unless the future is cancelled before; what it returns or raises is in it."""
        future: Future[T] = Future()
        self.start(partial(_carry_out, function, future), urgent=urgent)
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

    def _grow(self, missing: int) -> None:
        """Start up to `missing` more threads. With one or more running, less will do."""
        for _ in range(min(missing, self.count - len(self._threads))):
            name = f"{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process has as many as it may
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
            del job  # or an idle thread would keep what it was about
            with self._changed:
                self._idle += 1


def submit(function: Callable[[], T], name: str) -> Future[T]:
    """Run `function` in a new daemon thread of that name; the future has what it returns or raises.

    Raises:
        Closed: no thread can be started.
    """
    future: Future[T] = Future()
    try:
        threading.Thread(target=_carry_out, args=(function, future), name=name, daemon=True).start()
    except RuntimeError as error:  # the process has as many as it may
        raise Closed(f"{name}: {error}") from error
    return future


def within(timeout_s: float, function: Callable[[], T], name: str) -> T:
    """Return what `function` does, or raise, within `timeout_s` seconds; a late one goes on in its thread.

    Raises:
        TimeoutError: it is late.
        Closed: as `submit`.
    """
    return submit(function, name).result(timeout_s)


class Transfer(Future[T]):
    """The future result of a load, a store or a prefetch.

    While it is under way the engine's pages are in use: `cancel` asks it to stop, and the future completes,
    soon, with what was moved by then. Only a transfer that had not begun becomes cancelled.

    Attributes:
        pages: held while a store reads the engine's pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stop = threading.Event()
        self.pages = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    @property
    def stopped(self) -> bool:
        """Whether someone asked it to stop."""
        return self._stop.is_set()

    def cancel(self) -> bool:
        """Ask it to stop; True if it had not begun, and so moves nothing."""
        self._stop.set()
        self._wake()
        return super().cancel()

    def release_pages(self) -> None:
        """Have a store read the engine's pages no more: they may change when this returns.

        Waits for a copy that is under way, never for a tier or a slot. What was copied is still stored.
        """
        self.cancel()
        with self.pages:
            pass

    def when_stopped(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when someone asks it to stop; at once if someone has. Replaces the last one."""
        self._wake = wake
        if self._stop.is_set():
            wake()

    @staticmethod
    def start(workers: Workers, move: Callable[[Transfer[T]], T], urgent: bool = False) -> Transfer[T]:
        """Have one of `workers` carry out `move`, which looks at `stopped` now and then: see `start`."""
        transfer: Transfer[T] = Transfer()
        workers.start(partial(_carry_out, partial(move, transfer), transfer), urgent=urgent)
        return transfer


def _carry_out(function: Callable[[], T], future: Future[T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
