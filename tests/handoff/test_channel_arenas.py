"""A channel shares memory only with a proven process of the same user, and refuses any other."""
# ruff: noqa: F811

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from channels import (  # noqa: F401 - some are fixtures
    DEADLINE_S,
    SLOT_BYTES,
    Pair,
    Raw,
    Transport,
    arena,
    certificates,
    nowhere,
    open_descriptors,
    pair,
    pattern,
    transport,
)

from kvkit.handoff.transport import nixl, unix
from kvkit.handoff.transport.addresses import connect, listen
from kvkit.handoff.transport.channel import (
    HEADER,
    ChannelClosed,
    ChannelError,
    ChannelIdle,
    FrameError,
)
from kvkit.staging import PAGE_BYTES, Staging


def test_a_shared_arena_is_written_into_where_that_is_possible(pair: Pair, arena: Staging) -> None:
    """The same calls on each transport, and the same bytes in the slot."""
    for lease in arena.acquire(arena.slots, 0, at_least=arena.slots):
        lease.array[:] = 7
    pair.server.share(arena)
    pair.server.send(b"welcome")
    assert pair.client.receive(nowhere, DEADLINE_S) == b"welcome"
    assert pair.client.one_sided == isinstance(pair.client, unix.LocalChannel | nixl.NixlChannel)
    size = SLOT_BYTES - 100
    source = Staging(2 * SLOT_BYTES, 2)
    source.buffers[1][:size] = pattern(size)
    if pair.client.one_sided:
        for slot, too_much in [(4, 1), (-1, 1), (0, SLOT_BYTES + 1)]:
            with pytest.raises(ValueError, match=f"slot {slot}, {too_much} bytes: the peer has 4 slots"):
                pair.client.send(b"", source.buffers[1][:too_much], slot)
    pair.client.send(b"data", source.buffers[1][:size], 2)
    source.close()
    place: Callable[[bytes], memoryview | None]
    place = nowhere if pair.client.one_sided else lambda body: arena.buffers[2][:size]
    assert pair.server.receive(place, DEADLINE_S) == b"data"
    assert arena.buffers[2][:size] == pattern(size)
    assert (arena.arrays[2][size:] == 7).all()
    assert all((arena.arrays[other] == 7).all() for other in (0, 1, 3))


def offer(peer: socket.socket, descriptors: list[int], slot_bytes: int, slots: int) -> None:
    body = struct.pack("<QQ", slot_bytes, slots)
    socket.send_fds(peer, [HEADER.pack(len(body), 2**32 - 1) + body], descriptors)


class Passing:
    """A peer of this host that listens, is trusted, and passes descriptors on."""

    def __init__(self, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "peer.sock"))
            listening.listen()
            self.channel = connect(f"unix://{folder}/peer.sock", timeout_s=DEADLINE_S)
            self.socket = listening.accept()[0]
        self.channel.trusted = True

    def offer(self, descriptors: list[int], slot_bytes: int, slots: int) -> None:
        offer(self.socket, descriptors, slot_bytes, slots)

    def close(self) -> None:
        self.socket.close()
        self.channel.close()


@pytest.mark.parametrize("kind", ["file", "unsealed", "another size", "no slots", "no pages", "two"])
def test_a_descriptor_that_is_no_arena_is_refused(tmp_path: Path, arena: Staging, kind: str) -> None:
    """What could be truncated under us would kill the process that writes there."""
    assert arena.descriptor is not None
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    for descriptor in (file, unsealed):
        os.ftruncate(descriptor, 4 * SLOT_BYTES)
    before = open_descriptors()
    peer = Passing(tmp_path)
    offered, size, slots = {
        "file": ([file], SLOT_BYTES, 4),
        "unsealed": ([unsealed], SLOT_BYTES, 4),
        "another size": ([arena.descriptor], SLOT_BYTES, 5),
        "no slots": ([arena.descriptor], 0, 0),
        "no pages": ([arena.descriptor], 1, 4 * SLOT_BYTES),
        "two": ([arena.descriptor] * 2, SLOT_BYTES, 4),
    }[kind]
    peer.offer(offered, size, slots)
    with pytest.raises(FrameError, match="shares an invalid arena"):
        peer.channel.receive(nowhere, DEADLINE_S)
    assert not peer.channel.one_sided
    peer.close()
    assert open_descriptors() == before
    os.close(file)
    os.close(unsealed)


def test_only_one_arena_is_taken(tmp_path: Path, arena: Staging) -> None:
    assert arena.descriptor is not None
    peer = Passing(tmp_path)
    peer.offer([arena.descriptor], SLOT_BYTES, 4)
    with pytest.raises(ChannelIdle):
        peer.channel.receive(nowhere, 0.01)
    assert peer.channel.one_sided
    peer.offer([arena.descriptor], SLOT_BYTES, 4)
    with pytest.raises(FrameError, match="one arena for each channel"):
        peer.channel.receive(nowhere, DEADLINE_S)
    peer.close()


def test_no_thread_for_an_arena_costs_the_connection_alone(
    tmp_path: Path, arena: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the simulation found (docs/evidence/verification.md): it was an error that nobody expected."""
    assert arena.descriptor is not None
    before = open_descriptors()
    peer = Passing(tmp_path)
    peer.offer([arena.descriptor], SLOT_BYTES, 4)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ChannelError, match="no thread for its arena: can't start new thread"):
        peer.channel.receive(nowhere, DEADLINE_S)
    assert not peer.channel.one_sided
    peer.close()
    assert open_descriptors() == before


def test_a_descriptor_that_belongs_to_nothing(tmp_path: Path, arena: Staging) -> None:
    assert arena.descriptor is not None
    before = open_descriptors()
    peer = Passing(tmp_path)
    socket.send_fds(peer.socket, [HEADER.pack(1, 0) + b"!"], [arena.descriptor])
    assert peer.channel.receive(nowhere, DEADLINE_S) == b"!"
    with pytest.raises(FrameError, match="without an arena"):
        peer.channel.receive(nowhere, DEADLINE_S)
    peer.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("trusted", [False, True])
def test_who_connects_can_pass_nothing(tmp_path: Path, arena: Staging, trusted: bool) -> None:
    """An arena goes to the side that connected. What else comes is closed by the system."""
    assert arena.descriptor is not None
    with closing(listen(f"unix://{tmp_path}/run/kvkit.sock", timeout_s=DEADLINE_S)) as listener:
        before = open_descriptors()
        peer = Raw(listener)
        peer.channel.trusted = trusted
        offer(peer.socket, [arena.descriptor], SLOT_BYTES, 4)
        with pytest.raises(
            FrameError, match=r"shares an invalid arena|a payload before it was authenticated"
        ):
            peer.channel.receive(nowhere, DEADLINE_S)
        assert not peer.channel.one_sided
        assert open_descriptors() == before + 2
        peer.close()


def test_no_arena_is_taken_from_who_connected(pair: Pair, arena: Staging) -> None:
    if pair.client.share(arena):
        with pytest.raises(FrameError, match="arena"):
            pair.server.receive(nowhere, DEADLINE_S)
    assert not pair.server.one_sided


def test_an_arena_is_not_taken_from_who_proved_nothing(tmp_path: Path, arena: Staging) -> None:
    assert arena.descriptor is not None
    before = open_descriptors()
    peer = Passing(tmp_path)
    peer.channel.trusted = False
    peer.offer([arena.descriptor], SLOT_BYTES, 4)
    with pytest.raises(FrameError, match="a payload before it was authenticated"):
        peer.channel.receive(nowhere, DEADLINE_S)
    peer.close()
    assert open_descriptors() == before


def test_memory_that_a_peer_only_claims_to_have_is_not_brought_in() -> None:
    """Its owner touched the first MiB of 64; who maps it touches no more."""
    size = 64 << 20
    descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, b"x" * (1 << 20), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    before = os.fstat(descriptor).st_blocks
    arena = unix.PeerArena(os.dup(descriptor), PAGE_BYTES, size // PAGE_BYTES)
    assert arena.ready.wait(DEADLINE_S)
    assert os.fstat(descriptor).st_blocks == before
    arena.close()
    os.close(descriptor)


def listen_as(user: int, folder: Path, ready: Connection) -> None:
    """A process of another user that listens."""
    os.chown(folder, user, user)
    os.chdir(folder)  # which it may be in, though not reach
    os.setuid(user)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("kvkit.sock")
        listening.listen()
        ready.send(None)
        signal.pause()


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_a_process_of_another_user_is_no_peer(tmp_path: Path) -> None:
    """One that put its socket where ours should be: those of root are let in, so this one is not root's."""
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe()
    other = context.Process(target=listen_as, args=(65534, tmp_path, theirs), daemon=True)
    other.start()
    ready.recv()
    with pytest.raises(ChannelClosed, match=r"process \d+ is of user 65534, want 0 or root"):
        connect(f"unix://{tmp_path}/kvkit.sock", timeout_s=DEADLINE_S)
    other.kill()
    other.join(DEADLINE_S)


def test_an_arena_that_cannot_be_shared(tmp_path: Path) -> None:
    pair = Pair(Transport(f"unix://{tmp_path}/run/kvkit.sock"))
    private = Staging(SLOT_BYTES, 1)
    with pytest.raises(ValueError, match="shared=True"):
        pair.server.share(private)
    private.close()
    pair.close()
