"""Worker threads start when needed, and survive what callers do to their futures."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from kvkit.lab.testbed.waiting import wait_for
from kvkit.tiers.testing.contract import DEADLINE_S
from kvkit.workers import Closed, Workers


def test_a_future_that_is_cancelled_costs_no_thread() -> None:
    workers = Workers(1, "test")
    begun, gate = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> str:
        begun.set()
        gate.wait(DEADLINE_S)
        return "first"

    running = workers.submit(first)
    waiting = workers.submit(lambda: ran.append("waiting"))
    assert begun.wait(DEADLINE_S)
    assert not running.cancel(), "it is under way"
    assert waiting.cancel()
    gate.set()
    assert running.result(DEADLINE_S) == "first"
    with pytest.raises(CancelledError):
        waiting.result(DEADLINE_S)
    assert workers.submit(lambda: "last").result(DEADLINE_S) == "last"
    assert not ran
    assert workers.close(DEADLINE_S)
    with pytest.raises(Closed):
        workers.submit(lambda: None)


def test_threads_are_started_for_jobs_that_no_other_is_free_for() -> None:
    workers = Workers(3, "kvkit-lazy")

    def threads() -> int:
        return sum(thread.name.startswith("kvkit-lazy") for thread in threading.enumerate())

    assert threads() == 0
    for _ in range(5):  # one after the other
        assert workers.submit(lambda: 1).result(DEADLINE_S)
        wait_for(lambda: workers._idle == 1)
    assert threads() == 1
    gate = threading.Event()
    together = threading.Barrier(4)

    def job() -> int:
        together.wait(DEADLINE_S)
        return 2

    futures = [workers.submit(job) for _ in range(3)]
    together.wait(DEADLINE_S)  # all three run at a time
    assert [future.result(DEADLINE_S) for future in futures] == [2] * 3
    workers.start(*[lambda: gate.wait(DEADLINE_S)] * 20)
    assert threads() == 3
    gate.set()
    assert workers.close(DEADLINE_S)
    assert threads() == 0


def test_a_pool_that_can_start_no_thread_refuses_work_and_recovers() -> None:
    code = """
import resource
from kvkit.workers import Closed, Workers
workers, ran = Workers(2, "test"), []
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used, hard))
try:
    workers.start(lambda: ran.append("lost"))
except Closed as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
assert workers.waiting == 0
assert workers.submit(lambda: "done").result(60) == "done"
assert not ran
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "test-0: can't start new thread\n"


def test_an_idle_thread_keeps_nothing_of_its_last_job() -> None:
    class Memory:
        def use(self) -> None:
            pass

    workers, freed, memory = Workers(1, "test"), threading.Event(), Memory()
    weakref.finalize(memory, freed.set)
    workers.start(memory.use)
    del memory
    assert freed.wait(DEADLINE_S)
    workers.close()
