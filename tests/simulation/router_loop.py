"""An asyncio event loop whose clock and whose order of tasks are the simulation's.

asyncio runs callbacks in the order in which they became ready, and what becomes ready when is up to the
network. So each task has its steps in their order here, callbacks that are no task's have theirs, and
which of them goes on first the seed says. The clock stands still while any of them can go on.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.scheduler import MOST_STEPS, Over, Scheduler, Violation

_TURNS = 50
"""Within which a task that is cancelled ends."""


class NumberedTask(asyncio.Task[Any]):
    """`number`: in the order in which they began, which is the same in each run of a seed."""

    number = 0


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs in the thread that has the turn.

    Attributes:
        shuffles: how often another task than the first may go on.
        haste: how often a deadline comes before others have done what they can.
        hastened_s: seconds by which the clock was turned so.
        left: tasks that have not ended, by number.
    """

    def __init__(self, scheduler: Scheduler, shuffles: float, haste: float) -> None:
        super().__init__()
        self.scheduler, self.shuffles, self.haste = scheduler, shuffles, haste
        self.hastened_s = 0.0
        self.left: dict[int, NumberedTask] = {}
        self._unwinds = False
        self._tasks = 0
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self.scheduler.now

    def fair_time(self) -> float:
        """Return the time less `hastened_s`: no wait takes more of it than its deadline allows."""
        return self.scheduler.now - self.hastened_s

    def _new_task(self, loop: Any, coro: Coroutine[Any, Any, Any], **more: Any) -> NumberedTask:
        task = NumberedTask(coro, loop=self, **more)
        self._tasks += 1
        task.number = self._tasks
        self.left[task.number] = task
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: Any) -> None:
        del self.left[task.number]

    def _failed(self, loop: Any, context: dict[str, Any]) -> None:
        """What escapes to the loop is a defect, and so is what nobody asks a task for."""
        error = context.get("exception")
        if not isinstance(error, Over):
            self.record(error or Violation(context["message"]))

    def record(self, error: BaseException) -> None:
        """End the simulation with this, as soon as the callback that has the turn has ended."""
        if self.scheduler.failure is None:
            self.scheduler.failure = self.who(), error

    def who(self) -> str:
        """The task that has the turn, by its name."""
        task = asyncio.current_task(self)
        return "the loop" if task is None else task.get_name()

    def say(self, what: str, *values: object) -> None:
        """Add to the trace."""
        if self.scheduler.trace is not None:
            self.scheduler.trace.append((self.scheduler.now, self.who(), what.format(*values)))

    def check(self, holds: object, why: str, *values: object) -> None:
        """End the simulation unless `holds`."""
        if not holds and not self._unwinds:
            self.record(Violation(why.format(*values)))
            raise Over

    def unwind(self) -> None:
        """Have the tasks end that a simulation which found something leaves."""
        self._unwinds = True
        asyncio._set_running_loop(self)
        try:
            for _ in range(_TURNS):
                for task in list(self.left.values()):
                    task.cancel()
                for _ in range(len(self._ready)):
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
        finally:
            asyncio._set_running_loop(None)

    def _run_once(self) -> None:
        """asyncio's, without waiting for what is outside: one callback."""
        scheduler = self.scheduler
        if scheduler.failure is not None and not self._unwinds:
            raise Over
        scheduler.steps += 1
        if scheduler.steps > MOST_STEPS // 4:
            self.record(Violation(f"no end after {scheduler.steps} steps"))
        if not self._ready or (self.haste and scheduler.random.random() < self.haste):
            self._advance()
        if not self._ready:
            names = ", ".join(task.get_name() for task in self.left.values())
            self.record(Violation(f"nobody can go on: {names}"))
            raise Over
        handle = self._choose()
        if not handle.cancelled():
            handle._run()

    def _choose(self) -> asyncio.Handle:
        """Which callback goes on. Ordered by tasks, whatever made them ready."""
        ready = self._ready
        if len(ready) == 1 or self.scheduler.random.random() >= self.shuffles:
            return ready.popleft()
        first: dict[int, asyncio.Handle] = {}
        for handle in ready:
            first.setdefault(_owner(handle._callback), handle)
        chosen = first[self.scheduler.random.choice(sorted(first))]
        ready.remove(chosen)
        return chosen

    def _advance(self) -> None:
        """Turn the clock to the next deadline."""
        due: list[asyncio.TimerHandle] = []
        waiting, before = self._scheduled, self.scheduler.now
        while waiting and (not due or waiting[0].when() <= self.scheduler.now):
            handle = heapq.heappop(waiting)
            handle._scheduled = False
            if handle.cancelled():
                self._timer_cancelled_count -= 1
                continue
            self.scheduler.now = max(self.scheduler.now, handle.when())
            due.append(handle)
        if self._ready:
            self.hastened_s += self.scheduler.now - before
        self._ready.extend(sorted(due, key=lambda handle: (handle.when(), _owner(handle._callback))))

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""


def _owner(callback: Callable[..., object] | None) -> int:
    """The number of the task whose step this is, or whose deadline; 0: nobody's."""
    owner: object = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Timeout):
        owner = owner._task
    return owner.number if isinstance(owner, NumberedTask) else 0
