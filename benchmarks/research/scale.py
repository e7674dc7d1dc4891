"""What an index of many records takes: memory and time per record to open it, look up and put.

    python -m benchmarks.research.scale --json benchmarks/results/scale-<machine>.json

Records have names, sizes and chains as real ones; their bytes are simulated: no file has any, and slots are
never touched. Each part, at each size, is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from xxhash import xxh3_128_digest

from kvkit.format.names import array_name, record_name
from kvkit.format.record import HEADER, MAGIC
from kvkit.lab.files import about
from kvkit.router.index import BlockIndex, StoredBlocks
from kvkit.staging import PAGE_BYTES, Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import tier_at
from kvkit.tiers.shm.file import PoolFile
from kvkit.tiers.shm.pool import Pool

SIZES = 10**5, 10**6, 10**7
CHAIN = 40
"""Records of a sequence."""
ASKED, PUT = 2_000, 20_000
"""Sequences that are looked up, and records that are put where it is full."""
NAMESPACE = xxh3_128_digest(b"namespace")
ARRAY = array_name(NAMESPACE, 0)
RECORD_BYTES = 1 << 20
BLOCK = 16
"""Tokens of a block of the router's index."""
INDEX_BLOCKS = 1 << 22
"""Of an engine, about as many as its index has room for."""


def key(number: int) -> bytes:
    return xxh3_128_digest(number.to_bytes(8, "little"))


def name(number: int) -> str:
    return record_name(ARRAY, key(number))


def chain(number: int) -> list[str]:
    return [name(i) for i in range(number * CHAIN, number * CHAIN + CHAIN)]


def parent(number: int) -> int | None:
    return number - 1 if number % CHAIN else None


@dataclass
class Index:
    """What is measured: `count` says how many of a sequence, by number, are held; `put` one record more."""

    count: Callable[[int], int]
    put: Callable[[int], object] | None = None


class Listed:
    """An object store that lists `records` records, and takes every other."""

    def __init__(self, records: int) -> None:
        self.records = records

    def size(self, name: str) -> int | None:
        return None

    def scan(self) -> Iterator[tuple[str, int]]:
        return ((name(i), RECORD_BYTES) for i in range(self.records))

    def write(self, name: str, data: memoryview) -> None: ...

    def delete(self, name: str) -> None: ...


def folder(records: int, stack: ExitStack, capacity: int | None = None) -> Index:
    """A tier in files, as it opens: what is listed is what it knows."""
    with patch("kvkit.tiers.objects.open_store", lambda *_: Listed(records)):
        tier = ObjectTier(tier_at("simulated://").model_copy(update={"capacity": capacity}))
    stack.callback(tier.close)
    record = memoryview(bytearray(RECORD_BYTES))

    def put(number: int) -> None:
        head(record, number)
        tier.write(name(number), record)

    return Index(lambda number: tier.match_prefix(chain(number)), put if capacity else None)


def full_folder(records: int, stack: ExitStack) -> Index:
    """The same with a capacity, which is used up."""
    return folder(records, stack, records * RECORD_BYTES)


def memory(records: int, stack: ExitStack) -> Index:
    """A tier in memory, which is full."""
    staging = slots(PAGE_BYTES, 2, stack)
    (lease,) = staging.acquire(1, 0.0)
    lease.used = PAGE_BYTES
    staging.slots = records + 1  # of which all records are in one
    tier = MemoryTier(staging, records * PAGE_BYTES)

    def put(number: int) -> None:
        head(lease.buffer, number)
        tier.put([name(number)], [lease], lambda name, error: None)

    for number in range(records):
        put(number)
    return Index(lambda number: tier.match_prefix(chain(number)), put)


def shm(records: int, stack: ExitStack) -> Index:
    """A pool, which is full, as another process opens it."""
    path = str(Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) / "pool")
    stack.enter_context(patch("kvkit.staging.prefault", lambda *_: None))
    stack.enter_context(patch("os.posix_fallocate", lambda file, first, size: os.ftruncate(file, size)))

    fill(path, records)
    restart()
    pool = Pool(path, PAGE_BYTES, records * PAGE_BYTES)
    stack.callback(pool.close)
    pool.size("")

    def put(number: int) -> None:
        before = parent(number)
        slot = pool.take(name(number), PAGE_BYTES, None if before is None else name(before))
        assert slot is not None
        pool.publish(name(number), slot)

    return Index(lambda number: pool.use_run(chain(number)), put)


def router(records: int, stack: ExitStack) -> Index:
    """Blocks that the router knows of engines, as these tell them."""
    indices = [BlockIndex() for _ in range(-(-records // INDEX_BLOCKS))]

    def of(number: int) -> BlockIndex:
        return indices[number * CHAIN // INDEX_BLOCKS]

    def tokens(number: int) -> list[int]:
        return np.random.default_rng(number).integers(0, 1 << 17, CHAIN * BLOCK).tolist()

    for number in range(records // CHAIN):
        blocks = [int.from_bytes(key(i)[:8]) for i in range(number * CHAIN, number * CHAIN + CHAIN)]
        told = StoredBlocks(blocks, None, tokens(number), BLOCK, "GPU")
        of(number).apply(told)

    def count(number: int) -> int:
        return of(number).held_tokens(tokens(number), None, "", engine_cache=True) // BLOCK

    return Index(count)


def fill(path: str, records: int) -> None:
    """Have all slots of a new pool hold a record."""
    pool = PoolFile(path, PAGE_BYTES, records * PAGE_BYTES)
    for first in range(0, records, ASKED * CHAIN):
        part = slice(first, min(records, first + ASKED * CHAIN))
        numbers = np.arange(part.start, part.stop)
        pool.names[part] = [name(number).encode() for number in numbers.tolist()]
        pool.last[part] = (numbers // CHAIN + 2 << 20) - numbers % CHAIN
    pool.used[:] = PAGE_BYTES
    pool.clock[0] = records // CHAIN + 2 << 20
    pool.held[:] = True
    pool.close()


PARTS = {one.__name__: one for one in (folder, full_folder, memory, shm, router)}
_began = [0, 0.0]


def restart() -> None:
    """Measure what comes from here on."""
    gc.collect()
    _began[:] = resident(), time.perf_counter()


def head(record: memoryview, number: int) -> None:
    """Have a record say which one it follows. Mutates it."""
    before = parent(number)
    record[: len(MAGIC)] = MAGIC
    for field, value in ("namespace", NAMESPACE), ("parent", NAMESPACE if before is None else key(before)):
        offset = HEADER.fields[field][1]  # type: ignore[index]
        record[offset : offset + len(value)] = value


def slots(slot_bytes: int, count: int, stack: ExitStack) -> Staging:
    staging = Staging(slot_bytes, count)
    stack.callback(staging.close)
    return staging


def resident() -> int:
    """Bytes of this process's own memory: not what it shares with others."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * PAGE_BYTES


@contextmanager
def measured(part: str, records: int) -> Iterator[Index]:
    """One part, with so many records."""
    with ExitStack() as stack:
        yield PARTS[part](records, stack)


def measure(part: str, records: int) -> dict[str, object]:
    """One part at one size: bytes and seconds to open, times of a lookup and of a put."""
    name(0)
    restart()
    with measured(part, records) as index:
        opened_s = time.perf_counter() - _began[1]
        gc.collect()
        held = resident() - _began[0]
        random = np.random.default_rng(0)
        asked = random.integers(0, records // CHAIN, ASKED).tolist()
        naming = time.perf_counter()
        for number in asked:
            chain(number) if part != "router" else None
        naming = time.perf_counter() - naming
        began = time.perf_counter()
        for number in asked:
            found = index.count(number)
            assert found == CHAIN, f"{part}: {found} of {CHAIN}"
        looked_s = time.perf_counter() - began - naming
        result = {
            "part": part,
            "records": records,
            "bytes_per_record": held / records,
            "open_s": opened_s,
            "lookups_per_s": ASKED * CHAIN / looked_s,
        }
        if index.put is not None:
            took = []
            for number in range(records, records + PUT):
                began = time.perf_counter()
                index.put(number)
                took.append(time.perf_counter() - began)
            result |= {"puts_per_s": PUT / sum(took), "slowest_put_s": max(took)}
        return result


def main() -> None:
    """Measure every part at every size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--records", nargs="+", type=int, default=SIZES)
    arguments = parser.parse_args()
    results = []
    for part in arguments.parts:
        for records in arguments.records:
            results.append(in_process(part, records))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        document = about("python -m benchmarks.research.scale", seed=0) | {"results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def in_process(part: str, records: int) -> dict[str, object]:
    """`measure` in a process of its own."""
    call = f"measure({part!r}, {records})"
    code = f"import json; from benchmarks.research.scale import measure; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
