"""A request's policy is read within limits, and kept by loads, stores and evictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caches import CHUNK, make_engine, new_cache, new_staging, sequence

from kvkit.cache import Cache
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.settings import ConfigError
from kvkit.tiers.base import Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, PolicyError, RequestPolicy, Retention
from kvkit.transfer.requests import RequestLimits, read

LIMITS = RequestLimits(load_from=("disk",), store_to=("memory", "disk"), max_keep_s=60, max_priority=50)


def test_what_a_request_says_is_what_it_wants() -> None:
    said = {"load_from": ["disk"], "store_to": [], "max_load_tokens": 7, "keep_s": 60, "priority": 50}
    assert read(said, LIMITS, "w", "s") == RequestPolicy(("disk",), (), 7, 60.0, 50)
    assert read({"store": False}, LIMITS, "w", "s") == RequestPolicy(store_to=())
    assert read({"store_to": ["disk", "disk"]}, LIMITS, "w", "s") == RequestPolicy(store_to=("disk",))
    assert read({}, LIMITS, "w", "s") == DEFAULT_REQUEST_POLICY
    anywhere = read({"load_from": ["x"], "store_to": ["y"]}, RequestLimits(), "w", "s")
    assert anywhere == RequestPolicy(("x",), ("y",)), "without limits the tiers are the engine's to check"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (True, "w = True: want an object of store, store_to, load_from, max_load_tokens, keep_s, priority"),
        ({"stored": False}, r"w\.stored: unknown setting; did you mean 'store'\?"),
        ({"store": 0}, r"w\.store = 0: .*boolean"),
        ({"store_to": "disk"}, r"w\.store_to = 'disk': .*list"),
        ({"store_to": ["nfs"]}, r"w\.store_to = 'nfs': want some of s\.store_to: memory, disk"),
        ({"store": False, "store_to": ["disk"]}, r"w\.store_to = \['disk'\]: want none with store = false"),
        ({"load_from": ["memory"]}, r"w\.load_from = 'memory': want some of s\.load_from: disk"),
        ({"load_from": ["x" * 9999]}, r"w\.load_from = 'x{1,20}\.\.\.x{1,20}': want"),
        ({"max_load_tokens": -1}, r"w\.max_load_tokens = -1: .*greater than or equal to 0"),
        ({"max_load_tokens": True}, r"w\.max_load_tokens = True: .*integer"),
        ({"max_load_tokens": 10**40}, r"w\.max_load_tokens = 10*: .*less than or equal to 9007199254740991"),
        ({"keep_s": 10**40}, r"w\.keep_s = 1e\+40: want at most s\.max_keep_s = 60\.0"),
        ({"keep_s": 10**400}, r"w\.keep_s = "),
        ({"priority": 10**40}, r"w\.priority = 10*: .*less than or equal to 100"),
        ({"keep_s": 61}, r"w\.keep_s = 61\.0: want at most s\.max_keep_s = 60\.0"),
        ({"keep_s": float("nan")}, r"w\.keep_s = nan: .*finite"),
        ({"priority": 51}, r"w\.priority = 51: want at most s\.max_priority = 50"),
        ({"priority": 101}, r"w\.priority = 101: .*less than or equal to 100"),
    ],
)
def test_every_mistake_is_named(said: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(said, LIMITS, "w", "s")


class Caches:
    """A cache over a memory and a folder, and an engine. `room`: chunks that each of the two holds."""

    def __init__(self, folder: Path, room: int) -> None:
        self.engine: Engine = make_engine()
        staging = new_staging(self.engine, room + 32)
        size = staging.slot_bytes
        disk = TierConfig(url=str(folder), capacity=room * size, threads=1)
        tiers: list[Tier] = [MemoryTier(staging, room * size), ObjectTier(disk)]
        self.cache: Cache = new_cache(self.engine, staging, tiers, write_back_to=("memory",))

    def store(self, tokens: Any, policy: RequestPolicy = DEFAULT_REQUEST_POLICY, **more: Any) -> int:
        """New tokens; they are in the tiers."""
        table = self.engine.table(len(tokens))
        self.engine.compute(tokens, table)
        stored = self.cache.store(tokens, self.engine.places(table), policy=policy, **more)
        self.cache.flush()
        return stored.new_tokens

    def held(self, tokens: Any) -> dict[str, int]:
        """Leading chunks that each tier holds."""
        names = self.cache.chunks(tokens).names
        scans = {name: dict(tier.scan()) for name, tier in self.cache.tiers.items()}
        return {t: next((i for i, n in enumerate(names) if n not in s), len(names)) for t, s in scans.items()}


@pytest.fixture
def caches(tmp_path: Path) -> Any:
    made = Caches(tmp_path, 12)
    with made.cache:
        yield made


Load = Callable[[Caches, Any, RequestPolicy], dict[str, int]]


def load_whole(caches: Caches, tokens: Any, policy: RequestPolicy) -> dict[str, int]:
    hit = caches.cache.lookup(tokens, policy=policy)
    places = caches.engine.places(caches.engine.table(len(tokens)))
    return dict(caches.cache.load(hit, places).by_tier)


def load_by_layers(caches: Caches, tokens: Any, policy: RequestPolicy) -> dict[str, int]:
    hit = caches.cache.lookup_async(tokens, policy=policy).result()
    places = caches.engine.places(caches.engine.table(len(tokens)))
    load = caches.cache.load_layers(hit, places)
    list(load)
    return dict(load.loaded.by_tier)


@pytest.mark.parametrize("load", [load_whole, load_by_layers])
def test_it_is_loaded_from_the_tiers_that_it_names(caches: Caches, load: Load) -> None:
    tokens = sequence(3)
    caches.store(tokens)
    assert load(caches, tokens, DEFAULT_REQUEST_POLICY) == {"memory": len(tokens)}
    assert load(caches, tokens, RequestPolicy(load_from=("disk",))) == {"disk": len(tokens)}
    assert load(caches, tokens, RequestPolicy(load_from=())) == {}
    caches.cache.tiers["disk"].delete(caches.cache.chunks(tokens).names[1:])
    assert load(caches, tokens, RequestPolicy(load_from=("disk",))) == {"disk": CHUNK}


def test_what_is_gone_since_its_lookup_is_sought_in_the_tiers_that_it_names(caches: Caches) -> None:
    tokens = sequence(3)
    caches.store(tokens)
    hit = caches.cache.lookup(tokens, policy=RequestPolicy(load_from=("disk",)))
    caches.cache.tiers["disk"].delete(hit.chunks.names[1:])
    places = caches.engine.places(caches.engine.table(len(tokens)))
    assert caches.cache.load(hit, places).by_tier == {"disk": CHUNK}


def test_no_more_is_loaded_than_it_wants(caches: Caches) -> None:
    tokens = sequence(5)
    caches.store(tokens)
    wish = RequestPolicy(max_load_tokens=2 * CHUNK + 3)
    assert caches.cache.lookup(tokens, policy=wish).tokens == 2 * CHUNK
    assert caches.cache.lookup(tokens, policy=wish, first=1).tokens == 3 * CHUNK, (
        "besides what the engine has"
    )
    assert caches.cache.lookup(tokens, policy=wish, first=4).tokens == 5 * CHUNK
    assert caches.cache.lookup(tokens, policy=RequestPolicy(max_load_tokens=0)).tokens == 0


@pytest.mark.parametrize("load", [load_whole, load_by_layers])
def test_what_is_to_be_stored_nowhere_is_not_written_back_either(caches: Caches, load: Load) -> None:
    tokens, wish = sequence(3), RequestPolicy(store_to=())
    assert caches.store(tokens, wish) == 0
    assert caches.held(tokens) == {"memory": 0, "disk": 0}
    caches.store(tokens, to=("disk",))
    assert load(caches, tokens, wish) == {"disk": len(tokens)}
    caches.cache.flush()
    assert caches.held(tokens) == {"memory": 0, "disk": 3}


def test_it_is_stored_to_the_tiers_that_it_names(caches: Caches) -> None:
    engine, wish = caches.engine, RequestPolicy(store_to=("disk",))
    caches.store(sequence(2), wish)
    later, by_layers = sequence(2, seed=1), sequence(2, seed=2)
    for tokens in (later, by_layers):
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        if tokens is later:
            caches.cache.store_async(tokens, engine.places(table), policy=wish).result()
            continue
        with caches.cache.store_layers(tokens, engine.places(table), policy=wish) as store:
            store.layer(0)
            store.layer(1)
    caches.cache.flush()
    for tokens in (sequence(2), later, by_layers):
        assert caches.held(tokens) == {"memory": 0, "disk": 2}


def test_a_tier_that_does_not_exist_is_named(caches: Caches) -> None:
    tokens = sequence(1)
    with pytest.raises(PolicyError, match="load_from='nfs': no such tier; the tiers are memory, disk"):
        caches.cache.lookup(tokens, policy=RequestPolicy(load_from=("nfs",)))
    with pytest.raises(PolicyError, match="store_to='nfs': no such tier; the tiers are memory, disk"):
        caches.store(tokens, RequestPolicy(store_to=("memory", "nfs")))


def fill_up(caches: Caches) -> None:
    """Store newer sequences than both tiers have room for."""
    for seed in range(100, 104):
        caches.store(sequence(4, seed=seed))


def retain(caches: Caches, tokens: Any, wish: RequestPolicy, when: str) -> None:
    """Have a request with this policy meet tokens that are there, but when it is the one that stores them."""
    if when == "stored":
        caches.store(tokens, wish)
        return
    caches.store(tokens, to=("disk",) if when == "written back" else None)
    if when == "stored again":
        assert caches.store(tokens, wish) == 0
    elif when == "held":
        caches.cache.retain(tokens, wish)
    else:
        assert load_whole(caches, tokens, wish) == {"disk": len(tokens)}
        caches.cache.flush()


@pytest.mark.parametrize("wish", [RequestPolicy(keep_s=3600), RequestPolicy(priority=80)])
@pytest.mark.parametrize("when", ["stored", "stored again", "held", "written back"])
def test_what_it_wants_kept_outlives_what_is_newer(caches: Caches, wish: RequestPolicy, when: str) -> None:
    """In every tier that evicts: what it stores, what was there before, and what its load brings near."""
    tokens, plain = sequence(3), sequence(3, seed=1)
    caches.store(plain)
    retain(caches, tokens, wish, when)
    fill_up(caches)
    assert caches.held(plain) == {"memory": 0, "disk": 0}
    assert caches.held(tokens) == {"memory": 3, "disk": 0 if when == "written back" else 3}


@pytest.mark.parametrize("when", ["stored", "stored again", "held", "written back"])
def test_of_a_prefix_that_it_wants_kept_no_more_is_kept(caches: Caches, when: str) -> None:
    tokens = sequence(4)
    wish = RequestPolicy(prefixes=(Retention(CHUNK + 1, keep_s=3600), Retention(CHUNK, priority=80)))
    retain(caches, tokens, wish, when)
    fill_up(caches)
    assert caches.held(tokens) == {"memory": 2, "disk": 0 if when == "written back" else 2}


def test_what_has_a_low_priority_goes_before_what_is_older(caches: Caches) -> None:
    """But what others have stored as ever keeps its priority when such a request stores it again."""
    low, plain = RequestPolicy(priority=0), sequence(6)
    caches.store(plain)
    caches.store(plain, low)
    once = [sequence(3, seed=seed) for seed in (1, 2)]
    for tokens in once:
        caches.store(tokens, low)
    caches.store(sequence(4, seed=3))
    assert caches.held(plain) == {"memory": 6, "disk": 6}
    for tier in ("memory", "disk"):
        assert [caches.held(tokens)[tier] for tokens in once] == [0, 2], "of the two, the older one first"
