"""Tiers against bare system calls with as many threads, and against fsspec."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from benchmarks.batch import Batch
from benchmarks.timing import forget, interleaved, nothing, ratio
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import default_threads
from kvkit.tiers.folder import file_system
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import record_names

RECORDS = 32
MIB = 1 << 20
THREADS = default_threads()


class Fixture(Batch):
    """A batch, a folder on the disk of the repository, and threads."""

    def __init__(self, root: Path, record_bytes: int, records: int) -> None:
        super().__init__(records, record_bytes)
        self.root = root
        self.paths = [str(root / name) for name in self.names]
        self.record_bytes = record_bytes
        self.tier = ObjectTier(TierConfig(url=str(root), threads=THREADS))
        self.pool = ThreadPoolExecutor(THREADS)

    def bare(self, move: Callable[[str, memoryview], None]) -> None:
        """The same batch by threads that do nothing else."""

        def part(first: int) -> None:
            for i in range(first, len(self.paths), THREADS):
                move(self.paths[i], self.leases[i].buffer[: self.record_bytes])

        list(self.pool.map(part, range(THREADS)))

    def close(self) -> None:
        self.tier.close()
        self.pool.shutdown()
        self.release()
        shutil.rmtree(self.root)


@pytest.fixture(params=[2 * MIB, 6 * MIB], ids=["2MiB", "6MiB"])
def fixture(request: Any, benchmark: Any, pytestconfig: pytest.Config) -> Iterator[Fixture]:
    root = pytestconfig.rootpath / ".benchmarks" / f"tiers-{os.getpid()}"
    size, records = (request.param, RECORDS) if benchmark.enabled else (request.param >> 7, 8)
    root.mkdir(parents=True)
    fixture = Fixture(root, size, records)
    benchmark.extra_info.update(file_system=file_system(str(root)), threads=THREADS, records=records)
    yield fixture
    fixture.close()


def read_bare(path: str, buffer: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(buffer):
        done += os.preadv(file, [buffer[done:]], done)
    os.close(file)


def write_bare(flags: int, path: str, data: memoryview) -> None:
    temporary = path + ".tmp"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o644)
    done = 0
    while done < len(data):
        done += os.pwritev(file, [data[done:]], done)
    os.close(file)
    os.rename(temporary, path)


def compare(
    benchmark: Any,
    ours: Callable[[], object],
    other: Callable[[], object],
    against: str,
    rounds: int,
    before: Callable[[], object] = nothing,
) -> None:
    """Time of `ours` over that of `other`, from calls that take turns. `before` each call is not timed."""
    rounds = rounds if benchmark.enabled else 1
    benchmark.pedantic(ours, setup=before, rounds=rounds)
    times = interleaved({"ours": ours, "other": other}, rounds, warmup=2, before=before)
    found = ratio(times, "ours", "other")
    benchmark.extra_info.update(ratio_min=found["min"], ratio_median=found["median"], against=against)


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_read(benchmark: Any, fixture: Fixture, cache: str) -> None:
    fixture.move(fixture.tier.put)
    for lease in fixture.leases:
        lease.array[:] = 0
    compare(
        benchmark,
        lambda: fixture.move(fixture.tier.get),
        lambda: fixture.bare(read_bare),
        "open, preadv, close in as many threads",
        30 if cache == "warm" else 12,
        partial(forget, fixture.paths) if cache == "cold" else nothing,
    )
    assert all(lease.array.any() for lease in fixture.leases)


@pytest.mark.parametrize("job", ["get", "put"])
def test_by_nixl(benchmark: Any, fixture: Fixture, job: str) -> None:
    """Its POSIX plug-in against the folder's own reads and writes; warm."""
    nixl = ObjectTier(TierConfig(url=f"nixl+file://{fixture.root / 'nixl'}", threads=THREADS))
    fixture.move(fixture.tier.put)
    fixture.move(nixl.put)

    def move(tier: ObjectTier) -> None:
        if job == "put":
            tier.delete(fixture.names)
        fixture.move(getattr(tier, job))

    compare(benchmark, partial(move, nixl), partial(move, fixture.tier), "a folder", 12)
    nixl.close()


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_read_against_fsspec(benchmark: Any, fixture: Fixture, cache: str) -> None:
    fixture.move(fixture.tier.put)
    local = LocalFileSystem()
    compare(
        benchmark,
        lambda: fixture.move(fixture.tier.get),
        lambda: local.cat(fixture.paths),
        "fsspec LocalFileSystem.cat",
        12 if cache == "warm" else 6,
        partial(forget, fixture.paths) if cache == "cold" else nothing,
    )


@pytest.mark.parametrize("other", ["direct", "cached"])
def test_write(benchmark: Any, fixture: Fixture, other: str) -> None:
    """Sustained: what one round wrote stays until the last has written, as in a store."""
    folder = Path(fixture.paths[0]).parent
    turn = itertools.count()

    def set_aside() -> None:
        if folder.exists():
            folder.rename(fixture.root / f"round-{next(turn)}")
            fixture.tier.delete(fixture.names)
        folder.mkdir(parents=True)

    flags = os.O_DIRECT if other == "direct" else 0
    compare(
        benchmark,
        lambda: fixture.move(fixture.tier.put),
        lambda: fixture.bare(partial(write_bare, flags)),
        f"open, pwritev, close, rename in as many threads{', O_DIRECT' if flags else ''}",
        15,
        set_aside,
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted(Path(p).name for p in fixture.paths)


@pytest.fixture
def memory() -> Iterator[tuple[MemoryTier, list[str], Staging]]:
    count = 512
    staging = Staging(4096, count + 1)
    names = record_names(count)
    tier = MemoryTier(staging, count * staging.slot_bytes)
    leases = staging.acquire(count, 0, at_least=count)
    tier.put(names, leases, lambda name, error: None)
    release_all(leases)
    yield tier, names, staging
    tier.close()
    staging.close()


def test_memory_run(benchmark: Any, memory: tuple[MemoryTier, list[str], Staging]) -> None:
    tier, names, _ = memory
    held = dict.fromkeys(names)
    assert tier.match_prefix(names) == len(names)
    compare(
        benchmark,
        lambda: tier.match_prefix(names),
        lambda: [name in held for name in names],
        f"{len(names)} look-ups in a dict",
        200,
    )
    benchmark.extra_info["records"] = len(names)


def test_memory_borrow(benchmark: Any, memory: tuple[MemoryTier, list[str], Staging]) -> None:
    tier, names, staging = memory
    (lease,) = staging.acquire(1, 0)

    def borrow() -> None:
        for name in names:
            lent = tier.borrow(name)
            assert lent is not None
            lent.release()

    def share() -> None:
        for _ in names:
            lease.share().release()

    compare(benchmark, borrow, share, f"{len(names)} shares of one slot", 100)
    lease.release()
    benchmark.extra_info["records"] = len(names)
