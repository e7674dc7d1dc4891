"""Another node's memory is read as a tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handoff_nodes import IDENTITY, LONG_S, Node, Process, new_sender

from kvkit.handoff.peer import PeerTier
from kvkit.handoff.protocol.messages import Commit, Data, Proof, Pull, decode, encode
from kvkit.handoff.transport import handshake
from kvkit.handoff.transport.addresses import listen
from kvkit.handoff.transport.channel import Channel
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import OnComplete, TierError
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.testing.contract import (
    RECORDS,
    SLOT_BYTES,
    SLOTS,
    Completions,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)
from kvkit.tiers.testing.faulty import Wrapper


class Through(Wrapper):
    """Stores into the memory of a node, and reads it as a peer does: so that there is a whole tier."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.arena = Staging(SLOT_BYTES, RECORDS + 2)
        self.memory = MemoryTier(self.arena, RECORDS * SLOT_BYTES)
        self.node = Node(folder, near=[self.memory])
        address = self.node.unix if transport == "unix" else self.node.tcp
        super().__init__(PeerTier("peer", address, IDENTITY, timeout_s=LONG_S))

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        for name, lease in zip(names, leases, strict=True):
            (copy,) = self.arena.acquire(1, LONG_S)
            with copy:
                copy.array[: lease.used] = lease.record
                copy.used = lease.used
                self.memory.put([name], [copy], on_complete)

    def delete(self, names: Sequence[str]) -> None:
        self.memory.delete(names)

    def scan(self) -> Iterator[tuple[str, int]]:
        assert list(self.inner.scan()) == []
        return self.memory.scan()

    def close(self) -> None:
        self.inner.close()
        self.node.close()
        self.memory.close()
        self.arena.check_integrity()
        assert self.arena.free == self.arena.slots


@pytest.mark.parametrize("transport", ["unix", "tcp"])
class TestPeer(TierContract):
    @pytest.fixture
    def staging(self) -> Staging:
        return Staging(SLOT_BYTES, SLOTS)

    @pytest.fixture
    def tier(self, tmp_path: Path, transport: str) -> Through:
        return Through(tmp_path, transport)


def finish(tier: PeerTier, staging: Staging) -> None:
    tier.close()
    staging.check_integrity()
    assert staging.free == staging.slots
    staging.close()


def test_what_was_handed_over_can_be_pulled(tmp_path: Path) -> None:
    """A decoder's buffer is near memory like any other."""
    node = Node(tmp_path)
    staging = Staging(SLOT_BYTES, 8)
    sender = new_sender()
    names = record_names(4)
    transfer = sender.open("t", node.unix, names, LONG_S)
    transfer.admitted.result(LONG_S)
    leases = staging.acquire(4, LONG_S, at_least=4)
    for name, lease in zip(names, leases, strict=True):
        lease.array[:] = record_bytes(name)
        lease.used = SLOT_BYTES
    sender.put(names, leases, lambda name, error: None)
    release_all(leases)
    transfer.done.result(LONG_S)
    sender.close(LONG_S)
    tier = PeerTier("D", node.tcp, IDENTITY, timeout_s=LONG_S)
    assert tier.match_prefix([*names, "0/0/c.9.9.0.0.0.0"]) == 4
    for name, found in zip(names, get(tier, staging, names), strict=True):
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, record_bytes(name))
    finish(tier, staging)
    node.close()


def test_nothing_is_stored_at_a_peer(tmp_path: Path, staging: Staging) -> None:
    node = Node(tmp_path)
    tier = PeerTier("D", node.unix, IDENTITY, timeout_s=LONG_S)
    (error,) = put(tier, staging, record_names(1))
    assert isinstance(error, TierError)
    assert "another node's memory" in str(error)
    finish(tier, staging)
    node.close()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_peer_that_dies_is_an_error_and_one_that_is_back_is_found(
    tmp_path: Path, staging: Staging, transport: str
) -> None:
    process = Process("receiver", tmp_path)
    address = process.call("addresses")[["unix", "tcp"].index(transport)]
    tier = PeerTier("D", address, IDENTITY, timeout_s=LONG_S)
    assert tier.match_prefix(record_names(2)) == 0
    process.kill()
    for _ in range(2):
        with pytest.raises(OSError, match="tier 'D'"):
            tier.match_prefix(record_names(2))
    (error,) = get(tier, staging, record_names(1))
    assert isinstance(error, OSError)
    finish(tier, staging)


def test_a_stranger_is_an_error(tmp_path: Path, staging: Staging) -> None:
    node = Node(tmp_path)
    tier = PeerTier("D", node.tcp, replace(IDENTITY, secret=b"another"), timeout_s=LONG_S)
    with pytest.raises(TierError, match="the secrets differ"):
        tier.match_prefix(record_names(1))
    finish(tier, staging)
    node.close()


@pytest.mark.parametrize("records", [1, 4])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (4, 2), (2, 2)])
def test_a_peer_of_another_size_is_refused_by_name(
    ours: int, theirs: int, records: int, tmp_path: Path, staging: Staging
) -> None:
    """Where all heads are in one record, each rank has all."""
    node = Node(tmp_path, identity=replace(IDENTITY, ranks=theirs, record_ranks=records))
    mine = replace(IDENTITY, node="there", ranks=ours, record_ranks=records)
    tier = PeerTier("D", node.tcp, mine, timeout_s=LONG_S)
    if ours == theirs or records == 1:
        assert tier.match_prefix(record_names(1)) == 0
    else:
        says = f"tier 'D': ranks: node 'here' has {theirs}, 'there' has {ours}; want a peer of as many ranks"
        with pytest.raises(TierError, match=says):
            tier.match_prefix(record_names(1))
    finish(tier, staging)
    node.close()


def silent_endpoint(folder: Path, answer: list[bytes | tuple[bytes, bytes]]) -> tuple[str, threading.Thread]:
    """An endpoint that shakes hands, waits for a pull and then only says `answer`, until it is hung up on."""
    listener = listen(f"unix://{folder}/silent/socket", timeout_s=LONG_S)

    def serve() -> None:
        channel: Channel = listener.accept(LONG_S)
        theirs = channel.receive(lambda _: None, LONG_S)
        ours = encode(IDENTITY.hello())
        channel.send(ours)
        channel.receive(lambda _: None, LONG_S)
        channel.send(encode(Proof(handshake.prove(IDENTITY.secret, "server", theirs, ours))))
        channel.trusted = True
        assert isinstance(decode(channel.receive(lambda _: None, LONG_S)), Pull)
        for frame in answer:
            body, payload = frame if isinstance(frame, tuple) else (frame, None)
            channel.send(body, None if payload is None else memoryview(payload))
        try:
            while True:
                channel.receive(lambda _: None, LONG_S)
        except OSError:
            channel.close()
            listener.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.address, thread


def test_a_peer_that_goes_silent_is_late(tmp_path: Path, staging: Staging) -> None:
    """One of two records comes, the other never: it is a miss, and its slot comes back."""
    names = record_names(2)
    frame = encode(Data("D-1", 0, SLOT_BYTES)), record_bytes(names[0]).tobytes()
    address, thread = silent_endpoint(tmp_path, [frame])
    tier = PeerTier("D", address, IDENTITY, timeout_s=0.3)
    found = get(tier, staging, names)
    assert isinstance(found[0], np.ndarray)
    assert isinstance(found[1], TimeoutError)
    finish(tier, staging)
    thread.join(LONG_S)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        ((encode(Data("D-1", 2, 4)), b"word"), "record 2 is not expected"),
        (encode(Data("D-1", 0, 4)), "without its payload"),
        (encode(Commit("D-1")), "did not come"),
    ],
)
def test_a_peer_that_breaks_the_protocol(
    tmp_path: Path, staging: Staging, frame: bytes | tuple[bytes, bytes], says: str
) -> None:
    address, thread = silent_endpoint(tmp_path, [frame])
    tier = PeerTier("D", address, IDENTITY, timeout_s=LONG_S)
    for error in get(tier, staging, record_names(2)):
        assert isinstance(error, TierError)
        assert says in str(error)
    finish(tier, staging)
    thread.join(LONG_S)


def test_many_gets_at_once(tmp_path: Path, staging: Staging) -> None:
    """Several threads over one connection: each record reaches its own slot."""
    arena = Staging(SLOT_BYTES, 20)
    memory = MemoryTier(arena, 16 * SLOT_BYTES)
    names = record_names(16)
    put(memory, arena, names)
    node = Node(tmp_path, near=[memory])
    tier = PeerTier("D", node.unix, IDENTITY, timeout_s=LONG_S)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(20):
                mine = [names[i] for i in rng.permutation(16)[:3]]
                leases = staging.acquire(3, LONG_S, at_least=3)
                done = Completions()
                tier.get(mine, leases, done)
                assert [error for _, error in done.wait(3)] == [None] * 3
                for name, lease in zip(mine, leases, strict=True):
                    assert np.array_equal(lease.record, record_bytes(name))
                release_all(leases)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not errors, errors[0]
    finish(tier, staging)
    node.close()
    memory.close()
    assert arena.free == arena.slots
    arena.close()
