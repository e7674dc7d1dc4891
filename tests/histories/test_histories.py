"""Real processes under faults give explainable histories; invalid ones and planted defects are reported."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT, SUPPORT, TESTS

from histories.defects import DEFECTS
from histories.history import History, findings, operations_of
from histories.model import NEVER, Operation, State, unexplained

SAMPLE = (
    "a lookup counts what lies after a gap",
    "a pool shows a record before its bytes",
    "a lookup on a server remembers",
    "a receiver shows parts of a transfer",
)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m histories`."""
    return subprocess.run(
        [sys.executable, "-m", "histories", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}:{SUPPORT}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_run_finds_anything(tmp_path: Path) -> None:
    """Each set-up once. Where no link can be cut, processes are killed and stopped all the same."""
    run = command("--seconds=1", "--each=2", f"--keep={tmp_path}")
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert "4 runs" in run.stdout
    assert "chunks seen" in run.stdout
    for line in run.stdout.splitlines():
        if "no link is cut" in line:
            warnings.warn(line, stacklevel=1)


@pytest.mark.nightly
def test_planted_defects_are_found() -> None:
    run = command("--seconds=30", "--each=1.5", "--defects", *SAMPLE)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert all(f"found: {what}" in run.stdout for what in SAMPLE)
    assert {*SAMPLE} <= DEFECTS.keys()


# the model: operations on one record

HOLDERS = ("memory", "handoff/a", "handoff/b")


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind: Any = draw(st.sampled_from(("put", "put", "removed", "seen", "missed")))
    holder = draw(st.sampled_from(HOLDERS if kind == "put" else ("", "memory", "handoff/", "handoff/a")))
    begin = draw(st.integers(0, 20))
    must = kind in ("seen", "missed") or draw(st.booleans())
    end = NEVER if not must and draw(st.booleans()) else begin + draw(st.integers(0, 10))
    return Operation(kind, holder, begin, end, must, "")


def an_order_explains(some: Sequence[Operation]) -> bool:
    """The definition, without any care for time."""

    def follows(left: frozenset[int], state: State) -> bool:
        for number in left:
            after = some[number].apply(state)
            first = all(some[other].end >= some[number].begin for other in left - {number})
            if first and after is not None and follows(left - {number}, after):
                return True
        return not left

    must = [number for number, operation in enumerate(some) if operation.must]
    may = [number for number, operation in enumerate(some) if not operation.must]
    every = (itertools.combinations(may, count) for count in range(len(may) + 1))
    return any(follows(frozenset((*must, *more)), frozenset()) for chosen in every for more in chosen)


@given(st.lists(operations(), max_size=7))
def test_the_search_agrees_with_the_definition(some: list[Operation]) -> None:
    assert (unexplained(some) is None) == an_order_explains(some)


def operation(kind: Any, begin: int, end: float, must: bool = True, holder: str = "store") -> Operation:
    return Operation(kind, holder, begin, end, must, "")


@pytest.mark.parametrize(
    ("explained", "some"),
    [
        (True, [operation("put", 0, 10), operation("seen", 5, 6), operation("seen", 7, 20)]),
        # seen before it was begun; there and gone again; lost
        (False, [operation("put", 5, 10), operation("seen", 1, 4)]),
        (False, [operation("put", 0, 10), operation("seen", 2, 3), operation("missed", 4, 5)]),
        (False, [operation("put", 0, 1), operation("missed", 2, 3)]),
        # removed, before and meanwhile
        (False, [operation("put", 0, 1), operation("removed", 2, 3), operation("seen", 4, 5)]),
        (True, [operation("put", 0, 3), operation("removed", 2, 5), operation("seen", 6, 7)]),
        # cut short, it need not be there; it comes late only where it may take effect late
        (True, [operation("put", 0, 3, False), operation("missed", 4, 5)]),
        (False, [operation("put", 0, 3, False), operation("missed", 4, 5), operation("seen", 6, 7)]),
        (True, [operation("put", 0, NEVER, False), operation("missed", 4, 5), operation("seen", 6, 7)]),
        # held by another
        (False, [operation("put", 0, 1, holder="memory"), operation("seen", 2, 3, holder="handoff/")]),
    ],
)
def test_orders(explained: bool, some: list[Operation]) -> None:
    assert (unexplained(some) is None) == explained


# the history: notes of processes


class Notes:
    """The notes of a process, one operation after the other, each a microsecond long."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        self._now = 0
        self._ops = itertools.count(1)

    def now(self) -> int:
        self._now += 1000
        return self._now

    def did(self, do: str, chunks: Sequence[str], tiers: Sequence[str] = ("store",), **came: Any) -> None:
        """An operation that ended, whatever else it does."""
        op = next(self._ops)
        self.notes.append({"op": op, "begin": self.now(), "do": do, "chunks": chunks, "tiers": tiers})
        if do == "store":
            for tier in tiers:
                for number in range(len(chunks)):
                    self.notes.append({"op": op, "stored": self.now(), "tier": tier, "chunk": number})
            self.notes.append({"op": op, "settled": self.now()})
        self.notes.append({"op": op, "end": self.now()} | came)

    def looked(self, chunks: Sequence[str], found: int, tier: str = "store", do: str = "lookup") -> None:
        self.did(do, chunks, [tier], found=[[tier, found]] if found else [], sure=True)

    def history(self, **known: Any) -> History:
        return History({"c0.1": self.notes}, {"c0.1": 0}, {"c0.1": self.now()}, {"c0.1": 0}, **known)


ALL = ("0:0", "0:00", "0:000")


def test_a_good_history() -> None:
    notes = Notes()
    notes.looked(ALL, 0)
    notes.did("store", ALL, ("memory", "store"))
    notes.looked(ALL, 3)
    notes.looked(ALL, 3, do="load")
    notes.did("remove", ALL[1:2], ok=True)
    notes.looked(ALL, 1)
    notes.did("clear", [], ok=True)
    notes.looked(ALL, 0)
    history = notes.history()
    assert findings(history) == []
    assert {place for place, _ in operations_of(history)} == {"store", "c0.1"}


def bad_histories() -> list[tuple[str, Notes]]:
    early, lost, cleared, gap, foreign, torn, reset = (Notes() for _ in range(7))
    early.looked(ALL, 1)
    early.did("store", ALL)
    lost.did("store", ALL)
    lost.looked(ALL, 2)
    cleared.did("store", ALL, ("memory",))
    cleared.did("clear", [], ("memory",), ok=True)
    cleared.looked(ALL, 1, "memory", do="load")
    gap.did("store", (ALL[0], ALL[2]))
    gap.looked(ALL, 3)
    foreign.did("store", ALL)
    foreign.did("load", ALL, found=[["store", 3]], sure=True, wrong=[ALL[1]])
    torn.did("store", ALL)
    torn.did("load", ALL, found=[["store", 3]], sure=True, damaged="truncated")
    reset.did("store", ALL)
    reset.looked(["c0.1-0/1:0"], 1)
    return [
        ("0:0 in store: c0.1 #1 lookup sees what nobody had put", early),
        ("0:000 in store: c0.1 #2 lookup misses what was put and not removed", lost),
        ("0:0 in c0.1: c0.1 #3 load sees what was removed and not put again", cleared),
        ("0:00 in store: c0.1 #2 lookup sees what nobody had put", gap),
        ("c0.1 #2: loaded other bytes than belong to 0:00", foreign),
        ("c0.1 #2: a record was there that is not whole: truncated", torn),
        ("c0.1-0/1:0 in store: c0.1 #2 lookup sees what nobody had put", reset),
    ]


@pytest.mark.parametrize(("says", "notes"), bad_histories())
def test_a_bad_history(says: str, notes: Notes) -> None:
    (found,) = findings(notes.history())
    assert found.startswith(says)


@pytest.mark.parametrize("late", [True, False])
def test_what_a_killed_process_had_begun_may_come(late: bool) -> None:
    """Until its death; behind a network later, too."""
    killed, other = Notes(), Notes()
    killed.notes = [{"op": 1, "begin": 1, "do": "store", "chunks": ALL, "tiers": ["store"]}]
    other.looked(ALL, 0)
    other.looked(ALL, 3)
    notes = {"c0.1": killed.notes, "c1.1": other.notes}
    history = History(
        notes, dict.fromkeys(notes, 0), {"c0.1": 500, "c1.1": 9000}, {"c0.1": -9, "c1.1": 0}, late
    )
    assert bool(findings(history)) != late


@pytest.mark.parametrize("stale", [True, False])
def test_a_lookup_may_know_what_others_removed(stale: bool) -> None:
    """Where tiers have an index of their own; not what this process removed itself, and a load never."""

    def history(remover: str, do: str) -> History:
        notes = Notes()
        notes.did("store", ALL)
        notes.did("clear", [], ok=True)
        cleared, notes.notes = notes.notes, []
        notes.looked(ALL, 3, do=do)
        both = (
            {"c0.1": cleared + notes.notes} if remover == "self" else {"c0.1": cleared, "c1.1": notes.notes}
        )
        times = dict.fromkeys(both, 0), dict.fromkeys(both, notes.now())
        return History(both, *times, dict.fromkeys(both, 0), stale=stale)

    assert bool(findings(history("other", "lookup"))) != stale
    assert findings(history("self", "lookup"))
    assert findings(history("other", "load"))


def test_how_a_process_ended_counts() -> None:
    history = Notes().history(trouble=["D.1 does not end"])
    crashed = History({}, {}, {}, {"c0.1": -11, "c1.1": -9})
    assert findings(history) == ["D.1 does not end"]
    assert findings(crashed) == ["c0.1 ended with status -11"]
