"""Handoff over real sockets and processes delivers every record, and loses no slot after kill -9."""
# ruff: noqa: F811

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from handoff_nodes import (
    LONG_S,
    PATIENT,
    Node,
    Process,
    assert_holds,
    new_sender,
)
from handoff_pairs import (  # noqa: F401 - some are fixtures
    ADDRESSES,
    address,
    ended,
    node,
    send,
    sender,
    slots,
    wait_until_free,
)

from kvkit.handoff.sender import HandoffError, Sender
from kvkit.staging import Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.testing.contract import SLOT_BYTES, put, record_bytes, record_names


@ADDRESSES
def test_records_arrive(node: Node, sender: Sender, slots: Staging, transport: str) -> None:
    names = record_names(6)
    for number in range(3):
        transfer = sender.open(f"t{number}", address(node, transport), names, LONG_S)
        assert transfer.admitted.result(LONG_S) == 6
        assert sender.unsent(names) == {*names}
        send(sender, slots, names[::-1])
        assert transfer.done.result(LONG_S) == 0
        assert_holds(node.tier, names)
        assert sender.unsent(names) == set()
        node.receiver.check_integrity()
        node.receiver.release(transfer.id)
        assert node.tier.match_prefix(names) == 0
        wait_until_free(node)


@ADDRESSES
def test_a_lent_record_outlives_its_transfer(
    node: Node, sender: Sender, slots: Staging, transport: str
) -> None:
    names = record_names(8)
    first = sender.open("first", address(node, transport), names, LONG_S)
    first.admitted.result(LONG_S)
    send(sender, slots, names)
    first.done.result(LONG_S)
    lent = node.tier.borrow(names[3])
    assert lent is not None
    node.receiver.release("first")
    others = record_names(8, "fedcba9876543210")
    second = sender.open("second", address(node, transport), others, LONG_S)
    assert node.tier.match_prefix(names) == 0
    assert lent.record.tobytes() == record_bytes(names[3]).tobytes()
    assert not second.admitted.done(), "it was given a slot that is lent"
    lent.release()
    assert second.admitted.result(LONG_S) == 8
    send(sender, slots, others)
    second.done.result(LONG_S)
    assert_holds(node.tier, others)


@ADDRESSES
def test_the_order_that_is_a_deadlock_elsewhere(node: Node, slots: Staging, transport: str) -> None:
    """8 slots, A and B of 6, in the order A1, B1, A2; then B, and a cancel while another waits."""
    a, b = new_sender(), new_sender()
    names = {"A": record_names(6, "a" * 16), "B": record_names(6, "b" * 16)}
    first = a.open("A", address(node, transport), names["A"], LONG_S)
    assert first.admitted.result(LONG_S) == 6
    send(a, slots, names["A"][:3])
    second = b.open("B", address(node, transport), names["B"], LONG_S)
    third = b.open("C", address(node, transport), names["B"], LONG_S)
    send(a, slots, names["A"][3:])
    assert first.done.result(LONG_S) == 0
    b.cancel("C")
    with pytest.raises(HandoffError, match="C: cancelled"):
        third.done.result(LONG_S)
    assert not second.admitted.done()
    node.receiver.release("A")
    assert second.admitted.result(LONG_S) == 6
    send(b, slots, names["B"])
    assert second.done.result(LONG_S) == 0
    assert_holds(node.tier, names["B"])
    a.close(LONG_S)
    b.close(LONG_S)


def test_what_is_held_is_not_sent(tmp_path: Path, sender: Sender, slots: Staging) -> None:
    arena = Staging(SLOT_BYTES, 8)
    memory = MemoryTier(arena, 4 * SLOT_BYTES)
    names = record_names(6)
    put(memory, arena, names[:2])
    node = Node(tmp_path, near=[memory])
    first = sender.open("first", node.tcp, names[:4], LONG_S)
    assert first.admitted.result(LONG_S) == 2
    send(sender, slots, names[:4])
    assert first.done.result(LONG_S) == 0
    second = sender.open("second", node.unix, names, LONG_S)
    assert second.admitted.result(LONG_S) == 2
    node.receiver.release("first")
    send(sender, slots, names)
    assert second.done.result(LONG_S) == 0
    assert_holds(node.tier, names[2:])
    third = sender.open("third", node.unix, names, LONG_S)
    assert third.admitted.result(LONG_S) == 0
    assert third.done.result(LONG_S) == 0
    node.close()
    memory.close()
    arena.close()


def test_one_put_serves_every_transfer_that_waits(tmp_path: Path, sender: Sender, slots: Staging) -> None:
    nodes = [Node(tmp_path), Node(tmp_path)]
    names = record_names(4)
    transfers = [
        sender.open(f"to-{i}", address(node, t), names, LONG_S)
        for i, (node, t) in enumerate(zip(nodes, ("unix", "tcp"), strict=True))
    ]
    for transfer in transfers:
        assert transfer.admitted.result(LONG_S) == 4
    send(sender, slots, names)
    for transfer, receiving in zip(transfers, nodes, strict=True):
        assert transfer.done.result(LONG_S) == 0
        assert_holds(receiving.tier, names)
        receiving.close()


@ADDRESSES
def test_what_is_never_put_is_missing(node: Node, sender: Sender, slots: Staging, transport: str) -> None:
    names = record_names(5)
    transfer = sender.open("t", address(node, transport), names, LONG_S)
    transfer.admitted.result(LONG_S)
    send(sender, slots, names[:3])
    sender.finish("t")
    assert transfer.done.result(LONG_S) == 2
    assert node.tier.match_prefix(names) == 3
    assert node.receiver.arena.free == 5


def test_nothing_is_put_before_there_is_room(node: Node, sender: Sender, slots: Staging) -> None:
    """Otherwise nodes could wait for each other's slots in a circle."""
    first = sender.open("first", node.unix, record_names(8, "a" * 16), LONG_S)
    first.admitted.result(LONG_S)
    names = record_names(2)
    second = sender.open("second", node.unix, names, LONG_S)
    assert sender.unsent(names) == set()
    send(sender, slots, names)
    assert slots.free == slots.slots
    sender.cancel("first")
    assert second.admitted.result(LONG_S) == 2
    assert sender.unsent(names) == {*names}
    send(sender, slots, names)
    assert second.done.result(LONG_S) == 0


@ADDRESSES
def test_a_sender_is_killed(
    node: Node, sender: Sender, slots: Staging, tmp_path: Path, transport: str
) -> None:
    process = Process("sender", tmp_path)
    names = record_names(8)
    assert process.call("open", "whole", address(node, transport), names[:2]) == 2
    process.call("put", names[:2])
    assert process.call("done", "whole") == 0
    assert process.call("open", "half", address(node, transport), names[2:]) == 6
    process.call("put", names[2:5])
    waiting = sender.open("waiting", address(node, transport), record_names(6, "a" * 16), LONG_S)
    process.kill()
    assert ended(node, "half") == "its sender is gone"
    assert_holds(node.tier, names[:2])
    assert waiting.admitted.result(LONG_S) == 6
    sender.cancel("waiting")
    ended(node, "waiting")
    node.receiver.release("whole")
    wait_until_free(node)


@ADDRESSES
def test_a_receiver_is_killed(sender: Sender, slots: Staging, tmp_path: Path, transport: str) -> None:
    which = ["unix", "tcp"].index(transport)
    process = Process("receiver", tmp_path)
    names = record_names(6)
    where = process.call("addresses")[which]
    transfer = sender.open("t", where, names, LONG_S)
    waiting = sender.open("waiting", where, record_names(8, "a" * 16), LONG_S)
    assert transfer.admitted.result(LONG_S) == 6
    send(sender, slots, names[:3])
    process.kill()
    for future in (transfer.done, waiting.admitted, waiting.done):
        with pytest.raises(HandoffError, match="the receiver is gone"):
            future.result(LONG_S)
    send(sender, slots, names[3:])
    with pytest.raises(HandoffError, match="the receiver is gone"):
        sender.open("again", where, names, LONG_S).admitted.result(LONG_S)
    another = Process("receiver", tmp_path)
    where = another.call("addresses")[which]
    again = sender.open("again", where, names, LONG_S)
    assert again.admitted.result(LONG_S) == 6
    send(sender, slots, names)
    assert again.done.result(LONG_S) == 0
    assert another.call("wait", "again") == "committed"
    another.kill()


@ADDRESSES
def test_a_sender_hangs(sender: Sender, tmp_path: Path, transport: str) -> None:
    """Its transfer ends by its deadline. Slots that it can write into come back when it goes on."""
    node = Node(tmp_path, limits=replace(PATIENT, transfer_s=0.5))
    process = Process("sender", tmp_path)
    names = record_names(6)
    assert process.call("open", "t", address(node, transport), names) == 6
    process.call("put", names[:2])
    process.stop()
    assert ended(node, "t") == "nothing came in for too long"
    assert node.receiver.arena.free == (2 if transport == "unix" else 8)
    waiting = sender.open("waiting", node.tcp, record_names(8, "a" * 16), LONG_S)
    if transport == "unix":
        node.receiver.check_integrity()
        assert not waiting.admitted.done()
        process.go_on()
    assert waiting.admitted.result(LONG_S) == 8
    process.kill()
    ended(node, "waiting")
    node.close()


@ADDRESSES
def test_a_receiver_hangs(slots: Staging, tmp_path: Path, transport: str) -> None:
    """Transfers to it end by their deadlines, and the sender has its slots; going on, it serves again."""
    sender, patient = new_sender(transfer_s=0.3), new_sender()
    process = Process("receiver", tmp_path)
    where = process.call("addresses")[["unix", "tcp"].index(transport)]
    names = record_names(4)
    first = sender.open("first", where, names, LONG_S)
    assert first.admitted.result(LONG_S) == 4
    process.stop()
    send(sender, slots, names)
    with pytest.raises(HandoffError, match="the receiver did not confirm in time"):
        first.done.result(LONG_S)
    second = sender.open("second", where, names, deadline_s=0.3)
    with pytest.raises(HandoffError, match="the receiver did not answer in time"):
        second.admitted.result(LONG_S)
    process.go_on()
    third = patient.open("third", where, names, LONG_S)
    third.admitted.result(LONG_S)
    send(patient, slots, names)
    third.done.result(LONG_S)
    process.kill()
    sender.close(LONG_S)
    patient.close(LONG_S)


@pytest.mark.parametrize("phase", ["waiting", "receiving", "committed"])
def test_deadlines_of_the_receiver(tmp_path: Path, sender: Sender, slots: Staging, phase: str) -> None:
    soon = {"waiting": "allocation_s", "receiving": "transfer_s", "committed": "idle_s"}[phase]
    node = Node(tmp_path, limits=replace(PATIENT, **{soon: 0.05}))
    names = record_names(8)
    transfer = sender.open("t", node.unix, names, LONG_S)
    if phase == "waiting":
        assert transfer.admitted.result(LONG_S) == 8
        second = sender.open("second", node.unix, record_names(8, "a" * 16), LONG_S)
        with pytest.raises(HandoffError, match="no slots came free in time"):
            second.admitted.result(LONG_S)
        sender.cancel("t")
    elif phase == "receiving":
        with pytest.raises(HandoffError, match="nothing came in for too long"):
            transfer.done.result(LONG_S)
    else:
        transfer.admitted.result(LONG_S)
        send(sender, slots, names)
        transfer.done.result(LONG_S)
        assert ended(node, "t") == "nobody used it in time"
    ended(node, "t")
    again = sender.open("again", node.unix, names, LONG_S)
    assert again.admitted.result(LONG_S) == 8
    node.close()


@pytest.mark.parametrize("stage", ["asked", "sending"])
def test_deadlines_of_the_sender(node: Node, slots: Staging, stage: str) -> None:
    sender = new_sender(transfer_s=0.05)
    holder = new_sender()
    if stage == "asked":
        holder.open("holder", node.unix, record_names(8, "a" * 16), LONG_S).admitted.result(LONG_S)
        transfer = sender.open("t", node.tcp, record_names(8), deadline_s=0.05)
        # the receiver has the same deadline: whichever says so first
        says = "the receiver did not answer in time|no slots came free in time"
    else:
        transfer = sender.open("t", node.tcp, record_names(8), LONG_S)
        says = "no record was put for too long"
    with pytest.raises(HandoffError, match=says):
        transfer.done.result(LONG_S)
    holder.cancel("holder")
    ended(node, "t")
    sender.close(LONG_S)
    holder.close(LONG_S)


def test_what_never_fits_is_refused(node: Node, sender: Sender) -> None:
    transfer = sender.open("t", node.tcp, record_names(9), LONG_S)
    with pytest.raises(HandoffError, match="9 records do not fit the buffer's 8 slots"):
        transfer.admitted.result(LONG_S)


def test_bad_requests_are_errors_at_once(node: Node, sender: Sender) -> None:
    sender.open("t", node.tcp, record_names(8), LONG_S)
    with pytest.raises(HandoffError, match="this id is in use"):
        sender.open("t", node.tcp, record_names(1), LONG_S)
    with pytest.raises(HandoffError, match="0 records; want 1 to"):
        sender.open("u", node.tcp, [], LONG_S)
    with pytest.raises(ValueError, match="want unix:///<path>, tcp"):
        sender.open("u", "http://example.com", record_names(1), LONG_S)
    with pytest.raises(ValueError, match="transfer 'u v': want 1 to 128 printable ASCII"):
        sender.open("u v", node.tcp, record_names(1), LONG_S)
    for deadline_s in (0.0, -1.0, 3601.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"deadline_s=.*: want more than 0 and at most 3600"):
            sender.open("u", node.tcp, record_names(1), deadline_s)
    sender.close(0.0)
    with pytest.raises(HandoffError, match="the sender is closed"):
        sender.open("u", node.tcp, record_names(1), LONG_S)


@ADDRESSES
def test_closing_a_node_ends_its_transfers(
    tmp_path: Path, sender: Sender, slots: Staging, transport: str
) -> None:
    node = Node(tmp_path)
    first = sender.open("first", address(node, transport), record_names(6), LONG_S)
    second = sender.open("second", address(node, transport), record_names(6, "a" * 16), LONG_S)
    assert first.admitted.result(LONG_S) == 6
    send(sender, slots, record_names(3))
    node.close()
    for transfer in (first, second):
        with pytest.raises(HandoffError, match=r"the receiver is (closing|gone)"):
            transfer.done.result(LONG_S)


def test_futures_complete_without_the_lock(node: Node, sender: Sender, slots: Staging) -> None:
    """Who is told that there is room may call the sender, and take its time."""
    names = record_names(2)
    transfer = sender.open("t", node.unix, names, LONG_S)
    calls: list[Callable[[], object]] = [lambda: sender.unsent(names), sender.transfers]
    transfer.admitted.add_done_callback(lambda _: [call() for call in calls] and None)
    transfer.admitted.add_done_callback(lambda _: send(sender, slots, names))
    assert transfer.done.result(LONG_S) == 0
