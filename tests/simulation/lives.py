"""Seeds: one life each, of a scenario, and what came of it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from simulation.cache_life import cache_life
from simulation.folder_life import folder_life
from simulation.handoff_life import handoff_life
from simulation.router_life import router_life
from simulation.scheduler import Carriers, Scheduler, Violation
from simulation.world import World

SCENARIOS: dict[str, Callable[[World], Callable[[], None]]] = {
    "cache": cache_life,
    "folder": folder_life,
    "handoff": handoff_life,
    "router": router_life,
}
BUDGET = {"cache": 3000, "folder": 5400, "handoff": 1200, "router": 400}
"""Seeds of each in CI, within which a defect has to be found."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that found something, as people read it."""

    scenario: str
    seed: int
    thread: str
    error: BaseException

    def __str__(self) -> str:
        what = str(self.error)
        if not isinstance(self.error, Violation):
            what = "".join(traceback.format_exception(self.error))
        return f"{self.scenario}, seed {self.seed}: {self.thread}: {what}"


def live(scenario: str, seed: int, carriers: Carriers, *, traced: bool = False) -> Scheduler:
    """The simulation of a seed, at its end."""
    scheduler = Scheduler(f"{scenario} {seed}", carriers, traced=traced)
    world = World(scheduler)
    main = SCENARIOS[scenario](world)
    with world.installed(), uncollected():
        scheduler.run(main)
    return scheduler


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: what others left may start tasks and threads when it ends."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def failure_of(scenario: str, seed: int, scheduler: Scheduler) -> Failure | None:
    """What a simulation found."""
    if scheduler.failure is None:
        return None
    return Failure(scenario, seed, *scheduler.failure)


def story(scheduler: Scheduler) -> str:
    """The trace, a line for each thing that a thread did."""
    width = max((len(task.name) for task in scheduler.tasks), default=0)
    return "\n".join(
        f"{now - 1000.0:10.3f} s  {thread:{width}}  {what}" for now, thread, what in scheduler.trace or ()
    )
