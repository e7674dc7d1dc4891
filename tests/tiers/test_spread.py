"""Several disks serve as one tier, and a dead one costs only the records on it."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from caches import make_engine, new_cache, new_staging, sequence
from hypothesis import given
from hypothesis import strategies as st

from kvkit.cache import Cache
from kvkit.config import load_config, open_cache
from kvkit.format.layout import Namespace
from kvkit.format.record import ALIGN
from kvkit.settings import ConfigError
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import DamagedObject, OnComplete, UnreadableObject, complete
from kvkit.tiers.folder import Folder
from kvkit.tiers.health import FAILURES_TO_PAUSE
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.spread import SpreadTier, path_of
from kvkit.tiers.striped import StripedStore, parts
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, get, put, record_names
from kvkit.tiers.testing.faulty import Fault, FaultyTier, Wrapper

FAIL = Fault.FAIL


def test_a_path_is_a_function_of_the_name_alone() -> None:
    """Golden: other processes, and other versions, find what this one stored."""
    assert [path_of(name, 3) for name in record_names(8)] == [0, 2, 2, 2, 0, 0, 2, 0]
    many = Counter(path_of(f"ab/0/c.{i}.7.0.0.0.0", 4) for i in range(4000))
    assert min(many.values()) > 900


def test_a_path_that_dies_is_a_miss_for_its_records_alone(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(12)
    dead: set[str] = set()
    paths = [
        FaultyTier(
            ObjectTier(str(tmp_path / str(i)), name=f"disk[{i}]"),
            lambda op, name, i=i: Fault.FAIL if str(i) in dead else None,
        )
        for i in range(3)
    ]
    with new_cache(engine, new_staging(engine, 16), [SpreadTier("disk", paths)]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        names = cache.lookup(tokens).chunks.names
        assert {path_of(name, 3) for name in names} == {0, 1, 2}
        hit = cache.lookup(tokens)
        dead.add("1")
        engine.wipe()
        first = next(i for i, name in enumerate(names) if path_of(name, 3) == 1)
        loaded = cache.load(hit, engine.places(table))
        assert loaded.tokens == first * 8
        engine.assert_loaded(tokens, table, first)
        for _ in range(4):
            assert cache.lookup(tokens).tokens == first * 8
        assert cache.tier_states() == {"disk": "ok"}, "the other paths were blamed"
        assert not cache.counts().read_errors
        others = [name for name in names if path_of(name, 3) != 1]
        assert all(cache.tiers["disk"].size(name) is not None for name in others)


def test_a_record_that_cannot_be_read_is_dropped_and_does_not_cost_its_path(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(12)
    bad: set[str] = set()

    class Scratched(Wrapper):
        """A disk that cannot read some records."""

        def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
            for name, lease in zip(names, leases, strict=True):
                if name in bad:
                    complete(on_complete, name, lease.share(), UnreadableObject("a bad sector", name))
                else:
                    self.inner.get([name], [lease], on_complete)

    paths = [Scratched(ObjectTier(str(tmp_path / str(i)), name=f"disk[{i}]")) for i in range(3)]
    with new_cache(engine, new_staging(engine, 16), [SpreadTier("disk", paths)]) as cache:
        table = engine.table(len(tokens))
        for _ in range(2 * FAILURES_TO_PAUSE):
            engine.compute(tokens, table)
            cache.store(tokens, engine.places(table))
            cache.flush()
            hit = cache.lookup(tokens)
            assert hit.tokens == len(tokens), "a path is passed over"
            bad.add(hit.chunks.names[4])
            assert cache.load(hit, engine.places(table)).tokens == 4 * 8
            assert cache.load(hit, engine.places(table)).tokens == 4 * 8
            assert cache.lookup(tokens).tokens == 4 * 8
            bad.clear()
        assert cache.tier_states() == {"disk": "ok"}


def test_a_full_path_refuses_its_records_alone(tmp_path: Path) -> None:
    staging = Staging(SLOT_BYTES, SLOTS)
    tier = SpreadTier(
        "disk",
        [
            ObjectTier(TierConfig(url=str(tmp_path / "a"), capacity=SLOT_BYTES)),
            ObjectTier(str(tmp_path / "b")),
        ],
    )
    names = record_names(12)
    assert [put(tier, staging, [name]) for name in names] == [[None]] * 12
    held = [tier.size(name) is not None for name in names]
    on_first = [path_of(name, 2) == 0 for name in names]
    assert sum(h for h, first in zip(held, on_first, strict=True) if first) == 1
    assert all(h for h, first in zip(held, on_first, strict=True) if not first)
    assert tier.evicted == sum(on_first) - 1
    tier.close()


def test_a_path_that_fails_keeps_no_other_from_deleting_closing_and_taking(tmp_path: Path) -> None:
    staging = Staging(SLOT_BYTES, SLOTS)
    closed: list[str] = []

    class Noted(FaultyTier):
        def close(self) -> None:
            closed.append(self.name)
            super().close()
            if self.name in dead:
                raise OSError("on purpose")

    dead: set[str] = set()
    paths = [
        Noted(ObjectTier(str(tmp_path / name), name=name), lambda op, _, n=name: FAIL if n in dead else None)
        for name in "abc"
    ]
    tier = SpreadTier("disk", paths)
    names = record_names(12)
    assert put(tier, staging, names) == [None] * 12
    dead.add("c")
    with pytest.raises(OSError, match="planned fault: delete"):
        tier.delete(names)
    assert [size is not None for size in map(paths[2].inner.size, names)] == [
        path_of(n, 3) == 2 for n in names
    ]
    assert not any(paths[i].inner.size(name) for i in (0, 1) for name in names), "they were not asked"
    for _ in range(FAILURES_TO_PAUSE):
        assert all(isinstance(found, FileNotFoundError) for found in get(tier, staging, names))
    for name, error in zip(names, put(tier, staging, names), strict=True):
        assert (error is None) == (path_of(name, 3) != 2)
        assert not isinstance(error, FileNotFoundError), "nothing was sought"
    with pytest.raises(OSError, match="on purpose"):
        tier.close()
    assert sorted(closed) == ["a", "b", "c"]
    assert staging.free == staging.slots


@given(st.integers(0, 5 * ALIGN), st.integers(2, 5))
def test_parts_cover_an_object(size: int, count: int) -> None:
    found = parts(size, count)
    assert len(found) == count
    assert found[0][0] == 0
    assert found[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(start % ALIGN == 0 or start == size for start, _ in found)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_stripe_without_one_part_is_a_miss(part: int, tmp_path: Path) -> None:
    staging = Staging(SLOT_BYTES, SLOTS)
    urls = tuple(str(tmp_path / str(i)) for i in range(3))
    tier = ObjectTier(TierConfig(url=urls, spread="stripe"))
    name, other = record_names(2)
    put(tier, staging, [name, other])
    for i in range(3):
        assert os.path.getsize(Path(urls[i]) / name) in (8192, SLOT_BYTES - 2 * 8192, 0, 4096)
    (Path(urls[part]) / name).unlink()
    found = get(tier, staging, [name, other])
    assert isinstance(found[0], DamagedObject if part else FileNotFoundError), "it would stay a hit"
    assert not isinstance(found[1], OSError)
    if part < 2:  # the last part is empty
        with pytest.raises(DamagedObject if part else FileNotFoundError):
            tier.get_ranges(name, [(ALIGN, ALIGN)], [memoryview(bytearray(ALIGN))])
    tier.delete([name])
    assert put(tier, staging, [name]) == [None]
    assert isinstance(get(tier, staging, [name])[0], np.ndarray)
    tier.close()
    again = ObjectTier(TierConfig(url=urls, spread="stripe"))
    assert again.match_prefix([other]) == 1
    again.close()


def test_deleting_a_stripe_tries_every_disk_and_says_which_failed(tmp_path: Path) -> None:
    class Broken(Folder):
        def delete(self, name: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{self.root}/{name}")

    disks = [Broken(str(tmp_path / "0")), Folder(str(tmp_path / "1")), Folder(str(tmp_path / "2"))]
    name = record_names(1)[0]
    stripe = StripedStore(disks)
    stripe.write(name, memoryview(bytes(3 * ALIGN)))
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "0"))):
        stripe.delete(name)
    assert [disk.size(name) for disk in disks] == [ALIGN, None, None]


def test_a_stripe_that_breaks_off_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    staging = Staging(SLOT_BYTES, SLOTS)
    (small_disk / "ballast").write_bytes(bytes(1 << 20)[: (1 << 20) - 8192])
    tier = ObjectTier(
        TierConfig(url=(str(tmp_path / "a"), str(small_disk), str(tmp_path / "b")), spread="stripe")
    )
    errors = put(tier, staging, record_names(6))
    assert any(error is not None and error.errno == errno.ENOSPC for error in errors)
    whole = {name for name, error in zip(record_names(6), errors, strict=True) if error is None}
    for folder in (tmp_path / "a", small_disk, tmp_path / "b"):
        left = {str(p.relative_to(folder)) for p in folder.rglob("c.*")}
        assert left == whole
    tier.close()


def test_a_config_names_paths(tmp_path: Path) -> None:
    engine = make_engine()
    urls = [str(tmp_path / name) for name in "ab"]

    def opened(rank: int = 0, **disk: object) -> Cache:
        config = load_config(
            chunk_tokens=8,
            staging=1 << 20,
            tiers={"disk": {"url": urls, **disk}},
            policy={"staging_only": True},
        )
        fields = {
            name: getattr(engine.namespace, name) for name in ("model", "layout", "dtype", "chunk_tokens")
        }
        return open_cache(config, engine.layout, Namespace(**fields, rank=rank, world=2))

    for settings in ({}, {"spread": "stripe"}, {"spread": "by_rank", "rank": 1}):
        tokens = sequence(8)
        with opened(**settings) as cache:  # type: ignore[arg-type]
            table = engine.table(len(tokens))
            engine.compute(tokens, table)
            cache.store(tokens, engine.places(table))
            cache.flush()
            assert cache.lookup(tokens).tokens == len(tokens)
            assert cache.policy.staging_only
        found = [len(list(Path(url).rglob("c.*"))) for url in urls]
        if settings.get("spread") == "stripe":
            assert found == [8, 8]
        elif settings.get("spread") == "by_rank":
            assert found == [0, 8]
        else:
            assert sum(found) == 8
            assert min(found) > 0
        for url in urls:
            shutil.rmtree(url, ignore_errors=True)
    with pytest.raises(ConfigError, match=r"capacity: 3 values for 2 urls"):
        opened(capacity=["1MiB", "1MiB", "1MiB"])
    with pytest.raises(ConfigError, match=r"spread = 'stripe': 1 url, want at least 2"):
        load_config(tiers={"disk": {"url": "/x", "spread": "stripe"}})
    with pytest.raises(
        ConfigError, match=r"eviction = 'random': want one of lru, fifo, lfu, s3fifo, arc, sessions or"
    ):
        load_config(tiers={"disk": {"url": "/x", "eviction": "random"}})
