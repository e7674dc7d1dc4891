"""Records packed in slots of their receiver arrive whole or not at all, whichever side fails."""
# ruff: noqa: F811

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from handoff_nodes import LONG_S, Node, Process, assert_holds
from handoff_pairs import ended, node, sender, wait_until_free  # noqa: F401 - some are fixtures

from kvkit.handoff.protocol.messages import Admit
from kvkit.handoff.sender import HandoffError, RemoteSlots, Sender, Sending
from kvkit.handoff.transport.channel import ChannelError
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import release_all
from kvkit.tiers.testing.contract import SLOT_BYTES, Completions, record_bytes, record_names

NAMES = record_names(3)


def lend(
    sender: Sender, where: str, names: list[str] = NAMES, transfer: str = "t"
) -> tuple[Sending, RemoteSlots]:
    sending = sender.open(transfer, where, names, LONG_S)
    assert sending.admitted.result(LONG_S) == len(names)
    loan = sender.borrow_slots([sending], names)
    assert loan is not None
    return sending, loan


def write(loan: RemoteSlots, names: list[str]) -> None:
    with loan.writing():
        for name, lease in zip(names, loan.leases, strict=True):
            lease.array[:] = record_bytes(name)
            lease.used = SLOT_BYTES


def put(sender: Sender, loan: RemoteSlots, names: list[str]) -> None:
    sent = Completions()
    sender.put(names, loan.leases, sent)
    release_all(loan.leases)
    assert [error for _, error in sent.wait(len(names))] == [None] * len(names)


def test_a_record_is_made_in_its_slot_and_nowhere_else(node: Node, sender: Sender) -> None:
    arena = node.receiver.arena
    for array in arena.arrays:
        array[:] = 0xA5
    sending, loan = lend(sender, node.unix)
    write(loan, NAMES)
    places = [lease.slot for lease in loan.leases]
    assert [arena.arrays[place].tobytes() for place in places] == [record_bytes(n).tobytes() for n in NAMES]
    assert node.tier.match_prefix(NAMES) == 0, "nobody has said that they are whole"
    put(sender, loan, NAMES)
    assert sending.done.result(LONG_S) == 0
    assert_holds(node.tier, NAMES)
    others = set(range(arena.slots)) - set(places)
    assert len(others) == 5
    assert all((arena.arrays[slot] == 0xA5).all() for slot in others)


def test_slots_out_of_reach_are_not_lent(node: Node, sender: Sender) -> None:
    far = sender.open("far", node.tcp, NAMES, LONG_S)
    near = sender.open("near", node.unix, NAMES, LONG_S)
    for sending in (far, near):
        sending.admitted.result(LONG_S)
    assert sender.borrow_slots([far], NAMES) is None
    assert sender.borrow_slots([near], record_names(4)) is None, "it lacks no fourth one"
    loan = sender.borrow_slots([near], NAMES[:1])
    assert loan is not None
    assert sender.borrow_slots([near], NAMES) is None, "one of them is being made"
    release_all(loan.leases)
    assert sender.borrow_slots([near], NAMES) is not None


def test_a_slot_that_the_receiver_gives_twice_is_lent_once(
    node: Node, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fault costs a copy, and no thread of the sender."""
    handle_message = Sender.handle_message

    def hear(self: Sender, link: object, message: object) -> None:
        if isinstance(message, Admit):
            message = Admit(message.transfer, (message.slots[0], message.slots[0], 1 << 40))
        handle_message(self, link, message)  # type: ignore[arg-type]

    monkeypatch.setattr(Sender, "handle_message", hear)
    sending = sender.open("t", node.unix, NAMES, LONG_S)
    sending.admitted.result(LONG_S)
    assert sender.borrow_slots([sending], NAMES) is None
    assert sender.borrow_slots([sending], NAMES[2:]) is None
    loan = sender.borrow_slots([sending], NAMES[:1])
    assert loan is not None
    release_all(loan.leases)


def test_what_was_begun_and_not_put_is_missing(node: Node, sender: Sender) -> None:
    """A torn record is none: the receiver does not hear of it, and has its slot when all writing is over."""
    sending, loan = lend(sender, node.unix)
    with loan.writing():
        for lease in loan.leases:
            lease.array[: SLOT_BYTES // 2] = 7
    sender.put(NAMES[:1], loan.leases[:1], lambda name, error: None)
    sender.finish("t")
    assert sender.transfers() == {"t": "committed"}
    with pytest.raises(TimeoutError):
        sending.done.result(0.05)
    assert node.receiver.transfers() == {"t": "receiving"}, "slots are written to"
    release_all(loan.leases)
    assert sending.done.result(LONG_S) == 2
    assert node.tier.match_prefix(NAMES) == 1
    assert node.tier.match_prefix(NAMES[1:]) == 0


@pytest.mark.parametrize("who", ["receiver", "sender", "both"])
def test_slots_are_nobody_elses_while_they_are_packed(node: Node, sender: Sender, who: str) -> None:
    sending, loan = lend(sender, node.unix)
    if who != "sender":
        node.receiver.release("t", "given up")
    if who != "receiver":
        sender.cancel("t")
    with pytest.raises(HandoffError):
        sending.done.result(LONG_S)
    with pytest.raises(HandoffError), loan.writing():
        pass
    with pytest.raises(HandoffError, match="this id is in use"):
        sender.open("t", node.unix, NAMES, LONG_S)
    following = sender.open("following", node.unix, record_names(8, "a" * 16), LONG_S)
    with pytest.raises(TimeoutError):
        following.admitted.result(0.05)
    release_all(loan.leases)
    assert following.admitted.result(LONG_S) == 8
    node.receiver.check_integrity()


def test_a_record_of_two_transfers_is_made_once_and_copied(tmp_path: Path, sender: Sender) -> None:
    nodes = [Node(tmp_path), Node(tmp_path)]
    first, loan = lend(sender, nodes[0].unix, transfer="first")
    second = sender.open("second", nodes[1].unix, NAMES, LONG_S)
    assert second.admitted.result(LONG_S) == 3
    own = sender.borrow_slots([second], NAMES[:1])
    assert own is not None
    write(loan, NAMES)
    put(sender, loan, NAMES)
    assert first.done.result(LONG_S) == 0
    assert nodes[1].tier.match_prefix(NAMES) == 0
    assert second.state.unsent == {NAMES[0]}, "who makes it in its slot has it from nowhere else"
    write(own, NAMES[:1])
    put(sender, own, NAMES[:1])
    assert second.done.result(LONG_S) == 0
    for each in nodes:
        assert_holds(each.tier, NAMES)
        each.close()


def test_the_end_of_a_connection_waits_for_who_writes(node: Node, sender: Sender) -> None:
    """The receiver takes it for the end of all writing."""
    sending, loan = lend(sender, node.unix)
    link = sending.link
    with loan.writing():
        ending = threading.Thread(target=link.abort)
        ending.start()
        wait_for(lambda: not link.alive)
        ending.join(0.05)
        assert ending.is_alive()
        assert node.receiver.transfers() == {"t": "receiving"}
    ending.join(LONG_S)
    assert ended(node, "t") == "its sender is gone"
    with pytest.raises((ChannelError, HandoffError)), loan.writing():
        pass
    wait_until_free(node)
    release_all(loan.leases)


def test_a_receiver_is_killed_while_it_is_written_to(sender: Sender, tmp_path: Path) -> None:
    process = Process("receiver", tmp_path)
    sending, loan = lend(sender, process.call("addresses")[0])
    with loan.writing():
        process.kill()
        for lease in loan.leases:
            lease.array[:] = 7
    with pytest.raises(HandoffError, match="the receiver is gone"):
        sending.done.result(LONG_S)
    with pytest.raises((ChannelError, HandoffError)), loan.writing():
        pass
    release_all(loan.leases)


def test_a_sender_is_killed_while_it_packs(node: Node, sender: Sender, tmp_path: Path) -> None:
    """Its slots are free again, and what another sends meanwhile is what it should be."""
    for transfer in ("first", "second"):
        process = Process("sender", tmp_path)
        process.call("pack", transfer, node.unix, NAMES)
        other = sender.open("other", node.unix, record_names(5, "a" * 16), LONG_S)
        assert other.admitted.result(LONG_S) == 5
        process.kill()
        assert ended(node, transfer) == "its sender is gone"
        assert node.tier.match_prefix(NAMES) == 0
        sender.cancel("other")
        ended(node, "other")
    wait_until_free(node)
