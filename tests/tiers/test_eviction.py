"""Eviction holds, evicts and protects the same records as naive models."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.tiers.eviction.plugins import POLICIES
from kvkit.tiers.eviction.policies import MAIN, NORMAL, SMALL, Entry, prevails
from kvkit.tiers.eviction.state import EvictionState, add_run, note, pin, prioritise, remove, touch, use_run

CAPACITY, QUOTA = 20, 12
NAMES = "abcdefgh"
names = st.sampled_from(NAMES)
sizes = st.integers(1, CAPACITY + 2)


def add(state: EvictionState, name: str, size: int, **more: Any) -> list[str] | None:
    """The victims of one record; None: it has no room."""
    added, victims = add_run(state, (name,), size, **more)
    assert added or not victims
    return victims if added else None


class AgainstAList:
    """The model: a list of dicts; a victim has the lowest priority, then rank, among leaves that may go."""

    def __init__(self, policy: str, quota: int | None) -> None:
        self.state = EvictionState(CAPACITY, policy, quota)
        self.model: dict[str, dict[str, Any]] = {}
        self.pins: dict[str, float] = {}
        self.refused: set[str] = set()
        self.events = 0

    def rank(self, name: str) -> tuple[int, int, int]:
        e = self.model[name]
        policy = self.state.policy.name
        rank = {"lru": (e["last"], 0), "fifo": (e["born"], 0), "lfu": (e["uses"], e["last"])}[policy]
        return e["priority"], *rank

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
        self.model = left
        self.hold(name, size, parent, owner)

    def hold(self, name: str, size: int, parent: str | None, owner: str) -> None:
        self.refused.discard(name)
        self.model[name] = {
            "size": size,
            "parent": parent,
            "owner": owner,
            "born": self.events,
            "last": self.events,
            "uses": 0,
            "priority": NORMAL,
        }

    def note(self, name: str, size: int, parent: str | None, owner: str) -> None:
        self.events += 1
        parent = None if parent is not None and parent >= name else parent
        note(self.state, name, size, parent=parent, owner=owner)
        if name in self.model:
            self.use([name])
        else:
            self.hold(name, size, parent, owner)

    def use(self, used: list[str]) -> None:
        before = None
        for name in used:
            if name in self.model:
                e = self.model[name]
                e["last"], e["uses"] = self.events, e["uses"] + 1
                e["parent"] = e["parent"] or before
            before = name

    def touch(self, used: list[str]) -> None:
        self.events += 1
        touch(self.state, used)
        self.use(used)

    def remove(self, name: str) -> None:
        assert remove(self.state, name) == (self.model.pop(name, None) is not None)
        self.pins.pop(name, None)

    def pin(self, names: set[str], until: float) -> None:
        held = names & set(self.model)
        assert pin(self.state, sorted(names), until) == len(held)
        for name in held:
            self.pins[name] = max(until, self.pins.get(name, until))

    def prioritise(self, names: set[str], priority: int) -> None:
        prioritise(self.state, sorted(names), priority)
        for name in names & set(self.model):
            e = self.model[name]
            e["priority"] = priority if e["priority"] == NORMAL else max(priority, e["priority"])

    def agrees_with_the_model(self) -> None:
        assert {n: (e.size, e.parent) for n, e in self.state.entries.items()} == {
            n: (e["size"], e["parent"]) for n, e in self.model.items()
        }
        assert self.state.used_bytes == sum(e["size"] for e in self.model.values())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("quota", [None, QUOTA])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_what_leaves_is_what_a_list_says(policy: str, quota: int | None, seed: int) -> None:
    chance, both = random.Random(seed), AgainstAList(policy, quota)

    def some(most: int) -> set[str]:
        return set(chance.sample(NAMES, chance.randint(0, most)))

    for _ in range(150):
        name, size, owner = chance.choice(NAMES), chance.choice([1, 2, 3, 4, 5, 9, 21]), chance.choice("xy")
        parent = chance.choice([None, *NAMES])
        match chance.choices(["add", "touch", "remove", "pin", "prioritise", "note"], [60, 20, 5, 8, 12, 3])[
            0
        ]:
            case "add":
                both.add(name, size, parent, owner, some(2))
            case "touch":
                both.touch(sorted(some(4)))
            case "remove":
                both.remove(name)
            case "pin":
                both.pin(some(2), chance.choice([4.0, 5.0, 6.0]))
            case "prioritise":
                both.prioritise(some(3), chance.choice([10, 20, NORMAL, 80]))
            case "note":
                both.note(name, size, parent, owner)
        both.agrees_with_the_model()


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


def requested(seed: int) -> tuple[int, list[int]]:
    """A capacity, and requests for many more names, some of them far more often than others."""
    chance = random.Random(seed)
    steepness = chance.choice([0.3, 0.7, 1.5])
    return chance.choice([5, 10, 11, 20]), [int(chance.paretovariate(steepness)) % 40 for _ in range(400)]


@pytest.mark.parametrize("seed", range(24))
def test_s3fifo_is_that_of_the_paper(seed: int) -> None:
    """Against the pseudo-code of the paper, on single records of one byte."""
    capacity, requests = requested(seed)
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


@pytest.mark.parametrize("seed", range(24))
def test_arc_is_that_of_the_paper(seed: int) -> None:
    """Against its cases on single records of one byte, where a record is used twice per request."""
    capacity, requests = requested(seed)
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


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.sampled_from([10, NORMAL, 80])), max_size=40),
    st.integers(3, 12),
    st.sampled_from(list(POLICIES)),
)
def test_no_leaf_goes_before_one_of_a_lower_priority(
    runs: list[tuple[int, int, int]], capacity: int, policy: str
) -> None:
    """Whatever the policy, and however often each chain is used."""
    state = EvictionState(capacity, policy)
    for number, length, priority in runs:
        chain = [f"{number}.{i}" for i in range(length)]
        run = use_run(state, chain)
        for before, name in pairwise([None, *chain]):
            followed = {entry.parent for entry in state.entries.values()} | {before}
            leaves = {n: entry.priority for n, entry in state.entries.items() if n not in followed}
            for victim in add(state, name, 1, parent=before) or ():
                assert leaves[victim] == min(leaves.values())
        prioritise(state, chain[run:], priority)


@pytest.mark.parametrize(
    ("given", "before", "replaces"),
    [
        *((10, 35, True), (80, 35, True), (35, 35, False), (20, 10, True), (35, 10, True)),
        *((10, 20, False), (20, 20, False), (35, 80, False), (81, 80, True)),
    ],
)
def test_the_highest_priority_that_was_given_counts(given: int, before: int, replaces: bool) -> None:
    assert prevails(given, before) == replaces


def test_the_names_that_are_remembered_take_as_much_room_as_records() -> None:
    policy = POLICIES["s3fifo"]()
    for name, size in (("a", 4), ("b", 3), ("c", 5)):
        policy.evicted(name, Entry(name, size, None, "", 0, 0), 9)
    assert policy.queue_of("a", 4, 9) == SMALL, "forgotten for c"
    assert policy.queue_of("b", 3, 9) == MAIN
    policy.evicted("d", Entry("d", 4, None, "", 0, 0), 9)
    assert [policy.queue_of(name, 1, 9) for name in "cd"] == [MAIN, MAIN], "b returned, so there was room"


def test_a_short_memory_of_one_queue_gives_it_more_room_at_once() -> None:
    policy = POLICIES["arc"]()
    for name, queue in [("a", SMALL), ("b", MAIN), ("c", MAIN), ("d", MAIN)]:
        policy.evicted(name, Entry(name, 1, None, "", 0, 0, queue=queue), 10)
    assert policy.queue_of("a", 1, 10) == MAIN
    assert [policy.is_long(held, 10, 10) for held in (3, 4)] == [False, True]


def test_refused_records_change_nothing_that_shows() -> None:
    state = EvictionState(3)
    for name in "abc":
        add(state, name, 1)
    pin(state, ["a"], until=10.0)
    assert add(state, "big", 3, now=1.0) is None
    assert sorted(state.entries) == ["a", "b", "c"]
    assert state.used_bytes == 3
    assert add(state, "big", 3, now=10.0) == ["a", "b", "c"], "pins end"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_quota_is_the_capacity_of_its_owner(policy: str, seed: int) -> None:
    capacity, requests = requested(seed)
    limited, owned = EvictionState(capacity, policy), EvictionState(None, policy, quota_bytes=capacity)
    for i, request in enumerate(requests):
        size = 1 + request % 2
        assert add(limited, str(request), size) == add(owned, str(request), size, owner="x")
        add(owned, f"of nobody {i}", size)
    held = {name: entry.size for name, entry in owned.entries.items() if entry.owner}
    assert held == {name: entry.size for name, entry in limited.entries.items()}


def test_what_awaits_a_search_or_a_parent_is_forgotten_in_time() -> None:
    state = EvictionState(5000)
    for before, name in pairwise([None, *map(str, range(20))]):
        add(state, name, 1, parent=before)
    assert list(state._fresh) == ["19"], "what is followed is no leaf"
    for i in range(1030):
        add(state, f"leaf {i}", 1)
        assert len(state._fresh) <= 1024
    for name in ("one", "two"):
        add(state, name, 1, parent="missing")
    assert remove(state, "one")
    assert state._awaited == {"missing": 1}
    assert remove(state, "two")
    assert state._awaited == {}


def test_the_second_use_is_what_promotes() -> None:
    state = EvictionState(2, "arc")
    add(state, "a", 1)
    queues = []
    for _ in range(2):
        touch(state, ["a"])
        queues.append(state.entries["a"].queue)
    assert queues == [SMALL, MAIN]


def test_the_pins_of_what_left_are_forgotten() -> None:
    state = EvictionState(2)
    add(state, "a", 1)
    add(state, "b", 1)
    assert pin(state, ["a", "b"], until=1.0) == 2
    assert add(state, "c", 1, now=2.0) == ["a"]
    assert remove(state, "b")
    assert state._pins == {}


def test_the_names_that_were_refused_are_few() -> None:
    state = EvictionState(1)
    add(state, "held", 1)
    pin(state, ["held"], until=10.0)
    for i in range(1030):
        assert add(state, str(i), 1) is None
    assert len(state._refused) == 1024
    assert add(state, "behind", 1, parent="0", now=11.0) == ["held"], "long forgotten"
    assert add(state, "behind this", 1, parent="1029", now=11.0) is None


def test_a_policy_that_is_not_there_names_the_choices() -> None:
    with pytest.raises(
        ValueError, match=r"^policy='mru': want one of lru, fifo, lfu, s3fifo, arc, sessions or pack"
    ):
        EvictionState(1, "mru")


@pytest.mark.parametrize(("capacity", "quota"), [(None, None), (5, None), (None, 5), (5, 5)])
def test_without_a_limit_nothing_is_kept_for_a_search(capacity: int | None, quota: int | None) -> None:
    state = EvictionState(capacity, quota_bytes=quota)
    add(state, "a", 1)
    assert state.limited == bool(state._fresh) == (capacity is not None or quota is not None)


def test_many_events_cost_little_memory() -> None:
    state, chance = EvictionState(100, "lru"), random.Random(0)
    for _ in range(20_000):
        add(state, str(chance.randrange(500)), 1)
    assert sum(len(heap) for heap in state._leaves.values()) < 1000
    assert len(state._awaited) == 0
