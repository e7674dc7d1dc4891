"""Loads and stores survive tiers that report late, twice or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caches import CHUNK, DEADLINE_S, fill, make_engine, new_cache, new_staging, sequence

from kvkit.cache import CacheTimeout
from kvkit.staging import Lease, release_all
from kvkit.tiers import memory, store_index
from kvkit.tiers.base import HeldListener, OnComplete, Tier
from kvkit.tiers.health import PAUSES_S
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig, open_tier
from kvkit.tiers.testing.faulty import Fault, FaultyTier, Wrapper
from kvkit.transfer import tier_set as access
from kvkit.transfer.tier_set import ASKING_THREADS
from kvkit.workers import Transfer


class Stumbling(Wrapper):
    """`inner`, but a get or put of several records completes the first, twice, and then raises."""

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._stumble(self.inner.get, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._stumble(self.inner.put, names, leases, on_complete)

    @staticmethod
    def _stumble(
        move: Callable[[Sequence[str], Sequence[Lease], OnComplete], None],
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        done = threading.Event()

        def twice(name: str, error: BaseException | None) -> None:
            on_complete(name, error)
            on_complete(name, OSError("a second report"))
            done.set()

        move(names[:1], leases[:1], twice)
        assert done.wait(DEADLINE_S)
        if len(names) > 1:
            raise RuntimeError("stumbled")


def test_a_tier_that_raises_half_way_has_failed_in_the_rest_alone(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path / "a", tokens)
    with new_cache(engine, new_staging(engine, 16), [Stumbling(ObjectTier(str(tmp_path / "a")))]) as cache:
        table = engine.table(len(tokens))
        loaded = cache.load(cache.lookup(tokens), engine.places(table))
        assert loaded.tokens == CHUNK, "a record that came was taken for one that failed"
        engine.assert_loaded(tokens, table, 1)
    assert cache.staging.free == cache.staging.slots
    with new_cache(engine, new_staging(engine, 16), [Stumbling(ObjectTier(str(tmp_path / "b")))]) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        assert cache.pending_writes() == 0
        counts = cache.counts()
        assert (counts.stored_records, counts.write_errors) == ({"disk": 1}, {"disk": 3})


def test_what_was_put_is_counted_although_its_slot_is_in_use_again(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    staging = new_staging(engine, 4)  # half of them for puts: both records are one call of the tier
    stored = threading.Event()

    class Late(ObjectTier):
        """Reports when the caller, too, has given its slots back, and somebody has taken them."""

        def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
            def later(name: str, error: BaseException | None) -> None:
                assert stored.wait(DEADLINE_S)
                others = staging.acquire(staging.slots, DEADLINE_S)
                release_all(others)
                on_complete(name, error)

            super().put(names, leases, later)

    with new_cache(engine, staging, [Late(TierConfig(url=str(tmp_path), threads=1))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        stored.set()
        cache.flush()
        size = cache.lookup(tokens).chunks.formats[0].record_bytes
        moved = cache.counts().bytes_per_second["disk", "put"]
        seconds = cache.counts().seconds["disk", "put"]
        assert moved.total * seconds.total == pytest.approx(2 * size)


class Mute(Wrapper):
    """`inner`, which says nothing of what it evicts, as a server."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.reports_evictions = False

    def subscribe(self, held_listener: HeldListener) -> bool:
        return False


def test_what_a_tier_does_not_tell_its_answers_do(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path, tokens)
    told: dict[str, bool] = {}
    with new_cache(engine, new_staging(engine, 16), [Mute(ObjectTier(str(tmp_path)))]) as cache:
        tiers = cache.tier_set
        assert not tiers.subscribe(["disk"], lambda _, names, held: told.update(dict.fromkeys(names, held)))
        hit, places = cache.lookup(tokens), engine.places(engine.table(len(tokens)))
        names = hit.chunks.names
        assert told == dict.fromkeys(names, True)
        cache.tiers["disk"].delete(names[3:])
        cache.load(hit, places)
        assert told == dict.fromkeys(names[:3], True) | {names[3]: False}, "a read missed it"
        cache.tiers["disk"].delete(names[1:])
        cache.lookup(tokens)
        assert (told[names[0]], told[names[1]]) == (True, False), "a lookup missed it"
        cache.store(tokens, places)
        cache.flush()
        assert told == dict.fromkeys(names, True)
        cache.clear("disk")
        assert told == dict.fromkeys(names, False)


class Undescribed(Wrapper):
    """`inner`, whose zarr.json waits for `gate`, and then fails while `broken`."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.broken = False
        self.tries = 0

    def describe(self, array: str, metadata: bytes) -> None:
        self.tries += 1
        assert self.gate.wait(DEADLINE_S)
        if self.broken:
            raise OSError("no zarr.json, on purpose")
        super().describe(array, metadata)


def test_neither_loads_nor_stores_wait_for_a_description(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(4)
    disk = Undescribed(ObjectTier(str(tmp_path)))
    with new_cache(engine, new_staging(engine, 16), [disk]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        assert cache.store(tokens, engine.places(table)).new_tokens == len(tokens)
        with pytest.raises(CacheTimeout, match="puts are still in flight"):
            cache.flush(0.0)
        disk.gate.set()
        cache.flush()
        assert len(list(tmp_path.rglob("zarr.json"))) == 2
        assert disk.tries == 2, "an array was described twice"


def test_a_description_that_fails_is_tried_by_the_next_store_and_blames_no_tier(tmp_path: Path) -> None:
    engine = make_engine()
    disk = Undescribed(ObjectTier(str(tmp_path)))
    disk.broken = True
    disk.gate.set()
    with new_cache(engine, new_staging(engine, 4), [disk]) as cache:
        for turn in range(1, 6):
            tokens = sequence(8, turn)
            table = engine.table(len(tokens))
            engine.compute(tokens, table)
            cache.store(tokens, engine.places(table))  # in several batches
            cache.flush()
            assert disk.tries == turn
        assert cache.tier_states() == {"disk": "ok"}
        assert not cache.counts().read_errors
        disk.broken = False
        cache.store(sequence(1, 9), engine.places(table))
        cache.flush()
        assert len(list(tmp_path.rglob("zarr.json"))) == 1


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_description_that_finds_no_thread_keeps_no_flush_waiting(copy_first: bool, tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    disk = ObjectTier(str(tmp_path))
    with new_cache(engine, new_staging(engine, 8), [disk]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        assert cache.tier_set._asking["disk"].close(DEADLINE_S)
        done = threading.Event()
        store = cache.store_chunks(
            cache.chunks(tokens), engine.places(table), copy_first=copy_first, on_done=done.set
        )
        assert store.result(DEADLINE_S).new_tokens == len(tokens)
        assert done.wait(DEADLINE_S)
        cache.flush()
        assert cache.counts().stored_records == {"disk": 4}
    disk.close()


class Raising(Wrapper):
    """`inner`, whose gets raise while `broken`."""

    broken = False

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        if self.broken:
            raise RuntimeError("on purpose")
        self.inner.get(names, leases, on_complete)


def test_whole_records_that_are_read_for_layers_count_and_where_a_tier_raises_are_misses(
    tmp_path: Path,
) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path, tokens)
    disk = Raising(ObjectTier(TierConfig(url=str(tmp_path), codec="zstd")))  # it cannot read parts
    with new_cache(engine, new_staging(engine, 16), [disk]) as cache:
        place = engine.places(engine.table(len(tokens)))
        load = cache.load_layers(cache.lookup(tokens), place)
        assert list(load) == [0, 1]
        assert load.loaded.tokens == len(tokens)
        counts = cache.counts()
        assert counts.seconds["disk", "get"].count == 1
        assert counts.loaded_bytes["disk"] > 0
        disk.broken = True
        load = cache.load_layers(cache.lookup(tokens), place)
        assert list(load) == [0, 1]
        assert load.loaded.tokens == 0
        assert cache.counts().read_errors == {"disk": 1}
        cache.check_integrity()


def test_a_tier_that_hangs_does_not_keep_others_from_being_asked(tmp_path: Path) -> None:
    """As many callers as there are threads ask it; then another tier is asked."""
    engine, tokens = make_engine(), sequence(2)
    fill(engine, tmp_path / "disk", tokens)
    asked = threading.Semaphore(0)

    def plan(operation: str, name: str) -> Fault | None:
        asked.release()
        return Fault.HANG

    hung = FaultyTier(ObjectTier(str(tmp_path / "hung"), name="hung"), plan)
    disk = ObjectTier(str(tmp_path / "disk"))
    with new_cache(engine, new_staging(engine, 4), [hung, disk], retrieve_from=("disk",)) as cache:
        access = cache.tier_set
        callers = [threading.Thread(target=access.ask, args=("hung", ["a"])) for _ in range(ASKING_THREADS)]
        for caller in callers:
            caller.start()
        for _ in callers:
            assert asked.acquire(timeout=DEADLINE_S)
        assert cache.lookup_async(tokens).result(DEADLINE_S / 4).by_tier == {"disk": len(tokens)}
        hung.release()
        for caller in callers:
            caller.join(DEADLINE_S)
            assert not caller.is_alive()


@pytest.mark.parametrize("way", ["load", "store", "prefetch", "get"])
def test_what_is_called_off_waits_no_longer_for_slots(way: str, tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path / "disk", tokens)
    staging = new_staging(engine, 4)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path / "disk"))]) as cache:
        hit = cache.lookup(tokens)
        place = engine.places(engine.table(len(tokens)))
        starts: dict[str, Callable[[], Transfer[Any]]] = {
            "load": lambda: cache.load_async(hit, place),
            "store": lambda: cache.store_async(sequence(4, 1), place),
            "prefetch": lambda: cache.prefetch(tokens),
            "get": lambda: cache.get_non_blocking(tokens, 0),
        }
        held = staging.acquire(4, 0.0)
        transfer = starts[way]()
        while not staging.waiting:
            wait([transfer], 0.001)
        transfer.cancel()
        result = transfer.result(DEADLINE_S / 4)  # no slot came free, and its own deadline is later
        assert staging.waiting == 0
        if way == "get":
            assert result == []
        elif way == "store":
            assert result.new_tokens == 0
        else:
            assert result.tokens == 0
        assert cache.tier_states() == {"disk": "ok"}
        release_all(held)
        assert cache.load(hit, place).tokens == len(tokens)
        cache.check_integrity()


def test_a_tier_is_not_tried_while_its_late_reads_keep_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = make_engine(), sequence(3)
    fill(engine, tmp_path, tokens)
    hung = FaultyTier(
        ObjectTier(str(tmp_path)), lambda operation, _: Fault.HANG if operation == "get" else None
    )
    staging = new_staging(engine, 8)
    with new_cache(engine, staging, [hung]) as cache:
        place = engine.places(engine.table(len(tokens)))
        stale = cache.lookup(tokens)
        cache.tier_set.timeout_s = 0.1
        assert cache.load(stale, place).tokens == 0
        assert staging.free == 5
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + PAUSES_S[0])
        monkeypatch.setattr(access, "time", later)
        for _ in range(3):
            assert cache.tier_states() == {"disk": "half-open"}
            assert cache.lookup(tokens).tokens == 0
            assert cache.load(stale, place).tokens == 0
            assert staging.free == 5, "a trial cost more slots"
        hung.release()
        release_all(staging.acquire(8, DEADLINE_S, at_least=8))
        cache.tier_set.timeout_s = DEADLINE_S
        assert cache.load(cache.lookup(tokens), place).tokens == len(tokens)
        assert cache.tier_states() == {"disk": "ok"}


class Noting(Wrapper):
    """`inner`, and the prompts that it was told of; `fails`: the first is not taken."""

    def __init__(self, inner: Tier, learns: bool = True, fails: bool = False) -> None:
        super().__init__(inner)
        self.learns = learns
        self.fails = fails
        self.prompts: list[list[str]] = []
        self.answers: list[tuple[list[str], bool]] = []

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:
        self.answers.append((list(names), tool_call))

    def note_request(self, names: Sequence[str]) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("cannot be noted")
        self.prompts.append(list(names))


def test_tiers_that_learn_are_told_of_each_request_once(tmp_path: Path) -> None:
    """Of its whole prompt, whichever tier holds it; not of stores and loads, nor with fewer tiers sought."""
    engine, tokens = make_engine(), sequence(4)
    staging = new_staging(engine, 16)
    tiers = [
        Noting(MemoryTier(staging, 8 * staging.slot_bytes)),
        Noting(ObjectTier(str(tmp_path / "a"), name="a"), fails=True),
        Noting(ObjectTier(str(tmp_path / "b"), name="b"), learns=False),
    ]
    with new_cache(engine, staging, tiers) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens[: 2 * CHUNK], engine.places(table))
        cache.flush()
        assert not any(tier.prompts for tier in tiers)
        hit = cache.lookup(tokens)
        assert hit.tokens == 2 * CHUNK
        names = hit.chunks.names
        assert [len(names), *(tier.prompts for tier in tiers)] == [4, [names], [], []]
        cache.load(hit, engine.places(table))
        cache.lookup(tokens)
        assert [tier.prompts for tier in tiers] == [[names, names], [names], []]
        cache.note_answer(tokens, True)
        assert [tier.answers for tier in tiers] == [[(names, True)], [(names, True)], []]


@pytest.mark.parametrize("kind", ["memory", "folder", "paths"])
def test_what_an_agent_asks_for_stays_amid_prompts_that_do_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In each kind of tier that evicts by itself, with the policy `sessions` and the clock of the test."""
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    for module in (memory, store_index):
        monkeypatch.setattr(module, "time", clock)
    engine, agent = make_engine(blocks=256), sequence(4)
    staging = new_staging(engine, 32)
    size = 8 * staging.slot_bytes
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    if kind == "memory":
        tier: Tier = MemoryTier(staging, size, policy="sessions")
    else:
        urls = folders if kind == "paths" else folders[0]
        capacity = (size, size) if kind == "paths" else size
        config = TierConfig(url=urls, capacity=capacity, eviction="sessions")
        tier = open_tier("disk", config, staging)
    found = []
    with new_cache(engine, staging, [tier]) as cache:
        for step in range(60):
            for number, tokens in enumerate([agent, *(sequence(4, 1 + 10 * step + i) for i in range(4))]):
                clock.now_s = 10.0 * step + 2 * number
                hit = cache.lookup(tokens)
                if tokens is agent:
                    found.append(hit.tokens)
                table = engine.table(len(tokens))
                engine.compute(tokens, table)
                cache.store(tokens, engine.places(table))
                cache.flush()
    assert found[-20:] == [len(agent)] * 20
