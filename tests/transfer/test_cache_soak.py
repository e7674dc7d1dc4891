"""Fifty threads call everything of a cache at once for SOAK_SECONDS, or 20, over faulty tiers.

Each thread works in an engine of its own, so that whatever is loaded can be compared byte for byte.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from caches import CHUNK, make_engine, new_cache, new_staging, sequence

from kvkit.cache import Cache, CacheTimeout
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.staging import release_all
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier, random_plan

THREADS, SECONDS = 50, float(os.environ.get("SOAK_SECONDS", "20"))
FAULTS = {
    "get": [Fault.FAIL, Fault.FLIP, Fault.TRUNCATE],
    "put": [Fault.FAIL, Fault.DROP],
    "count": [Fault.FAIL],
}


def work(cache: Cache, seed: int, until: float, done: Counter[str], errors: list[BaseException]) -> None:
    """One thread's calls, chosen at random; `done` counts them."""
    chance = random.Random(seed)
    engine = make_engine(2, blocks=16)
    shared = [sequence(3, seed) for seed in range(4)]
    try:
        while time.monotonic() < until:
            tail = sequence(chance.randrange(3), chance.randrange(40))
            tokens = np.concatenate([chance.choice(shared), tail])
            table = engine.table(len(tokens))
            what = chance.choice(["store", "load", "load", "prefetch", "layers", "get", "cancel", "pin"])
            done[what] += 1
            engine.wipe()
            call(cache, engine, what, tokens, table, chance)
    except BaseException as error:
        errors.append(error)


def call(
    cache: Cache,
    engine: Engine,
    what: str,
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
    table: list[int],
    chance: random.Random,
) -> None:
    """One call; whatever it loads must be right, and nothing else written."""
    if what == "store":
        engine.compute(tokens, table)
        cache.store_async(tokens, engine.places(table)).result(120)
    elif what == "load":
        hit = cache.lookup(tokens)
        loaded = cache.load_async(hit, engine.places(table)).result(120)
        assert loaded.tokens <= hit.tokens
        engine.assert_loaded(tokens, table, loaded.tokens // CHUNK)
    elif what == "prefetch":
        cache.prefetch(tokens).result(120)
    elif what == "layers":
        load = cache.load_layers(cache.lookup(tokens), engine.places(table))
        for _ in load:
            if chance.random() < 0.2:
                load.close()
                return
        chunks = load.loaded.tokens // CHUNK
        keys = engine.keys(tokens)[:chunks]
        expected = [[engine.kv(key, g).tobytes() for key in keys] for g in range(2)]
        assert engine.read(tokens, table, chunks) == expected
    elif what == "get":
        release_all(cache.get_non_blocking(tokens, chance.randrange(3)).result(120))
    elif what == "cancel":
        future = cache.load_async(cache.lookup(tokens), engine.places(table))
        if not future.cancel():
            loaded = future.result(120)
            engine.assert_loaded(tokens, table, loaded.tokens // CHUNK)
    else:
        cache.pin(tokens, 0.01)


@pytest.mark.nightly
def test_fifty_threads(tmp_path: Path) -> None:
    staging = new_staging(make_engine(2), 40)
    turn = [0]

    def plan(operation: str, name: str) -> Fault | None:
        turn[0] += 1  # another share of the objects fails now than a moment ago
        return random_plan(turn[0] // 200, 0.05, FAULTS)(operation, name)

    tiers = [
        MemoryTier(staging, 12 * staging.slot_bytes, policy="arc"),
        FaultyTier(
            ObjectTier(TierConfig(url=str(tmp_path / "disk"), capacity=30 * staging.slot_bytes)), plan
        ),
        ObjectTier(
            TierConfig(
                url=tuple([str(tmp_path / name) for name in "ab"]), spread="stripe", eviction="s3fifo"
            ),
            name="stripe",
        ),
    ]
    done: Counter[str] = Counter()
    errors: list[BaseException] = []
    engine = make_engine(2)
    cache = new_cache(engine, staging, tiers, write_back_to=("memory", "stripe"))
    until = time.monotonic() + SECONDS
    threads = [
        threading.Thread(target=work, args=(cache, seed, until, done, errors)) for seed in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 240)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors, errors[0]
    with suppress(CacheTimeout):
        cache.flush()
    cache.check_integrity()
    cache.close()
    staging.check_integrity()
    assert staging.free == staging.slots, "a slot is lost"
    assert len(done) == 7, f"not every call was made: {done}"
    assert not list(tmp_path.rglob(".tmp-*"))
