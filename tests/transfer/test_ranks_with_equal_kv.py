"""Ranks with equal KV share the work: each stores and fetches every nth chunk."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from caches import CHUNK, DEADLINE_S, Recorder, make_engine, new_cache, new_staging, sequence

from kvkit import RequestPolicy
from kvkit.cache import Cache
from kvkit.format.record import Damage
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.shm.file import pool_path
from kvkit.tiers.shm.tier import ShmTier
from kvkit.tiers.testing.contract import put
from kvkit.transfer import shared_reads
from kvkit.transfer.shared_reads import exchange_tier
from kvkit.transfer.tier_set import TierSet

CHUNKS = 7
TOKENS = sequence(CHUNKS)


class Copy:
    """One of `copies` ranks with equal KV: a cache over a disk of theirs, and what was read from there."""

    def __init__(self, copy: int, copies: int, folder: Path, pool: str | None, groups: int = 1) -> None:
        made = make_engine(groups)
        self.engine = Engine(replace(made.layout, copy=copy, copies=copies), made.namespace, made.blocks)
        self.table = self.engine.table(len(TOKENS))
        staging = new_staging(self.engine, 64)
        disk = ObjectTier(str(folder))
        self.disk = Recorder(disk)
        self.disk.shared_by_ranks = True
        size = 32 * staging.slot_bytes
        near: MemoryTier | ShmTier = MemoryTier(staging, size, "near")
        if pool is not None:
            near = ShmTier.open("near", TierConfig(url=pool, capacity=size), staging)
            near.shared_by_ranks = True
        to = ("disk", "near") if pool is None else ("disk",)
        self.cache: Cache = new_cache(
            self.engine, staging, [near, self.disk], store_to=to, write_back_to=("near",)
        )

    def store(self) -> None:
        self.engine.compute(TOKENS, self.table)
        self.cache.store(TOKENS, self.engine.places(self.table))
        self.cache.flush()
        self.engine.wipe()

    def load(self) -> None:
        hit = self.cache.lookup(TOKENS)
        assert self.cache.load(hit, self.engine.places(self.table)).tokens == len(TOKENS)
        self.engine.assert_loaded(TOKENS, self.table, CHUNKS)


@pytest.fixture
def pool() -> Iterator[str]:
    url = f"shm://test-{uuid.uuid4().hex}"
    yield url
    with suppress(FileNotFoundError):
        os.unlink(pool_path(url))


def opened(stack: ExitStack, copies: int, folder: Path, pool: str | None, groups: int = 1) -> list[Copy]:
    made = [Copy(copy, copies, folder, pool, groups) for copy in range(copies)]
    for copy in made:
        stack.enter_context(closing(copy.cache))
    return made


@pytest.mark.parametrize(("copies", "groups"), [(2, 1), (3, 2)])
def test_each_stores_every_nth_chunk(copies: int, groups: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = opened(stack, copies, tmp_path, None, groups)
        for i, rank in enumerate(ranks):
            chunks = len(range(i, CHUNKS, copies))
            assert rank.cache.lookup(TOKENS).tokens == min(i, 1) * i * CHUNK, "what others did not store yet"
            rank.store()
            counts = rank.cache.counts()
            assert counts.stored_records["near"] == CHUNKS * groups, "its own memory has all"
            assert counts.stored_records["disk"] == chunks * groups
            size = sum(form.record_bytes for form in rank.cache.lookup(TOKENS).chunks.formats)
            assert counts.stored_bytes["disk"] == chunks * size
        assert len(list(tmp_path.rglob("c.*"))) == CHUNKS * groups
    with ExitStack() as stack:
        for rank in opened(stack, copies, tmp_path, None, groups):
            rank.load()
            assert len(rank.disk.got) == CHUNKS * groups, "nothing to meet in: each reads all"


def test_a_record_that_one_rank_lacks_is_a_miss_until_it_is_stored(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = opened(stack, 2, tmp_path, None)
        first.store()
        second.store()
    with ExitStack() as stack:
        first, second = opened(stack, 2, tmp_path, None)
        gone = first.cache.lookup(TOKENS).chunks.names[3]  # the second's
        for rank in (first, second):
            rank.disk.delete([gone])
        assert first.cache.lookup(TOKENS).tokens == second.cache.lookup(TOKENS).tokens == 3 * CHUNK
        first.store()
        assert second.cache.lookup(TOKENS).tokens == 3 * CHUNK
        second.store()
        second.load()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with ExitStack() as stack:
        for rank in opened(stack, 2, tmp_path, None):
            rank.store()
    return tmp_path


def test_each_reads_every_nth_chunk_and_meets_the_others_in_a_pool(
    stored: Path, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "EXCHANGE_WAIT_S", DEADLINE_S)
    with ExitStack() as stack:
        ranks = opened(stack, 2, stored, pool)
        names = ranks[0].cache.lookup(TOKENS).chunks.names
        with ThreadPoolExecutor() as threads:
            list(threads.map(Copy.load, ranks))
        for i, rank in enumerate(ranks):
            assert rank.disk.got == names[i::2]
            assert rank.cache.lookup(TOKENS).by_tier == {"near": len(TOKENS)}
            rank.cache.check_integrity()


def test_a_chunk_that_is_read_while_its_load_waits_for_it_is_put_at_once(
    stored: Path, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "EXCHANGE_WAIT_S", DEADLINE_S)
    swapped, swap = threading.Event(), shared_reads.SharedReads._swap

    def swap_and_note(reads: shared_reads.SharedReads, exchange: str) -> None:
        swap(reads, exchange)
        swapped.set()

    monkeypatch.setattr(shared_reads.SharedReads, "_swap", swap_and_note)
    with ExitStack() as stack:
        rank, other = opened(stack, 2, stored, pool)
        first = rank.cache.lookup(TOKENS).chunks.names[:1]
        rank.disk.gate.clear()
        threads = stack.enter_context(ThreadPoolExecutor())
        loading = threads.submit(rank.load)
        assert swapped.wait(DEADLINE_S)  # it waits for its first chunk
        rank.disk.gate.set()
        until = time.monotonic() + 5.0
        while not (put_at_once := other.cache.tiers["near"].match_prefix(first)) and time.monotonic() < until:
            time.sleep(0.001)
        other.load()
        loading.result(DEADLINE_S)
        assert put_at_once, "the other rank had to wait for the end of the load"


def test_what_another_rank_does_not_bring_is_read_here(stored: Path, pool: str) -> None:
    """As if it were dead."""
    with ExitStack() as stack:
        rank, _ = opened(stack, 2, stored, pool)
        rank.load()
        assert sorted(rank.disk.got) == sorted(rank.cache.lookup(TOKENS).chunks.names)


def test_what_another_rank_leaves_is_verified(stored: Path, pool: str) -> None:
    with ExitStack() as stack:
        rank, other = opened(stack, 2, stored, pool)
        name = rank.cache.lookup(TOKENS).chunks.names[1]
        rank.disk.gate.clear()
        threads = stack.enter_context(ThreadPoolExecutor())
        loading = threads.submit(rank.load)
        assert rank.disk.asked.wait(DEADLINE_S)
        assert put(other.cache.tiers["near"], other.cache.staging, [name], size=5000) == [None]
        rank.disk.gate.set()
        loading.result(DEADLINE_S)
        assert rank.cache.counts().damaged == {("near", Damage.HEADER): 1}
        assert (stored / name).exists(), "the record itself is sound"


def test_what_is_approximate_is_left_to_nobody(tmp_path: Path, pool: str) -> None:
    with ExitStack() as stack:
        rank, _ = opened(stack, 2, tmp_path, pool)
        chunks, cache = rank.cache.lookup(TOKENS).chunks, rank.cache
        for precision, place in ((None, "near"), ("fp8", None)):
            rank.disk.precision = precision
            tiers = TierSet(cache.tiers, cache.policy, cache.staging, DEADLINE_S, copy=0, copies=2)
            assert exchange_tier(tiers, "disk", chunks) == place


def test_a_request_that_stores_nothing_leaves_nothing(stored: Path, pool: str) -> None:
    with ExitStack() as stack:
        rank, _ = opened(stack, 2, stored, pool)
        hit = rank.cache.lookup(TOKENS, policy=RequestPolicy(store_to=()))
        assert rank.cache.load(hit, rank.engine.places(rank.table)).tokens == len(TOKENS)
        rank.cache.flush()
        assert list(rank.cache.tiers["near"].scan()) == []
