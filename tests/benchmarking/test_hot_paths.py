"""Paths that every request takes do no more calls than is on record, and slower ones are found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.report import check

COUNTED = """
import threading
from benchmarks.report.hot_paths import Calls

def once(): pass

def twice():
    once()
    abs(1)

calls = Calls()
go, done = threading.Semaphore(0), threading.Semaphore(0)

def serve():
    while go.acquire():
        twice()
        done.release()

threading.Thread(target=serve, daemon=True).start()

def by_thread():
    go.release()
    done.acquire()

print(calls.of(once), calls.of(twice), min(calls.of(by_thread) for _ in range(3)) == 4)
"""


def test_no_path_does_more_than_is_recorded() -> None:
    recorded = check.recorded_for(check.python())
    if recorded is None:
        pytest.skip("counts are recorded for another Python: benchmarks/results/counts.json")
    assert check.worse_counts(check.counts(), recorded) == [], "if it is meant: --counts --keep"


def test_calls_are_counted_in_every_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTED],
        env=check.environment_of(check.ROOT),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "3", "True"]


def test_what_is_worse_is_said() -> None:
    counts = {"calls": 100, "allocated_kib": 100, "reads_and_writes": 2, "bytes_read_and_written": 9}
    recorded = {"hit": counts}
    assert check.worse_counts(recorded, recorded) == []
    more = {"hit": {"calls": 111, "allocated_kib": 117, "reads_and_writes": 3, "bytes_read_and_written": 10}}
    assert check.worse_counts(more, recorded) == [
        "hit: calls 111, recorded 100",
        "hit: allocated_kib 117, recorded 100",
        "hit: reads_and_writes 3, recorded 2",
        "hit: bytes_read_and_written 10, recorded 9",
    ]
    assert check.worse_counts({"store": counts}, recorded) == [
        "store: not recorded",
        "hit: recorded, but gone",
    ]


def test_slower_is_what_noise_does_not_explain() -> None:
    def times(new: float, again: float) -> dict[str, list[float]]:
        return {"new": [new, new], "old": [1.0, 1.0], "old again": [again, again]}

    assert check.slower(times(1.05, 1.0))[1]
    assert not check.slower(times(1.02, 1.0))[1]
    assert not check.slower(times(1.05, 1.03))[1]
    assert check.slower(times(1.05, 1.01))[0] == "1.050 (minima), 1.050 (medians); noise 0.010, 0.010"
