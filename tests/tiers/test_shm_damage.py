"""A damaged or shrunk pool file costs records, but no process and no room."""

from __future__ import annotations

import logging
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from caches import CHUNK, make_engine, new_cache, new_staging, sequence
from forks import fork

from kvkit.tiers.base import TierFull
from kvkit.tiers.shm.file import PoolFile, pool_path
from kvkit.tiers.shm.pool import Pool
from kvkit.tiers.shm.tier import ShmTier
from kvkit.tiers.testing.contract import record_bytes, record_names

SLOT_BYTES, SLOTS = 8192, 8
NAMES = record_names(6)
MIB = 1 << 20
HIGH = 2**64 - 1
DAMAGE: dict[str, Sequence[object]] = {
    "log": (2**32 - 1, SLOTS, 5),
    "held": (0, 200, 255),
    "names": (b"", b"\xff" * 112, b"a/b", NAMES[0].encode()),
    "used": (0, SLOT_BYTES + 1, HIGH),
    "last": (0, 1 << 56, 1 << 63, HIGH),
    "pins": (np.nan, np.inf, -np.inf, 1e300),
    "parents": (60_000_000, SLOTS + 1, SLOTS, 1),
    "clock": (0, 1 << 56, 1 << 63, HIGH - (1 << 20), HIGH),
    "changes": (0, 3, 1 << 63, HIGH),
}


@pytest.fixture
def path() -> Iterator[str]:
    path = pool_path(f"shm://test-{uuid.uuid4().hex}")
    yield path
    with suppress(FileNotFoundError):
        os.unlink(path)


def open_pool(path: str, slots: int = SLOTS) -> Pool:
    return Pool(path, SLOT_BYTES, slots * SLOT_BYTES)


def damage(path: str, column: str, rows: slice, value: object) -> None:
    """Write over a column of the file, as another program might."""
    with closing(PoolFile(path, SLOT_BYTES, SLOTS * SLOT_BYTES)) as file:
        getattr(file, column)[rows] = value


def write(pool: Pool, name: str, parent: str | None = None) -> None:
    lease = pool.take(name, SLOT_BYTES, parent)
    if lease is not None:
        with lease:
            lease.record[:] = record_bytes(name, SLOT_BYTES)
            pool.publish(name, lease)


def write_chain(pool: Pool, names: Sequence[str]) -> None:
    for parent, name in zip((None, *names), names, strict=False):
        write(pool, name, parent)


def look(pool: Pool) -> None:
    for name in {*NAMES, *dict(pool.listed())}:
        lease = pool.lend(name)
        if lease is not None:
            with lease:
                assert len(lease.record) == lease.used <= SLOT_BYTES
        assert (pool.size(name) or 0) <= SLOT_BYTES


def use_all(pool: Pool) -> None:
    """Call whatever a pool has; it may be full, and nothing else."""
    calls: list[Callable[[], object]] = [
        lambda: pool.use_run(NAMES),
        lambda: look(pool),
        lambda: pool.pin(NAMES, 0.0),
        lambda: pool.prioritise(NAMES, 3),
        lambda: write_chain(pool, record_names(SLOTS, "cc")),
        lambda: write_chain(pool, NAMES),
        lambda: pool.remove([name for name, _ in pool.listed()]),
        lambda: [write(pool, name) for name in record_names(SLOTS + 1, "dd")],
    ]
    for call in calls:
        with suppress(TierFull):
            call()


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize(
    ("column", "value"), [(column, value) for column, values in DAMAGE.items() for value in values]
)
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1)], ids=["all", "one"])
def test_a_damaged_column_costs_records_alone(
    path: str, column: str, value: object, rows: slice, opened: str
) -> None:
    """Seen by who has the pool open, and by who opens it then."""
    with closing(open_pool(path)) as first:
        write_chain(first, NAMES)
        second = open_pool(path) if opened == "before" else None
        damage(path, column, rows, value)
        second = second or open_pool(path)
        use_all(second)
        use_all(first)
        second.close()
        with closing(open_pool(path)) as fresh:
            fresh.remove([name for name, _ in fresh.listed()])
            names = record_names(2 * SLOTS, "ee")
            for name in names:
                write(fresh, name)
            for pool in (fresh, first):
                assert {name for name, _ in pool.listed()} == {*names[SLOTS:]}, "room is lost"
                for name in names[SLOTS:]:
                    lease = pool.lend(name)
                    assert lease is not None
                    with lease:
                        assert np.array_equal(lease.record, record_bytes(name, SLOT_BYTES))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("pins", [np.nan] * SLOTS),
        ("pins", [np.inf] * SLOTS),
        ("pins", [1e300] * SLOTS),
        ("last", [HIGH] * SLOTS),
        ("last", [1 << 60] * SLOTS),
        ("parents", [*range(2, SLOTS + 1), 1]),
        ("parents", range(1, SLOTS + 1)),
    ],
)
def test_what_is_damaged_can_be_evicted(path: str, column: str, values: Sequence[object]) -> None:
    with closing(open_pool(path)) as first:
        write_chain(first, record_names(SLOTS, "aa"))
        damage(path, column, slice(None), values)
        names = record_names(SLOTS, "bb")
        with closing(open_pool(path)) as second:
            for name in names:
                write(second, name)
        assert {name for name, _ in first.listed()} == {*names}


def test_a_damaged_log_hides_no_record_for_long(path: str) -> None:
    """Who did not hear of a removal takes the record for held until it asks for it."""
    with closing(open_pool(path)) as first, closing(open_pool(path)) as second:
        write_chain(first, NAMES)
        assert second.use_run(NAMES) == len(NAMES)
        first.remove(NAMES[1:2])
        damage(path, "log", slice(None), 5)
        assert second.lend(NAMES[1]) is None
        assert second.use_run(NAMES) == 1
        write(second, NAMES[1], NAMES[0])
        assert first.use_run(NAMES) == len(NAMES)


def test_a_chain_whose_first_record_was_removed_keeps_no_room(path: str) -> None:
    """What comes into its slot may follow what followed it: in a ring, nothing could ever be evicted."""
    first, second, third, *others = record_names(6)
    with closing(open_pool(path, 2)) as pool, closing(open_pool(path, 2)) as other:
        write_chain(pool, [first, second])
        pool.remove([first])
        write(pool, third, second)
        for name in others:
            write(other, name)
        assert {name for name, _ in pool.listed()} == {*others[-2:]}


def test_what_another_process_writes_over_a_record_before_a_load_is_a_miss(path: str) -> None:
    engine, tokens = make_engine(), sequence(4)
    table = engine.table(len(tokens))
    slots = new_staging(engine, 8)
    size = 16 * slots.slot_bytes
    with new_cache(engine, slots, [ShmTier(path, slots, size)]) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        third = cache.chunks(tokens).names[2]

        def other() -> None:
            with closing(Pool(path, slots.slot_bytes, size)) as pool:
                lease = pool.lend(third)
                assert lease is not None
                lease.array[slots.slot_bytes // 2 :] ^= 0xFF

        assert fork(other) == 0
        engine.wipe()
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 2 * CHUNK
        engine.assert_loaded(tokens, table, 2)
        assert cache.tiers["shm"].size(third) is None


# the file


def take_all_memory(folder: Path) -> None:
    with suppress(OSError), open(folder / "others", "ab") as file:
        while True:
            os.write(file.fileno(), bytes(4096))


def punch(path: str, offset: int, size: int) -> None:
    command = ["fallocate", "--punch-hole", "--offset", str(offset), "--length", str(size), path]
    subprocess.run(command, check=True)


def touch(path: str) -> None:
    with closing(open_pool(path)) as pool:
        pool.ready.wait()
        pool.arrays[:] = 1
        pool.listed()


@pytest.mark.parametrize("offset", [0, -SLOT_BYTES], ids=["the columns", "a slot"])
def test_holes_in_a_full_file_system_end_no_process(pool_disk: Path, offset: int) -> None:
    path = str(pool_disk / "pool")
    with closing(open_pool(path)) as pool:
        write_chain(pool, NAMES)
        pool.ready.wait()
    size = os.stat(path).st_size
    punch(path, 4096 if offset == 0 else size + offset, SLOT_BYTES)
    take_all_memory(pool_disk)

    def other() -> None:
        with pytest.raises(OSError, match=f"{SLOT_BYTES} bytes of the pool have lost their memory"):
            touch(path)

    assert fork(other) == 0


def test_holes_are_filled_where_there_is_memory(path: str) -> None:
    with closing(open_pool(path)) as pool:
        write_chain(pool, NAMES)
        last = pool.lend(NAMES[-1])
        assert last is not None
        slot = last.slot
        last.release()
        first = os.stat(path).st_size - SLOTS * SLOT_BYTES
    punch(path, first + slot * SLOT_BYTES, SLOT_BYTES)
    with closing(open_pool(path)) as pool:
        assert os.stat(path).st_blocks * 512 >= os.stat(path).st_size
        assert pool.use_run(NAMES) == len(NAMES)
        for name in NAMES:
            lease = pool.lend(name)
            assert lease is not None
            with lease:
                whole = np.array_equal(lease.record, record_bytes(name, SLOT_BYTES))
                assert whole == (name != NAMES[-1])


@pytest.mark.parametrize("size", [0, 4, 4096, 2 * MIB])
def test_a_truncated_file_is_no_pool(path: str, size: int) -> None:
    """Or a new one, where nothing says that it was one."""
    open_pool(path).close()
    os.truncate(path, size)
    if not size:
        open_pool(path).close()
    else:
        with pytest.raises(OSError, match="not a complete pool of this version; remove it"):
            open_pool(path)


@pytest.mark.parametrize("damaged", [bytes(8), bytes(40)])
def test_a_pool_in_use_whose_head_is_damaged_is_not_made_anew(path: str, damaged: bytes) -> None:
    """Those who have it mapped would end with SIGBUS."""

    def other() -> None:
        with closing(open_pool(path)) as pool:
            write_chain(pool, NAMES)
            with open(path, "r+b") as file:
                file.write(damaged)
            with pytest.raises(OSError, match="not a complete pool of this version; remove it"):
                open_pool(path)
            look(pool)
        with closing(open_pool(path)) as pool:
            assert pool.listed() == []

    assert fork(other) == 0


@pytest.mark.parametrize("slot_bytes", [0, 1, 100, SLOT_BYTES + 1, SLOT_BYTES // 2 + 8])
def test_slots_of_no_whole_pages_are_no_pool(path: str, slot_bytes: int) -> None:
    open_pool(path).close()
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(slot_bytes.to_bytes(8, "little"))
    with pytest.raises(OSError, match="not a complete pool of this version; remove it"):
        open_pool(path)


def test_a_nearly_full_file_system_is_told_of(pool_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_pool(str(pool_disk / "small")).close()
        assert not caplog.messages
        os.unlink(pool_disk / "small")
        large = 5 * MIB // SLOT_BYTES + 64
        open_pool(str(pool_disk / "large"), large).close()
    (message,) = caplog.messages
    assert "large: its file system has 0 of 8 MiB left" in message
    assert "set a smaller capacity" in message
