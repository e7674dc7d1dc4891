"""Records from one process to another through kvkit.handoff's transports, against memcpy and bare sockets."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from benchmarks.batch import Batch
from benchmarks.micro.bench_record import COPIES, KEY, TOKENS, format_of, sealed
from benchmarks.timing import interleaved, ratio
from kvkit.format import record as records
from kvkit.handoff.transport.addresses import connect, listen
from kvkit.handoff.transport.channel import Channel, ChannelClosed
from kvkit.staging import PAGE_BYTES, Staging

MIB = 1 << 20
RECORDS = 32
TIMEOUT_S = 60.0
ROUNDS = 120
SPAWN = multiprocessing.get_context("spawn")


def digest(records: Iterable[memoryview]) -> bytes:
    """Of records one after another."""
    state = xxhash.xxh3_128()
    for record in records:
        state.update(record)
    return state.digest()


def receive(pipe: Connection, record_bytes: int, address: str, shared: bool = True) -> None:
    """A receiver: a batch into its slots, over and over, each answered when it is in."""
    arena = Staging(record_bytes, RECORDS, shared=shared)
    arena.ready.wait(TIMEOUT_S)
    listener = listen(address, timeout_s=TIMEOUT_S)
    pipe.send(listener.address)
    channel = listener.accept(TIMEOUT_S)
    channel.trusted = True
    if shared:
        channel.share(arena)
    channel.send(b"welcome")
    with suppress(ChannelClosed):
        while True:
            body = channel.receive(lambda body: arena.buffers[int(body)][:record_bytes], TIMEOUT_S)
            if body == b"commit":
                channel.send(b"done")
            elif body == b"digest":
                records = [buffer[:record_bytes] for buffer in arena.buffers]
                channel.send(digest(records))


def receive_bare(pipe: Connection, record_bytes: int, address: str) -> None:
    """The same by a blocking socket that knows what comes."""
    arena = Staging(record_bytes, RECORDS)
    arena.ready.wait(TIMEOUT_S)
    server = socket.create_server(("127.0.0.1", 0))
    pipe.send(server.getsockname()[1])
    peer, _ = server.accept()
    while True:
        for buffer in arena.buffers:
            if not peer.recv_into(buffer[:record_bytes], 0, socket.MSG_WAITALL):
                return
        peer.sendall(b"!")


class Peer:
    """A receiver in a process of its own."""

    def __init__(self, receiver: Callable[..., None], record_bytes: int, address: str = "") -> None:
        pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=receiver, args=(theirs, record_bytes, address), daemon=True)
        self.process.start()
        self.where = pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def nowhere(body: bytes) -> None:
    return None


class Ours(Peer):
    """A receiver on a channel."""

    def __init__(self, record_bytes: int, address: str, shared: bool = True) -> None:
        super().__init__(partial(receive, shared=shared), record_bytes, address)
        self.channel: Channel = connect(self.where, timeout_s=TIMEOUT_S)
        self.channel.trusted = True
        self.channel.receive(nowhere, TIMEOUT_S)

    def send(self, batch: Batch) -> None:
        for slot, lease in enumerate(batch.leases):
            self.channel.send(b"%d" % slot, lease.buffer[: lease.used], slot, more=True)
        self.channel.send(b"commit")
        assert self.channel.receive(nowhere, TIMEOUT_S) == b"done"

    def digest(self) -> bytes:
        """Of what the receiver has in its slots."""
        self.channel.send(b"digest")
        return self.channel.receive(nowhere, TIMEOUT_S)

    def close(self) -> None:
        self.channel.close()
        super().close()


class Bare(Peer):
    """A receiver on a socket."""

    def __init__(self, record_bytes: int) -> None:
        super().__init__(receive_bare, record_bytes)
        self.socket = socket.create_connection(("127.0.0.1", self.where))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, batch: Batch) -> None:
        for lease in batch.leases:
            self.socket.sendall(lease.buffer[: lease.used])
        assert self.socket.recv(1) == b"!"


@pytest.fixture
def batch(benchmark: Any) -> Iterator[Batch]:
    batch = Batch(RECORDS, 2 * MIB if benchmark.enabled else PAGE_BYTES)
    yield batch
    batch.release()


def compare(
    benchmark: Any, batch: Batch, peers: dict[str, Ours], against: str, roof: Callable[[], object]
) -> None:
    """Time of the roof over that of each peer, from calls that take turns: 1 is as fast."""
    expected = digest(lease.buffer[: lease.used] for lease in batch.leases)
    calls = {name: partial(peer.send, batch) for name, peer in peers.items()}
    for name, call in calls.items():
        call()
        assert peers[name].digest() == expected
    rounds = ROUNDS if benchmark.enabled else 1
    times = interleaved({against: roof, **calls}, rounds)
    benchmark.pedantic(next(iter(calls.values())), rounds=rounds)
    benchmark.extra_info["bytes"] = sum(lease.used for lease in batch.leases)
    for name in times:
        found = ratio(times, against, name)
        benchmark.extra_info[name] = {"us": min(times[name]) * 1e6, **found}
        took = f"{min(times[name]) * 1e3:.2f} ms"
        print(f"{name:12} {took:>10}, of {against}: min {found['min']:.2f}, median {found['median']:.2f}")
    benchmark.extra_info["against"] = against
    for peer in peers.values():
        peer.close()


def test_one_host(benchmark: Any, batch: Batch, tmp_path: Path) -> None:
    """From the sender's slots into the receiver's, against a copy between two arenas of one process."""
    size = batch.staging.slot_bytes
    other = Staging(size, RECORDS)
    assert other.ready.wait(TIMEOUT_S)

    def memcpy() -> None:
        for lease in batch.leases:
            np.copyto(other.arrays[lease.slot], lease.array)

    peers = {"unix": Ours(size, f"unix://{tmp_path}/run/bench.sock")}
    compare(benchmark, batch, peers, "memcpy", memcpy)
    other.close()


@pytest.mark.parametrize("scheme", ["tcp", "nixl"])
def test_loopback(benchmark: Any, batch: Batch, scheme: str) -> None:
    """Against a socket of each side that does nothing else."""
    if scheme == "nixl":
        pytest.importorskip("nixl_cu12")
    size = batch.staging.slot_bytes
    bare = Bare(size)
    peers = {scheme: Ours(size, f"{scheme}://127.0.0.1:0")}
    compare(benchmark, batch, peers, "bare socket", partial(bare.send, batch))
    bare.close()


def test_private_memory(benchmark: Any, batch: Batch, tmp_path: Path) -> None:
    """Through the socket into slots that nobody else maps, against the sender's writing into shared ones."""
    size = batch.staging.slot_bytes
    shared = Ours(size, f"unix://{tmp_path}/shared/bench.sock")
    peers = {"private": Ours(size, f"unix://{tmp_path}/private/bench.sock", shared=False)}
    compare(benchmark, batch, peers, "shared", partial(shared.send, batch))
    shared.close()


@pytest.mark.parametrize("layers", [11, 30])
def test_copy_before_verifying(benchmark: Any, layers: int) -> None:
    """What it would take to verify, of shared memory, only what nobody else can change: 4 and 12 MB."""
    form = format_of(layers, 3, 64, "float32")
    held = [sealed(form) for _ in range(COPIES if benchmark.enabled else 1)]
    turns = itertools.cycle(held)
    private = np.ones_like(held[0])

    def verify(record: npt.NDArray[np.uint8]) -> None:
        assert records.verify(form, record, form.digest, KEY, TOKENS) is None

    def copy_and_verify() -> None:
        np.copyto(private, next(turns))
        verify(private)

    calls = {"verify": lambda: verify(next(turns)), "copy and verify": copy_and_verify}
    times = interleaved(calls, ROUNDS if benchmark.enabled else 1)
    benchmark.pedantic(copy_and_verify, rounds=1)
    found = {name: {"us": min(took) * 1e6} | ratio(times, name, "verify") for name, took in times.items()}
    benchmark.extra_info.update(found, against="verify", bytes=form.record_bytes)
