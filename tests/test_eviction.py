"""Eviction against naive models: what is held, what leaves, what may not."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkit.tiers.eviction.policies import POLICIES
from kvkit.tiers.eviction.state import EvictionState, add_run, pin, remove, touch, use_run

CAPACITY, QUOTA = 20, 12
names = st.sampled_from("abcdefgh")
sizes = st.integers(1, CAPACITY + 2)


def add(state: EvictionState, name: str, size: int, **more: Any) -> list[str] | None:
    """The victims of one record; None: it has no room."""
    added, victims = add_run(state, (name,), size, **more)
    assert added or not victims
    return victims if added else None


class AgainstAList(RuleBasedStateMachine):
    """The model: a list of dicts; a victim is the lowest rank among the leaves that may go."""

    @initialize(
        policy=st.sampled_from([name for name, policy in POLICIES.items() if not policy.queued]),
        quota=st.sampled_from([None, QUOTA]),
    )
    def begin(self, policy: str, quota: int | None) -> None:
        self.state = EvictionState(CAPACITY, policy, quota)
        self.model: dict[str, dict[str, Any]] = {}
        self.pins: dict[str, float] = {}
        self.refused: set[str] = set()
        self.events = 0

    def rank(self, name: str) -> tuple[int, int]:
        e = self.model[name]
        return {"lru": (e["last"], 0), "fifo": (e["born"], 0), "lfu": (e["uses"], e["last"])}[
            self.state.policy.name
        ]

    @rule(name=names, size=sizes, parent=st.none() | names, owner=st.sampled_from("xy"), kept=st.sets(names))
    def add(self, name: str, size: int, parent: str | None, owner: str, kept: set[str]) -> None:
        self.events += 1
        parent = None if parent is not None and parent >= name else parent  # chains have no circles
        victims = add(
            self.state, name, size, parent=parent, owner=owner, now=5.0, may_evict=lambda n: n not in kept
        )
        if name in self.model:
            assert victims == []
            self.use([name])
            return
        if parent in self.refused:
            assert victims is None
            self.refused.add(name)
            return
        left, expected = dict(self.model), []
        for scope, limit in ((owner, self.state.quota_bytes), (None, CAPACITY)):
            while (
                limit and sum(e["size"] for e in left.values() if scope in (None, e["owner"])) + size > limit
            ):
                followed = {e["parent"] for e in left.values()} | {parent}
                free = [
                    n
                    for n, e in left.items()
                    if n not in followed
                    and n not in kept
                    and scope in (None, e["owner"])
                    and self.pins.get(n, 0) <= 5
                ]
                if not free:
                    assert victims is None
                    self.refused.add(name)
                    return
                expected.append(min(free, key=self.rank))
                del left[expected[-1]]
        assert victims == expected
        for victim in expected:
            self.pins.pop(victim, None)
        self.refused.discard(name)
        new = {
            "size": size,
            "parent": parent,
            "owner": owner,
            "born": self.events,
            "last": self.events,
            "uses": 0,
        }
        self.model = left | {name: new}

    def use(self, used: list[str]) -> None:
        before = None
        for name in used:
            if name in self.model:
                e = self.model[name]
                e["last"], e["uses"] = self.events, e["uses"] + 1
                e["parent"] = e["parent"] or before
            before = name

    @rule(used=st.lists(names, unique=True).map(sorted))
    def touch(self, used: list[str]) -> None:
        self.events += 1
        touch(self.state, used)
        self.use(used)

    @rule(name=names)
    def remove(self, name: str) -> None:
        assert remove(self.state, name) == (self.model.pop(name, None) is not None)
        self.pins.pop(name, None)

    @rule(names=st.sets(names), until=st.sampled_from([4.0, 6.0]))
    def pin(self, names: set[str], until: float) -> None:
        held = names & set(self.model)
        assert pin(self.state, sorted(names), until) == len(held)
        for name in held:
            self.pins[name] = max(until, self.pins.get(name, until))

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        assert {n: (e.size, e.parent) for n, e in self.state.entries.items()} == {
            n: (e["size"], e["parent"]) for n, e in self.model.items()
        }
        assert self.state.used_bytes == sum(e["size"] for e in self.model.values()) <= CAPACITY


TestEviction = AgainstAList.TestCase


@given(st.lists(st.tuples(names, sizes)), st.sampled_from(list(POLICIES)))
def test_without_a_limit_nothing_leaves(events: list[tuple[str, int]], policy: str) -> None:
    state = EvictionState(None, policy)
    assert all(add(state, name, size, may_evict=lambda _: False) == [] for name, size in events)
    assert set(state.entries) == {name for name, _ in events}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_shrinks_from_its_end(policy: str) -> None:
    state = EvictionState(8, policy)
    chain = [f"c{i}" for i in range(8)]
    for before, name in zip([None, *chain], chain, strict=False):
        assert add(state, name, 1, parent=before) == []
    assert add(state, "tail", 1, parent="c7") is None, "nothing but what it follows could go"
    left = [victim for i in range(8) for victim in add(state, f"other{i}", 1, owner="b") or ()]
    assert left == chain[::-1][: len(left)]
    assert left or POLICIES[policy].queued


@pytest.mark.parametrize("policy", POLICIES)
def test_records_that_a_scan_found_are_linked_by_use(policy: str) -> None:
    state = EvictionState(4, policy)
    for name in ("a", "b", "c", "d"):
        add(state, name, 1)
    touch(state, ["a", "b", "c", "d"])
    touch(state, ["a", "b", "c", "d"])
    victims = [victim for i in range(2) for victim in add(state, f"new{i}", 1) or ()]
    assert not {"a", "b"} & set(victims)


@given(st.lists(st.integers(0, 30), max_size=400), st.integers(5, 12))
def test_s3fifo_is_that_of_the_paper(requests: list[int], capacity: int) -> None:
    """Against the pseudo-code of the paper, on single records of one byte."""
    state = EvictionState(capacity, "s3fifo")
    small: deque[str] = deque()
    main: deque[str] = deque()
    ghost: deque[str] = deque()
    uses: dict[str, int] = {}

    def evict() -> None:
        while True:
            if small and (not main or len(small) * 10 >= capacity):
                name = small.popleft()
                if uses[name] > 1:
                    main.append(name)
                    uses[name] = 0
                    continue
                ghost.append(name)
                while len(ghost) > capacity:
                    ghost.popleft()
            else:
                name = main.popleft()
                if uses[name] > 0:
                    main.append(name)
                    uses[name] = min(uses[name], 3) - 1
                    continue
            del uses[name]
            return

    for request in requests:
        name = str(request)
        if name in uses:
            uses[name] += 1
        else:
            if len(uses) == capacity:
                evict()
            if name in ghost:
                ghost.remove(name)
                main.append(name)
            else:
                small.append(name)
            uses[name] = 0
        add(state, name, 1)
        assert set(state.entries) == set(uses)


@given(st.lists(st.integers(0, 30), max_size=400), st.integers(5, 12))
def test_arc_is_that_of_the_paper(requests: list[int], capacity: int) -> None:
    """Against its cases on single records of one byte, where a record is used twice per request."""
    state = EvictionState(capacity, "arc")
    queues: list[list[str]] = [[], []]  # T1, T2: the least recently used first
    ghosts: list[list[str]] = [[], []]  # B1, B2
    target = 0
    for request in requests:
        name = str(request)
        held = [name in queue for queue in queues]
        if any(held):
            queues[held.index(True)].remove(name)
            queues[1].append(name)
        else:
            if len(queues[0]) + len(queues[1]) == capacity:
                victims = 0 if queues[0] and (not queues[1] or len(queues[0]) > target) else 1
                ghosts[victims].append(queues[victims].pop(0))
                del ghosts[victims][:-capacity]
            b1, b2 = len(ghosts[0]), len(ghosts[1])
            if name in ghosts[0]:
                target = min(capacity, target + max(1, b2 // b1))
            elif name in ghosts[1]:
                target = max(0, target - max(1, b1 // b2))
            remembered = name in ghosts[0] + ghosts[1]
            for ghost in ghosts:
                if name in ghost:
                    ghost.remove(name)
            queues[1 if remembered else 0].append(name)
        if name in state.entries:
            touch(state, [name])
            touch(state, [name])
        else:
            add(state, name, 1)
        assert set(state.entries) == {*queues[0], *queues[1]}


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_chain_too_long_the_beginning_stays(policy: str) -> None:
    state = EvictionState(3, policy)
    chain = [f"c{i}" for i in range(6)]
    taken = [add(state, name, 1, parent=before) for before, name in pairwise([None, *chain])]
    assert taken == [[], [], [], None, None, None]
    assert set(state.entries) == set(chain[:3])
    state.capacity_bytes = 4
    assert add(state, "c4", 1, parent="c3") is None, "what it follows is still missing"
    assert add(state, "c3", 1, parent="c2") == []
    assert add(state, "c4", 1, parent="c3") is None
    assert set(state.entries) == set(chain[:4])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=40),
    st.integers(3, 20),
    st.sampled_from(list(POLICIES)),
)
def test_a_run_is_added_as_its_records_are(runs: list[tuple[int, int]], capacity: int, policy: str) -> None:
    """Chains that share their first two records, added and used."""
    together, apart = EvictionState(capacity, policy), EvictionState(capacity, policy)
    for number, length in runs:
        names = [f"{number if i >= 2 else number % 2}.{i}" for i in range(length)]
        run = use_run(together, names)
        assert run == next((i for i, name in enumerate(names) if name not in apart.entries), length)
        touch(apart, names[:run])
        added, victims = add_run(together, names[run:], 1, parent=names[run - 1] if run else None)
        expected: list[str] = []
        for i in range(run, length):
            found = add(apart, names[i], 1, parent=names[i - 1] if i else None)
            assert (found is None) == (i - run >= added)
            expected += found or ()
        assert victims == expected
        assert together.entries == apart.entries


def test_refused_records_change_nothing_that_shows() -> None:
    state = EvictionState(3)
    for name in "abc":
        add(state, name, 1)
    pin(state, ["a"], until=10.0)
    assert add(state, "big", 3, now=1.0) is None
    assert sorted(state.entries) == ["a", "b", "c"]
    assert state.used_bytes == 3
    assert add(state, "big", 3, now=10.0) == ["a", "b", "c"], "pins end"


def test_many_events_cost_little_memory() -> None:
    state, chance = EvictionState(100, "lru"), random.Random(0)
    for _ in range(20_000):
        add(state, str(chance.randrange(500)), 1)
    assert sum(len(heap) for heap in state._leaves.values()) < 1000
    assert len(state._followers) == 0
