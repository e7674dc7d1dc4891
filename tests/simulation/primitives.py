"""What `threading` and `time` are to the product while it is simulated."""

from __future__ import annotations

import inspect
import linecache
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulation.scheduler import Busy, Scheduler, Task

_MADE = re.compile(r"(\w+)\s*(?::[^=]*)?=[^=]")


class SimulatedLock:
    """`threading.Lock`; whoever comes first after a release has it, as there. `owner`: who has it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.owner: Task | None = None
        self._waiters: list[Task] = []
        self._name = name_of_what_is_made(scheduler)

    def __str__(self) -> str:
        return self._name if self.owner is None else f"{self._name}, which {self.owner.name} has"

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.pause()
        until = None if timeout < 0 else scheduler.now + timeout
        while self.owner is not None:
            if scheduler.observing:
                raise Busy
            if not blocking:
                return False
            self._waiters.append(scheduler.current)
            left = None if until is None else until - scheduler.now
            woken = scheduler.block(self, left)
            if not woken:
                self._waiters.remove(scheduler.current)
                return False
        self.owner = scheduler.current
        return True

    def release(self) -> None:
        if self.owner is None:
            raise RuntimeError("release unlocked lock")
        self.owner = None
        if self._waiters:
            self.wake_waiters()
        self._scheduler.pause()

    def locked(self) -> bool:
        return self.owner is not None

    def wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._scheduler.wake(task)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock(SimulatedLock):
    """`threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.owner is not self._scheduler.current:
            self._scheduler.pause()
            if self.owner is not None and not super().acquire(blocking, timeout):
                return False
            self.owner = self._scheduler.current
        self._count += 1
        return True

    def release(self) -> None:
        if self.owner is not self._scheduler.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self.owner = None
            if self._waiters:
                self.wake_waiters()
            self._scheduler.pause()

    def abort(self) -> int:
        """Release it wholly, without a pause; how often it was held."""
        count, self._count, self.owner = self._count, 0, None
        self.wake_waiters()
        return count

    def take_back(self, count: int) -> None:
        self.acquire()
        self._count = count


class SimulatedCondition:
    """`threading.Condition`: wakes in the order of the waits, and who is late may take a notification."""

    def __init__(self, scheduler: Scheduler, lock: SimulatedRLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = SimulatedRLock(scheduler) if lock is None else lock
        self._name = name_of_what_is_made(scheduler)
        self._waiters: deque[Task] = deque()

    def __str__(self) -> str:
        return f"news of {self._name}"

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        if self._lock.owner is not me:
            raise RuntimeError("cannot wait on un-acquired lock")
        self._waiters.append(me)
        count = self._lock.abort()
        try:
            woken = scheduler.block(self, timeout)
            if not woken and me in self._waiters:
                self._waiters.remove(me)
        finally:
            self._lock.take_back(count)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = self._scheduler
        until = None
        result = predicate()
        while not result:
            if timeout is None:
                self.wait()
            else:
                until = scheduler.now + timeout if until is None else until
                left = until - scheduler.now
                if left <= 0:
                    break
                self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        if self._lock.owner is not self._scheduler.current:
            raise RuntimeError("cannot notify on un-acquired lock")
        while self._waiters and n > 0:
            self._scheduler.wake(self._waiters.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class SimulatedEvent:
    """`threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiters: list[Task] = []
        self._name = name_of_what_is_made(scheduler)

    def __str__(self) -> str:
        return f"event {self._name}"

    def is_set(self) -> bool:
        self._scheduler.pause()
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._scheduler.wake(task)
        self._scheduler.pause()

    def clear(self) -> None:
        self._set = False
        self._scheduler.pause()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.pause()
        if not self._set:
            me = scheduler.current
            self._waiters.append(me)
            woken = scheduler.block(self, timeout)
            if not woken and me in self._waiters:
                self._waiters.remove(me)
            return woken or self._set
        return True


class SimulatedThread:
    """`threading.Thread`; one that cannot be started says so as the real one does."""

    def __init__(
        self,
        threads: SimulatedThreading,
        target: Callable[..., object],
        name: str = "a thread",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._threads = threads
        self._run = lambda: target(*args, **(kwargs or {}))
        self._task: Task | None = None
        self.name = name
        self.daemon = bool(daemon)

    def start(self) -> None:
        scheduler = self._threads.scheduler
        scheduler.pause()
        if self._threads.refuses():
            scheduler.say(f"cannot start {self.name}")
            raise RuntimeError("can't start new thread")
        self._task = scheduler.spawn(self.name, self._run)
        self._threads.by_task[self._task] = self
        scheduler.pause()

    def join(self, timeout: float | None = None) -> None:
        if self._task is None:
            raise RuntimeError("cannot join thread before it is started")
        scheduler = self._threads.scheduler
        until = None if timeout is None else scheduler.now + timeout
        while not (self._task.done or self._task.killed):
            self._task.joined.append(scheduler.current)
            left = None if until is None else until - scheduler.now
            if not scheduler.block(f"the end of {self.name}", left):
                self._task.joined.remove(scheduler.current)
                return

    def is_alive(self) -> bool:
        return self._task is not None and not (self._task.done or self._task.killed)

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)


class SimulatedLocal:
    """`threading.local`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.__dict__["_kept"] = (scheduler, {})

    def __getattr__(self, name: str) -> Any:
        scheduler, values = self.__dict__["_kept"]
        try:
            return values[scheduler.current, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        scheduler, values = self.__dict__["_kept"]
        values[scheduler.current, name] = value


class SimulatedThreading:
    """The module `threading`; threads that are none of the simulation's have the real one's locks.

    Attributes:
        refuses: whether the thread that is about to be started cannot be.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.by_task: dict[Task, SimulatedThread] = {}
        self.refuses: Callable[[], bool] = lambda: False

    def Lock(self) -> Any:
        return threading.Lock() if self.scheduler.is_strange() else SimulatedLock(self.scheduler)

    def RLock(self) -> Any:
        return threading.RLock() if self.scheduler.is_strange() else SimulatedRLock(self.scheduler)

    def Condition(self, lock: Any = None) -> Any:
        strange = self.scheduler.is_strange()
        return threading.Condition(lock) if strange else SimulatedCondition(self.scheduler, lock)

    def Event(self) -> Any:
        return threading.Event() if self.scheduler.is_strange() else SimulatedEvent(self.scheduler)

    def Thread(self, **arguments: Any) -> Any:
        strange = self.scheduler.is_strange()
        return threading.Thread(**arguments) if strange else SimulatedThread(self, **arguments)

    def local(self) -> SimulatedLocal:
        return SimulatedLocal(self.scheduler)

    def current_thread(self) -> Any:
        if self.scheduler.is_strange():
            return threading.current_thread()
        return self.by_task.get(self.scheduler.current, self.scheduler.current)


class SimulatedTime:
    """The module `time`.

    Attributes:
        ahead_s: of the wall clock, which somebody may set, of the monotonic one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.ahead_s = 1.7e9

    def monotonic(self) -> float:
        return time.monotonic() if self._scheduler.is_strange() else self._scheduler.now

    perf_counter = monotonic

    def time(self) -> float:
        return time.time() if self._scheduler.is_strange() else self._scheduler.now + self.ahead_s

    def sleep(self, seconds: float) -> None:
        (time if self._scheduler.is_strange() else self._scheduler).sleep(seconds)


def name_of_what_is_made(scheduler: Scheduler) -> str:
    """What the line of the product that makes something calls it, where a trace is kept."""
    if scheduler.trace is None:
        return "a lock"
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    made = _MADE.search(line)
    owner = frame.f_locals.get("self")
    kind = "" if owner is None else f"{type(owner).__name__}."
    return kind + (made[1] if made else frame.f_code.co_name)
