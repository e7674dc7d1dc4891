"""Handoff between nodes: real sockets and processes, kill -9, hostile peers; no slot is lost."""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from handoff_nodes import (
    IDENTITY,
    LONG_S,
    PATIENT,
    Node,
    Process,
    Speaker,
    assert_holds,
    fill,
    new_sender,
    raw_socket,
)
from waiting import wait_for

from kvkit.handoff.protocol.messages import (
    MAX_BODY_BYTES,
    Admit,
    Cancel,
    Commit,
    Data,
    Done,
    Error,
    Message,
    Proof,
    Pull,
    Query,
    Refuse,
    Release,
    Reserve,
    encode,
)
from kvkit.handoff.sender import HandoffError, Sender
from kvkit.handoff.transport.channel import ChannelError, ChannelIdle
from kvkit.handoff.transport.unix import PeerArena
from kvkit.staging import Staging, release_all
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.testing.contract import SLOT_BYTES, Completions, put, record_bytes, record_names

ADDRESSES = pytest.mark.parametrize("transport", ["unix", "tcp"])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = new_sender()
    yield sender
    for transfer in sender.transfers():
        sender.cancel(transfer)
    sender.close(LONG_S)


@pytest.fixture
def slots() -> Iterator[Staging]:
    """The sender's slots."""
    slots = Staging(SLOT_BYTES, 16)
    yield slots
    slots.check_integrity()
    assert slots.free == slots.slots, "the sender keeps slots"
    slots.close()


def send(sender: Sender, slots: Staging, names: list[str]) -> None:
    """Put records and wait until each is sent, or was not wanted."""
    leases = fill(slots, names)
    sent = Completions()
    sender.put(names, leases, sent)
    release_all(leases)
    sent.wait(len(names))


def address(node: Node, transport: str) -> str:
    return node.unix if transport == "unix" else node.tcp


def ended(node: Node, transfer: str) -> str:
    """Why a transfer is over; waits until it is."""
    receiver = node.receiver

    def reason() -> str:
        status = receiver.status(transfer)
        return "" if status is None else status.reason

    with receiver._changed:
        assert receiver._changed.wait_for(reason, LONG_S), f"{transfer} goes on: {receiver.status(transfer)}"
    return reason()


def wait_until_free(node: Node) -> None:
    """A sender that is cut off may hear so before the slots are back."""
    wait_for(lambda: node.receiver.arena.free == node.receiver.arena.slots)
    node.receiver.check_integrity()


@ADDRESSES
def test_records_arrive(node: Node, sender: Sender, slots: Staging, transport: str) -> None:
    names = record_names(6)
    for number in range(3):
        transfer = sender.open(f"t{number}", address(node, transport), names, LONG_S)
        assert transfer.admitted.result(LONG_S) == 6
        assert sender.count_unneeded(names) == 0
        send(sender, slots, names[::-1])
        assert transfer.done.result(LONG_S) == 0
        assert_holds(node.tier, names)
        assert sender.count_unneeded(names) == 6
        node.receiver.check_integrity()
        node.receiver.release(transfer.id)
        assert node.tier.count_leading(names) == 0
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
    assert node.tier.count_leading(names) == 0
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
    for transfer, node in zip(transfers, nodes, strict=True):
        assert transfer.done.result(LONG_S) == 0
        assert_holds(node.tier, names)
        node.close()


@ADDRESSES
def test_what_is_never_put_is_missing(node: Node, sender: Sender, slots: Staging, transport: str) -> None:
    names = record_names(5)
    transfer = sender.open("t", address(node, transport), names, LONG_S)
    transfer.admitted.result(LONG_S)
    send(sender, slots, names[:3])
    sender.finish("t")
    assert transfer.done.result(LONG_S) == 2
    assert node.tier.count_leading(names) == 3
    assert node.receiver.arena.free == 5


def test_nothing_is_put_before_there_is_room(node: Node, sender: Sender, slots: Staging) -> None:
    """Otherwise nodes could wait for each other's slots in a circle."""
    first = sender.open("first", node.unix, record_names(8, "a" * 16), LONG_S)
    first.admitted.result(LONG_S)
    names = record_names(2)
    second = sender.open("second", node.unix, names, LONG_S)
    assert sender.count_unneeded(names) == 2
    send(sender, slots, names)
    assert slots.free == slots.slots
    sender.cancel("first")
    assert second.admitted.result(LONG_S) == 2
    assert sender.count_unneeded(names) == 0
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


@ADDRESSES
@pytest.mark.parametrize("field", ["secret", "version", "namespace", "layout", "slot_bytes"])
def test_strangers_are_refused(node: Node, transport: str, field: str) -> None:
    where = address(node, transport)
    if field == "version":
        stranger = Speaker(where)
        answer = stranger.hello(version=2)
        stranger.close()
        assert isinstance(answer, Error)
        assert answer.message == "version: node 'here' has 2, 'here' has 1"
        return
    another: dict[str, object] = {"secret": b"another", "slot_bytes": 4096}
    identity = replace(IDENTITY, **{field: another.get(field, "another")})
    sender = new_sender(identity)
    transfer = sender.open("t", where, record_names(1), LONG_S)
    says = f"{field}: node 'sender' has {another.get(field, 'another')!r}, 'here' has"
    if field == "secret":
        says = "the secrets differ"
    with pytest.raises(HandoffError, match=says):
        transfer.admitted.result(LONG_S)
    sender.close(LONG_S)
    wait_until_free(node)


def test_a_false_endpoint_is_refused(tmp_path: Path) -> None:
    """The proof is mutual: one who does not know the secret gets no records either."""
    node = Node(tmp_path, identity=replace(IDENTITY, secret=b"another"))
    sender = new_sender()
    with pytest.raises(HandoffError, match="the secrets differ"):
        sender.open("t", node.unix, record_names(1), LONG_S).admitted.result(LONG_S)
    sender.close(LONG_S)
    node.close()


@ADDRESSES
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<II", MAX_BODY_BYTES + 1, 0),
        struct.pack("<II", 2**32 - 1, 2**32 - 1),
        struct.pack("<II", 4, 0) + b"\xff\xff\xff\xff",
        struct.pack("<II", 100, 0) + b"half",
        struct.pack("<II", 0, 0),
        struct.pack("<II", 4, 4) + b"\x81\xa4ty" + b"load",
        os.urandom(4096),
    ],
    ids=["http", "body", "both", "body-malformed", "half", "empty", "payload", "random"],
)
def test_garbage_ends_a_connection_and_nothing_else(
    node: Node, sender: Sender, slots: Staging, transport: str, garbage: bytes
) -> None:
    transfer = sender.open("t", address(node, transport), record_names(3), LONG_S)
    assert transfer.admitted.result(LONG_S) == 3
    for stage in ("before the hello", "after it"):
        if stage == "after it":
            speaker = Speaker(address(node, transport))
            assert isinstance(speaker.hello(), Proof)
            plain = speaker.channel._stream.socket.dup()  # type: ignore[attr-defined]
        else:
            plain = raw_socket(address(node, transport))
        plain.sendall(garbage)
        with suppress(OSError):  # the endpoint was faster
            plain.shutdown(1)
        with suppress(ConnectionError):
            while plain.recv(65536):
                pass
        plain.close()
    send(sender, slots, record_names(3))
    assert transfer.done.result(LONG_S) == 0
    node.receiver.release("t")
    wait_until_free(node)


def violations() -> dict[str, list[tuple[Message, bytes | None]]]:
    """What a peer that is known must not say."""
    names = tuple(record_names(2))
    payload = bytes(SLOT_BYTES)
    reserve = (Reserve("t", names, 5.0), None)
    return {
        "hello again": [(IDENTITY.hello(), None)],
        "data for another's transfer": [(Data("other", 0, SLOT_BYTES), payload)],
        "data twice": [reserve, *[(Data("t", 0, SLOT_BYTES), payload)] * 2],
        "data past the end": [reserve, (Data("t", 2, SLOT_BYTES), payload)],
        "data too large": [reserve, (Data("t", 0, SLOT_BYTES + 1), payload + b"x")],
        "another size": [reserve, (Data("t", 0, SLOT_BYTES - 1), payload)],
        "no payload": [reserve, (Data("t", 0, SLOT_BYTES), None)],
        "commit before all is in": [reserve, (Commit("t"), None)],
        "commit of what is in as missing": [
            reserve,
            (Data("t", 0, SLOT_BYTES), payload),
            (Data("t", 1, SLOT_BYTES), payload),
            (Commit("t", (0,)), None),
        ],
        "a receiver's word": [(Done("t"), None)],
        "a payload that nobody expects": [(Reserve("t", names, 5.0), payload)],
        "two pulls of one name": [(Pull("p", names), None), (Pull("p", names), None)],
    }


@pytest.mark.parametrize("what", violations())
def test_who_breaks_the_protocol_is_cut_off(node: Node, sender: Sender, slots: Staging, what: str) -> None:
    other = sender.open("other", node.tcp, record_names(3, "a" * 16), LONG_S)
    assert other.admitted.result(LONG_S) == 3
    speaker = Speaker(node.tcp)
    speaker.hello()
    with suppress(ChannelError):  # cut off before all is said
        for message, payload in violations()[what]:
            speaker.say(message, payload)
    heard = speaker.hear_all()
    speaker.close()
    if what != "another size":  # a frame error: the stream is of no further use
        assert [message.code for message in heard if isinstance(message, Error)] == ["unexpected"]
    send(sender, slots, record_names(3, "a" * 16))
    assert other.done.result(LONG_S) == 0
    node.receiver.release("other")
    wait_until_free(node)


def test_what_comes_too_late_is_passed_over(node: Node) -> None:
    """The receiver gave up while data was on its way: no error, and the slot is somebody else's."""
    speaker = Speaker(node.tcp)
    speaker.hello()
    speaker.say(Reserve("t", tuple(record_names(2)), 5.0))
    assert isinstance(speaker.hear(), Admit)
    node.receiver.release("t", "given up")
    for index in range(2):
        speaker.say(Data("t", index, SLOT_BYTES), bytes(SLOT_BYTES))
    speaker.say(Commit("t"))
    assert speaker.hear() == Release("t", "given up")
    speaker.say(Cancel("t"))
    speaker.say(Query(1, tuple(record_names(2))))
    assert speaker.hear().runs[0].records == 0  # type: ignore[union-attr]
    wait_until_free(node)
    speaker.close()


def test_slots_that_a_peer_may_still_write_are_lent_to_nobody(node: Node) -> None:
    """With shared memory a receiver cannot stop a sender: it waits for its word, or its end."""
    names = tuple(record_names(8))
    for end, following in (("cancel", "first"), ("leave", "second")):
        speaker = Speaker(node.unix)
        speaker.hello()
        speaker.say(Reserve(end, names, 5.0))
        assert isinstance(speaker.hear(), Admit)
        node.receiver.release(end, "given up")
        assert speaker.hear() == Release(end, "given up")
        assert node.receiver.transfers() == {}
        assert node.receiver.arena.free == 0
        speaker.say(Reserve(following, names, 5.0))
        if end == "cancel":
            speaker.say(Cancel(end))
            assert isinstance(speaker.hear(), Admit)
        speaker.close()
        ended(node, following)
        assert node.receiver.arena.free == 8
        node.receiver.check_integrity()


def test_the_end_of_a_connection_is_the_end_of_writing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that is cut off while it writes into a slot is gone only when that is done."""
    write, begun, go_on = PeerArena.write, threading.Event(), threading.Event()

    def slow_write(arena: PeerArena, slot: int, payload: memoryview) -> None:
        begun.set()
        assert go_on.wait(LONG_S)
        write(arena, slot, payload)

    monkeypatch.setattr(PeerArena, "write", slow_write)
    speaker = Speaker(node.unix)
    speaker.hello()
    speaker.say(Reserve("t", tuple(record_names(8)), 5.0))
    admit = speaker.hear()
    assert isinstance(admit, Admit)

    def say() -> None:
        with suppress(ChannelError):
            speaker.say(Data("t", 0, SLOT_BYTES), bytes(SLOT_BYTES), admit.slots[0])

    saying, ending = threading.Thread(target=say), threading.Thread(target=speaker.channel.shutdown)
    saying.start()
    assert begun.wait(LONG_S)
    ending.start()
    with pytest.raises(ChannelIdle):
        speaker.channel.receive(lambda _: None, 0.05)
    assert node.receiver.transfers() == {"t": "receiving"}
    go_on.set()
    assert ended(node, "t") == "its sender is gone"
    saying.join(LONG_S)
    ending.join(LONG_S)
    speaker.close()
    wait_until_free(node)


def test_a_name_that_is_used_again_before_the_answer(node: Node) -> None:
    """The sender's word frees the slots of both transfers of that name."""
    names = tuple(record_names(4))
    speaker = Speaker(node.unix)
    speaker.hello()
    for _ in range(2):
        speaker.say(Reserve("t", names, 5.0))
        assert isinstance(speaker.hear(), Admit)
        node.receiver.release("t", "given up")
        assert speaker.hear() == Release("t", "given up")
    assert node.receiver.arena.free == 0
    speaker.say(Cancel("t"))
    speaker.say(Reserve("u", tuple(record_names(8)), 5.0))
    assert isinstance(speaker.hear(), Admit)
    speaker.close()
    ended(node, "u")
    wait_until_free(node)


def test_a_payload_may_follow_where_memory_is_shared(node: Node) -> None:
    """A peer that does not map the memory, or whose transport cannot."""
    names = tuple(record_names(1))
    speaker = Speaker(node.unix)
    speaker.hello()
    speaker.say(Reserve("t", names, 5.0))
    assert isinstance(speaker.hear(), Admit)
    speaker.say(Data("t", 0, SLOT_BYTES), record_bytes(names[0]).tobytes())
    speaker.say(Commit("t"))
    assert speaker.hear() == Done("t")
    assert_holds(node.tier, names)
    speaker.close()


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
    sender.open("t", node.tcp, record_names(9), LONG_S)
    with pytest.raises(HandoffError, match="there is one of that name"):
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


def test_who_does_not_read_is_cut_off(tmp_path: Path, sender: Sender, slots: Staging) -> None:
    """A puller that never reads: its connection ends at the frame's deadline, other peers notice nothing."""
    arena = Staging(SLOT_BYTES, 40)
    memory = MemoryTier(arena, 32 * SLOT_BYTES)
    names = record_names(32)
    put(memory, arena, names)
    node = Node(tmp_path, near=[memory], timeout_s=0.2)
    speaker = Speaker(node.unix)
    speaker.hello()
    for number in range(64):  # 64 times half a megabyte is more than sockets hold
        speaker.say(Pull(f"p{number}", tuple(names)))
    transfer = sender.open("t", node.tcp, record_names(3, "a" * 16), LONG_S)
    assert transfer.admitted.result(LONG_S) == 3
    send(sender, slots, record_names(3, "a" * 16))
    assert transfer.done.result(LONG_S) == 0
    hung_up = select.poll()
    hung_up.register(speaker.channel, 0)
    assert hung_up.poll(LONG_S * 1000), "it was not cut off"
    speaker.close()
    node.close()
    memory.close()
    arena.check_integrity()
    assert arena.free == arena.slots
    arena.close()


def test_refusals_say_why(node: Node) -> None:
    speaker = Speaker(node.tcp)
    speaker.hello()
    names = tuple(record_names(2))
    speaker.say(Reserve("t", names, 5.0))
    assert isinstance(speaker.hear(), Admit)
    speaker.say(Reserve("t", names, 5.0))
    assert speaker.hear() == Refuse("t", "there is a transfer t already")
    speaker.close()


def test_futures_complete_without_the_lock(node: Node, sender: Sender, slots: Staging) -> None:
    """Who is told that there is room may call the sender, and take its time."""
    names = record_names(2)
    transfer = sender.open("t", node.unix, names, LONG_S)
    calls: list[Callable[[], object]] = [lambda: sender.count_unneeded(names), sender.transfers]
    transfer.admitted.add_done_callback(lambda _: [call() for call in calls] and None)
    transfer.admitted.add_done_callback(lambda _: send(sender, slots, names))
    assert transfer.done.result(LONG_S) == 0


def test_messages_are_bounded_by_what_a_node_says_of_itself() -> None:
    assert len(encode(IDENTITY.hello())) < 1024
    assert b"of the tests" not in repr(IDENTITY).encode()
