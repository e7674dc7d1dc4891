"""LMCache's L2 gets from kvkit's tiers the objects that it stored, or none (`make test-lmcache`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="needs LMCache's files; `make test-lmcache` runs it")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache_l2 import DTYPE, HASHES, LAYOUTS, SHAPE, Adapter, objects, same
from lmcache_l2 import some_keys as keys
from page_attacks import files

from kvkit.adapters.engine.keyed_pages import KeyedPages
from kvkit.settings import ConfigError


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[Adapter]:
    found = Adapter(tmp_path)
    yield found
    found.shutdown()


def test_objects_come_back(adapter: Adapter, tmp_path: Path) -> None:
    """Also after a restart; buffers of missing ones stay as they are."""
    given = objects(8, seed=1)
    result = adapter.store(keys(8), given)
    assert result.is_successful()
    assert result.bytes_transferred() == 8 * len(given[0].byte_array)
    assert adapter.lookup(keys(10)) == [True] * 8 + [False] * 2
    later = Adapter(tmp_path)
    for each in (adapter, later):
        targets = objects(4)
        wanted = [*keys(1, 5), *keys(1, 11), *keys(2, 0)]
        assert each.load(wanted, targets) == [True, False, True, True]
        assert [same(targets[i], given[n]) for i, n in ((0, 5), (2, 0), (3, 1))] == [True] * 3
        assert bytes(targets[1].byte_array) == b"\x07" * len(targets[1].byte_array)
    later.shutdown()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_object_is_missing(adapter: Adapter, tmp_path: Path) -> None:
    adapter.store(keys(3), objects(3, seed=1))
    (pages,) = adapter.l2._pages.values()
    flip(tmp_path / pages._chunks([HASHES[1]]).names[0])
    targets = objects(3)
    assert adapter.load(keys(3), targets) == [True, False, True]
    assert bytes(targets[1].byte_array) == b"\x07" * len(targets[1].byte_array)
    assert adapter.lookup(keys(3)) == [True, False, True]


def test_lmcaches_own_files_give_a_damaged_object_back(tmp_path: Path) -> None:
    """The page says so."""
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    own = FSL2Adapter(FSL2AdapterConfig(str(tmp_path)))
    peer = Adapter.around(own)
    (given,), targets = objects(1, seed=1), objects(1)
    peer.store(keys(1), [given])
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    flip(file)
    assert peer.load(keys(1), targets) == [True]
    assert not same(targets[0], given)
    assert not own.supports_global_eviction
    peer.shutdown()


@pytest.mark.parametrize(
    "change",
    [{"model_name": "org/other"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "tenant"}],
    ids=str,
)
def test_other_keys_find_nothing(adapter: Adapter, change: dict[str, Any]) -> None:
    adapter.store(keys(2), objects(2, seed=1))
    layouts = LAYOUTS | {1: LAYOUTS[0]}
    assert adapter.lookup(keys(2, **change), layouts) == [False, False]
    assert adapter.load(keys(2, **change), objects(2)) == [False, False]
    adapter.store(keys(2, **change), objects(2, seed=2))
    targets = objects(2)
    assert adapter.load(keys(2), targets) == [True, True]
    assert same(targets[0], objects(1, seed=1)[0])


def test_other_layouts_and_weights_find_nothing(adapter: Adapter, tmp_path: Path) -> None:
    adapter.store(keys(2), objects(2, seed=1))
    turned = torch.Size([3, 2, 16, 64])
    assert adapter.lookup(keys(2), {0: MemoryLayoutDesc([turned], [DTYPE])}) == [False, False]
    assert adapter.lookup(keys(2), {0: MemoryLayoutDesc([SHAPE], [torch.float16])}) == [False, False]
    assert adapter.lookup(keys(2), {}) == [False, False]
    other = Adapter(tmp_path, identity="v")
    assert other.lookup(keys(2)) == [False, False]
    other.shutdown()


def test_objects_of_several_kinds_in_one_task(adapter: Adapter) -> None:
    """Two groups have other sizes, and the larger one comes later."""
    large = torch.Size([2, 6, 16, 64])
    mixed = [*keys(2), *keys(2, object_group_id=1)]
    given = [*objects(2, seed=1), *objects(2, seed=2, shape=large)]
    assert adapter.store(mixed, given).is_successful()
    layouts = LAYOUTS | {1: MemoryLayoutDesc([large], [DTYPE])}
    assert adapter.lookup(mixed, layouts) == [True] * 4
    targets = [*objects(2), *objects(2, shape=large)]
    assert adapter.load(mixed[::-1], targets[::-1]) == [True] * 4
    assert all(map(same, targets, given))


class Listener(L2AdapterListener):
    """Note what LMCache is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[ObjectKey]]] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.told.append(("stored", keys))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.told.append(("accessed", keys))

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.told.append(("deleted", keys))

    def held(self) -> set[ObjectKey]:
        """Return what is held by what was told; nothing is stored twice, or deleted that was not stored."""
        found = set[ObjectKey]()
        for what, told in self.told:
            if what == "stored":
                assert not found & set(told)
                found |= set(told)
            elif what == "deleted":
                assert found >= set(told)
                found -= set(told)
        return found


def test_lmcache_hears_what_is_held(tmp_path: Path) -> None:
    """Also of objects that kvkit evicts, and of those of before a restart once they are found."""
    disk = {"url": str(tmp_path), "capacity": "128KiB"}  # for six of these objects
    tiers = {
        "kvkit": {
            "staging": "2MiB",
            "tiers": {"disk": disk, "ram": {"url": "memory://", "capacity": "64KiB"}},
        }
    }
    adapter, listener = Adapter(tmp_path, **tiers), Listener()
    adapter.l2.register_listener(listener)
    for i in range(12):
        adapter.store(keys(1, i, cache_salt=f"tenant {i % 2}"), objects(1, seed=i))
    adapter.l2.delete([])  # what was told before is heard then
    wanted = [key for i in range(12) for key in keys(1, i, cache_salt=f"tenant {i % 2}")]
    found = adapter.lookup(wanted)
    held = {key for key, hit in zip(wanted, found, strict=True) if hit}
    assert 4 <= len(held) < 12
    assert listener.held() == held
    size, usage = len(objects(1)[0].byte_array), adapter.l2.get_usage()
    assert usage.total_bytes_used == len(held) * size
    assert usage.bytes_by_cache_salt == {
        salt: size * count for salt, count in Counter(key.cache_salt for key in held).items()
    }
    (one, *_) = held
    adapter.load([one], objects(1))
    assert listener.told[-1] == ("accessed", [one])
    adapter.shutdown()
    later, listener = Adapter(tmp_path, **tiers), Listener()
    later.l2.register_listener(listener)
    found = later.lookup(wanted)
    later.l2.delete([])
    assert listener.held() == {key for key, hit in zip(wanted, found, strict=True) if hit} != set()
    later.shutdown()


def test_deleted_objects_are_gone(adapter: Adapter, tmp_path: Path) -> None:
    """And those of other models, salts and groups stay; what was never stored is passed over."""
    listener = Listener()
    adapter.l2.register_listener(listener)
    adapter.store(keys(4), objects(4, seed=1))
    adapter.store(keys(4, cache_salt="tenant"), objects(4, seed=2))
    adapter.l2.delete([*keys(2, 1), *keys(1, 9), *keys(1, model_name="org/other")])
    assert adapter.lookup(keys(4)) == [True, False, False, True]
    assert adapter.lookup(keys(4, cache_salt="tenant")) == [True] * 4
    assert {key for what, told in listener.told if what == "deleted" for key in told} == set(keys(2, 1))
    assert adapter.store(keys(2, 1), objects(2, seed=3)).is_successful()
    assert adapter.lookup(keys(4)) == [True] * 4
    assert len(files(tmp_path)) == 8


def test_a_store_that_no_tier_takes_fails(tmp_path: Path) -> None:
    tiers = {"staging": "2MiB", "tiers": {"disk": {"url": str(tmp_path), "capacity": "4KiB"}}}
    adapter = Adapter(tmp_path, kvkit=tiers)
    assert not adapter.store(keys(2), objects(2, seed=1)).is_successful()
    assert adapter.store([], []).is_successful()
    adapter.shutdown()


def test_a_store_that_cannot_begin_has_failed(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache hears of it, and stores again."""

    def refuse(*_: object) -> None:
        raise ValueError("no")

    with monkeypatch.context() as patched:
        patched.setattr(KeyedPages, "store", refuse)
        assert not adapter.store(keys(2), objects(2, seed=1)).is_successful()
    assert adapter.store(keys(2), objects(2, seed=1)).is_successful()
    assert adapter.lookup(keys(2)) == [True] * 2


@pytest.mark.parametrize(
    ("params", "message"),
    [({"kvkit": {}}, "adapter_params: no tiers"), ({"url": "/x"}, "adapter_params: url: unknown")],
    ids=str,
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapter(tmp_path, **params)
