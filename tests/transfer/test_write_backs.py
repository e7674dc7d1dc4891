"""Write-backs start after the last read of their load, or once a caller lacks slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from caches import CHUNK, DEADLINE_S, fill, make_engine, new_cache, new_staging, sequence

from kvkit.cache import Cache, Hit
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import OnComplete, Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.faulty import Fault, FaultyTier, Wrapper
from kvkit.transfer import sequence as sequences
from kvkit.transfer.read_pipeline import PlanReads, RecordRead


class Logged(Wrapper):
    """`inner`, with what it was given to put, and what it got, in `log`."""

    def __init__(self, inner: Tier, log: list[tuple[str, str]]) -> None:
        super().__init__(inner)
        self._log = log

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._log.extend(("put", name) for name in names)
        self.inner.put(names, leases, on_complete)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        def completed(name: str, error: BaseException | None) -> None:
            self._log.append(("got", name))
            on_complete(name, error)

        self.inner.get(names, leases, completed)


def far_tier(folder: Path, log: list[tuple[str, str]], hangs: set[str]) -> tuple[Tier, FaultyTier]:
    """A tier whose gets of `hangs` wait for its release, logged and bare."""
    faulty = FaultyTier(
        ObjectTier(str(folder), name="far"),
        lambda operation, name: Fault.HANG if operation == "get" and name in hangs else None,
    )
    return Logged(faulty, log), faulty


def when_used(monkeypatch: pytest.MonkeyPatch, chunks: int) -> threading.Event:
    """An event that is set when a load has done all with its first `chunks` chunks, and asks for more."""
    event = threading.Event()
    taken = 0
    take = PlanReads.take

    def note(reads: PlanReads) -> list[RecordRead]:
        nonlocal taken
        if taken >= chunks:
            event.set()
        ready = take(reads)
        taken += len(ready)
        return ready

    monkeypatch.setattr(PlanReads, "take", note)
    return event


def load(cache: Cache, engine: Engine, hit: Hit, threads: ThreadPoolExecutor) -> Future[Any]:
    return threads.submit(cache.load, hit, engine.places(engine.table(hit.tokens)))


def load_async(cache: Cache, engine: Engine, hit: Hit, threads: ThreadPoolExecutor) -> Future[Any]:
    return cache.load_async(hit, engine.places(engine.table(hit.tokens)))


def prefetch(cache: Cache, engine: Engine, hit: Hit, threads: ThreadPoolExecutor) -> Future[Any]:
    return cache.prefetch(hit.chunks.tokens)


@pytest.mark.parametrize("target", ["memory", "disk"])
@pytest.mark.parametrize("way", [load, load_async, prefetch])
def test_nothing_is_put_before_the_last_read(
    way: Callable[..., Future[Any]], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last read hangs until all before it were used."""
    engine, tokens = make_engine(), sequence(6)
    fill(engine, tmp_path / "far", tokens)
    log: list[tuple[str, str]] = []
    hangs: set[str] = set()
    far, faulty = far_tier(tmp_path / "far", log, hangs)
    staging = new_staging(engine, 32)
    near: Tier = MemoryTier(staging, 8 * staging.slot_bytes)
    if target == "disk":
        near = ObjectTier(str(tmp_path / "disk"))
    with (
        ThreadPoolExecutor(1) as threads,
        new_cache(engine, staging, [Logged(near, log), far], write_back_to=(target,)) as cache,
    ):
        hit = cache.lookup(tokens)
        names = hit.chunks.names
        hangs.add(names[-1])
        used = when_used(monkeypatch, 5)
        future = way(cache, engine, hit, threads)
        assert used.wait(DEADLINE_S)
        faulty.release()
        assert future.result(DEADLINE_S).tokens == len(tokens)
        cache.flush()
        assert [name for what, name in log if what == "put"] == list(names)
        assert log.index(("put", names[0])) > log.index(("got", names[-1]))
        assert near.match_prefix(names) == 6


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [2, 3, 16])
def test_all_is_written_back_through_any_number_of_slots(groups: int, slots: int, tmp_path: Path) -> None:
    engine, tokens = make_engine(groups), sequence(24)
    fill(engine, tmp_path / "far", tokens)
    tiers = [ObjectTier(str(tmp_path / name), name=name) for name in ("disk", "far")]
    staging = new_staging(engine, slots)
    with new_cache(engine, staging, tiers, write_back_to=("disk",)) as cache:
        table = engine.table(len(tokens))
        assert cache.load(cache.lookup(tokens), engine.places(table)).by_tier == {"far": len(tokens)}
        engine.assert_loaded(tokens, table, 24)
        cache.flush()
        assert staging.free == slots
        assert cache.lookup(tokens).by_tier == {"disk": len(tokens)}


@pytest.mark.parametrize("first", ["the load", "the other"])
def test_who_waits_for_slots_gets_those_that_are_held(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load keeps two records to be written back, while its third read hangs; there are three slots.

    Another asks for two slots, after the load keeps them or before.
    """
    engine, tokens = make_engine(), sequence(3)
    fill(engine, tmp_path / "far", tokens)
    early, late = set[str](), set[str]()
    far, last = far_tier(tmp_path / "far", [], late)
    rest = FaultyTier(
        far, lambda operation, name: Fault.HANG if operation == "get" and name in early else None
    )
    disk = ObjectTier(str(tmp_path / "disk"))
    staging = new_staging(engine, 3)
    with (
        ThreadPoolExecutor(1) as threads,
        new_cache(engine, staging, [disk, rest], write_back_to=("disk",)) as cache,
    ):
        hit = cache.lookup(tokens)
        names = hit.chunks.names
        late.add(names[2])
        if first == "the other":
            early.update(names[:2])
        used = when_used(monkeypatch, 2)
        loaded = load_async(cache, engine, hit, threads)
        while rest.hanging < len(early) or not last.hanging:
            wait([loaded], 0.001)
        if first == "the load":
            assert used.wait(DEADLINE_S)
            assert disk.match_prefix(names) == 0
        other = threads.submit(staging.acquire, 2, DEADLINE_S / 2, at_least=2)
        while first == "the other" and not staging.waiting:
            wait([other], 0.001)
        rest.release()
        release_all(other.result(DEADLINE_S))
        assert not loaded.done()
        last.release()
        assert loaded.result(DEADLINE_S).tokens == len(tokens)
        cache.flush()
        assert disk.match_prefix(names) == 3


@pytest.mark.parametrize("end", ["called off", "raises"])
def test_what_was_used_is_written_back_however_the_load_ends(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path / "far", tokens)
    hangs: set[str] = set()
    far, faulty = far_tier(tmp_path / "far", [], hangs)
    disk = ObjectTier(str(tmp_path / "disk"))
    staging = new_staging(engine, 8)
    with (
        ThreadPoolExecutor(1) as threads,
        new_cache(engine, staging, [disk, far], write_back_to=("disk",)) as cache,
    ):
        hit = cache.lookup(tokens)
        hangs.add(hit.chunks.names[3])
        used = when_used(monkeypatch, 3)
        loaded = load_async(cache, engine, hit, threads)
        assert used.wait(DEADLINE_S)
        if end == "called off":
            loaded.cancel()
            assert loaded.result(DEADLINE_S).tokens == 3 * CHUNK
        else:
            monkeypatch.setattr(sequences, "unpack", None)
            faulty.release()
            assert isinstance(loaded.exception(DEADLINE_S), TypeError)
        cache.flush()
        assert disk.match_prefix(hit.chunks.names) == 3
        faulty.release()


def test_what_goes_nowhere_keeps_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path / "far", tokens)
    hangs: set[str] = set()
    far, faulty = far_tier(tmp_path / "far", [], hangs)
    staging = new_staging(engine, 8)
    with new_cache(engine, staging, [far], write_back_to=("far",)) as cache, ThreadPoolExecutor(1) as threads:
        hit = cache.lookup(tokens)
        hangs.add(hit.chunks.names[3])
        used = when_used(monkeypatch, 3)
        loaded = load_async(cache, engine, hit, threads)
        assert used.wait(DEADLINE_S)
        assert staging.free == 7
        faulty.release()
        assert loaded.result(DEADLINE_S).tokens == len(tokens)
