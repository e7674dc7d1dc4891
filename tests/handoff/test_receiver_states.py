"""The receiver's states, model-checked, have no deadlock and lose no slot; each request that fits ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkit.handoff.protocol import states
from kvkit.handoff.protocol.states import (
    Action,
    Buffer,
    Complete,
    Delete,
    Deny,
    End,
    Grant,
    Limits,
    Phase,
    RequestRef,
    Unexpected,
    Verdict,
    check_integrity,
)

LIMITS = Limits(allocation_s=10.0, transfer_s=20.0, idle_s=30.0)


def names(word: str) -> list[str]:
    """A name per letter."""
    return list(word)


def reserve(buffer: Buffer, transfer: str, word: str, now: float = 0.0, **more: object) -> states.Transition:
    """Whose name is a letter and a digit brings one of two parts of what the letter stands for."""
    given = {"elsewhere": (), "deadline_s": 100.0} | more
    if transfer[1:]:
        given.setdefault("request", RequestRef(transfer[0], 2))
    return states.reserve(buffer, transfer, f"peer of {transfer}", names(word), now=now, **given)


def bring(buffer: Buffer, transfer: str, count: int, now: float = 0.0) -> Buffer:
    """`count` records of a transfer come in."""
    for _ in range(count):
        found = buffer.transfers[transfer]
        index = min(found.own - found.arrived)
        buffer, actions = states.record_arrived(buffer, transfer, found.peer, index, now)
        assert actions == ()
    return buffer


def finish(buffer: Buffer, transfer: str, now: float = 0.0) -> states.Transition:
    """All that is still to come comes in, and is committed."""
    found = buffer.transfers[transfer]
    buffer = bring(buffer, transfer, len(found.own - found.arrived), now)
    return states.commit(buffer, transfer, found.peer, (), now)


def kinds(actions: Sequence[Action]) -> list[tuple[str, str]]:
    return [(type(a).__name__, a.transfer) for a in actions if isinstance(a, Verdict)]


def test_the_order_that_is_a_deadlock_elsewhere() -> None:
    """8 slots, A and B of 6, in the order A1, B1, A2."""
    buffer = Buffer.empty(8, LIMITS)
    buffer, actions = reserve(buffer, "A", "abcdef")
    assert kinds(actions) == [("Grant", "A")]
    buffer = bring(buffer, "A", 3)
    buffer, actions = reserve(buffer, "B", "ghijkl")
    assert actions == ()
    buffer, actions = finish(buffer, "A")
    assert kinds(actions) == [("Complete", "A")]
    buffer, actions = states.release(buffer, "A", "used", 0.0)
    assert kinds(actions) == [("End", "A")]
    buffer, actions = states.slots_freed(buffer, 6, 0.0)
    assert kinds(actions) == [("Grant", "B")]
    buffer, actions = finish(buffer, "B")
    assert kinds(actions) == [("Complete", "B")]
    check_integrity(buffer)


def test_what_never_fits_is_refused_at_once() -> None:
    buffer, (refusal,) = reserve(Buffer.empty(3, LIMITS), "A", "abcd")
    assert refusal == Deny("A", "peer of A", "4 records do not fit the buffer's 3 slots")
    assert not buffer.transfers
    buffer, actions = reserve(buffer, "A", "abcd", elsewhere="ab")
    assert actions == (Grant("A", "peer of A", 4, frozenset({2, 3})),)


def test_records_are_shared_until_the_last_holder_ends() -> None:
    buffer, _ = reserve(Buffer.empty(4, LIMITS), "A", "abc")
    buffer, _ = finish(buffer, "A")
    buffer, actions = reserve(buffer, "B", "abcd")
    assert actions == (Grant("B", "peer of B", 4, frozenset({3})),)
    buffer, (end,) = states.release(buffer, "A", "used", 0.0)
    assert end == End("A", "peer of A", "used", frozenset(), ())
    buffer, _ = finish(buffer, "B")
    buffer, (end,) = states.release(buffer, "B", "used", 0.0)
    assert end == End("B", "peer of B", "used", frozenset(), ("a", "b", "c", "d"))
    buffer, _ = states.slots_freed(buffer, 4, 0.0)
    assert buffer == Buffer.empty(4, LIMITS)


def test_the_second_copy_of_a_record_is_let_go() -> None:
    buffer, _ = reserve(Buffer.empty(4, LIMITS), "A", "ab")
    buffer, _ = reserve(buffer, "B", "bc")
    buffer, _ = finish(buffer, "A")
    buffer, actions = finish(buffer, "B")
    assert actions == (Complete("B", "peer of B", frozenset({1}), frozenset({0})),)
    assert buffer.held == {"a": 1, "b": 2, "c": 1}
    check_integrity(buffer)


def test_what_is_missing_takes_no_slot() -> None:
    buffer, _ = reserve(Buffer.empty(4, LIMITS), "A", "abcd")
    buffer = bring(buffer, "A", 2)
    with pytest.raises(Unexpected, match="2 records are missing, not 1"):
        states.commit(buffer, "A", "peer of A", [3], 0.0)
    buffer, actions = states.commit(buffer, "A", "peer of A", [2, 3], 0.0)
    assert actions == (Complete("A", "peer of A", frozenset({0, 1}), frozenset({2, 3})),)
    buffer, actions = reserve(buffer, "B", "ef")
    assert actions == ()
    buffer, actions = states.slots_freed(buffer, 2, 0.0)
    assert kinds(actions) == [("Grant", "B")]


def test_deadlines() -> None:
    buffer, _ = reserve(Buffer.empty(2, LIMITS), "A", "ab", now=0.0)
    buffer, _ = reserve(buffer, "B", "cd", now=0.0)
    buffer, _ = reserve(buffer, "C", "cd", now=0.0, deadline_s=3.0)
    assert states.next_deadline(buffer) == 3.0
    assert states.expire(buffer, 2.9) == (buffer, ())
    buffer, actions = states.expire(buffer, 10.0)
    assert [(a.transfer, a.reason) for a in actions if isinstance(a, Deny)] == [
        ("B", "no slots came free in time"),
        ("C", "no slots came free in time"),
    ]
    buffer = bring(buffer, "A", 1, now=15.0)
    assert states.expire(buffer, 34.9) == (buffer, ())
    late, actions = states.expire(buffer, 35.0)
    assert actions == (End("A", "peer of A", "nothing came in for too long", frozenset({0, 1}), ()),)
    check_integrity(late)
    buffer, _ = finish(buffer, "A", now=34.0)
    assert states.next_deadline(buffer) == 64.0
    buffer, actions = states.expire(buffer, 64.0)
    assert actions == (End("A", "peer of A", "nobody used it in time", frozenset(), ("a", "b")),)


def test_damaged_records_are_let_go() -> None:
    buffer, _ = reserve(Buffer.empty(3, LIMITS), "A", "ab")
    buffer, _ = finish(buffer, "A")
    buffer, _ = reserve(buffer, "B", "bc")
    buffer, actions = states.delete(buffer, ["b", "x"])
    assert actions == (Delete(("b",)),)
    check_integrity(buffer)
    assert states.delete(buffer, ["b"]) == (buffer, ())
    buffer, (end,) = states.release(buffer, "A", "used", 0.0)
    assert end == End("A", "peer of A", "used", frozenset(), ("a",))


def test_a_lost_sender_leaves_what_it_committed() -> None:
    buffer = Buffer.empty(4, LIMITS)
    for transfer, word in (("A", "ab"), ("B", "cd"), ("C", "ef")):
        buffer, _ = states.reserve(buffer, transfer, "P", word, (), 100.0, 0.0)
    buffer, _ = finish(buffer, "A")
    buffer = bring(buffer, "B", 1)
    buffer, actions = states.peer_lost(buffer, "P", 0.0)
    assert sorted(kinds(actions)) == [("Deny", "C"), ("End", "B")]
    assert list(buffer.transfers) == ["A"]
    assert buffer.held == {"a": 1, "b": 1}


def test_events_of_others_do_not_count() -> None:
    buffer, _ = reserve(Buffer.empty(2, LIMITS), "A", "ab")
    for event in (
        lambda: states.record_arrived(buffer, "A", "another", 0, 0.0),
        lambda: states.commit(buffer, "A", "another", (0, 1), 0.0),
        lambda: states.record_arrived(buffer, "A", "peer of A", 2, 0.0),
    ):
        with pytest.raises(
            Unexpected, match=r"^transfer A: (this peer has no receiving|record 2 is not expected)"
        ):
            event()
    assert states.cancel(buffer, "A", "another", 0.0) == (buffer, ())
    assert states.record_arrived(buffer, "over", "another", 0, 0.0) == (buffer, ())
    with pytest.raises(Unexpected, match="record 0"):
        states.record_arrived(bring(buffer, "A", 1), "A", "peer of A", 0, 0.0)
    again, (refusal,) = reserve(buffer, "A", "c")
    assert refusal == Deny("A", "peer of A", "there is a transfer A already")
    assert again == buffer


def test_no_more_transfers_are_known_than_may_be() -> None:
    buffer, _ = reserve(Buffer.empty(1, LIMITS), "A", "a")
    (first,) = buffer.transfers.values()
    few = {str(i): replace(first, id=str(i)) for i in range(states.MAX_TRANSFERS - 1)}
    buffer, actions = reserve(replace(buffer, transfers=few), "B", "b")
    assert actions == ()
    again, (refusal,) = reserve(buffer, "C", "c")
    assert refusal == Deny("C", "peer of C", "4096 transfers are in flight")
    assert again == buffer


def test_the_sender_s_cancel_ends_what_is_not_committed() -> None:
    buffer, _ = reserve(Buffer.empty(2, LIMITS), "A", "ab")
    over, actions = states.cancel(bring(buffer, "A", 1), "A", "peer of A", 0.0)
    assert actions == (End("A", "peer of A", "cancelled by its sender", frozenset({0, 1}), ()),)
    assert states.cancel(over, "A", "peer of A", 0.0) == (over, ())
    done, _ = finish(buffer, "A")
    assert states.cancel(done, "A", "peer of A", 0.0) == (done, ())


def test_a_buffer_that_does_not_add_up_is_a_defect() -> None:
    buffer, _ = reserve(Buffer.empty(8, LIMITS), "A", "ab")
    buffer, _ = finish(buffer, "A")
    buffer, _ = reserve(buffer, "B0", "bc")
    buffer, _ = reserve(buffer, "B1", "d")
    buffer, _ = reserve(bring(buffer, "B0", 1), "C0", "e")
    check_integrity(buffer)
    b0 = buffer.transfers["B0"]
    changed = [
        replace(b0, shared=b0.shared | b0.own),
        replace(b0, arrived=frozenset({0, 1})),
        replace(b0, shared=frozenset()),
        replace(b0, request=RequestRef("B", 3)),
        replace(b0, phase=Phase.WAITING, own=frozenset(), shared=frozenset(), arrived=frozenset()),
    ]
    without = {name: found for name, found in buffer.transfers.items() if name != "B1"}
    for broken in [
        replace(buffer, free=buffer.free - 1),
        replace(buffer, free=buffer.free + 1, lent=-1),
        replace(buffer, free=-1, lent=buffer.free + 1),
        replace(buffer, held={"a": 1, "b": 1}),
        replace(buffer, requests={}),
        replace(buffer, requests={**buffer.requests, "A": ("A",)}),
        replace(buffer, free=buffer.free + 1, transfers=without, requests={"B": ("B0",), "C": ("C0",)}),
        *(replace(buffer, transfers={**buffer.transfers, "B0": part}) for part in changed),
    ]:
        with pytest.raises(AssertionError):
            check_integrity(broken)
    with pytest.raises(AssertionError, match="1 slots are freed, 0 were lent"):
        states.slots_freed(buffer, 1, 0.0)


def test_parts_of_a_request_are_admitted_together_or_not_at_all() -> None:
    """4 slots, in the order A0, B0, B1, A1: what has not all of its parts yet stands in nobody's way."""
    buffer, actions = reserve(Buffer.empty(4, LIMITS), "A0", "ab")
    assert actions == ()
    buffer, actions = reserve(buffer, "B0", "cd")
    assert actions == ()
    buffer, actions = reserve(buffer, "B1", "ef")
    assert kinds(actions) == [("Grant", "B0"), ("Grant", "B1")]
    buffer, actions = reserve(buffer, "A1", "gh")
    assert actions == ()
    buffer, actions = states.release(buffer, "B", "used", 0.0)
    assert kinds(actions) == [("End", "B0"), ("End", "B1")]
    buffer, actions = states.slots_freed(buffer, 3, 0.0)
    assert actions == (), "one of two parts would fit"
    buffer, actions = states.slots_freed(buffer, 1, 0.0)
    assert kinds(actions) == [("Grant", "A0"), ("Grant", "A1")]
    check_integrity(buffer)


def test_parts_of_a_request_end_together() -> None:
    buffer, _ = reserve(Buffer.empty(4, LIMITS), "A0", "ab")
    buffer, _ = reserve(buffer, "A1", "cd")
    buffer, _ = finish(buffer, "A0")
    over, actions = states.peer_lost(bring(buffer, "A1", 1), "peer of A1", 0.0)
    assert actions == (
        End("A1", "peer of A1", "its sender is gone", frozenset({0, 1}), ()),
        End("A0", "peer of A0", "another part of it: its sender is gone", frozenset(), ("a", "b")),
    )
    assert states.slots_freed(over, 4, 0.0) == (Buffer.empty(4, LIMITS), ())
    over, actions = states.peer_lost(buffer, "peer of A0", 0.0)
    assert (over, actions) == (buffer, ()), "what it committed stays"
    waiting, _ = reserve(buffer, "B0", "xy")
    _, actions = states.expire(waiting, 10.0)
    assert actions == (Deny("B0", "peer of B0", "no slots came free in time"),)


def test_parts_wait_for_their_use_from_the_last_of_them_on() -> None:
    buffer, _ = reserve(Buffer.empty(4, LIMITS), "A0", "ab")
    buffer, _ = reserve(buffer, "A1", "cd")
    buffer, _ = finish(buffer, "A0")
    _, actions = states.expire(buffer, 20.0)
    assert kinds(actions) == [("End", "A1"), ("End", "A0")], "nothing of its other part came"
    buffer = bring(buffer, "A1", 1, now=15.0)
    buffer = bring(buffer, "A1", 1, now=34.0)
    assert states.expire(buffer, 40.0) == (buffer, ()), "its other part is still coming"
    buffer, _ = finish(buffer, "A1", now=40.0)
    assert states.next_deadline(buffer) == 70.0
    _, actions = states.expire(buffer, 70.0)
    assert kinds(actions) == [("End", "A0"), ("End", "A1")]


def test_parts_that_cannot_be_are_refused_at_once() -> None:
    buffer, _ = reserve(Buffer.empty(3, LIMITS), "A0", "ab")
    over, actions = reserve(buffer, "A1", "cd")
    reason = "4 records do not fit the buffer's 3 slots"
    assert actions == (
        Deny("A1", "peer of A1", reason),
        Deny("A0", "peer of A0", f"another part of it: {reason}"),
    )
    assert over == Buffer.empty(3, LIMITS)
    for of in (RequestRef("A", 3), RequestRef("A", 1)):
        again, actions = reserve(buffer, "A1", "c", request=of)
        assert actions == (Deny("A1", "peer of A1", "request A has 1 of 2 transfers already"),)
        assert again == buffer
    again, (refusal,) = reserve(buffer, "A", "c")
    assert isinstance(refusal, Deny)
    assert again == buffer
    buffer, _ = reserve(buffer, "A1", "c")
    again, (refusal,) = reserve(buffer, "A2", "d")
    assert refusal == Deny("A2", "peer of A2", "request A has 2 of 2 transfers already")
    assert again == buffer


def test_what_is_elsewhere_takes_no_room_of_its_request() -> None:
    buffer, _ = reserve(Buffer.empty(2, LIMITS), "A0", "ab", elsewhere="a")
    _, actions = reserve(buffer, "A1", "c")
    assert kinds(actions) == [("Grant", "A0"), ("Grant", "A1")]


def test_closing_lets_what_comes_in_come_in() -> None:
    buffer, _ = reserve(Buffer.empty(2, LIMITS), "A", "ab")
    buffer, _ = reserve(buffer, "B", "cd")
    buffer, actions = states.close(buffer, 0.0, at_once=False)
    assert kinds(actions) == [("Deny", "B")]
    _, (refusal,) = reserve(buffer, "C", "a")
    assert refusal == Deny("C", "peer of C", "the receiver is closing")
    buffer, actions = finish(buffer, "A")
    assert kinds(actions) == [("Complete", "A")]
    buffer, actions = states.close(buffer, 0.0, at_once=True)
    assert actions == (End("A", "peer of A", "the receiver is closing", frozenset(), ("a", "b")),)


@dataclass(frozen=True)
class World:
    """A buffer, what each sender does next, and how many faults may still come.

    Attributes:
        todo: by transfer, what is left: "reserve", "data", "commit", "release".
    """

    buffer: Buffer
    todo: tuple[tuple[str, tuple[str, ...]], ...]
    faults: int
    ended: frozenset[str] = frozenset()

    def key(self) -> str:
        return repr(self)


def advance(world: World, words: dict[str, str]) -> Iterator[World]:
    """Every world that one event makes of this one."""
    buffer = world.buffer

    def after(outcome: states.Transition, transfer: str = "", faults: int = world.faults) -> World:
        changed, actions = outcome
        check_integrity(changed)
        over = {a.transfer for a in actions if isinstance(a, End | Deny)}
        todo = tuple((t, rest[1:] if t == transfer else rest) for t, rest in world.todo)
        return World(changed, todo, faults, world.ended | over)

    for transfer, rest in world.todo:
        found = buffer.transfers.get(transfer)
        if not rest or transfer in world.ended:
            continue
        parts = [] if found is None else states.transfers_of(buffer, found.request.id)
        if rest[0] == "reserve" and any(t[0] == transfer[0] for t in world.ended):
            yield replace(world, ended=world.ended | {transfer})  # as a receiver refuses it
        elif rest[0] == "reserve":
            yield after(reserve(buffer, transfer, words[transfer]), transfer)
        elif rest[0] == "data" and found is not None and found.phase is Phase.RECEIVING:
            due = found.own - found.arrived
            if due:
                yield after(states.record_arrived(buffer, transfer, found.peer, min(due), 0.0))
            else:
                yield after((buffer, ()), transfer)
        elif rest[0] == "commit":
            yield after(states.commit(buffer, transfer, f"peer of {transfer}", (), 0.0), transfer)
        elif rest[0] == "release" and {part.phase for part in parts} == {Phase.COMMITTED}:
            yield after(states.release(buffer, transfer, "used", 0.0), transfer)
        if world.faults and found is not None:
            yield after(states.cancel(buffer, transfer, found.peer, 0.0), faults=world.faults - 1)
            yield after(states.peer_lost(buffer, found.peer, 0.0), faults=world.faults - 1)
            yield after(states.release(buffer, transfer, "given up", 0.0), faults=world.faults - 1)
    if buffer.lent:
        yield after(states.slots_freed(buffer, 1, 0.0))


@pytest.mark.parametrize(
    ("slots", "words", "faults"),
    [
        (8, ("abcdef", "ghijkl"), 1),
        (8, ("abcdef", "abcghi"), 1),
        (4, ("abc", "def", "gh"), 1),
        (4, ("abc", "abd", "acd"), 1),
        (3, ("ab", "cd", "ab"), 2),
        (2, ("a", "a", "b", "bc"), 1),
        (1, ("a", "b", "a"), 2),
    ],
)
def test_every_order_of_events_ends_well(slots: int, words: tuple[str, ...], faults: int) -> None:
    """All interleavings, with faults anywhere: what is left to do can be done, and at the end all is free."""
    explore(slots, dict(zip("ABCD", words, strict=False)), faults)


@pytest.mark.parametrize(
    ("slots", "words", "faults"),
    [
        (2, {"A0": "a", "A1": "b", "B0": "c", "B1": "d"}, 1),
        (3, {"A0": "ab", "A1": "c", "B": "ad"}, 1),
    ],
)
def test_every_order_of_parts_ends_well(slots: int, words: dict[str, str], faults: int) -> None:
    """Each would have half of the room and wait for the other half, if parts were admitted one by one."""
    explore(slots, words, faults)


def explore(slots: int, by_name: dict[str, str], faults: int) -> None:
    script = ("reserve", "data", "commit", "release")
    start = World(Buffer.empty(slots, LIMITS), tuple((t, script) for t in by_name), faults)
    seen = {start.key()}
    queue = deque([start])
    ends = 0
    while queue:
        world = queue.popleft()
        following = list(advance(world, by_name))
        if not any(w.faults == world.faults for w in following):
            ends += 1
            assert world.buffer == Buffer.empty(slots, LIMITS), f"stuck: {world}"
            assert all(not rest or t in world.ended for t, rest in world.todo), f"stuck: {world}"
        for after in following:
            if after.key() not in seen:
                seen.add(after.key())
                queue.append(after)
    assert ends >= 1


class BufferMachine(RuleBasedStateMachine):
    """A random life: many transfers of many peers, time that passes, faults; then everything is let end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.buffer = Buffer.empty(6, LIMITS)
        self.count = 0
        self.asked: list[str] = []
        self.admitted: list[str] = []

    def take(self, outcome: states.Transition) -> None:
        self.buffer, actions = outcome
        for action in actions:
            if isinstance(action, Grant):
                self.admitted.append(action.transfer)
                assert len(action.own) <= self.buffer.slots
            if isinstance(action, Grant | Deny):
                self.asked.remove(action.transfer)

    @rule(
        word=st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=8, unique=True),
        outside=st.sets(st.sampled_from("abcdefghij"), max_size=3),
        peer=st.integers(0, 2),
        patience=st.sampled_from([1.0, 100.0]),
    )
    def reserve(self, word: list[str], outside: set[str], peer: int, patience: float) -> None:
        self.count += 1
        transfer = str(self.count)
        self.asked.append(transfer)
        self.take(states.reserve(self.buffer, transfer, peer, word, outside, patience, self.now))

    @precondition(lambda self: any(t.own - t.arrived for t in self.buffer.transfers.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        due = [t for t in self.buffer.transfers.values() if t.own - t.arrived]
        found = data.draw(st.sampled_from(due))
        index = data.draw(st.sampled_from(sorted(found.own - found.arrived)))
        self.take(states.record_arrived(self.buffer, found.id, found.peer, index, self.now))

    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        if not self.buffer.transfers:
            return
        found = data.draw(st.sampled_from(list(self.buffer.transfers.values())))
        what = data.draw(st.sampled_from(["commit", "commit", "cancel", "release", "lost"]))
        if what == "commit" and found.phase is Phase.RECEIVING:
            missing = found.own - found.arrived
            self.take(states.commit(self.buffer, found.id, found.peer, missing, self.now))
        elif what == "cancel":
            self.take(states.cancel(self.buffer, found.id, found.peer, self.now))
        elif what == "release":
            self.take(states.release(self.buffer, found.id, "used", self.now))
        elif what == "lost":
            self.take(states.peer_lost(self.buffer, found.peer, self.now))

    @precondition(lambda self: self.buffer.held)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(sorted(self.buffer.held)), min_size=1)) | {"unknown"}
        self.take(states.delete(self.buffer, gone))
        assert not gone & self.buffer.held.keys()

    @precondition(lambda self: self.buffer.lent)
    @rule(data=st.data())
    def slots_come_back(self, data: st.DataObject) -> None:
        self.take(states.slots_freed(self.buffer, data.draw(st.integers(1, self.buffer.lent)), self.now))

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(states.expire(self.buffer, self.now))
        deadline = states.next_deadline(self.buffer)
        assert deadline is None or deadline > self.now

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        check_integrity(self.buffer)
        assert self.admitted == sorted(self.admitted, key=int), "somebody overtook"

    @invariant()
    def whoever_fits_is_not_left_waiting(self) -> None:
        waiting = [t for t in self.buffer.transfers.values() if t.phase is Phase.WAITING]
        if waiting:
            first = waiting[0]
            inside = {n for i, n in enumerate(first.names) if i not in first.elsewhere}
            assert len(inside - self.buffer.held.keys()) > self.buffer.free

    def teardown(self) -> None:
        """Time alone ends everything."""
        for _ in range(200):
            if self.buffer.lent:
                self.take(states.slots_freed(self.buffer, self.buffer.lent, self.now))
            deadline = states.next_deadline(self.buffer)
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            self.take(states.expire(self.buffer, self.now))
        assert self.buffer == Buffer.empty(6, LIMITS)
        assert not self.asked, "neither admitted nor refused"


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
