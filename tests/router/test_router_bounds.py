"""The router's index of KV takes bounded memory, and keeps no request waiting."""

from __future__ import annotations

import asyncio
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("aiohttp")

from event_subscriber import Following, addresses
from memory_limits import Measured

from kvkit.lab.testbed.waiting import START_S
from kvkit.router.index import BlockIndex, ClearedBlocks, KVEvent, RemovedBlocks

MIB = 1 << 20
LIMIT_BYTES = 2 * MIB
END = -1


def stored(number: int, **more: Any) -> dict[str, Any]:
    """An event of a block of 8 tokens that no other has."""
    ids = [number >> shift & 255 for shift in range(0, 64, 8)]
    event = {"block_hashes": [number], "parent_block_hash": None, "token_ids": ids, "block_size": 8}
    return {"type": "BlockStored", **event, **more}


def held(number: int) -> dict[str, Any]:
    """In a tier."""
    return stored(number, ownership="memory")


def blocks(number: int, count: int = 1024, **more: Any) -> dict[str, Any]:
    """An event of so many blocks of one token that no other has."""
    hashes = [*range(number * count, (number + 1) * count)]
    return stored(0, block_hashes=hashes, token_ids=[number] * count, block_size=1, **more)


LONG = 10_000
GROWS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "media": (5_000, lambda i: stored(i, medium=f"medium {i}")),
    "tiers": (5_000, lambda i: stored(i, ownership=f"tier {i}")),
    "long media": (1000, lambda i: stored(i, medium=f"{i:0{LONG}}")),
    "adapters": (10_000, lambda i: stored(i, lora_name=f"adapter {i}")),
    "long adapters": (1000, lambda i: stored(i, lora_name=f"{i:0{LONG}}")),
    "long hashes": (1000, lambda i: stored(i, block_hashes=[f"{i:0{LONG}}".encode()])),
    "hashes of the same tokens": (20_000, lambda i: stored(0, block_hashes=[i])),
    "blocks": (40, blocks),
    "blocks in both": (40, lambda i: blocks(i // 2, ownership="memory" if i % 2 else None)),
    "block sizes": (2000, lambda i: stored(i, block_size=i + 1, token_ids=[1] * (i + 1))),
}


@pytest.mark.parametrize("name", GROWS)
def test_an_index_grows_to_its_limit_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two tables while one grows."""
    monkeypatch.setattr("kvkit.router.index.MAX_INDEX_BYTES", LIMIT_BYTES)
    count, make = GROWS[name]
    decoder, index = msgspec.msgpack.Decoder(KVEvent), BlockIndex()
    index.apply(ClearedBlocks(complete=True))
    tracemalloc.start()
    try:
        for number in range(count):
            index.apply(decoder.decode(msgspec.msgpack.encode(make(number))))
        assert tracemalloc.get_traced_memory()[1] < 2 * LIMIT_BYTES
    finally:
        tracemalloc.stop()
    full = index.size_bytes > LIMIT_BYTES or name in ("media", "tiers", "long media", "block sizes")
    assert index.complete != full, "of what is left out the engine is asked"


def test_what_an_index_counts_is_what_it_takes() -> None:
    decoder, index = msgspec.msgpack.Decoder(KVEvent), BlockIndex()
    tracemalloc.start()
    try:
        for number in range(60):
            index.apply(decoder.decode(msgspec.msgpack.encode(blocks(number))))
            if number % 2:
                index.apply(RemovedBlocks([*range(number << 10, (number << 10) + 1000)]))
        taken = tracemalloc.get_traced_memory()[0]
        assert taken <= index.size_bytes < 1.6 * taken
    finally:
        tracemalloc.stop()


def test_an_index_forgets_a_few_blocks_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows all of the others meanwhile."""
    monkeypatch.setattr("kvkit.router.index._SWEEP_BLOCKS", 100)
    index, count = BlockIndex(), 20_000
    events = [msgspec.convert(stored(number), KVEvent) for number in range(count)]
    for event in events:
        index.apply(event)
    index.apply(RemovedBlocks([*range(count // 4, count)]))
    left, steps = len(index._sweeping), 0
    assert left > count // 2
    while index._sweeping:
        index.apply(RemovedBlocks([count]))
        steps += 1
        assert len(index._sweeping) >= left - 100 * steps
        for number in (0, count // 8, count // 4 - 1, count // 4):
            tokens = events[number].token_ids
            assert index.held_tokens(tokens, None, "", engine_cache=True) == 8 * (number < count // 4)
    assert len(index._blocks) < count // 2


@pytest.mark.parametrize(
    "event",
    [
        stored(0, block_hashes=[*range(1 << 18)], token_ids=[1]),
        stored(0, token_ids=[1] * (1 << 22)),
        stored(0, block_size=1 << 20, token_ids=[1] * (1 << 20)),
        stored(0, extra_keys=[None] * (1 << 18)),
        {"type": "BlockRemoved", "block_hashes": [1] * (1 << 18)},
    ],
)
def test_an_event_of_too_many_is_not_understood(event: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=KVEvent)


def test_what_is_nested_in_extra_keys_is_not_unpacked() -> None:
    """An empty list takes 56 bytes, and one byte to send."""
    sent = msgspec.msgpack.encode(stored(0, extra_keys=[[[]] * MIB]))
    tracemalloc.start()
    try:
        BlockIndex().apply(msgspec.msgpack.decode(sent, type=KVEvent))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


class Source:
    """An engine's sockets: replays are answered by a thread. A context manager.

    Args:
        replays: what it answers who asks for batches from a number on, by number.
    """

    def __init__(self, folder: Path, replays: Callable[[int], Iterator[tuple[int, bytes]]]) -> None:
        self.replays = replays
        self.asked: list[int] = []
        context, where = zmq.Context.instance(), addresses(folder)
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._router.set_hwm(2)
        self._router.set(zmq.ROUTER_MANDATORY, 1)  # it waits for who reads slowly
        self._router.rcvtimeo = self._router.sndtimeo = 20
        for socket, address in ((self._pub, where["events"]), (self._router, where["replay"])):
            socket.linger = 0
            socket.bind(address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Source:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._pub.close()
        self._router.close()

    def tell(self, number: bytes, batch: bytes) -> None:
        self._pub.send_multipart((b"", number, batch))

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(zmq.ZMQError):  # nobody asks, or who asked reads no more
                who, _, first = self._router.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                for number, batch in self.replays(self.asked[-1]):
                    self._send(who, b"", b"", named(number), batch)

    def _send(self, *frames: bytes) -> None:
        while True:
            try:
                return self._router.send_multipart(frames)
            except zmq.Again:
                if self._ended.is_set() or self._router.poll(0):
                    raise


def named(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def batch_of(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), None])


def replay_of(*batches: bytes) -> Callable[[int], Iterator[tuple[int, bytes]]]:
    """Of batches from 0 on, and their end."""

    def replay(first: int) -> Iterator[tuple[int, bytes]]:
        yield from [*enumerate(batches)][first:]
        yield END, b""

    return replay


def endless(first: int) -> Iterator[tuple[int, bytes]]:
    """Batches of a MiB that say little."""
    padding = bytes(MIB)
    return ((number, batch_of(stored(number, more=padding))) for number in itertools.count(first))


@pytest.mark.parametrize(
    ("events", "turns"),
    [
        ([blocks(1, 1 << 17)], 128),
        ([stored(0, block_hashes=[*range(64)], token_ids=[1] * (1 << 20), block_size=1 << 14)], 32),
        ([{"type": "BlockRemoved", "block_hashes": [1] * (1 << 17)}], 128),
        ([{"type": "AllBlocksCleared"}] * (1 << 16), 64),
    ],
)
def test_requests_have_their_turns_while_a_batch_is_taken(
    events: list[dict[str, Any]], turns: int, tmp_path: Path
) -> None:
    async def follow() -> None:
        follower = Following(tmp_path).make_follower()
        task = asyncio.create_task(follower._apply(0, batch_of(*events)))
        seen = 0
        while not task.done():
            await asyncio.sleep(0)
            seen += 1
        assert task.result()
        assert seen >= turns

    asyncio.run(follow())


def follow_for_long(folder: Path, batches: int) -> None:
    """Follow an engine whose replay never ends until so many batches were taken."""

    async def follow() -> None:
        with Source(folder, endless):
            async with Following(folder) as router, asyncio.timeout(START_S):
                while router.known < batches:
                    await asyncio.sleep(0.01)

    asyncio.run(follow())


def follow_shortly(folder: Path, _: int) -> None:
    (folder / "before").mkdir()
    follow_for_long(folder / "before", 10)


def test_a_replay_without_end_takes_little_memory(tmp_path: Path) -> None:
    with Measured() as process:
        peak = process.peak_bytes(follow_for_long, tmp_path, 400, prepare=follow_shortly)
    assert peak < 50 * MIB


def test_a_replay_without_end_is_broken_off_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkit.router.events.MAX_REPLAY_S", 0.2)

    async def follow() -> None:
        with Source(tmp_path, endless) as source:
            async with Following(tmp_path) as router, asyncio.timeout(START_S):
                while not any(source.asked[1:]):
                    await asyncio.sleep(0.01)
                    assert not router.follower.current
                monkeypatch.undo()
                source.replays = lambda first: iter([next(endless(first)), (END, b"")])
                await router.until_current()
        assert source.asked == sorted(source.asked)

    asyncio.run(follow())


def test_what_a_replay_left_out_is_asked_for_again(tmp_path: Path) -> None:
    """A publisher drops what a follower does not read in time."""
    told = [batch_of(held(number)) for number in range(9)]
    whole = replay_of(*told)

    def with_gaps(first: int) -> Iterator[tuple[int, bytes]]:
        return (sent for sent in whole(first) if sent[0] not in (first + 3, first + 5))

    async def follow() -> None:
        with Source(tmp_path, with_gaps) as source:
            async with Following(tmp_path) as router, asyncio.timeout(START_S):
                await router.until_current(9)
                assert source.asked[:4] == [0, 2, 4, 6]
                for number in range(9):
                    found = await router.held_tokens(stored(number)["token_ids"])
                    assert (found, router.asked) == (8, router.asked)

    asyncio.run(follow())


@pytest.mark.parametrize("nonsense", [b"\x93\x00\x91" + b"\x91" * 5000 + b"\xc0\xc0", b"\x93\x00", b""])
def test_nonsense_does_not_end_the_following(nonsense: bytes, tmp_path: Path) -> None:
    """Nor do numbers of many digits."""
    told = [batch_of(held(0)), nonsense, batch_of(held(1))]

    async def follow() -> None:
        with Source(tmp_path, replay_of(*told)) as source:
            async with Following(tmp_path) as router, asyncio.timeout(START_S):
                await router.until_current(3)
                for number in (b"\x01" * 9, b"", bytes(8)):
                    source.tell(number, told[0])
                source.replays = replay_of(*told, batch_of(held(2)))
                source.tell(named(3), batch_of(held(2)))
                await router.until_current(4)
                found = [await router.held_tokens(stored(number)["token_ids"]) for number in range(3)]
                assert found == [0, 8, 8]

    asyncio.run(follow())
