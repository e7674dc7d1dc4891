"""Threads that outlive what is done to the futures they owe."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from kvkit.testing import DEADLINE_S
from kvkit.threads import Closed, Workers


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
