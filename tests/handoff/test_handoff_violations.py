"""A peer that breaks the protocol is cut off, and no slot is lost."""
# ruff: noqa: F811

from __future__ import annotations

import os
import select
import struct
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from handoff_nodes import (
    IDENTITY,
    LONG_S,
    Node,
    Speaker,
    assert_holds,
    new_sender,
    raw_socket,
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
from kvkit.staging import Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.testing.contract import SLOT_BYTES, put, record_bytes, record_names


@ADDRESSES
@pytest.mark.parametrize("field", ["secret", "version", "namespace", "layout", "slot_bytes"])
def test_strangers_are_refused(node: Node, transport: str, field: str) -> None:
    where = address(node, transport)
    if field == "version":
        stranger = Speaker(where)
        answer = stranger.hello(version=1)
        stranger.close()
        assert isinstance(answer, Error)
        assert answer.message == "version: node 'here' has 1, 'here' has 2"
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
            plain = speaker.socket.dup()
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
    hung_up.register(speaker.socket, 0)
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


def test_messages_are_bounded_by_what_a_node_says_of_itself() -> None:
    assert len(encode(IDENTITY.hello())) < 1024
    assert b"of the tests" not in repr(IDENTITY).encode()
