"""Sizes of a process that rise count as growth, and a soak's steps share its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.soak.leaks import JUDGED_S, Flat, Size, judge, size_of
from benchmarks.soak.phases import FEWEST, Phases

MINUTES = np.arange(0, 30, 1.5)


def sizes(mib: object, descriptors: object = 20, threads: object = 5) -> list[Size]:
    """A rest every minute and a half; what is no array stays the same."""
    columns = (np.broadcast_to(np.asarray(column), MINUTES.shape) for column in (mib, descriptors, threads))
    rows = zip(MINUTES, *columns, strict=True)
    return [Size(60 * float(at), float(m), int(d), int(t)) for at, m, d, t in rows]


NOISE = np.random.default_rng(0).normal(0, 1.0, len(MINUTES))
WARM = np.minimum(MINUTES, 8) / 8


@pytest.mark.parametrize(
    "series",
    [
        sizes(100.0),
        sizes(100 + NOISE),
        sizes(100 + 300 * WARM),
        sizes(100 + 0.3 * MINUTES),
        sizes(100 - 3 * MINUTES),
        sizes(100 + 50 * np.exp(-MINUTES / 4) * NOISE),
        sizes(100, descriptors=20 - WARM * 3, threads=np.where(MINUTES == 3, 9, 5)),
        sizes(100, descriptors=np.where(MINUTES % 4.5 == 0, 21, 20)),
        sizes(100, threads=np.where(MINUTES > 20, 7, 5)),
        [Size(0, 100, 20, 5)],
        [],
    ],
)
def test_what_does_not_rise_is_flat(series: list[Size]) -> None:
    assert judge(series) == []


@pytest.mark.parametrize(
    ("series", "what"),
    [
        (sizes(100 + 1.0 * MINUTES), "resident memory grows by 1.00 MiB a minute"),
        (sizes(100 + 1.0 * MINUTES + NOISE), "resident memory"),
        (sizes(100 + 10 * np.floor(MINUTES / 9)), "resident memory"),
        (sizes(100 + 300 * WARM + 0.03 * MINUTES**2), "resident memory"),
        (sizes(100, descriptors=20 + MINUTES), "descriptors: 48 in the second half, 33 in the first"),
        (sizes(100, descriptors=np.where(MINUTES > 28, 23, 20)), "descriptors: 23"),
        (sizes(100, threads=5 + MINUTES // 4), "threads: 12"),
    ],
)
def test_what_rises_is_not_flat(series: list[Size], what: str) -> None:
    (found,) = judge(series)
    assert found.startswith(what)


def test_a_soak_says_how_much_it_may_grow() -> None:
    assert judge(sizes(100 + 3.0 * MINUTES), growth=4) == []
    assert len(judge(sizes(100 + 3.0 * MINUTES), growth=2)) == 1


def test_too_little_time_says_nothing_of_memory() -> None:
    def few(between_s: float) -> list[Size]:
        return [Size(between_s * i, 100 + 20 * i, 20 + i, 5) for i in range(12)]

    assert len(judge(few(0.3 * JUDGED_S))) == 1, "descriptors alone"
    assert len(judge(few(0.4 * JUDGED_S))) == 2


def test_sizes_are_those_of_the_process() -> None:
    """Ten more descriptors, two more threads and 64 MiB more are seen."""
    grow = """
import os, sys, threading
kept = []
for line in sys.stdin:
    kept += [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
    for _ in range(2):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    kept.append(b"x" * (64 << 20))
    print(flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", grow], **pipes) as process:  # type: ignore[call-overload]
        sizes, flat = [], Flat(process.pid)
        for _ in range(3):
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            sizes.append(size_of(process.pid))
            flat.rest()
        process.kill()
    (mib, descriptors, threads), _, (more_mib, more_descriptors, more_threads) = sizes
    assert more_mib - mib == pytest.approx(128, abs=8)
    assert (more_descriptors - descriptors, more_threads - threads) == (20, 4)
    assert [words.partition(":")[0] for words in flat.result()["not_flat"]] == ["descriptors", "threads"]


def test_phases_take_the_time_or_the_work_that_they_are_given() -> None:
    phases, done, found = Phases(0, least=40), 0, []
    for _ in phases:
        while phases.goes_on(done):
            done += 1
        found.append(done)
    assert found == [10, 20, 30, 40]
    long = Phases(1800)
    assert len([number for number in long if not long.stopped]) == 20
    assert len([*Phases(1.0)]) == FEWEST


def test_a_signal_ends_them_after_the_one_under_way() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    phases = Phases(3600)
    phases.listen()
    try:
        rests = 0
        for number in phases:
            assert phases.goes_on(0)
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                assert not phases.goes_on(0)
            rests += 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert rests == 3
