"""SGLang's HiCache gets from kvkit's tiers the pages that it stored, or none (`make test-sglang`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang's Python files; `make test-sglang` runs it")

from hicache import KEYS, PAGE, PAGES, Host, at, config, opened, transfer
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer

from kvkit.settings import ConfigError


@pytest.fixture(params=["page_first", "layer_first", "latents"])
def host(request: pytest.FixtureRequest) -> Host:
    torch.manual_seed(0)
    return Host(request.param)


@pytest.fixture
def backend(tmp_path: Path, host: Host) -> Iterator[Any]:
    found = opened(tmp_path, host)
    yield found
    found.close()


def test_pages_come_back_by_the_calls_for_pools(backend: Any, host: Host, tmp_path: Path) -> None:
    """In any order, to any pages; the others stay as they were. A restart finds them."""
    wanted = [host.page(i) for i in range(PAGES)]
    assert backend.batch_set_v2([transfer(KEYS[:8], at(*range(8)))]) == {PoolName.KV: [True] * 8}
    assert backend.batch_exists([*KEYS[:8], "none"]) == backend.batch_exists_v2([*KEYS]).kv_hit_pages == 8
    for again in (backend, opened(tmp_path, host)):
        host.buffer.zero_()
        found = again.batch_get_v2([transfer([KEYS[5], "none", KEYS[0]], at(9, 3, 2))])
        assert found == {PoolName.KV: [True, False, True]}
        assert torch.equal(host.page(9), wanted[5])
        assert torch.equal(host.page(2), wanted[0])
        assert not any(host.page(i).any() for i in range(PAGES) if i not in (2, 9))
        assert again.batch_get_v1(KEYS[:2], at(0, 1)) == [True, True]
        assert torch.equal(host.page(1), wanted[1])
        again.close()


def test_pages_come_back_by_the_calls_for_tensors(backend: Any, host: Host) -> None:
    values = [host.page(i) for i in range(4)]
    assert backend.batch_set(KEYS[:4], values)
    assert backend.set(KEYS[4], host.page(4))
    assert backend.exists(KEYS[4])
    assert not backend.exists("none")
    targets = [host.get_dummy_flat_data_page() for _ in range(3)]
    found = backend.batch_get([KEYS[1], "none", KEYS[3]], targets)
    assert [page is target for page, target in zip(found, targets, strict=True)] == [True, False, True]
    assert found[1] is None
    assert torch.equal(found[0], values[1])
    assert torch.equal(found[2], values[3])
    assert not targets[1].any()
    assert torch.equal(backend.get(KEYS[4], host.get_dummy_flat_data_page()), host.page(4))
    assert backend.get("none", host.get_dummy_flat_data_page()) is None


def test_a_flipped_bit_is_a_miss_where_sglangs_file_backend_returns_it(
    backend: Any, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "own"))
    own = HiCacheFile(config(tmp_path))
    own.registered_pools = {PoolName.KV: host}
    moved = [transfer(KEYS[:3], at(0, 1, 2))]
    results = {}
    for name, each, folder in (("kvkit", backend, tmp_path), ("SGLang", own, tmp_path / "own")):
        each.batch_set_v2(moved)
        pages = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
        if name == "kvkit":
            pages = [folder / backend._pool(PoolName.KV).pages._chunks([KEYS[1].encode()]).names[0]]
        else:
            pages = [path for path in pages if KEYS[1] in path.name]
        (file,) = pages
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        before = host.page(1)
        results[name] = each.batch_get_v2(moved)[PoolName.KV], torch.equal(host.page(1), before)
        host.set_from_flat_data_page(PAGE, before)
    assert results == {"kvkit": ([True, False, True], True), "SGLang": ([True, True, True], False)}


@pytest.mark.parametrize(
    ("host_change", "change"),
    [
        ({"dtype": torch.float16}, {}),
        ({"layout": "layer_first"}, {}),
        ({"layers": 1}, {}),
        ({}, {"extra": {"identity": "v"}}),
        ({}, {"model_name": "org/other"}),
        ({}, {"tp_rank": 1, "tp_size": 2}),
        ({}, {"pp_rank": 1, "pp_size": 2}),
        ({}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
    ],
    ids=str,
)
def test_another_engines_pages_are_not_found(
    tmp_path: Path, host_change: dict[str, Any], change: dict[str, Any]
) -> None:
    """SGLang's keys leave dtype and layout out (sglang#33268)."""
    first = opened(tmp_path)
    first.batch_set_v1(KEYS[:2], at(0, 1))
    first.close()
    other, same = opened(tmp_path, Host(**host_change), **change), opened(tmp_path)
    assert other.batch_exists(KEYS) == 0
    assert same.batch_exists(KEYS) == 2
    other.close()
    same.close()


def test_ranks_share_latents(tmp_path: Path) -> None:
    """They are the same on all tensor-parallel ranks."""
    ranks = [opened(tmp_path, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    ranks[0].batch_set_v1(KEYS[:2], at(0, 1))
    assert ranks[1].batch_exists(KEYS) == 2
    for rank in ranks:
        rank.close()


def test_pools_have_pages_of_their_own(tmp_path: Path) -> None:
    """Pages have their pool's size, and what can be restored follows its policy."""
    kv, states = Host(), Host(layers=1)
    backend = opened(tmp_path, kv)
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    backend.on_host_pools_registered()
    backend.batch_set_v2([transfer(KEYS[:6], at(*range(6)))])
    backend.batch_set_v2([transfer([KEYS[1], KEYS[4]], at(1, 4), PoolName.MAMBA)])

    def restorable(policy: PoolHitPolicy, keys: list[str]) -> Any:
        wanted = PoolTransfer(PoolName.MAMBA, keys=keys, hit_policy=policy)
        found = backend.batch_exists_v2(KEYS, [wanted])
        return found.kv_hit_pages, found.restorable_prefix_pages, found.extra_pool_hit_pages

    assert restorable(PoolHitPolicy.TRAILING_PAGES, KEYS[:1]) == (5, [2, 5], {"kv": 6, "mamba": 5})
    assert restorable(PoolHitPolicy.TRAILING_PAGES, KEYS[:2]) == (0, [], {"kv": 6})
    assert restorable(PoolHitPolicy.ALL_PAGES, []) == (0, [], {"kv": 6})
    before = states.page(4)
    states.buffer.zero_()
    assert backend.batch_get_v2([transfer([KEYS[4]], at(4), PoolName.MAMBA)]) == {PoolName.MAMBA: [True]}
    assert torch.equal(states.page(4), before)
    backend.close()


def test_a_larger_pool_may_come_later(tmp_path: Path) -> None:
    small, large = Host(layers=1), Host(layers=2)
    backend = opened(tmp_path, small)
    assert backend.batch_set_v1(KEYS[:1], at(0)) == [True]
    backend.register_mem_host_pool_v2(large, PoolName.DRAFT)
    assert backend.batch_set_v2([transfer(KEYS[:1], at(3), PoolName.DRAFT)]) == {PoolName.DRAFT: [True]}
    before = large.page(3)
    large.buffer.zero_()
    assert backend.batch_get_v2([transfer(KEYS[:1], at(3), PoolName.DRAFT)]) == {PoolName.DRAFT: [True]}
    assert torch.equal(large.page(3), before)
    backend.close()


def test_what_does_not_fit_is_no_page(backend: Any, host: Host) -> None:
    assert backend.batch_set_v2([transfer(KEYS[:2], at(0))]) == {PoolName.KV: [False, False]}
    assert backend.batch_get_v2([PoolTransfer(PoolName.KV, keys=KEYS[:2])]) == {PoolName.KV: [False, False]}
    assert backend.batch_get_v2([PoolTransfer(PoolName.KV)]) == {PoolName.KV: []}
    assert backend.batch_set([], [])
    assert backend.batch_get([]) == []


def test_clear_deletes_this_engines_pages_alone(tmp_path: Path) -> None:
    own, other = opened(tmp_path), opened(tmp_path, model_name="org/other")
    for backend in (own, other):
        assert backend.batch_set_v1(KEYS[:3], at(0, 1, 2)) == [True] * 3
    own.clear()
    assert own.batch_exists(KEYS) == 0
    assert other.batch_exists(KEYS) == 3
    assert own.batch_set_v1(KEYS[:3], at(0, 1, 2)) == [True] * 3
    own.close()
    own.close()
    other.close()


def test_a_store_that_fails_does_not_raise(tmp_path: Path, host: Host) -> None:
    """SGLang's backup thread would die of it (sglang#38428)."""
    tiers = {"tiers": {"disk": {"url": str(tmp_path), "capacity": "4KiB"}}}
    backend = opened(tmp_path, host, extra={"kvkit": tiers})
    assert backend.batch_set_v1(KEYS[:2], at(0, 1)) == [False, False]
    assert not backend.set(KEYS[0], host.page(0))
    backend.close()


def test_threads_of_sglangs(backend: Any, host: Host) -> None:
    """Backup and prefetch threads call at once: a page is right, or missing."""
    wanted, faults = [host.page(i) for i in range(PAGES)], list[str]()

    def store() -> None:
        for _ in range(3):
            backend.batch_set(KEYS, wanted)

    def fetch() -> None:
        for _ in range(8):
            for i, page in enumerate(backend.batch_get(KEYS)):
                if page is not None and not torch.equal(page, wanted[i]):
                    faults.append(KEYS[i])

    threads = [threading.Thread(target=work) for work in (store, fetch, fetch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert backend.batch_exists(KEYS) == PAGES


def test_weights_are_known_by_their_files(tmp_path: Path) -> None:
    """By the contents of the model's folder; a model without files is shared with nobody."""
    for folder, content in (("a", b"weights"), ("b", b"weights"), ("c", b"others")):
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / "model.safetensors").write_bytes(content)

    def pages(name: str) -> Any:
        backend = opened(tmp_path / "kv", model_name=name, extra={"identity": ""})
        found = backend._pool(PoolName.KV).pages._namespace
        backend.close()
        return found

    same, copy, other = (pages(str(tmp_path / folder / "model")) for folder in "abc")
    assert same == copy != other
    assert pages("org/nowhere") != pages("org/nowhere")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kvkit": {}}, "hicache-storage-backend-extra-config: no tiers"),
        ({"kvkit": {"tier": {}}}, "tier: unknown"),
        ({"identity": 7}, "identity"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, extra=extra)
