"""Pools in shared memory serve all processes of a user, and survive deaths at any instruction."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import stat
import subprocess
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import pytest
from caches import CHUNK, make_engine, new_cache, new_staging, sequence
from forks import fork
from repository import SUPPORT

from kvkit import load_config
from kvkit.cache import Cache
from kvkit.observe.inspect import list_store, list_tier
from kvkit.settings import ConfigError
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import Tier, TierError, TierFull
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.shm.file import PoolFile, pool_path
from kvkit.tiers.shm.pool import Pool
from kvkit.tiers.shm.tier import ShmTier
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    RECORDS,
    SLOT_BYTES,
    SLOTS,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)

ROUNDS = os.environ.get("KVKIT_DEATHS", "110")
"""Processes to kill in each test that kills some."""
NOBODY = 65534
MAP_FIXED_NOREPLACE = 0x100000


@pytest.fixture
def url() -> Iterator[str]:
    url = f"shm://test-{uuid.uuid4().hex}"
    yield url
    with suppress(FileNotFoundError):
        os.unlink(pool_path(url))


@pytest.fixture
def staging() -> Iterator[Staging]:
    with closing(Staging(SLOT_BYTES, SLOTS)) as staging:
        yield staging


def shm(url: str, staging: Staging, records: int = RECORDS) -> ShmTier:
    return ShmTier.open("shm", TierConfig(url=url, capacity=records * staging.slot_bytes), staging)


class TestShm(TierContract):
    @pytest.fixture
    def tier(self, url: str, staging: Staging) -> Tier:
        return shm(url, staging)


# one pool


def test_a_fork_that_lets_go_of_a_pool_keeps_what_it_has_at_that_address(url: str) -> None:
    pools = [PoolFile(pool_path(url), SLOT_BYTES, RECORDS * SLOT_BYTES)]
    size, address = len(pools[0].records), np.frombuffer(pools[0].records, np.uint8).ctypes.data

    def other() -> None:
        libc, at = ctypes.CDLL(None), ctypes.c_void_p(address)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mmap(at, ctypes.c_size_t(size), rights, flags, -1, ctypes.c_long(0)) == address
        pools.clear()
        gc.collect()
        ctypes.memset(at, 1, size)

    assert fork(other) == 0
    pools.pop().close()


def test_what_one_process_stores_the_others_hit_and_a_restart_too(url: str, staging: Staging) -> None:
    names = record_names(6)

    def other() -> None:
        slots = Staging(SLOT_BYTES, SLOTS)
        tier = shm(url, slots)
        assert tier.match_prefix(names) == 3
        for name, found in zip(names[:3], get(tier, slots, names[:3]), strict=True):
            assert np.array_equal(found, record_bytes(name))
        assert put(tier, slots, names[3:]) == [None] * 3

    with closing(shm(url, staging)) as tier:
        put(tier, staging, names[:3])
        assert fork(other) == 0
        assert tier.match_prefix(names) == 6
        assert all(
            np.array_equal(f, record_bytes(n)) for n, f in zip(names, get(tier, staging, names), strict=True)
        )
    with closing(shm(url, staging)) as tier:
        assert tier.match_prefix(names) == 6
        assert sorted(name for name, _ in tier.scan()) == names


def test_a_cache_loads_what_another_stored_without_a_copy(url: str) -> None:
    engine, tokens = make_engine(groups=2), sequence(4)
    table = engine.table(len(tokens))
    caches: list[Cache] = []
    for _ in range(2):
        slots = new_staging(engine, 8)
        caches.append(new_cache(engine, slots, [shm(url, slots, 16)], write_back_to=("shm",)))
    engine.compute(tokens, table)
    with caches[0] as first, caches[1] as second:
        first.store(tokens, engine.places(table))
        first.flush()
        engine.wipe()
        slots_of_all = second.staging.acquire(second.staging.slots, 0)  # a copy would take one
        loaded = second.load(second.lookup(tokens), engine.places(table))
        release_all(slots_of_all)
        assert dict(loaded.by_tier) == {"shm": len(tokens)}
        engine.assert_loaded(tokens, table, 4)
        assert second.prefetch_chunks > 0
        for cache in caches:
            cache.check_integrity()


def test_a_closed_cache_gives_up_its_memory_with_its_last_reference(url: str) -> None:
    """Not when garbage happens to be collected: it has all of the pool mapped, by two descriptors."""
    engine, tokens = make_engine(), sequence(4)
    table = engine.table(len(tokens))
    gc.collect()
    gc.disable()
    try:
        before = os.listdir("/proc/self/fd")
        slots = new_staging(engine, 8)
        with new_cache(engine, slots, [shm(url, slots, 16)]) as cache:
            engine.compute(tokens, table)
            cache.store(tokens, engine.places(table))
            cache.flush()
            assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == len(tokens)
        gone = weakref.ref(cache)
        del cache, slots
        assert gone() is None
        assert len(os.listdir("/proc/self/fd")) == len(before)
    finally:
        gc.enable()


def test_capacity_and_use_are_those_of_the_pool(url: str, staging: Staging) -> None:
    """As in `test_memory_lets_the_least_recently_used_go`, by two that take turns."""
    first, second = shm(url, staging, 4), shm(url, staging, 4)
    names = record_names(6)
    put(first, staging, names[:4])
    assert second.match_prefix(names[:2]) == 2
    put(first, staging, names[4:])
    for tier in (first, second):
        assert [tier.size(name) is not None for name in names] == [True, True, False, False, True, True]
    put(second, staging, [names[2]])
    assert first.match_prefix(names[:2]) == 1, "of one run the tail goes first"
    assert (first.evicted, second.evicted) == (2, 1)
    assert second.pin(names[:1], 3600) == 1
    put(first, staging, [f"aa/0/c.0.{i}.0.0.0.0" for i in range(6)])
    assert second.match_prefix(names[:1]) == 1
    first.close()
    second.close()


def test_chains_shrink_from_their_ends(url: str) -> None:
    """Also where an end came in long after the rest, and another process evicts."""
    engine = make_engine()
    slots = new_staging(engine, 12)
    with closing(shm(url, slots, 6)) as other, new_cache(engine, slots, [shm(url, slots, 6)]) as cache:

        def store(chunks: int, seed: int) -> None:
            tokens = sequence(8, seed)[: chunks * CHUNK]
            table = engine.table(len(tokens))
            engine.compute(tokens, table)
            cache.store(tokens, engine.places(table))
            cache.flush()

        def held(seed: int) -> int:
            return sum(other.size(name) is not None for name in cache.chunks(sequence(8, seed)).names)

        store(2, seed=1)
        store(2, seed=2)
        store(4, seed=1)
        put(other, slots, record_names(1), 64)
        assert (held(1), held(2)) == (4, 1)
        store(3, seed=3)
        assert (held(1), held(2), held(3)) == (2, 0, 3)
        assert other.match_prefix(cache.chunks(sequence(8, 1)).names) == 2
        store(8, seed=4)
        assert held(4) == 6, "a run evicts none of its own"
        assert other.match_prefix(cache.chunks(sequence(8, 4)).names) == 6


def test_an_end_that_came_late_goes_before_what_it_follows(url: str) -> None:
    a, b, c, d, e, f, end = record_names(7)
    with closing(Pool(pool_path(url), SLOT_BYTES, 4 * SLOT_BYTES)) as pool:

        def write(name: str, parent: str | None = None) -> None:
            lease = pool.take(name, 1, parent)
            assert lease is not None
            pool.publish(name, lease)

        for name in (a, b, c, d, e):
            write(name)
        assert pool.size(a) is None  # by an order that has b next
        pool.remove([c])
        write(end, b)
        write(f)
        assert [name for name, _ in pool.listed() if name in (b, end)] == [b]


def test_priorities_are_those_of_the_pool(url: str, staging: Staging) -> None:
    """Whoever gave them, and whoever evicts; also for those that come after all have ended."""
    names = record_names(6)
    with closing(shm(url, staging, 4)) as first, closing(shm(url, staging, 4)) as second:
        put(first, staging, names[:4])
        second.prioritise(names[:1], 80)
        second.prioritise(names[:2], 10)
        first.prioritise([names[3], "ab/0/c.0.0.0.0.0.0"], 20)
    with closing(shm(url, staging, 4)) as tier:
        gone = []
        for name in names[4:] + [f"cd/0/c.0.{i}.0.0.0.0" for i in range(2)]:
            held = {name for name, _ in tier.scan()}
            put(tier, staging, [name])
            gone += held - {name for name, _ in tier.scan()}
        assert gone == [names[1], names[3], names[2], names[4]], "the highest of its priorities counts"


def test_a_slot_on_loan_is_nobody_elses(url: str, staging: Staging) -> None:
    first, second = shm(url, staging, 2), shm(url, staging, 2)
    names = record_names(5)
    put(first, staging, names[:2])
    lent = second.borrow(names[0])
    assert lent is not None
    first.delete([names[0]])
    assert put(first, staging, names[2:4])[0] is None  # in the place of the other
    assert np.array_equal(lent.record, record_bytes(names[0]))
    assert len(list(first.scan())) == 1
    lent.release()
    assert put(first, staging, names[4:]) == [None]
    assert len(list(second.scan())) == 2
    share = second.borrow(names[4])
    assert share is not None
    second.close()
    put(first, staging, names[:2])
    assert np.array_equal(share.record, record_bytes(names[4])), "the closed tier's loan was not kept"
    share.release()
    assert put(first, staging, names[:2]) == [None, None]
    assert first.match_prefix(names) == 2
    first.close()


# deaths


@pytest.mark.parametrize(
    ("way", "rounds"), [("instructions", ROUNDS), ("moments", ROUNDS), ("outlived", "3")]
)
def test_records_and_room_survive_kill_9(way: str, rounds: str) -> None:
    command = [sys.executable, str(SUPPORT / "shm_deaths.py"), way, rounds]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0.9 * int(rounds)  # one or another ends before its turn


def test_a_slot_that_others_gave_to_another_record_is_not_lent(url: str, staging: Staging) -> None:
    first, second = record_names(2)
    with closing(shm(url, staging, 1)) as tier, closing(Staging(SLOT_BYTES, 1)) as slots:
        put(tier, staging, [first])
        with closing(shm(url, slots, 1)) as other:
            other.delete([first])
            put(other, slots, [second])
        assert tier.borrow(first) is None
        lent = tier.borrow(second)
        assert lent is not None
        lent.release()


def test_one_that_is_stopped_with_the_mutex_holds_nobody_up_for_long(
    url: str, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = record_names(4)
    with closing(shm(url, staging)) as tier:
        put(tier, staging, names[:1])
        stopped = PoolFile(pool_path(url), SLOT_BYTES, RECORDS * SLOT_BYTES)
        stopped.lock_mutex(DEADLINE_S)
        monkeypatch.setattr("kvkit.tiers.shm.pool._MUTEX_TIMEOUT_S", 0.05)
        first, *others = put(tier, staging, names[1:])
        assert "another process has had it locked" in str(first)
        assert all(error is first for error in others), "each waited for itself"
        lent = tier.borrow(names[0])
        assert lent is not None, "what is known to be there is lent all the same"
        lent.release()
        assert tier.borrow(names[1]) is None
        with pytest.raises(TierError, match="another process has had it locked"):
            tier.match_prefix(names)
        stopped.close()
        assert put(tier, staging, names[1:]) == [None] * 3
        assert tier.match_prefix(names) == 4


# whose it is


def test_the_file_is_for_its_user_alone_whatever_the_umask(url: str, staging: Staging) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            shm(url, staging).close()
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(pool_path(url)).st_mode) == 0o600
        os.unlink(pool_path(url))


def spoil_mode(path: str) -> None:
    os.chmod(path, 0o640)


def spoil_owner(path: str) -> None:
    os.chown(path, NOBODY, NOBODY)


def spoil_link(path: str) -> None:
    os.rename(path, f"{path}-2")
    os.symlink(f"{path}-2", path)


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
@pytest.mark.parametrize("spoil", [spoil_mode, spoil_owner, spoil_link])
def test_what_is_not_ours_alone_is_refused(url: str, staging: Staging, spoil: Callable[[str], None]) -> None:
    shm(url, staging).close()
    spoil(pool_path(url))
    try:
        with pytest.raises(OSError, match=r"want a file of user 0 that no other user|symbolic links"):
            shm(url, staging)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(f"{pool_path(url)}-2")


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_another_user_cannot_open_it_and_has_a_pool_of_its_own(url: str, staging: Staging) -> None:
    with closing(shm(url, staging)) as tier:
        put(tier, staging, record_names(1))
        path = pool_path(url)

        def other() -> None:
            os.setuid(NOBODY)
            with pytest.raises(PermissionError):
                Pool(path, SLOT_BYTES, RECORDS * SLOT_BYTES)
            with closing(shm(url, Staging(SLOT_BYTES, SLOTS))) as own:
                assert list(own.scan()) == []
            os.unlink(pool_path(url))

        assert fork(other) == 0


# settings


def test_a_pool_is_as_large_as_its_maker_said(url: str, staging: Staging) -> None:
    with closing(shm(url, staging, 4)):
        with pytest.raises(ValueError, match=rf"'shm': capacity=131072: the pool in .* has {4 * SLOT_BYTES}"):
            shm(url, staging, 8)
        larger = Staging(2 * SLOT_BYTES, 4)
        with closing(larger), pytest.raises(ValueError, match="records of up to 16384"):
            shm(url, larger, 2)
        with closing(Staging(SLOT_BYTES // 4, 4)) as smaller, closing(shm(url, smaller, 16)) as joined:
            assert put(joined, smaller, record_names(1), 4096) == [None]
    with pytest.raises(ValueError, match="capacity_bytes=100, want at least"):
        ShmTier(pool_path(url), staging, 100)
    for magic, size in ((b"KVKITSH2", None), (b"KVKITSH3", 4096)):
        with open(pool_path(url), "r+b") as file:
            file.write(magic)
            file.truncate(size or os.stat(pool_path(url)).st_size)
        with pytest.raises(OSError, match="not a complete pool of this version; remove it"):
            shm(url, staging, 4)


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"url": "shm://a"}, "in shared memory needs a capacity"),
        (
            {"url": "shm://a", "capacity": "1GiB", "eviction": "arc"},
            "eviction = 'arc': no tier in shared memory",
        ),
        ({"url": ("shm://a", "shm://b"), "capacity": "1GiB"}, "url: a tier in shared memory has one"),
    ],
)
def test_settings_that_it_does_not_have(tier: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(tiers={"pool": tier})


@pytest.mark.parametrize("url", ["shm://", "shm://a/b", "shm://../x", "shm://" + "a" * 65])
def test_names_of_pools(url: str, staging: Staging) -> None:
    with pytest.raises(ValueError, match=r"want shm://<name>, of 1 to 64"):
        shm(url, staging)


def test_more_memory_than_there_is_leaves_nothing_behind(url: str, staging: Staging) -> None:
    size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    with pytest.raises(OSError, match="No space left"):
        shm(url, staging, 2 * size // SLOT_BYTES)
    assert os.stat(pool_path(url)).st_blocks == 0


def test_inspecting_makes_no_pool(url: str, staging: Staging) -> None:
    config = TierConfig(url=url, capacity=RECORDS * SLOT_BYTES)
    with pytest.raises(FileNotFoundError, match="no such pool"):
        list(list_tier("pool", config))
    with pytest.raises(FileNotFoundError):
        list_store(url)
    with closing(shm(url, staging)) as tier:
        put(tier, staging, record_names(2))
        for listed in list_tier("pool", config), list_store(url):
            (damaged,) = (listing.damaged for listing, done in listed if done)
            assert len(damaged) == 2  # random bytes


def test_full_before_what_was_used_later(url: str, staging: Staging) -> None:
    """A pool that is full of what is lent has no room, and says so."""
    with closing(shm(url, staging, 2)) as tier:
        names = record_names(3)
        put(tier, staging, names[:2])
        lent = [tier.borrow(name) for name in names[:2]]
        (error,) = put(tier, staging, names[2:])
        assert isinstance(error, TierFull)
        release_all(lease for lease in lent if lease is not None)
        assert put(tier, staging, names[2:]) == [None]


def test_what_a_pool_holds_is_told_by_what_it_answers(url: str) -> None:
    """Others put and evict there: an engine tells what it stored or found, and that there may be more."""
    engine, tokens = make_engine(), sequence(3)
    staging = new_staging(engine, 8)
    with (
        new_cache(engine, staging, [shm(url, staging, 6)]) as cache,
        closing(new_staging(engine, 8)) as slots,
    ):
        told: list[tuple[list[str], bool]] = []
        complete = cache.tier_set.subscribe(
            ["shm"], lambda tier, names, held: told.append((list(names), held))
        )
        assert not complete, "a router goes on asking"
        engine.compute(tokens, engine.table(len(tokens)))
        cache.store(tokens, engine.places(engine.table(len(tokens))))
        cache.flush()
        names = cache.chunks(tokens).names
        assert {name for some, held in told for name in some if held} == set(names)
        with closing(shm(url, slots, 6)) as other:
            other.delete(names[1:])
        told.clear()
        assert cache.lookup(tokens).tokens == CHUNK
        assert [some for some, held in told if some and held] == [names[:1]]
        assert {name for some, held in told for name in some if not held} == {names[1]}
