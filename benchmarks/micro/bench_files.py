"""The choices of `kvkit.tiers.folder`, measured: flat names against nested, page cache against O_DIRECT."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import interleaved, ratio

THREADS, RECORDS, RECORD_BYTES = 4, 32, 2 << 20


def compare(benchmark: Any, ours: Callable[[], object], other: Callable[[], object], against: str) -> None:
    """pytest-benchmark's own statistics of `ours`; its ratio to `other` from calls that take turns."""
    benchmark.pedantic(ours, rounds=3)
    times = interleaved({"ours": ours, "other": other}, 15 if benchmark.enabled else 1, warmup=1)
    found = ratio(times, "ours", "other")
    benchmark.extra_info.update(ratio_min=found["min"], ratio_median=found["median"], against=against)


@pytest.mark.parametrize("job", ["make", "list"])
def test_flat_names(benchmark: Any, tmp_path: Path, job: str) -> None:
    """Small objects in one folder, against c/<16 bits>/<46 bits>/0/0/0/0."""
    count = 1000 if benchmark.enabled else 10
    turn = itertools.count()

    def make(name: Callable[[int], str]) -> Path:
        root = tmp_path / str(next(turn))
        for i in range(count):
            path = root / name(i * 2654435761 % 2**46)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(b"x" * 4096)
        return root

    def flat(i: int) -> str:
        return f"c.{i % 2**16}.{i}.0.0.0.0"

    def nested(i: int) -> str:
        return f"c/{i % 2**16}/{i}/0/0/0/0"

    if job == "make":
        compare(benchmark, lambda: make(flat), lambda: make(nested), "the same objects in nested folders")
    else:
        roots = make(flat), make(nested)
        listing = [lambda root=root: sum(len(files) for _, _, files in os.walk(root)) for root in roots]
        assert [found() for found in listing] == [count, count]
        compare(benchmark, listing[0], listing[1], "the same objects in nested folders")
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("job", ["write", "read-cold"])
def test_page_cache(benchmark: Any, tmp_path: Path, job: str) -> None:
    """32 new files of 2 MiB, or as many read after the page cache dropped them; against O_DIRECT."""
    slots = [mmap.mmap(-1, RECORD_BYTES) for _ in range(RECORDS)]
    for slot in slots:
        slot.write(b"x" * RECORD_BYTES)
    turn = itertools.count()

    def write(flags: int) -> Path:
        folder = tmp_path / str(next(turn))
        folder.mkdir()

        def one(i: int) -> None:
            file = os.open(folder / str(i), os.O_CREAT | os.O_WRONLY | flags)
            assert os.pwritev(file, [slots[i]], 0) == RECORD_BYTES
            os.close(file)

        list(pool.map(one, range(RECORDS)))
        return folder

    def read(flags: int) -> None:
        def one(i: int) -> None:
            file = os.open(folder / str(i), os.O_RDONLY | flags)
            done = 0
            while done < RECORD_BYTES:
                done += os.preadv(file, [memoryview(slots[i])[done:]], done)
            os.close(file)
            cached = os.open(folder / str(i), os.O_RDONLY)
            os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_DONTNEED)  # cold again for whoever comes next
            os.close(cached)

        list(pool.map(one, range(RECORDS)))

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            folder = write(os.O_DIRECT)
        except OSError as error:
            pytest.skip(f"this file system has no O_DIRECT: {error}")
        move = write if job == "write" else read
        compare(benchmark, lambda: move(0), lambda: move(os.O_DIRECT), "O_DIRECT, as many threads")
    shutil.rmtree(tmp_path)
