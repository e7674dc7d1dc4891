"""LMCache's L2 gets from kvkit's tiers the objects that it stored, or none (`make test-lmcache`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="needs LMCache's files; `make test-lmcache` runs it")

from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache_l2 import DTYPE, HASHES, LAYOUTS, SHAPE, Adapter, objects, same
from lmcache_l2 import some_keys as keys

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


def test_a_store_that_no_tier_takes_fails(tmp_path: Path) -> None:
    tiers = {"staging": "2MiB", "tiers": {"disk": {"url": str(tmp_path), "capacity": "4KiB"}}}
    adapter = Adapter(tmp_path, kvkit=tiers)
    assert not adapter.store(keys(2), objects(2, seed=1)).is_successful()
    assert adapter.store([], []).is_successful()
    adapter.shutdown()


@pytest.mark.parametrize(
    ("params", "message"),
    [({"kvkit": {}}, "adapter_params: no tiers"), ({"url": "/x"}, "adapter_params: url: unknown")],
    ids=str,
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapter(tmp_path, **params)
