"""Processes report a pool whose file was removed, leave it, and free its memory."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import pytest
from caches import make_engine, new_cache, new_staging, sequence

from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging
from kvkit.tiers.shm.file import PoolFile, PoolRemoved, pool_path
from kvkit.tiers.shm.tier import ShmTier
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    RECORDS,
    SLOT_BYTES,
    SLOTS,
    get,
    put,
    record_bytes,
    record_names,
)


@pytest.fixture
def path() -> Iterator[str]:
    path = pool_path(f"shm://test-{uuid.uuid4().hex}")
    yield path
    for left in (path, f"{path}-2"):
        with suppress(FileNotFoundError):
            os.unlink(left)


@pytest.fixture
def staging() -> Iterator[Staging]:
    with closing(Staging(SLOT_BYTES, SLOTS)) as staging:
        yield staging


def rename(path: str) -> None:
    os.rename(path, f"{path}-2")


def replace(path: str) -> None:
    open(f"{path}-2", "xb").close()
    os.replace(f"{path}-2", path)


def wait_until_left() -> None:
    for thread in threading.enumerate():
        if thread.name.endswith("-leave"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def is_mapped(path: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(path in line for line in maps)


@pytest.mark.parametrize("remove", [os.unlink, rename, replace])
def test_a_removed_pool_is_left_and_its_memory_freed(
    path: str, staging: Staging, remove: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    names = record_names(4)
    tier = ShmTier(path, staging, RECORDS * SLOT_BYTES)
    put(tier, staging, names[:3])
    lent = tier.borrow(names[0])
    assert lent is not None
    remove(path)
    calls: list[Callable[[], object]] = [
        lambda: tier.match_prefix(names),
        lambda: tier.pin(names, 1.0),
        lambda: tier.prioritise(names, 1),
        lambda: tier.delete(names),
        lambda: tier.size(names[0]),
        lambda: list(tier.scan()),
    ]
    for call in calls:
        with pytest.raises(PoolRemoved, match="was removed"):
            call()
    assert isinstance(put(tier, staging, names[3:])[0], PoolRemoved)
    assert tier.borrow(names[0]) is None
    assert isinstance(get(tier, staging, names[:1])[0], OSError)
    (warning,) = caplog.messages
    assert f"tier 'shm': the pool {path} was removed; this process stops using it" in warning
    assert np.array_equal(lent.record, record_bytes(names[0])), "a load that had begun lost its record"
    lent.release()
    del lent
    wait_for(lambda: not is_mapped(path))
    wait_until_left()
    tier.close()


def test_who_comes_later_has_a_pool_of_its_own(path: str, staging: Staging) -> None:
    names = record_names(2)
    with closing(ShmTier(path, staging, RECORDS * SLOT_BYTES)) as tier:
        put(tier, staging, names[:1])
        os.unlink(path)
        with closing(ShmTier(path, staging, RECORDS * SLOT_BYTES)) as other:
            assert isinstance(put(tier, staging, names[1:])[0], PoolRemoved)
            assert list(other.scan()) == []
            assert put(other, staging, names) == [None, None]
            assert other.match_prefix(names) == 2
    wait_until_left()


def test_a_cache_computes_what_a_removed_pool_had(path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine, tokens = make_engine(), sequence(4)
    table = engine.table(len(tokens))
    slots = new_staging(engine, 8)
    with new_cache(engine, slots, [ShmTier(path, slots, 16 * slots.slot_bytes)]) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        hit = cache.lookup(tokens)
        assert hit.tokens == len(tokens)
        os.unlink(path)
        assert cache.lookup(tokens).tokens == 0
        cache.load(hit, engine.places(table))
        cache.store(sequence(4, 2), engine.places(table))
        cache.flush()
        assert sum("this process stops using it" in message for message in caplog.messages) == 1
        cache.check_integrity()
    wait_until_left()


def test_a_pool_that_is_removed_while_it_is_opened_is_opened_anew(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its opener waited for the mutex of a file that nobody after it would find."""
    lock_mutex, removed = PoolFile.lock_mutex, []

    def remove_then_wait(file: PoolFile, timeout_s: float) -> None:
        if not removed:
            removed.append(os.stat(path).st_ino)
            os.rename(path, f"{path}-2")
        lock_mutex(file, timeout_s)

    monkeypatch.setattr(PoolFile, "lock_mutex", remove_then_wait)
    with closing(PoolFile(path, SLOT_BYTES, RECORDS * SLOT_BYTES)) as file:
        file.check()
        assert os.stat(path).st_ino != removed[0]
