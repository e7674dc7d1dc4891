"""LRU against a naive model: what is held, what leaves, what may not."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkit.eviction import LruState, add, remove, touch

CAPACITY = 20
names = st.sampled_from("abcdefgh")
sizes = st.integers(1, CAPACITY + 2)


class LruAgainstAList(RuleBasedStateMachine):
    """The model: a list of (name, size), least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.state = LruState(CAPACITY)
        self.model: list[tuple[str, int]] = []

    def _held(self, name: str) -> tuple[str, int] | None:
        return next((entry for entry in self.model if entry[0] == name), None)

    @rule(name=names, size=sizes, pinned=st.sets(names))
    def add(self, name: str, size: int, pinned: set[str]) -> None:
        before = deepcopy(self.state)
        victims = add(self.state, name, size, lambda candidate: candidate not in pinned)
        held = self._held(name)
        if held:
            assert victims == []
            self.model.remove(held)
            self.model.append(held)
            return
        kept, expected = list(self.model), []
        while sum(s for _, s in kept) + size > CAPACITY:
            free = [entry for entry in kept if entry[0] not in pinned]
            if not free:
                assert victims is None
                assert self.state == before
                return
            kept.remove(free[0])
            expected.append(free[0][0])
        assert victims == expected
        assert set(before.entries) - set(self.state.entries) == set(expected)
        self.model = [*kept, (name, size)]

    @rule(used=st.lists(names))
    def touch(self, used: list[str]) -> None:
        touch(self.state, used)
        for name in used:
            held = self._held(name)
            if held:
                self.model.remove(held)
                self.model.append(held)

    @rule(name=names)
    def remove(self, name: str) -> None:
        held = self._held(name)
        assert remove(self.state, name) == (held is not None)
        if held:
            self.model.remove(held)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert list(self.state.entries.items()) == self.model
        assert self.state.used_bytes == sum(size for _, size in self.model) <= CAPACITY


TestLru = LruAgainstAList.TestCase


@given(st.lists(st.tuples(names, sizes)))
def test_without_a_limit_nothing_leaves(events: list[tuple[str, int]]) -> None:
    state = LruState(None)
    assert all(add(state, name, size, lambda _: False) == [] for name, size in events)
    assert set(state.entries) == {name for name, _ in events}


def test_what_fits_exactly_stays() -> None:
    state = LruState(3)
    assert add(state, "a", 1) == []
    assert add(state, "b", 2) == []
    assert add(state, "c", 3) == ["a", "b"]
    assert state == LruState(3, 3, OrderedDict(c=3))
