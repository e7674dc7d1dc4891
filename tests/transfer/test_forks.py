"""A fork of a process with an open cache can change nothing in it, and gets an error."""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import fork

from kvkit.cache import Cache
from kvkit.format.record import RecordFormat
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import PAGE_BYTES, Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.contract import DEADLINE_S
from kvkit.transfer.policy import RequestPolicy
from kvkit.workers import Forked, Workers

TOKENS = np.arange(40, dtype=np.int32)
ENGINE = Engine(small_layout(), small_namespace(small_layout()))
PLACES = ENGINE.places(ENGINE.table(len(TOKENS)))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    form = RecordFormat.of(ENGINE.layout, 0, ENGINE.namespace)
    staging = Staging(form.record_bytes, 12)
    tiers = [MemoryTier(staging, 5 * staging.slot_bytes), ObjectTier(f"file://{tmp_path}", name="disk")]
    with Cache(ENGINE.layout, ENGINE.namespace, tiers, staging=staging) as cache:
        ENGINE.compute(TOKENS, ENGINE.table(len(TOKENS)))
        cache.store(TOKENS, PLACES)
        cache.flush()
        yield cache


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(
        Forked, match=f"was opened in process {os.getppid()}, and this is process {os.getpid()}"
    ):
        call()


def test_whatever_is_asked_of_a_cache_in_a_fork_is_refused(cache: Cache) -> None:
    hit = cache.lookup(TOKENS)
    arguments: dict[str, tuple[Any, ...]] = {
        "lookup": (TOKENS,),
        "lookup_async": (TOKENS,),
        "chunks": (TOKENS,),
        "held_async": (hit.chunks, ["disk"]),
        "load": (hit, PLACES),
        "load_async": (hit, PLACES),
        "load_layers": (hit, PLACES),
        "store_layers": (TOKENS, PLACES),
        "prefetch": (TOKENS,),
        "get_non_blocking": (TOKENS, 0),
        "store": (TOKENS, PLACES),
        "store_async": (TOKENS, PLACES),
        "warm_up": (PLACES,),
        "store_chunks": (hit.chunks, PLACES),
        "pin": (TOKENS, 1.0),
        "retain": (TOKENS, RequestPolicy()),
        "query": (TOKENS,),
        "note_answer": (TOKENS, True),
        "clear": ("disk",),
    }
    methods = [name for name, _ in inspect.getmembers(Cache, inspect.isfunction) if not name.startswith("_")]
    assert not set(arguments) - set(methods)

    def child() -> None:
        for name in methods:
            if name != "close":
                refused(lambda name=name: getattr(cache, name)(*arguments.get(name, ())))
        cache.close()

    assert fork(child) == 0
    assert cache.load(hit, PLACES).tokens == hit.tokens == len(TOKENS)
    assert cache.clear("disk") == 5
    cache.check_integrity()


def test_a_lock_that_was_held_at_the_fork_keeps_nobody_waiting(cache: Cache) -> None:
    with cache.staging._changed:  # as a thread of the parent may hold it
        assert fork(lambda: refused(lambda: cache.staging.acquire(1, 0))) == 0


def test_what_a_fork_writes_to_a_private_slot_stays_its_own() -> None:
    staging = Staging(PAGE_BYTES, 2)
    with staging.acquire(1, 0)[0] as lease:
        lease.array[:] = 7

        def child() -> None:
            assert bytes(lease.array) == bytes([7]) * PAGE_BYTES
            lease.array[:] = 9
            refused(lease.share)
            refused(lease.release)

        assert fork(child) == 0
        assert bytes(lease.array) == bytes([7]) * PAGE_BYTES
    staging.close()


def test_a_fork_cannot_touch_a_shared_slot() -> None:
    staging = Staging(PAGE_BYTES, 2, shared=True)
    with staging.acquire(1, 0)[0] as lease:
        lease.array[:] = 7

        def child() -> None:
            faulthandler.disable()
            lease.array[:] = 9

        assert fork(child) == -signal.SIGSEGV
        assert bytes(lease.array) == bytes([7]) * PAGE_BYTES
    staging.close()


def test_threads_take_no_work_from_a_fork() -> None:
    workers = Workers(1, "test")
    assert workers.submit(threading.get_ident).result(DEADLINE_S)
    assert fork(lambda: refused(lambda: workers.submit(threading.get_ident))) == 0
    assert workers.close(DEADLINE_S)
