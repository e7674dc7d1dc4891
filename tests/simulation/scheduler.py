"""One thread at a time, chosen by a seed, and a clock that stands still while anyone can go on.

A simulated thread is a real one that waits for its turn. It gives others a turn wherever it calls `pause`, as
every lock, event and condition of `simulation.primitives` does, and in half of the seeds after any line of
the product. So a seed is one interleaving, which it makes again whenever it is run.

How the next thread is chosen, the seed decides as well: now and then at random, or by priorities that change
at a few random steps, which finds a defect that needs d such changes with a known probability (Burckhardt et
al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import traceback
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from types import FrameType
from typing import Any

OWN = str(__file__).rpartition("/")[0]

MOST_STEPS = 400_000
"""A simulation with more turns than that does not end."""
WATCHDOG_S = 120.0
"""Of real time: a simulated thread waits for something that is not simulated."""
FINE = 0.3
"""Seeds that interrupt threads after lines: they find what lacks a lock, and take longer."""
START_S = 1000.0
"""What the clock says at first."""


class Over(BaseException):
    """The simulation has ended: unwinds the threads that are left."""


class Violation(AssertionError):
    """Something does not hold that should."""


class Busy(BaseException):
    """An observer needs a lock that a thread has: what it protects may be inconsistent."""


class Carrier:
    """A thread of the operating system, that carries simulated ones, one after the other."""

    def __init__(self) -> None:
        self.turn = allocate_lock()
        self.turn.acquire()
        self.task: Task | None = None
        self.ident = start_new_thread(self._carry, ())

    def _carry(self) -> None:
        while True:
            self.turn.acquire()
            task, self.task = self.task, None
            assert task is not None
            task.scheduler.carry(task)


class Carriers:
    """Idle ones, that many simulations use after each other."""

    def __init__(self) -> None:
        self.idle: list[Carrier] = []
        self._idents: set[int] = set()

    def get(self) -> Carrier:
        """Find one for a simulated thread; it comes back to `idle` by itself."""
        if self.idle:
            return self.idle.pop()
        carrier = Carrier()
        self._idents.add(carrier.ident)
        return carrier

    def include(self, ident: int) -> bool:
        """Tell whether a thread of the operating system carries simulated ones."""
        return ident in self._idents


class Task:
    """A simulated thread.

    Attributes:
        waits_for: what, while it cannot go on.
        woken: whether what it waited for came; otherwise it was the deadline.
        waits: how often it has waited: a deadline is of one wait.
        process: which it is of, the one of the thread that started it; None where there is but one.
        killed: it never has a turn again; what it holds, it holds for ever.
    """

    __slots__ = (
        *("carrier", "done", "joined", "killed", "name", "priority", "process", "run", "scheduler", "waits"),
        *("waits_for", "woken"),
    )

    def __init__(self, scheduler: Scheduler, name: str, run: Callable[[], object], priority: float) -> None:
        self.scheduler = scheduler
        self.name = name
        self.run = run
        self.priority = priority
        self.carrier: Carrier | None = None
        self.waits_for: object = None
        self.woken = False
        self.waits = 0
        self.process: object = None
        self.killed = False
        self.done = False
        self.joined: list[Task] = []


class Scheduler:
    """The simulated threads of one seed.

    Args:
        traced: whether to keep a trace, which changes nothing else.
        fine: whether threads are interrupted after lines, too; None: in `FINE` of the seeds.

    Attributes:
        random: for whatever the seed decides.
        now: the clock, in seconds.
        current: whose turn it is.
        trace: (time, thread, what it did), where one is kept.
        failure: why the simulation ended early, and of which thread.
        observe: called at each change of turns, as if by a further thread; it must not wait.
        observing: whether it is being called: nobody else has a turn, and a lock that is taken is `Busy`.
    """

    def __init__(
        self, seed: object, carriers: Carriers, *, traced: bool = False, fine: bool | None = None
    ) -> None:
        self.random = Random(str(seed))
        self.now = START_S
        self.trace: list[tuple[float, str, str]] | None = [] if traced else None
        self.failure: tuple[str, BaseException] | None = None
        self.observe: Callable[[], None] | None = None
        self.observing = False
        self.tasks: list[Task] = []
        self.steps = 0
        self._carriers = carriers
        self._runnable: list[Task] = []
        self._deadlines: list[tuple[float, int, Task, int]] = []
        self._put = 0  # deadlines so far
        self._over = False
        self._ended = allocate_lock()
        self._ended.acquire()
        self._next = 0  # step of the next change of turns
        self.fine = self.random.random() < FINE if fine is None else fine
        self._by_priority = self.random.random() < 0.5
        self._mean = self.random.choice((1, 3, 10, 30)) * (8 if self.fine else 1)
        horizon = self.random.choice((30, 300, 1000, 3000)) * (8 if self.fine else 1)
        changes = self.random.randint(1, 4)
        self._changes = sorted(self.random.randrange(horizon) for _ in range(changes))
        self._lowest = 0.0
        self.haste = 0.0  # how often a deadline comes before others have done what they can
        self._product: dict[str, bool] = {}
        self.current = Task(self, "nobody", lambda: None, -math.inf)
        self._plan_next()

    # what a simulation is made of

    def run(self, main: Callable[[], object]) -> None:
        """Run `main` as the first thread, to its end. The others end then, too: wherever they are.

        Raises:
            TimeoutError: it waits for what is not simulated.
        """
        self.current = self.spawn("main", main)
        self._resume(self.current)
        if not self._ended.acquire(timeout=WATCHDOG_S):
            raise TimeoutError(f"{self.current.name} waits outside of the simulation:\n{self.positions()}")

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        """A thread more, that can go on at once."""
        task = Task(self, name, run, self.random.random())
        task.process = self.current.process
        self.tasks.append(task)
        self._runnable.append(task)
        self._hurry(task)
        return task

    def is_strange(self) -> bool:
        """Tell whether a thread calls that is none of the simulation's: one that an earlier test left."""
        return bool(self.tasks) and not self._carriers.include(get_ident())

    def pause(self) -> None:
        """Let others have a turn, if it is time."""
        self.steps += 1
        if self.steps >= self._next:
            self._change()

    def block(self, what: object, timeout: float | None = None) -> bool:
        """Wait until somebody calls `wake`; False: `timeout` seconds are over."""
        me = self.current
        if self._over:
            raise Over
        me.waits_for, me.woken, me.waits = what, False, me.waits + 1
        self._runnable.remove(me)
        if timeout is not None:
            self._put += 1
            heappush(self._deadlines, (self.now + max(0.0, timeout), self._put, me, me.waits))
        if self.trace is not None:
            until = "" if timeout is None else f", for {timeout:.3f} s at most"
            self.say(f"waits for {what}{until}{self._where()}")
        self._turn_to(self._choose())
        me.waits_for = None
        if self.trace is not None:
            self.say(f"goes on{'' if me.woken else ': the time is over'}")
        return me.woken

    def wake(self, task: Task) -> None:
        """Have a thread that waits go on."""
        if task.waits_for is not None and not task.woken and not task.killed:
            task.woken = True
            if task not in self._runnable:
                self._runnable.append(task)
                self._hurry(task)

    def kill(self, process: object) -> None:
        """Have the threads of a process stop where they are; one that kills its own has no further turn."""
        for task in self.tasks:
            if task.process is process and not task.done:
                task.killed = True
                if task in self._runnable:
                    self._runnable.remove(task)
                for other in task.joined:
                    self.wake(other)
        if self.current.killed:
            self._turn_to(self._choose())

    def sleep(self, seconds: float) -> None:
        """Have the current thread go on so much later."""
        if seconds > 0:
            self.block("the time", seconds)
        else:
            self.pause()

    def say(self, what: str) -> None:
        """Add to the trace."""
        if self.trace is not None:
            self.trace.append((self.now, self.current.name, what))

    def fail(self, error: BaseException) -> None:
        """End the simulation, for this reason. Raises `Over`."""
        if self.failure is None and not self._over:
            self.failure = self.current.name, error
        self._end()
        raise Over

    def check(self, holds: object, why: str, *values: object) -> None:
        """End the simulation unless `holds`."""
        if not holds:
            self.fail(Violation(why.format(*values)))

    def check_unlocked(self, check: Callable[[], object]) -> None:
        """End the simulation if an observer's `check` finds a fault; skip it where it finds a lock taken."""
        try:
            check()
        except Busy:
            pass
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            self.fail(Violation(str(error) or line))

    def positions(self) -> str:
        """Where every thread is, and what it waits for."""
        frames = sys._current_frames()
        lines = []
        for task in self.tasks:
            if task.done or task.killed:
                continue
            frame = None if task.carrier is None else frames.get(task.carrier.ident)
            where = " < ".join(places(frame, 4)) or "not begun"
            lines.append(f"  {task.name}: waits for {task.waits_for}: {where}")
        return "\n".join(lines)

    # turns

    def carry(self, task: Task) -> None:
        """Run a thread from its beginning to its end, by the carrier that it has."""
        if self.fine:
            sys.settrace(self._enter)
        try:
            if not self._over:
                task.run()
        except Over:
            pass
        except BaseException as error:
            if self.failure is None and not self._over:  # unwinding breaks into what is locked
                self.failure = task.name, error
        finally:
            sys.settrace(None)
        task.done = True
        for other in task.joined:
            self.wake(other)
        if self.failure is not None or task is self.tasks[0]:
            self._end()
        if task in self._runnable:
            self._runnable.remove(task)
        assert task.carrier is not None
        self._carriers.idle.append(task.carrier)
        try:
            following = self._choose()
        except Over:
            self._ended.release()
            return
        self.current = following
        self._resume(following)

    def _end(self) -> None:
        """Have every thread unwind, each in its turn."""
        self._over = True
        self._next = 0

    def _change(self) -> None:
        """A step at which the turn may pass on."""
        if self._over:
            raise Over
        if self.steps > MOST_STEPS:
            self.fail(Violation(f"no end after {self.steps} steps:\n{self.positions()}"))
        if self._by_priority and self._changes and self.steps >= self._changes[0]:
            self._changes.pop(0)
            self._lowest -= 1.0
            self.current.priority = self._lowest
        self._plan_next()
        self._turn_to(self._choose())

    def _plan_next(self) -> None:
        if self._by_priority:
            self._next = self._changes[0] if self._changes else MOST_STEPS + 1
        else:
            self._next = self.steps + 1 + int(self.random.expovariate(1 / self._mean))

    def _hurry(self, task: Task) -> None:
        """A thread can go on: by priorities it may have to do so at the next step."""
        if self._by_priority and task.priority > self.current.priority and not self._over:
            self._next = self.steps + 1

    def _choose(self) -> Task:
        """Who goes on. Raises `Over` where nobody is left."""
        if self._over:
            left = next((task for task in self.tasks if not task.done and task.carrier is not None), None)
            if left is None:
                raise Over
            return left
        if self.haste and self.random.random() < self.haste:
            self._advance()
        while not self._runnable:
            if not self._advance():
                self.failure = self.current.name, Violation(f"nobody can go on:\n{self.positions()}")
                self._end()
                return self._choose()
        if self._by_priority:
            return max(self._runnable, key=lambda task: task.priority)
        return self._runnable[self.random.randrange(len(self._runnable))]

    def _advance(self) -> bool:
        """Turn the clock to the next deadline; whether there is one."""
        while self._deadlines:
            due, _, task, waits = heappop(self._deadlines)
            if task.waits != waits or task.waits_for is None or task.woken or task in self._runnable:
                continue
            if task.killed:
                continue
            self.now = max(self.now, due)
            self._runnable.append(task)
            self._hurry(task)
            while self._deadlines and self._deadlines[0][0] <= self.now:
                _, _, other, number = heappop(self._deadlines)
                waiting = other.waits == number and other.waits_for is not None and not other.woken
                if waiting and not other.killed and other not in self._runnable:
                    self._runnable.append(other)
            return True
        return False

    def _turn_to(self, following: Task) -> None:
        me = self.current
        if following is me and not self._over:
            return
        if self.observe is not None and not self._over:
            self._observe(self.observe)
        if self.trace is not None and me.waits_for is None and not self._over:
            self.say(f"is interrupted{self._where()}")
        if following is not me:
            self.current = following
            self._resume(following)
            assert me.carrier is not None
            me.carrier.turn.acquire()
        if self._over:
            raise Over

    def _observe(self, observe: Callable[[], None]) -> None:
        """Have it called: a thread of its own, so that a lock of the current one is not its own."""
        me, steps, following = self.current, self.steps, self._next
        self.current, self.observing, self._next = Task(self, me.name, me.run, 0.0), True, sys.maxsize
        try:
            observe()
        finally:
            self.current, self.observing = me, False
            if not self._over:
                self.steps, self._next = steps, following

    def _resume(self, task: Task) -> None:
        if task.carrier is None:
            task.carrier = self._carriers.get()
            task.carrier.task = task
        task.carrier.turn.release()

    # lines of the product

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        product = self._product.get(file)
        if product is None:
            product = self._product[file] = is_product(file)
        return self._line if product else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.steps += 1
            if self.steps >= self._next:
                self._change()
        return self._line

    def _where(self) -> str:
        found = places(inspect.currentframe(), 2)
        return f", in {' < '.join(found)}" if found else ""


PURE = (
    "/format/",
    "/eviction/",
    "/transfer/plan.py",
    "/transfer/policy.py",
    "/transfer/counters.py",
    "/protocol/",
)


def is_product(file: str) -> bool:
    """Whether lines of this file are interrupted: what is pure shares nothing that is not locked outside."""
    return "/kvkit/" in file and "/tests/" not in file and not any(part in file for part in PURE)


def places(frame: FrameType | None, most: int) -> list[str]:
    """Function and line of the innermost frames that are none of the simulation's own primitives."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        inside = code.co_filename.startswith(OWN) and code.co_filename.endswith(
            ("scheduler.py", "primitives.py")
        )
        if not inside and code.co_filename != threading.__file__:
            file = code.co_filename.rpartition("/")[2]
            found.append(f"{code.co_qualname} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return found
