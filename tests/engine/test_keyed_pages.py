"""Pages of another engine are stored and found in any order, verified, and shared only where all is equal."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkit.adapters.engine.keyed_pages import KeyedPages, KeyedStore, held_each
from kvkit.config import load_config
from kvkit.format.record import HEADER, Damage, examine
from kvkit.kernels.checks import LaunchError
from kvkit.settings import ConfigError
from kvkit.tiers.testing.contract import DEADLINE_S

BYTES, ROWS = 5000, 16
KEYS = [os.urandom(32) + bytes([0, 0, 0, group]) for group in range(ROWS)]
WHOSE: dict[str, Any] = {"model": "m", "dtype": "bfloat16", "weights": "w"}
LAYOUT = {"ranks": 1}


@contextmanager
def opened(folder: Path, tiers: dict[str, Any] | None = None, **changes: Any) -> Iterator[KeyedPages]:
    config = load_config(staging="1MiB", timeout_s=5, tiers=tiers or {"disk": {"url": str(folder)}})
    size, layout = changes.pop("page_bytes", BYTES), changes.pop("determines", LAYOUT)
    with KeyedStore(config, size, **WHOSE | changes) as store:
        yield store.pages(size, layout)


def memory(seed: int | None = None) -> torch.Tensor:
    """Rows of an engine's memory; without a seed, all are 7."""
    if seed is None:
        return torch.full((ROWS, BYTES), 7, dtype=torch.uint8)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (ROWS, BYTES), np.uint8))


def store_pages(pages: KeyedPages, keys: Sequence[bytes], tensor: torch.Tensor, rows: Sequence[int]) -> bool:
    ended, answers = threading.Event(), list[bool]()

    def on_stored(complete: bool) -> None:
        answers.append(complete)
        ended.set()

    pages.store(keys, pages.memory(tensor), rows, on_stored)
    assert ended.wait(DEADLINE_S)
    (answer,) = answers
    return answer


def load(pages: KeyedPages, keys: Sequence[bytes], rows: Sequence[int]) -> tuple[int, torch.Tensor]:
    target = memory()
    return pages.load(keys, pages.memory(target), rows), target


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[KeyedPages]:
    with opened(tmp_path) as found:
        yield found
        found.cache.check_integrity()


@pytest.mark.parametrize("kind", ["folder", "memory", "memory before a folder", "compressed"])
def test_pages_come_back_in_any_order_to_any_rows(tmp_path: Path, kind: str) -> None:
    disk = {"url": str(tmp_path)}
    tiers = {
        "folder": {"disk": disk},
        "memory": {"ram": {"url": "memory://", "capacity": "1MiB"}},
        "memory before a folder": {"ram": {"url": "memory://", "capacity": "64KiB"}, "disk": disk},
        "compressed": {"disk": disk | {"codec": "zstd"}},
    }[kind]
    source, rng = memory(1), np.random.default_rng(2)
    with opened(tmp_path, tiers) as pages:
        for rows in (range(5), range(12, 3, -1)):  # they overlap, and the second is reversed
            assert store_pages(pages, [KEYS[i] for i in rows], source, rows)
        assert pages.held(KEYS) == [i < 13 for i in range(ROWS)]
        order, rows = rng.permutation(13), rng.permutation(ROWS)[:13]
        count, target = load(pages, [KEYS[i] for i in order], rows)
        assert count == 13
        assert torch.equal(target[rows], source[order])
        assert (np.delete(target.numpy(), rows, 0) == 7).all()
        assert pages.leading([KEYS[3], KEYS[0], KEYS[14], KEYS[1]]) == 2
        count, target = load(pages, [KEYS[3], KEYS[14], KEYS[1]], [0, 1, 2])
        assert count == 1
        assert torch.equal(target[0], source[3])
        assert (target[1:] == 7).all()
        pages.cache.check_integrity()


@given(st.lists(st.integers(0, 700), min_size=1, max_size=ROWS), st.sampled_from([1, 2, 16, 64]))
def test_pages_come_back_that_lie_anywhere_in_memory(gaps: list[int], step: int) -> None:
    """In a store and a load they lie at other places; the memory between them stays as it was."""
    with opened(Path("unused"), {"ram": {"url": "memory://", "capacity": "1MiB"}}) as pages:
        source, target = (torch.full((ROWS * (BYTES + 64 * 701),), 7, dtype=torch.uint8) for _ in range(2))
        ends = list(itertools.accumulate((BYTES + step * gap for gap in gaps), initial=0))
        there = [source[end - BYTES : end] for end in ends[1:]]
        for page, row in zip(there, memory(1), strict=False):
            page.copy_(row)
        where, rows = pages.scattered(there)
        ended = threading.Event()
        pages.store(KEYS[: len(there)], where, rows, lambda complete: ended.set() if complete else None)
        assert ended.wait(DEADLINE_S)
        here = [target[start : start + BYTES] for start in ends[:-1]][::-1]
        where, rows = pages.scattered(here)
        assert pages.load(KEYS[: len(here)], where, rows) == len(here)
        assert all(map(torch.equal, here, there))
        for page in here:
            page.fill_(7)
        assert (target == 7).all()


def test_pages_anywhere_in_memory_are_refused_that_do_not_fit(pages: KeyedPages) -> None:
    with pytest.raises(LaunchError, match=r"pages\[1\]: torch.uint8 \(4999,\) on cpu, want uint8 \[5000\]"):
        pages.scattered([memory()[0], memory()[0, 1:]])


def test_a_restart_finds_them(tmp_path: Path) -> None:
    with opened(tmp_path) as pages:
        assert store_pages(pages, KEYS, memory(1), range(ROWS))
    with opened(tmp_path) as pages:
        assert pages.leading(KEYS) == ROWS
        assert torch.equal(load(pages, KEYS, range(ROWS))[1], memory(1))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"dtype": "float16"},
        {"weights": "v"},
        {"determines": {"ranks": 2}},
        {"salt": "tenant"},
        {"page_bytes": BYTES + 1},
    ],
    ids=str,
)
def test_other_pages_are_not_found(tmp_path: Path, change: dict[str, Any]) -> None:
    with opened(tmp_path) as pages:
        assert store_pages(pages, KEYS, memory(1), range(ROWS))
    with opened(tmp_path, **change) as pages:
        assert not any(pages.held(KEYS))
    with opened(tmp_path) as pages:
        assert all(pages.held(KEYS))
        pages.begin_epoch("later")
        assert not any(pages.held(KEYS))


def test_pages_of_several_sizes_in_one_store(tmp_path: Path) -> None:
    """They share tiers and staging; one page of a kind is none of another."""
    config = load_config(staging="1MiB", tiers={"disk": {"url": str(tmp_path)}})
    with KeyedStore(config, BYTES, **WHOSE) as store:
        large, small, other = (
            store.pages(size, {"pool": name})
            for size, name in ((BYTES, "kv"), (700, "state"), (700, "draft"))
        )
        tensor = torch.arange(3 * 700, dtype=torch.int32).to(torch.uint8).reshape(3, 700)
        ended = threading.Event()
        small.store(KEYS[:3], small.memory(tensor), range(3), lambda _: ended.set())
        assert ended.wait(DEADLINE_S)
        assert store_pages(large, KEYS[:2], memory(1), range(2))
        assert small.leading(KEYS) == 3
        assert large.leading(KEYS) == 2
        assert other.leading(KEYS) == 0
        target = torch.zeros(3, 700, dtype=torch.uint8)
        assert small.load(KEYS[:3], small.memory(target), range(3)) == 3
        assert torch.equal(target, tensor)
        with pytest.raises(ConfigError, match="page_bytes = 5001: this store was opened for pages of 5000"):
            store.pages(BYTES + 1, None)


def test_keys_are_whole_bytes(pages: KeyedPages) -> None:
    """No key stands for another that begins alike, ends in zeros or is empty."""
    keys = [b"", b"\0", b"\0\0", b"a", b"a\0", b"a" * 64, b"a" * 65]
    assert store_pages(pages, keys[::2], memory(1), range(4))
    assert pages.held(keys) == [True, False] * 3 + [True]


def offsets(record: bytes) -> list[int]:
    """Bytes of every field of the header, of its padding, of the page, and of the trailer."""
    header, _, damage = examine(lambda start, size: record[start : start + size], len(record))
    assert damage is None
    fields = [offset for _, offset in (HEADER.fields or {}).values()]
    after = HEADER.itemsize
    assert header.layers_end == header.header_bytes + BYTES
    return [
        *(*fields, after, after + 8, header.header_bytes - 1, header.header_bytes, header.header_bytes + 777),
        *(header.layers_end - 1, header.layers_end, len(record) - 30, len(record) - 1),
    ]


def test_a_changed_byte_ends_a_load_before_its_page(pages: KeyedPages, tmp_path: Path) -> None:
    """Whichever byte it is; the row keeps what it had, and the record goes."""
    source = memory(1)
    assert store_pages(pages, KEYS, source, range(ROWS))
    file = tmp_path / pages._chunks(KEYS).names[2]
    whole = file.read_bytes()
    for offset, bit in itertools.product(offsets(whole), (0, 7)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << bit
        file.write_bytes(damaged)
        count, target = load(pages, KEYS[:4], range(4))
        assert count == 2, offset
        assert torch.equal(target[:2], source[:2])
        assert (target[2:] == 7).all()
        assert not file.exists()
        assert pages.held(KEYS[:4]) == [True, True, False, True]
        assert store_pages(pages, KEYS[:4], source, range(4))
        assert file.read_bytes() == whole
    assert sum(pages.cache.counts().damaged.values()) == 2 * len(offsets(whole))


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        (lambda page: page[:-1], Damage.TRUNCATED),
        (lambda page: page[:100], Damage.TRUNCATED),
        (lambda page: b"", Damage.TRUNCATED),
        (lambda page: page + b"\0" * 4096, Damage.OVERSIZE),
        (lambda page: bytes(len(page)), Damage.HEADER),
    ],
    ids=["last byte cut", "cut", "empty", "longer", "zeros"],
)
def test_a_file_of_another_length_is_a_miss(
    pages: KeyedPages, tmp_path: Path, change: Any, damage: Damage
) -> None:
    assert store_pages(pages, KEYS[:3], memory(1), range(3))
    file = tmp_path / pages._chunks(KEYS).names[1]
    file.write_bytes(change(file.read_bytes()))
    count, target = load(pages, KEYS[:3], range(3))
    assert count == 1
    assert (target[1:] == 7).all()
    assert pages.cache.counts().damaged == {("disk", damage): 1}


def test_a_page_under_the_name_of_another_is_refused(pages: KeyedPages, tmp_path: Path) -> None:
    assert store_pages(pages, KEYS[:2], memory(1), range(2))
    first, second = (tmp_path / name for name in pages._chunks(KEYS[:2]).names)
    second.write_bytes(first.read_bytes())
    assert load(pages, KEYS[:2], range(2))[0] == 1
    assert pages.cache.counts().damaged == {("disk", Damage.KEY): 1}


def test_a_capacity_holds(tmp_path: Path) -> None:
    with opened(tmp_path, {"disk": {"url": str(tmp_path), "capacity": "64KiB"}}) as pages:
        for i in range(ROWS):
            store_pages(pages, KEYS[i : i + 1], memory(1), [i])
        files = [file for file in tmp_path.rglob("c.*") if file.is_file()]
        assert 0 < sum(file.stat().st_size for file in files) <= 64 << 10
        assert sum(pages.held(KEYS)) == len(files)
        assert pages.held(KEYS[-1:]) == [True]


def test_a_touched_page_outlives_others(tmp_path: Path) -> None:
    """Pages that the engine has in its own memory are used without being read here."""
    record = 12288
    tiers = {"disk": {"url": str(tmp_path), "capacity": f"{4 * record}"}}
    with opened(tmp_path, tiers) as pages:
        for i in range(12):
            assert store_pages(pages, KEYS[i : i + 1], memory(1), [i])
            pages.touch(KEYS[:1])
            pages._workers.submit(lambda: None).result(DEADLINE_S)
        assert pages.held(KEYS[:2]) == [True, False]


def test_a_store_that_no_tier_takes_says_so(tmp_path: Path) -> None:
    tiers = {"disk": {"url": str(tmp_path), "capacity": "4KiB"}}
    with opened(tmp_path, tiers) as pages:
        assert not store_pages(pages, KEYS[:2], memory(1), range(2))
        assert not any(pages.held(KEYS[:2]))


def test_a_store_into_a_tier_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """It counts as failed, once, and the rows are free: nothing reads them any more."""
    config = load_config(staging="1MiB", timeout_s=0.2, tiers={"disk": {"url": str(tmp_path)}})
    opens, answers, ended = threading.Event(), list[bool](), threading.Event()

    def on_stored(complete: bool) -> None:
        answers.append(complete)
        ended.set()

    with KeyedStore(config, BYTES, **WHOSE) as store:
        tier: Any = store.cache.tiers["disk"]
        write = tier.write

        def hang(name: str, record: memoryview) -> None:
            opens.wait(DEADLINE_S)
            write(name, record)

        tier.write = hang
        pages, source = store.pages(BYTES, LAYOUT), memory(1)
        pages.store(KEYS[:2], pages.memory(source), range(2), on_stored)
        assert ended.wait(DEADLINE_S)
        wanted = source[:2].clone()
        source.zero_()
        opens.set()
        store.cache.flush(DEADLINE_S)
        assert answers == [False]
        count, target = load(pages, KEYS[:2], range(2))
        assert count == 2
        assert torch.equal(target[:2], wanted)


def test_a_store_whose_deadline_cannot_be_watched_ends_at_once(
    pages: KeyedPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no more threads can be had: its end is told once, and nothing is raised after it began."""

    def refuse(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    answers, source = list[bool](), memory(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", refuse)
        pages.store(KEYS[:2], pages.memory(source), range(2), answers.append)
    pages.cache.flush(DEADLINE_S)
    assert len(answers) == 1
    assert store_pages(pages, KEYS[2:4], source, range(2))


def test_one_of_two_tiers_is_enough(tmp_path: Path) -> None:
    full = {"url": str(tmp_path / "full"), "capacity": "4KiB"}
    with opened(tmp_path, {"full": full, "disk": {"url": str(tmp_path / "disk")}}) as pages:
        assert store_pages(pages, KEYS[:2], memory(1), range(2))
        assert store_pages(pages, KEYS[:3], memory(1), range(3)), "two of them were there already"


def test_closed_pages_end_what_is_asked_of_them(tmp_path: Path) -> None:
    with opened(tmp_path) as pages:
        pass
    assert not store_pages(pages, KEYS[:2], memory(1), range(2))


def test_loads_and_stores_at_once(pages: KeyedPages) -> None:
    """Of the same pages: a load finds a leading run, right or not at all."""
    source, faults = memory(1), list[str]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            chosen = rng.permutation(ROWS)[: rng.integers(1, ROWS)]
            keys = [KEYS[i] for i in chosen]
            if rng.random() < 0.5:
                store_pages(pages, keys, source, chosen)
                continue
            count, target = load(pages, keys, range(len(keys)))
            if not torch.equal(target[:count], source[chosen[:count]]) or not (target[count:] == 7).all():
                faults.append(f"{seed}: {chosen}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not faults
    assert all(pages.held(KEYS)) or not any(thread.is_alive() for thread in threads)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    tiers = {"disk": {"url": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"precision='fp8'.*opaque"):
        KeyedStore(load_config(tiers=tiers, precision="fp8"), BYTES, **WHOSE)
    with pytest.raises(ConfigError, match=r"staging=4.0KiB.*slots of 12"):
        KeyedStore(load_config(tiers=tiers, staging="4KiB"), BYTES, **WHOSE)
    with opened(tmp_path) as pages, pytest.raises(LaunchError, match="page_bytes=5000"):
        pages.memory(torch.zeros(3, 4999, dtype=torch.uint8))


@given(st.lists(st.booleans(), max_size=40))
def test_each_name_is_asked_for_in_few_calls(held: list[bool]) -> None:
    calls = list[int]()

    def leading(names: Sequence[str]) -> int:
        calls.append(len(names))
        return next((i for i, name in enumerate(names) if not held[int(name)]), len(names))

    found = held_each(leading, [str(i) for i in range(len(held))])
    assert found == [i for i, here in enumerate(held) if here]
    runs = sum(1 for here, _ in itertools.groupby(held) if here)
    assert len(calls) <= held.count(False) + runs * (len(held)).bit_length()
    assert sum(calls) <= 3 * len(held)
