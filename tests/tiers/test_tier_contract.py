"""Every tier and wrapper fulfils the contract, with the particulars of memory, wrappers and stores."""

from __future__ import annotations

import stat
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from kvkit.format import arrays, record
from kvkit.format.record import RecordFormat
from kvkit.lab.testbed.engine_stub import small_layout, small_namespace
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import DamagedObject, Tier, TierFull
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.spread import SpreadTier
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    RECORDS,
    SLOT_BYTES,
    SLOTS,
    Completions,
    TierContract,
    get,
    put,
    record_bytes,
    record_names,
)
from kvkit.tiers.testing.faulty import Fault, FaultyTier, LatencyTier, random_plan


def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}"


class TestMemory(TierContract):
    @pytest.fixture
    def tier(self, staging: Staging) -> Tier:
        return MemoryTier(staging, RECORDS * SLOT_BYTES)


class TestPath(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return ObjectTier(str(tmp_path / "store"))


class TestFileUrlFullyUsed(TierContract):
    """With fsync, a single thread and no byte to spare."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return ObjectTier(
            TierConfig(url=f"file://{tmp_path}/store", fsync=True, threads=1, capacity=RECORDS * SLOT_BYTES)
        )


class TestMemoryUrl(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return ObjectTier(TierConfig(url=memory_url(), scope="shared"))


class TestStoreWithoutAtomicPut(TierContract):
    """A file system that kvkit does not know: it writes under another name and moves."""

    @pytest.fixture
    def tier(self) -> Tier:
        return ObjectTier(f"dir::{memory_url()}")


class TestSpread(TierContract):
    """Over three paths by key."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return SpreadTier("disk", [ObjectTier(str(tmp_path / str(i)), name=f"disk[{i}]") for i in range(3)])


class TestStriped(TierContract):
    """Over three paths, a part of each record on each."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return ObjectTier(TierConfig(url=tuple([str(tmp_path / str(i)) for i in range(3)]), spread="stripe"))


class TestLate(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return LatencyTier(ObjectTier(str(tmp_path)), get_s=0.01, put_s=0.01, run_s=0.001)


class TestFaultless(TierContract):
    @pytest.fixture
    def tier(self, staging: Staging) -> Tier:
        return FaultyTier(MemoryTier(staging, RECORDS * SLOT_BYTES), lambda operation, name: None)


def one_fault(operation: str, name: str, fault: Fault) -> Any:
    return lambda o, n: fault if (o, n) == (operation, name) else None


# memory


def test_memory_lets_the_least_recently_used_go(staging: Staging) -> None:
    tier = MemoryTier(staging, 4 * SLOT_BYTES)
    names = record_names(6)
    put(tier, staging, names[:4])
    assert tier.match_prefix(names[:2]) == 2
    put(tier, staging, names[4:])
    assert [tier.size(name) is not None for name in names] == [True, True, False, False, True, True]
    put(tier, staging, [names[2]])
    assert tier.match_prefix(names[:2]) == 1, "of one run the tail goes first: without the head it is no use"
    tier.close()
    assert staging.free == SLOTS
    staging.close()


@pytest.mark.parametrize(("keep_s", "left"), [(3600.0, slice(0, 4)), (1e-9, slice(2, 6))])
def test_memory_keeps_what_came_in_for_as_long_as_it_was_told(
    staging: Staging, keep_s: float, left: slice
) -> None:
    tier = MemoryTier(staging, 4 * SLOT_BYTES, keep_s=keep_s)
    names = record_names(6)
    put(tier, staging, names[:2])
    put(tier, staging, names[2:4])
    assert [isinstance(error, TierFull) for error in put(tier, staging, names[4:])] == [keep_s > 1] * 2
    assert [name for name in names if tier.size(name) is not None] == names[left]
    tier.close()
    staging.close()


def test_memory_needs_room_for_staging(staging: Staging) -> None:
    for capacity in (SLOT_BYTES - 1, SLOTS * SLOT_BYTES):
        with pytest.raises(ValueError, match=f"'ram'.*capacity_bytes={capacity}"):
            MemoryTier(staging, capacity, name="ram")
    staging.close()


# objects


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_capacity_deletes_the_least_recently_used(kind: str, tmp_path: Path, staging: Staging) -> None:
    url = str(tmp_path) if kind == "file" else memory_url()
    tier = ObjectTier(TierConfig(url=url, capacity=4 * SLOT_BYTES + 100))
    names = record_names(6)
    assert put(tier, staging, names[:4]) == [None] * 4
    assert tier.match_prefix(names[:2]) == 2
    assert put(tier, staging, names[4:]) == [None, None]
    assert {name for name, _ in tier.scan()} == {*names[:2], *names[4:]}
    assert tier.match_prefix(names) == 2
    tier.close()
    reopened = ObjectTier(TierConfig(url=url, capacity=2 * SLOT_BYTES))
    assert reopened.match_prefix(names) == 2
    assert put(reopened, staging, [names[3]]) == [None]
    assert len(list(reopened.scan())) == 2, "a smaller capacity takes effect with the next put"
    reopened.close()
    staging.close()


def test_a_record_larger_than_the_capacity(tmp_path: Path, staging: Staging) -> None:
    tier = ObjectTier(TierConfig(url=str(tmp_path), capacity=SLOT_BYTES))
    first, second = record_names(2)
    assert put(tier, staging, [first], 4096) == [None]
    tier.close()
    tier = ObjectTier(TierConfig(url=str(tmp_path), capacity=SLOT_BYTES - 1))
    (error,) = put(tier, staging, [second])
    assert isinstance(error, TierFull)
    assert "capacity_bytes=16383" in str(error)
    assert tier.match_prefix([first]) == 1, "nothing is let go for a record that does not fit"
    tier.close()
    staging.close()


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_another_process_writes_and_deletes(kind: str, tmp_path: Path, staging: Staging) -> None:
    url = str(tmp_path) if kind == "file" else memory_url()
    ours, theirs = ObjectTier(url), ObjectTier(url)
    names = record_names(4)
    put(theirs, staging, names[:3])
    assert ours.match_prefix(names) == 3
    theirs.delete([names[1]])
    assert isinstance(get(ours, staging, names[:3])[1], FileNotFoundError)
    assert ours.match_prefix(names) == 1, "what vanished is not a hit twice"
    put(theirs, staging, [names[1]])
    assert ours.match_prefix(names) == 3
    ours.close()
    theirs.close()
    staging.close()


def test_a_failed_put_is_not_a_hit(tmp_path: Path, staging: Staging) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    tier = ObjectTier(TierConfig(url=str(tmp_path / "store"), capacity=SLOT_BYTES))
    names = record_names(2)
    for name in names:
        (error,) = put(tier, staging, [name])
        assert isinstance(error, OSError)
        assert not isinstance(error, TierFull), "the room that the failed put took was not given back"
    assert tier.match_prefix(names) == 0
    assert tier.size(names[0]) is None
    tier.delete(names)
    assert list(tier.scan()) == []
    tier.close()
    staging.close()


def test_metadata_is_written_once(tmp_path: Path) -> None:
    layout = small_layout()
    form = RecordFormat.of(layout, 0, small_namespace(layout, chunk_tokens=32))
    first, second = arrays.metadata(form), arrays.metadata(form, "zstd")
    for url in (str(tmp_path), memory_url()):
        tier = ObjectTier(url)
        tier.describe("ab/0", first)
        tier.describe("ab/0", second)
        with fsspec.open(f"{url}/ab/0/zarr.json", "rb") as file:
            assert file.read() == first != second
        tier.close()


def test_settings_are_checked(tmp_path: Path) -> None:
    for url, message in (
        ("nosuch://x", "'d'.*url='nosuch://x'.*file.*memory"),
        (f"simplecache::file://{tmp_path}", "'d'.*want the folder itself"),
    ):
        with pytest.raises(ValueError, match=message):
            ObjectTier(url, name="d")


@pytest.mark.parametrize("nested", [False, True])
def test_copies_of_a_far_store_are_their_users_alone(nested: bool, tmp_path: Path, staging: Staging) -> None:
    copies = tmp_path / "copies"
    options: dict[str, Any] = {"cache_storage": str(copies)}
    tier = ObjectTier(
        TierConfig(
            url=f"simplecache::{memory_url()}", options={"simplecache": options} if nested else options
        )
    )
    names = record_names(1)
    assert put(tier, staging, names) == [None]
    assert isinstance(get(tier, staging, names)[0], np.ndarray)
    tier.close()
    staging.close()
    assert list(copies.iterdir())
    assert stat.S_IMODE(copies.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize(
    "name",
    [
        "../0/c.1.1.0.0.0.0",
        "/etc/passwd",
        "ab/0/../../../c.1.1.0.0.0.0",
        "ab/0/c.1.1.0.0.0.0\n",
        "ab/0/.tmp-1",
        "ab/0/c.1.1.0.0.0.0/x",
        "",
    ],
)
def test_no_name_leaves_the_root(kind: str, name: str, tmp_path: Path, staging: Staging) -> None:
    root = tmp_path / "root"
    tier = ObjectTier(str(root) if kind == "file" else memory_url())
    (put_error,) = put(tier, staging, [name])
    (got,) = get(tier, staging, [name])
    for error in (put_error, got):
        assert isinstance(error, OSError)
        assert "name=" in str(error)
    for ask in (tier.size, lambda n: tier.match_prefix([n]), lambda n: tier.delete([n])):
        with pytest.raises(OSError, match="name="):
            ask(name)
    with pytest.raises(OSError, match="name="):
        tier.describe("../x", b"{}")
    assert list(tmp_path.rglob("*")) == []
    tier.close()
    staging.close()


def test_names_and_leases_must_pair(tmp_path: Path, staging: Staging) -> None:
    tier = ObjectTier(str(tmp_path))
    leases = staging.acquire(2, DEADLINE_S, at_least=2)
    with pytest.raises(ValueError, match="1 names, 2 leases"):
        tier.get(record_names(1), leases, Completions())
    release_all(leases)
    tier.close()
    assert staging.free == SLOTS
    staging.close()


@pytest.mark.parametrize("reader", ["none", "zstd"])
def test_parts_of_a_compressed_record(reader: str, tmp_path: Path, staging: Staging) -> None:
    """Places are those of the record without compression, also for a tier that has lost its codec."""
    layout = small_layout()
    form = RecordFormat.of(layout, 0, small_namespace(layout, chunk_tokens=32))
    parent, key = bytes(16), bytes(range(16))
    (lease,) = staging.acquire(1, DEADLINE_S)
    lease.array[:] = 7
    record.seal(form, lease.buffer[: form.record_bytes], parent, key, np.arange(32, dtype=np.int32))
    lease.used = form.record_bytes
    whole = lease.record.copy()
    name = form.name(key)
    writer = ObjectTier(TierConfig(url=str(tmp_path), codec="zstd"))
    done = Completions()
    writer.put([name], [lease], done)
    assert done.wait(1) == [(name, None)]
    stored = writer.size(name)
    assert stored is not None
    assert stored < len(whole)
    writer.close()
    tier = ObjectTier(TierConfig(url=str(tmp_path), codec=reader))
    for offset, size in ((0, form.header_bytes), record.layer_range(form, 1), (len(whole) - 8, 8)):
        part = memoryview(bytearray(size))
        tier.get_ranges(name, [(offset, size)], [part])
        assert np.array_equal(part, whole[offset : offset + size])
    path = next(tmp_path.rglob("c.*"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DamagedObject):
        tier.get_ranges(name, [record.layer_range(form, 1)], [memoryview(bytearray(form.layer_bytes))])
    lease.release()
    tier.close()
    assert staging.free == SLOTS
    staging.close()


# wrappers


def test_failures(staging: Staging) -> None:
    names = record_names(3)
    inner = MemoryTier(staging, RECORDS * SLOT_BYTES)
    put(inner, staging, names)
    tier = FaultyTier(inner, one_fault("get", names[1], Fault.FAIL))
    found = get(tier, staging, names)
    assert [isinstance(f, OSError) for f in found] == [False, True, False]
    assert tier.borrow(names[1]) is None
    for operation in ("count", "delete", "size"):
        failing = FaultyTier(inner, one_fault(operation, names[0], Fault.FAIL))
        calls: dict[str, Any] = {
            "count": lambda t: t.match_prefix(names),
            "delete": lambda t: t.delete(names[:1]),
            "size": lambda t: t.size(names[0]),
        }
        with pytest.raises(OSError, match=operation):
            calls[operation](failing)
    failing = FaultyTier(inner, one_fault("put", "ff/0/c.9.9.0.0.0.0", Fault.FAIL))
    assert isinstance(put(failing, staging, ["ff/0/c.9.9.0.0.0.0"])[0], OSError)
    assert inner.match_prefix(names) == 3
    TierContract().finish(tier, staging)


def test_damage(staging: Staging) -> None:
    names = record_names(2)
    inner = MemoryTier(staging, RECORDS * SLOT_BYTES)
    put(inner, staging, names)
    for fault, flipped, size in [(Fault.FLIP, 1, SLOT_BYTES), (Fault.TRUNCATE, 0, SLOT_BYTES // 2)]:
        harmed, whole = get(FaultyTier(inner, one_fault("get", names[0], fault)), staging, names)
        assert isinstance(harmed, np.ndarray)
        assert isinstance(whole, np.ndarray)
        assert len(harmed) == size
        assert int(np.unpackbits(harmed ^ record_bytes(names[0])[:size]).sum()) == flipped
        assert np.array_equal(whole, record_bytes(names[1]))
    (intact, _) = get(inner, staging, names)
    assert isinstance(intact, np.ndarray)
    assert np.array_equal(intact, record_bytes(names[0])), "the fault harmed the tier's own record"
    TierContract().finish(inner, staging)


def test_dropped_puts(staging: Staging) -> None:
    names = record_names(3)
    tier = FaultyTier(MemoryTier(staging, RECORDS * SLOT_BYTES), one_fault("put", names[1], Fault.DROP))
    assert put(tier, staging, names) == [None] * 3
    assert tier.match_prefix(names) == 1
    TierContract().finish(tier, staging)


@pytest.mark.parametrize("end", ["release", "close"])
def test_what_hangs_goes_on(end: str, staging: Staging) -> None:
    names = record_names(3)
    inner = MemoryTier(staging, RECORDS * SLOT_BYTES)
    put(inner, staging, names[:2])
    tier = FaultyTier(inner, lambda o, n: Fault.HANG if (o, n) in hang else None)
    hang = {("get", names[0]), ("put", names[2]), ("count", names[0])}
    leases = staging.acquire(3, DEADLINE_S, at_least=3)
    done = Completions()
    tier.get(names[:2], leases[:2], done)
    tier.put(names[2:], leases[2:], done)
    release_all(leases)
    runs: list[int] = []
    asking = threading.Thread(target=lambda: runs.append(tier.match_prefix(names)))
    asking.start()
    assert done.wait(1) == [(names[1], None)]
    assert tier.hanging == 2
    assert tier.size(names[2]) is None
    getattr(tier, end)()
    assert sorted(done.wait(3), key=lambda call: call[0]) == [(name, None) for name in names]
    asking.join(DEADLINE_S)
    assert runs in ([0], [2], [3]), "answered before, between or after the others went on"
    if end == "release":
        assert isinstance(get(tier, staging, names[:1])[0], np.ndarray), "released for good"
    TierContract().finish(tier, staging)


def test_random_plans_repeat() -> None:
    names = record_names(400)
    plan = random_plan(1, 0.25, {"get": [Fault.FLIP, Fault.FAIL]})
    first = [plan("get", name) for name in names]
    again = random_plan(1, 0.25, {"get": [Fault.FLIP, Fault.FAIL]})
    assert first[::-1] == [again("get", name) for name in reversed(names)]
    assert {plan("put", name) for name in names} == {None}
    assert 60 < sum(fault is not None for fault in first) < 140
    assert {Fault.FLIP, Fault.FAIL} < set(first)
    assert first != [random_plan(2, 0.25, {"get": [Fault.FLIP, Fault.FAIL]})("get", name) for name in names]


def test_closing_hurries_the_late(tmp_path: Path, staging: Staging) -> None:
    tier = LatencyTier(ObjectTier(str(tmp_path)), put_s=1e6, get_s=1e6)
    names = record_names(4)
    leases = staging.acquire(4, DEADLINE_S, at_least=4)
    done = Completions()
    tier.put(names, leases, done)
    release_all(leases)
    assert staging.free == SLOTS - 4
    assert done.count == 0
    tier.close()
    assert sorted(done.wait(4), key=lambda call: call[0]) == [(name, None) for name in names]
    TierContract().finish(tier, staging)
