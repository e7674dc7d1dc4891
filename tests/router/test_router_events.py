"""The router's index, built from KV events, holds what the engines hold."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("vllm")

from event_subscriber import Following, addresses
from event_workers import ToldEngine, lives, prompts
from routers import (  # noqa: F401 - fixtures, too
    COMPLETIONS,
    LONG,
    Routed,
    Start,
    ask,
    completion,
    engine_processes,
    engines_as_new,
)
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvkit.adapters.vllm.events import TierBlocksStored, TiersCleared
from kvkit.lab.testbed.servers import adjacent_ports
from kvkit.lab.testbed.waiting import START_S, wait_for
from kvkit.router.index import BlockIndex, KVEvent
from kvkit.router.settings import read_router_config

IDS = tuple(range(40))
WHERE = {"medium": "CPU", "ownership": "memory"}
COMPLETE = TiersCleared(complete=True)


def stored(first: int, last: int, tokens: tuple[int, ...] = IDS, **more: Any) -> BlockStored:
    """Blocks [first, last) of 8 tokens, by hashes from 100 on."""
    given: dict[str, Any] = {
        "block_hashes": list(range(100 + first, 100 + last)),
        "parent_block_hash": 99 + first if first else None,
        "token_ids": list(tokens[8 * first : 8 * last]),
        "block_size": 8,
        "lora_id": None,
        "lora_name": None,
    }
    return (TierBlocksStored if "resync" in more else BlockStored)(**(given | WHERE | more))


def removed(*blocks: int, **more: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=[100 + block for block in blocks], **(WHERE | more))


def index_of(*events: KVCacheEvent) -> BlockIndex:
    """What is known of an engine that tells these, through vLLM's encoding."""
    index = BlockIndex()
    for event in msgspec.msgpack.decode(msgspec.msgpack.encode(list(events)), type=list[KVEvent]):
        index.apply(event)
    return index


def found(index: BlockIndex, model: str | None = None, salt: str = "", *, engine_cache: bool = False) -> int:
    return index.held_tokens(IDS, model, salt, engine_cache=engine_cache)


DISK = {"medium": "STORAGE", "ownership": "disk"}
VLLM = {"medium": "GPU", "ownership": None}


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([], 0),
        ([stored(0, 3)], 24),
        ([stored(0, 2), stored(2, 5)], 40),
        ([stored(2, 5)], 0),
        ([stored(2, 5), stored(0, 2)], 40),
        ([stored(0, 5), removed(3)], 24),
        ([stored(0, 5), stored(0, 4, **DISK), removed(2, 3, 4), removed(3, **DISK)], 24),
        ([stored(0, 5), removed(0, 1), stored(0, 1), stored(1, 2)], 40),
        ([stored(0, 5), removed(0, **DISK)], 40),
        ([stored(0, 5), TiersCleared(complete=True)], 0),
        ([stored(0, 5), AllBlocksCleared()], 40),
        ([stored(0, 3), stored(0, 5, **VLLM)], 24),
        ([stored(0, 2, extra_keys=[("s",), None])], 0),
        ([stored(0, 3, extra_keys=[None, [("image", 0)], None])], 8),
        ([stored(0, 3, lora_name="l", extra_keys=[("l",), ("l",), ("l",)])], 0),
        ([stored(0, 3, block_hashes=[1, 2])], 0),
    ],
)
def test_a_run_ends_where_a_block_is_held_nowhere(events: list[KVCacheEvent], tokens: int) -> None:
    assert found(index_of(*events)) == tokens


def test_salts_adapters_and_vllms_own_cache_are_told_apart() -> None:
    salted = stored(0, 1, extra_keys=[("l", "s")], lora_name="l")
    index = index_of(salted, stored(0, 2, block_hashes=[1, 2]), stored(0, 3, block_hashes=[1, 2, 3], **VLLM))
    assert found(index, "l", "s") == 8
    assert (found(index, "l"), found(index, None, "s"), found(index, "base")) == (0, 0, 16)
    assert found(index, engine_cache=True) == 24
    index.apply(index_event(AllBlocksCleared()))
    assert found(index, engine_cache=True) == 16
    several = index_of(stored(0, 3, group_idx=0, **VLLM), stored(0, 1, group_idx=1, **VLLM))
    assert found(several, engine_cache=True) == 0, "each group of layers has blocks of its own"


def index_event(event: KVCacheEvent) -> KVEvent:
    (made,) = msgspec.msgpack.decode(msgspec.msgpack.encode([event]), type=list[KVEvent])
    return made


def test_an_index_says_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(COMPLETE, stored(0, 4))
    assert index.holds_no_more(IDS, 32)
    assert not index_of(TiersCleared(complete=False), stored(0, 4)).holds_no_more(IDS, 32)
    assert index_of(stored(0, 5)).holds_no_more(IDS, 40), "there is no more to know"
    monkeypatch.setattr("kvkit.router.index.MAX_INDEX_BYTES", index.size_bytes - 1)
    index.apply(index_event(stored(0, 3, block_hashes=[1, 2, 3], tokens=IDS[::-1])))
    assert not index.holds_no_more(IDS, 32)
    assert not index_of(COMPLETE, stored(0, 4, resync=0, complete=False)).complete


def test_who_has_received_a_whole_round_knows_all() -> None:
    def tier(resync: int, complete: bool = True) -> BlockStored:
        return stored(0, 3, resync=resync, complete=complete)

    cleared = TiersCleared(complete=False)
    for events, complete in (
        ([cleared, tier(0, False), tier(1)], True),
        ([tier(4)], False),
        ([tier(4), tier(5)], False),
        ([tier(4), tier(5), tier(6, False)], False),
        ([tier(4), tier(5), tier(6)], True),
        ([tier(4), tier(6)], True),
        ([tier(4), tier(6), tier(6, False)], False),
        ([tier(4), tier(6), AllBlocksCleared(), removed(0)], True),
        ([tier(4), tier(6), stored(0, 3, **VLLM)], True),
    ):
        assert index_of(*events).complete == complete, events
    index = index_of(tier(4), tier(5))
    index.clear()
    index.apply(index_event(tier(6)))
    assert not index.complete


def test_what_is_gone_is_forgotten_and_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkit.router.index._SPARE_BLOCKS", 0)
    index = index_of(stored(0, 5), removed(0, 1))
    assert len(index._blocks) == 5
    index.apply(index_event(removed(3)))
    assert len(index._blocks) == 2
    index.apply(index_event(stored(0, 2)))
    assert found(index) == 24


class Publisher(ZmqEventPublisher):
    """vLLM's, whose network loses messages while it is told to."""

    def __init__(self, where: Path | dict[str, str], rank: int = 0, **more: Any) -> None:
        self.loses = False
        self.count = 0
        where = addresses(where) if isinstance(where, Path) else where
        super().__init__(rank, where["events"], where["replay"], **more)
        assert self._pub is not None
        send = self._pub.send_multipart
        self._pub = Lossy(self._pub, lambda frames: None if self.loses else send(frames))

    def close(self) -> None:
        self.shutdown()

    def tell(self, *events: KVCacheEvent) -> None:
        if events:
            self.publish(KVEventBatch(time.time(), list(events)))
            self.count += 1

    async def sent(self) -> None:
        """Return when all that it was told is sent, or lost."""
        while self._event_queue.unfinished_tasks:
            await asyncio.sleep(0.002)


async def subscribed(router: Following, publisher: Publisher) -> None:
    """Tell again and again until the router has the last of it, which comes by its subscription alone.

    It may be current before that is there: by a replay.
    """
    async with asyncio.timeout(START_S):
        while not (router.follower.current and router.known == publisher.count):
            publisher.tell(COMPLETE, stored(0, 5))
            await publisher.sent()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await router.until_current(publisher.count)


class Lossy:
    """A socket that sends in another way."""

    def __init__(self, socket: Any, send: Any) -> None:
        self._socket = socket
        self.send_multipart = send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


@pytest.mark.parametrize("seed", [5, 6])
def test_the_index_is_what_the_engine_would_say(seed: int, tmp_path: Path) -> None:
    """After evictions, damage, clears, resets, restarts, and messages that were lost."""

    async def soak() -> None:
        engine, chance, publisher = ToldEngine(tmp_path / "kv"), random.Random(seed), Publisher(tmp_path)
        told = 0
        async with Following(tmp_path) as router:
            for what in lives(engine, seed, 50):
                if what == "restart":
                    publisher.close()
                    publisher = Publisher(tmp_path)
                publisher.loses = chance.random() < 0.3
                publisher.tell(*engine.told())
                await router.until_current(publisher.count)
                for text in prompts():
                    router.held, before = engine.query(text), router.asked
                    assert await router.held_tokens(text) == router.held, what
                    told += router.asked == before
            assert told > 300, "or it was asked all the time"
        publisher.close()
        engine.close()

    asyncio.run(soak())


def test_a_router_that_comes_late_knows_what_is_held(tmp_path: Path) -> None:
    """Whatever the engine's disk held at its start, although few batches are kept."""

    async def soak() -> None:
        keeps = 6
        engine, publisher = (
            ToldEngine(tmp_path / "kv", buffer_steps=keeps),
            Publisher(tmp_path, buffer_steps=keeps),
        )
        told = 0
        for number, what in enumerate(lives(engine, 8, 60)):
            if what == "restart":
                publisher.close()
                publisher = Publisher(tmp_path, buffer_steps=keeps)
            publisher.tell(*engine.told())
            if number % 6 == 5:
                await publisher.sent()
                async with Following(tmp_path) as router:
                    await router.until_current(publisher.count)
                    for text in prompts():
                        router.held = engine.query(text)
                        assert await router.held_tokens(text) == router.held, what
                    told += not router.asked
        assert told > 5
        publisher.close()
        engine.close()

    asyncio.run(soak())


def test_what_was_told_before_the_router_came_is_asked_for(tmp_path: Path) -> None:
    async def follow() -> None:
        with closing(Publisher(tmp_path)) as publisher:
            publisher.tell(COMPLETE, stored(0, 3))
            publisher.tell(stored(3, 4))
            async with Following(tmp_path) as router:
                await router.until_current(publisher.count)
                assert await router.held_tokens(list(IDS)) == 32
                assert router.asked == 0
                router.held = 40
                assert await router.held_tokens(list(IDS), wait_s=1.0) == 40, "of what is being stored"

    asyncio.run(follow())


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_whose_events_are_lost_is_asked(replay: bool, tmp_path: Path) -> None:
    """They are no longer kept for a replay, or there is none."""

    async def follow() -> None:
        with closing(Publisher(tmp_path, buffer_steps=2)) as publisher:
            publisher.tell(COMPLETE, stored(0, 5))
            async with Following(tmp_path, replay, START_S) as router:
                await subscribed(router, publisher)
                publisher.loses = True
                for _ in range(3):
                    publisher.tell(removed(4))
                await publisher.sent()
                publisher.loses = False
                publisher.tell(removed(3))
                await router.until_current(publisher.count)
                router.held = 16
                assert await router.held_tokens(list(IDS)) == 16
                assert router.asked == 1
                publisher.tell(COMPLETE, stored(0, 3))
                await router.until_current(publisher.count)
                assert await router.held_tokens(list(IDS)) == 24
                assert router.asked == 1

    asyncio.run(follow())


def test_an_engine_that_is_gone_is_not_believed(tmp_path: Path) -> None:
    async def follow() -> None:
        publisher = Publisher(tmp_path)
        async with Following(tmp_path) as router:
            publisher.tell(COMPLETE, stored(0, 5))
            await router.until_current(publisher.count)
            publisher.close()
            async with asyncio.timeout(START_S):
                while router.follower.current:
                    await asyncio.sleep(0.01)
            assert await router.held_tokens(list(IDS)) == 0
            assert router.asked == 1
            with closing(Publisher(tmp_path)) as again:
                again.tell(COMPLETE, stored(0, 2))
                await router.until_current(again.count)
                assert await router.held_tokens(list(IDS)) == 16

    asyncio.run(follow())


@pytest.mark.parametrize("replay", [True, False])
def test_numbers_that_go_on_after_a_new_start_are_not_believed(replay: bool, tmp_path: Path) -> None:
    """What the simulation found (docs/evidence/verification.md): nobody has seen the engine down."""

    async def follow() -> None:
        publisher = Publisher(tmp_path)
        async with Following(tmp_path, replay, START_S) as router:
            await subscribed(router, publisher)
            known = publisher.count
            publisher.close()
            with closing(Publisher(tmp_path)) as again:
                async with asyncio.timeout(START_S):
                    while router.known == known:  # until the subscription is there
                        again._seq_gen = itertools.count(known)
                        again.tell(stored(4, 5))
                        await again.sent()
                        await asyncio.sleep(0.05)
                assert found(router.follower.index) == 0

    asyncio.run(follow())


def test_what_is_no_event_ends_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    async def follow() -> None:
        with closing(Publisher(tmp_path)) as publisher:
            async with Following(tmp_path) as router:
                for nonsense in ({"block_size": "eight"}, {"block_size": 0}, {"token_ids": [1 << 40] * 8}):
                    publisher.tell(COMPLETE, stored(0, 5))
                    await router.until_current(publisher.count)
                    assert await router.held_tokens(list(IDS)) == 40
                    publisher.tell(stored(0, 1, **nonsense))
                    await router.until_current(publisher.count)
                    assert await router.held_tokens(list(IDS)) == 0
                assert router.asked == 3

    asyncio.run(follow())


def test_a_request_goes_where_its_prompt_is_told_to_be(start: Start, tmp_path: Path) -> None:
    engines, tokens = start(0, 2), tuple(LONG.encode())
    blocks = len(tokens) // 8
    folders = {name: tmp_path / name for name in ("d0", "d1")}
    for folder in folders.values():
        folder.mkdir()
    told = {name: addresses(folder) for name, folder in folders.items()}
    with closing(Publisher(folders["d0"])) as d0, closing(Publisher(folders["d1"])) as d1:
        d0.tell(COMPLETE, stored(0, 2, tokens))
        d1.tell(COMPLETE, stored(0, blocks, tokens))
        with Routed(**engines.settings(**told)) as router:
            wait_for(lambda: little_new(router, "d1"))
            d1.tell(COMPLETE)
            d0.tell(stored(2, blocks, tokens))
            wait_for(lambda: little_new(router, "d0"))


def test_each_rank_of_data_parallelism_is_followed_and_chosen(start: Start) -> None:
    engines, tokens = start(0, 1), tuple(LONG.encode())
    port = adjacent_ports()
    where = {"events": f"tcp://*:{port}", "replay": f"tcp://*:{port + 10_000}"}
    told: Any = {name: address.replace("*", "127.0.0.1") for name, address in where.items()}
    with (
        closing(Publisher(where)) as first,
        closing(Publisher(where, rank=1)) as second,
        Routed(**engines.settings(d0=told | {"data_parallel": 2})) as router,
    ):
        first.tell(COMPLETE, stored(0, 2, tokens))
        second.tell(COMPLETE, stored(0, len(tokens) // 8, tokens))
        wait_for(lambda: little_new(router, "d0/1"))
        assert engines["d0"].seen()[-1]["headers"]["x-data-parallel-rank"] == "1"
        second.tell(COMPLETE)
        first.tell(stored(2, len(tokens) // 8, tokens))
        wait_for(lambda: little_new(router, "d0/0"))
        assert engines["d0"].seen()[-1]["headers"]["x-data-parallel-rank"] == "0"


def test_the_ports_of_ranks_are_where_vllm_has_them() -> None:
    engine = read_router_config(
        decode={
            "d": {
                "url": "http://h:1",
                "cache": "http://h:2000",
                "events": "tcp://h:3000",
                "replay": "tcp://h:4000",
                "data_parallel": 3,
                "workers": 2,
            }
        }
    ).decode["d"]
    named, ranks, numbers = zip(*engine.ranks("d"), strict=True)
    assert (named, numbers) == (("d/0", "d/1", "d/2"), (0, 1, 2))
    assert [rank.cache for rank in ranks] == ["http://h:2000", "http://h:2002", "http://h:2004"]
    offset = ZmqEventPublisher.offset_endpoint_port
    for number, rank in enumerate(ranks):
        assert (rank.events, rank.replay) == (offset(engine.events, number), offset(engine.replay, number))


def little_new(router: Routed, name: str) -> bool:
    """Whether a conversation, the router's next, came to that engine as it holds nearly all of the prompt."""
    status, _ = ask(router.url, COMPLETIONS, completion(), **{"X-Session-ID": uuid.uuid4().hex})
    assert status == 200
    return f'decode="{name}",prefill="",reason="little-new"' in router.metrics()
