"""Seeds of simulated interleavings find nothing, and find planted defects."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_sizes import NIGHTLY, nightly

pytest.importorskip("aiohttp")
pytest.importorskip("zmq")

from repository import ROOT, SUPPORT, TESTS

from kvkit.workers import Workers
from simulation import scheduler as scheduler_module
from simulation.lives import BUDGET, SCENARIOS, failure_of, live, story
from simulation.mutants import MUTANTS
from simulation.mutation import copied, find, plant
from simulation.primitives import SimulatedLock, SimulatedThreading
from simulation.router_clients import PROMPTS
from simulation.router_life import RouterLife
from simulation.router_loop import SimulatedLoop
from simulation.router_network import Exchange
from simulation.scheduler import Carriers, Scheduler, Violation
from simulation.world import World

SHARE = 1 if NIGHTLY else 15
"""CI has time for every so many seeds of the budget; `make nightly` for all."""
MENDED = {
    "cache": (30008811, 30009867, 41002994),
    "folder": (40000228,),
    "handoff": (30007331, 41007817),
    "router": (7000724, 8001577, 8002232, 9000343, 9001660, 9028158, 9044295, 41018617),
}
"""Seeds beyond the budgets that ended red once, by a fault of the product or of the simulation itself."""
SAMPLE = (
    "evicted records keep their slots",
    "the names of new folders are not synced",
    *nightly(
        "a flush does not hear of the last put",
        "what is queued when a link ends is told to nobody",
        "a client that leaves does not end its request to the engine",
    ),
)


@pytest.fixture(autouse=True)
def no_slot_is_lost() -> None:
    """Instead of that of all tests, whose locks would be of simulations that have ended: lives check it."""


@pytest.fixture(scope="module")
def carriers() -> Carriers:
    return Carriers()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_seed_finds_anything(scenario: str) -> None:
    count = BUDGET[scenario] // SHARE
    run = subprocess.run(
        [
            *(sys.executable, "-m", "simulation"),
            "--scenario",
            scenario,
            f"--seeds={count}",
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}:{SUPPORT}", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert f"{count} seeds" in run.stdout


@pytest.mark.parametrize(("scenario", "seed"), [(name, n) for name, seeds in MENDED.items() for n in seeds])
def test_a_seed_that_was_red_finds_nothing(scenario: str, seed: int, carriers: Carriers) -> None:
    assert failure_of(scenario, seed, live(scenario, seed, carriers)) is None


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_is_one_interleaving(scenario: str, carriers: Carriers) -> None:
    """Whatever ran before it, and whether or not a trace is kept."""
    seeds = range(12)
    first = {seed: live(scenario, seed, carriers) for seed in seeds}
    for seed in reversed(seeds):
        again = live(scenario, seed, carriers, traced=True)
        assert (again.steps, again.now) == (first[seed].steps, first[seed].now)
        assert story(again) == story(live(scenario, seed, carriers, traced=True))
    assert len({(life.steps, life.now) for life in first.values()}) == len(seeds)


def test_what_others_left_does_not_end_amid_a_life(
    carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def starts_a_task_at_its_end(loop: SimulatedLoop) -> None:
        try:
            await loop.create_future()
        finally:
            if not loop.is_closed():
                loop.create_task(asyncio.sleep(0))

    first, run_once, steps = live("router", 0, carriers), SimulatedLoop._run_once, itertools.count()

    def leave_garbage(loop: SimulatedLoop) -> None:
        """Which only the collector finds, and soon, if it runs."""
        if next(steps) == 100:
            coroutine = starts_a_task_at_its_end(loop)
            coroutine.send(None)
            cycle: list[object] = [coroutine]
            cycle.append(cycle)
        run_once(loop)

    monkeypatch.setattr(SimulatedLoop, "_run_once", leave_garbage)
    before = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        again = live("router", 0, carriers)
    finally:
        gc.set_threshold(*before)
    assert (again.steps, again.now) == (first.steps, first.now)


def test_threads_that_others_left_take_no_part_in_a_life(
    carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of executors, and of the product, both of which are simulated meanwhile."""
    steps: list[int] = []

    def leave_threads(world: World) -> Callable[[], None]:
        def use_the_product() -> None:
            workers = Workers(1, "left")
            workers.submit(lambda: None).result()
            workers.close()

        def main() -> None:
            steps.append(world.scheduler.steps)
            for use in (use_the_product, lambda: Future[None]().set_result(None)):
                thread = threading.Thread(target=use)
                thread.start()
                thread.join()
            steps.append(world.scheduler.steps)

        return main

    monkeypatch.setitem(SCENARIOS, "threads", leave_threads)
    assert failure_of("threads", 0, live("threads", 0, carriers)) is None
    assert steps[0] == steps[1]


def test_a_story_names_threads_times_and_what_they_wait_for(carriers: Carriers) -> None:
    told = "\n".join(story(live("cache", seed, carriers, traced=True)) for seed in range(12))
    for words in (
        "client-0",
        "kvkit-load-0",
        "stores ",
        "loads it",
        "disk writes",
        "waits for news of Workers.",
    ):
        assert words in told


def test_the_story_of_a_handoff_has_all_that_goes_wrong(carriers: Carriers) -> None:
    told = "\n".join(story(live("handoff", seed, carriers, traced=True)) for seed in range(60))
    for words in (
        *("is killed", "is cut off", "closes", "gives r0 up", "calls r0 off", "ends its connection"),
        *("cannot start kvkit-handoff", "Cannot allocate memory", "has a slot of D for", "D1-use-r0"),
    ):
        assert words in told, words


def test_the_story_of_a_router_has_all_that_goes_wrong(carriers: Carriers) -> None:
    told = "\n".join(story(live("router", seed, carriers, traced=True)) for seed in range(40))
    for words in (
        *("is down", "is stuck", "is sick", "leaves", "refuses", "garbage", "abort", "loses batch"),
        *("asks p0/v1/completions", "asks d0/v1/chat/completions", "is answered: 200", "is answered: 502"),
    ):
        assert words in told, words


@pytest.mark.parametrize("what", SAMPLE)
def test_a_planted_defect_is_found(what: str, tmp_path: Path) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.what == what)
    seed, says = find(mutant, copied(tmp_path), 300)
    assert seed is not None
    assert says


def test_what_the_defects_replace_is_in_the_product(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    for mutant in MUTANTS:
        before = plant(mutant, copy)
        compile((copy / mutant.file).read_text(), mutant.file, "exec")
        (copy / mutant.file).write_text(before)
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)


# the scheduler itself, on programs whose defects are known

Program = Callable[[Scheduler, SimulatedThreading], None]


def failures(program: Program, carriers: Carriers, seeds: int, fine: bool = False) -> list[BaseException]:
    """What some seeds of a program end with."""
    found = []
    for seed in range(seeds):
        scheduler = Scheduler(seed, carriers, fine=fine)
        scheduler.run(partial(program, scheduler, SimulatedThreading(scheduler)))
        if scheduler.failure is not None:
            found.append(scheduler.failure[1])
    return found


def side_by_side(threading: SimulatedThreading, *targets: Callable[[], None]) -> None:
    threads = [threading.Thread(target=target, name=f"thread-{i}") for i, target in enumerate(targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("checks_again", [True, False])
def test_a_wait_without_a_second_look(checks_again: bool, carriers: Carriers) -> None:
    def program(scheduler: Scheduler, threading: SimulatedThreading) -> None:
        changed, items = threading.Condition(), list[int]()

        def put() -> None:
            for i in range(3):
                with changed:
                    items.append(i)
                    changed.notify()

        def take() -> None:
            for _ in range(3):
                with changed:
                    if checks_again:
                        changed.wait_for(lambda: items)
                    elif not items:
                        changed.wait()
                    items.pop()

        side_by_side(threading, put, put, take, take)

    found = failures(program, carriers, 300)
    assert bool(found) is not checks_again
    assert all(isinstance(error, IndexError) for error in found)


@pytest.mark.parametrize("same_order", [True, False])
def test_two_locks_in_two_orders(same_order: bool, carriers: Carriers) -> None:
    def program(scheduler: Scheduler, threading: SimulatedThreading) -> None:
        one, two = threading.Lock(), threading.Lock()

        def take(first: SimulatedLock, second: SimulatedLock) -> None:
            with first, second:
                pass

        others = (one, two) if same_order else (two, one)
        side_by_side(threading, partial(take, one, two), partial(take, *others))

    found = failures(program, carriers, 300)
    assert bool(found) is not same_order
    assert all(isinstance(error, Violation) and "nobody can go on" in str(error) for error in found)
    assert all("thread-0: waits for" in str(error) for error in found)


@pytest.mark.parametrize("locked", [True, False])
def test_lines_of_the_product_are_interrupted(
    locked: bool, carriers: Carriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lock gives others a turn, a line does."""
    monkeypatch.setattr(scheduler_module, "is_product", lambda file: file == __file__)

    def program(scheduler: Scheduler, threading: SimulatedThreading) -> None:
        lock, count = threading.Lock(), [0]

        def add() -> None:
            with lock if locked else nullcontext():
                before = count[0]
                count[0] = before + 1

        side_by_side(threading, add, add, add)
        scheduler.check(count[0] == 3, "{} of 3 are counted", count[0])

    assert bool(failures(program, carriers, 300, fine=True)) is not locked
    assert not failures(program, carriers, 300, fine=False)


def test_the_clock_stands_still_while_anyone_can_go_on(carriers: Carriers) -> None:
    def program(scheduler: Scheduler, threading: SimulatedThreading) -> None:
        began, event, woken = scheduler.now, threading.Event(), list[str]()

        def wait(name: str, seconds: float) -> None:
            assert not event.wait(seconds)
            woken.append(name)

        side_by_side(threading, partial(wait, "late", 3600.0), partial(wait, "early", 2.0))
        scheduler.check(woken == ["early", "late"], "woken: {}", woken)
        scheduler.check(scheduler.now == began + 3600.0, "it is {} s", scheduler.now - began)

    assert not failures(program, carriers, 50)


def test_a_process_that_is_killed_runs_no_further(carriers: Carriers) -> None:
    """Its locks stay taken, and nobody waits for its threads to end; one of them may have killed it."""

    def program(scheduler: Scheduler, threading: SimulatedThreading, suicide: bool) -> None:
        process, lock, steps = object(), threading.Lock(), [0]

        def work(kills: bool) -> None:
            scheduler.current.process = process
            with lock:
                for _ in range(20):
                    steps[0] += 1
                    scheduler.pause()
                if kills:
                    scheduler.kill(process)
                    steps[0] += 1000
                scheduler.sleep(5.0)

        threads = [threading.Thread(target=partial(work, suicide and i == 0)) for i in range(2)]
        for thread in threads:
            thread.start()
        scheduler.sleep(1.0)
        scheduler.kill(process)
        before = steps[0]
        for thread in threads:
            thread.join()
        scheduler.sleep(100.0)
        scheduler.check(steps[0] == before < 1000, "{} steps, {} before", steps[0], before)
        scheduler.check(lock.locked(), "a dead thread gave its lock back")

    for suicide in (False, True):
        assert not failures(partial(program, suicide=suicide), carriers, 50)


def test_threads_that_are_left_are_unwound(carriers: Carriers) -> None:
    """They hold nothing, and their carriers serve the next simulation."""
    ended = list[str]()

    def program(scheduler: Scheduler, threading: SimulatedThreading) -> None:
        event = threading.Event()

        def wait() -> None:
            try:
                event.wait()
            finally:
                ended.append("waiter")

        threading.Thread(target=wait, name="waiter").start()
        scheduler.sleep(1.0)

    assert not failures(program, carriers, 20)
    assert ended == ["waiter"] * 20


# the event loop

Tasks = Callable[[SimulatedLoop], Coroutine[Any, Any, None]]


def looped(
    tasks: Tasks, carriers: Carriers, seed: int, shuffles: float = 1.0, haste: float = 0.0
) -> Scheduler:
    """What becomes of them."""
    scheduler = Scheduler(seed, carriers, fine=False)
    return run_in(SimulatedLoop(scheduler, shuffles, haste), tasks)


def run_in(loop: SimulatedLoop, tasks: Tasks) -> Scheduler:
    """Run them to their end in a simulation of their own."""

    def run() -> None:
        try:
            loop.run_until_complete(tasks(loop))
        finally:
            loop.unwind()
            loop.close()

    loop.scheduler.run(run)
    return loop.scheduler


@pytest.mark.parametrize("shuffles", [0.0, 1.0])
def test_a_loop_keeps_the_order_within_a_task_and_draws_among_them(
    shuffles: float, carriers: Carriers
) -> None:
    orders = set[str]()

    async def tasks(loop: SimulatedLoop) -> None:
        began, said = loop.time(), list[str]()

        async def step(letters: str) -> None:
            for letter in letters:
                said.append(letter)
                await asyncio.sleep(0)

        for letter in "123":
            loop.call_soon(said.append, letter)
        await asyncio.gather(step("abc"), step("xyz"))
        await asyncio.sleep(3600.0)
        loop.check(loop.time() == began + 3600.0, "it is {}", loop.time())
        for letters in ("123", "abc", "xyz"):
            kept = "".join(letter for letter in said if letter in letters)
            loop.check(kept == letters, "{} is run as {}", letters, kept)
        orders.add("".join(said))

    for seed in range(20):
        assert looped(tasks, carriers, seed, shuffles).failure is None
    assert (len(orders) > 5) == bool(shuffles)


@pytest.mark.parametrize("haste", [0.0, 0.3])
def test_no_more_fair_time_passes_than_a_deadline_allows(haste: float, carriers: Carriers) -> None:
    """However late it is noticed, and whether or not the clock is hastened until then."""
    late = set[bool]()

    async def tasks(loop: SimulatedLoop) -> None:
        async def work() -> None:
            for _ in range(30):
                await asyncio.sleep(loop.scheduler.random.choice((0.0, 0.0, 0.2)))

        async def wait(limit_s: float) -> None:
            began, fairly = loop.time(), loop.fair_time()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await loop.create_future()
            took, fair = loop.time() - began, loop.fair_time() - fairly
            late.add(took > limit_s + 0.01)
            loop.check(fair <= limit_s + 0.01, "{} s of {} s", fair, limit_s)
            loop.check(haste or abs(fair - limit_s) < 0.01, "{} s of {} s, without haste", fair, limit_s)
            loop.haste = 0.0

        await asyncio.gather(wait(1.0), wait(1.5), work(), work())

    for seed in range(30):
        assert looped(tasks, carriers, seed, haste=haste).failure is None
    assert (True in late) == bool(haste)


def test_what_escapes_from_a_task_ends_a_simulation(carriers: Carriers) -> None:
    async def fails() -> None:
        raise ValueError("escaped")

    async def lone(loop: SimulatedLoop) -> None:
        loop.create_task(fails(), name="lone")
        await asyncio.sleep(1.0)

    async def stuck(loop: SimulatedLoop) -> None:
        await loop.create_future()

    lost, ended = looped(lone, carriers, 0).failure, looped(stuck, carriers, 0).failure
    assert lost is not None
    assert isinstance(lost[1], ValueError)
    assert ended is not None
    assert "nobody can go on" in str(ended[1])


def test_a_dead_engine_computes_nothing(carriers: Carriers) -> None:
    """Or the requests that it died with would add to what it holds when it has restarted."""

    def dies(seed: int) -> Scheduler:
        life = RouterLife(World(Scheduler(seed, carriers)))
        engine, life.quiet = life.engines[0], True
        data = json.dumps({"prompt": PROMPTS[0], "max_tokens": 4, "stream": True}).encode()

        async def ask() -> None:
            async with Exchange(life, f"http://{engine.name}/v1/completions", data, {}) as response:
                async for _ in response:
                    pass

        async def tasks(loop: SimulatedLoop) -> None:
            asking = loop.create_task(ask())
            await asyncio.sleep(life.delay())
            engine.turn("down")
            await asyncio.gather(asking, return_exceptions=True)
            loop.check(not engine.held, "a dead engine holds {}", engine.held)

        return run_in(life.loop, tasks)

    assert [scheduler.failure for scheduler in map(dies, range(100))] == [None] * 100
