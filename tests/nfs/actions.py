"""What the tests call on a client machine. `stream` is the line to the tests, of JSON messages.

`root` is the name of a folder on the mount. Records hold `record_bytes` of their names.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np
from guest import MOUNT

from kvkit.staging import Staging
from kvkit.tiers import folder as files
from kvkit.tiers.folder import Folder
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.contract import DEADLINE_S, SLOT_BYTES, SLOTS, TierContract, get, put, record_bytes


def say(stream: TextIO, message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def folder(root: str, fsync: bool = False) -> Folder:
    return Folder(f"{MOUNT}/{root}", fsync)


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or [class, errno, message] of its OSError."""
    try:
        return call()
    except OSError as error:
        return [type(error).__name__, error.errno, str(error)]


def contract(root: str, test: str, stream: TextIO) -> None:
    """Run one test of `TierContract` on the mount."""
    staging = Staging(SLOT_BYTES, SLOTS)
    tier = ObjectTier(f"{MOUNT}/{root}")
    getattr(TierContract(), test)(tier, staging)
    TierContract().finish(tier, staging)


def kind(root: str, stream: TextIO) -> str:
    return files.file_system(f"{MOUNT}/{root}")


def exists(root: str, name: str, stream: TextIO) -> bool:
    """Whether the client believes so, without asking the server."""
    return os.path.exists(f"{MOUNT}/{root}/{name}")


def size(root: str, name: str, stream: TextIO) -> Any:
    return outcome(lambda: folder(root).size(name))


def read(root: str, name: str, size: int, stream: TextIO) -> Any:
    """Whether the record is read whole and right."""
    buffer = bytearray(size + 1)
    return outcome(lambda: buffer[: folder(root).read(name, memoryview(buffer))] == data(name, size))


def data(name: str, size: int) -> bytes:
    return record_bytes(name, size).tobytes()


def write(root: str, name: str, size: int, stream: TextIO, fsync: bool = False) -> Any:
    return outcome(lambda: folder(root, fsync).write(name, record_bytes(name, size).data))


def delete(root: str, name: str, stream: TextIO) -> Any:
    return outcome(lambda: folder(root).delete(name))


def clean(root: str, stream: TextIO) -> None:
    folder(root).clean()


def scan(root: str, stream: TextIO) -> list[str]:
    return sorted(name for name, _ in folder(root).scan())


def kill(pid: int, stream: TextIO) -> None:
    os.kill(pid, signal.SIGKILL)


def hold(root: str, array: str, stream: TextIO) -> int:
    """In a process of its own, start a record and hold it half written; say the process."""
    child = os.fork()
    if child == 0:
        file, _ = folder(root)._create_temporary(f"{MOUNT}/{root}/{array}")
        os.write(file, b"half a record")
        os.fsync(file)
        say(stream, os.getpid())
        signal.pause()
    return os.waitpid(child, 0)[1]


def keep_cleaning(root: str, stream: TextIO) -> int:
    """Clean until told to stop; how often."""
    stop = threading.Event()
    threading.Thread(target=lambda: (stream.readline(), stop.set())).start()
    say(stream, "ready")
    count = 0
    while not stop.is_set():
        folder(root).clean()
        count += 1
    return count


def watch_tier(root: str, names: list[str], stream: TextIO) -> list[int]:
    """Runs of `names` that a tier sees, once for each message, from the moment it was opened on."""
    tier = ObjectTier(f"{MOUNT}/{root}")
    say(stream, "ready")
    runs = []
    while json.loads(stream.readline()) != "stop":
        runs.append(tier.match_prefix(names))
        say(stream, "seen")
    tier.close()
    return runs


def put_and_get(root: str, names: list[str], stream: TextIO) -> list[Any]:
    """Put and get all of `names` by a tier; one entry for each that failed or came back wrong."""
    staging, tier = Staging(SLOT_BYTES, SLOTS), ObjectTier(f"{MOUNT}/{root}")
    say(stream, "ready")
    stream.readline()
    wrong: list[Any] = [str(error) for error in put(tier, staging, names) if error is not None]
    for name, found in zip(names, get(tier, staging, names), strict=True):
        if not isinstance(found, np.ndarray) or not np.array_equal(found, record_bytes(name)):
            wrong.append([name, str(found)])
    tier.close()
    staging.check_integrity()
    return wrong


def read_as_they_come(root: str, names: list[str], size: int, stream: TextIO) -> list[str]:
    """Read each record as soon as it is seen; those that were not whole, or never came."""
    store, buffer = folder(root), bytearray(size + 1)
    say(stream, "ready")
    deadline = time.monotonic() + DEADLINE_S
    wrong, left = [], list(names)
    while left and time.monotonic() < deadline:
        for name in list(left):
            seen = store.size(name)
            if seen is not None:
                left.remove(name)
                count = store.read(name, memoryview(buffer))
                if seen != size or buffer[:count] != data(name, size):
                    wrong.append(f"{name}: {seen} bytes seen, {count} read")
    return wrong + left


def read_in_two(root: str, name: str, size: int, stream: TextIO) -> Any:
    """Read a record by halves, and between them wait for a message; the same as `read`."""
    halves = [bytearray(size // 2), bytearray(size // 2)]

    def ranges() -> Iterator[tuple[int, int]]:
        yield 0, size // 2
        say(stream, "half")
        stream.readline()
        with open("/proc/sys/vm/drop_caches", "w") as caches:
            caches.write("3")  # what was read ahead, or the server would not be asked
        yield size // 2, size // 2

    def both() -> bool:
        folder(root).read_ranges(name, ranges(), [memoryview(half) for half in halves])  # type: ignore[arg-type]
        return halves[0] + halves[1] == data(name, size)

    return outcome(both)


def write_until_it_fails(root: str, names: list[str], size: int, stream: TextIO) -> Any:
    """Write record after record, then the first again, saying each one's end; the first error."""
    turns = itertools.cycle(names)
    while (done := write(root, name := next(turns), size, stream)) is None:
        say(stream, name)
    return done


def traffic(root: str, name: str, stream: TextIO, write_bytes: int = 0) -> dict[str, int]:
    """Requests to the server, by kind, of a look at one record, or of its writing; and "direct", bytes."""
    store, record = folder(root), record_bytes(name, write_bytes).data
    before = _traffic()
    store.write(name, record) if write_bytes else store.size(name)
    return {kind: count - before[kind] for kind, count in _traffic().items() if count != before[kind]}


def _traffic() -> dict[str, int]:
    with open("/proc/self/mountstats") as file:
        stats = file.read().partition(f" mounted on {MOUNT} ")[2]
    found = re.findall(r"^\s+([A-Z_]+): (\d+) ", stats, re.M)
    byte_counts = re.findall(r"^\s+bytes:\s+(.*)$", stats, re.M)[0].split()
    return {name: int(count) for name, count in found} | {"direct": int(byte_counts[3])}
