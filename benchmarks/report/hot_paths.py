"""The paths that every request takes, each as a call; a script that times or counts them as `check` tells it.

python benchmarks/report/hot_paths.py times: a line of standard input is a number of calls and a path's
name; the answer is a line of JSON, seconds of each call. python benchmarks/report/hot_paths.py counts: one
line, the counts.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from bench_cache import SMOLLM2, THIN, Case
from bench_pages import Job
from bench_record import KEY, TOKENS, sealed
from bench_record import SMOLLM2 as FORM

from kvkit.format import record as records
from kvkit.kernels.pages.api import pack, unpack
from kvkit.router.index import BlockIndex, ClearedBlocks, StoredBlocks
from kvkit.router.routing import Candidate, RoutingLimits, choose_decode

ENGINES, BLOCKS, BLOCK_TOKENS = 8, 512, 16
REPEATS = 15
"""Calls of which the least is taken: who waits for a thread looks again more often."""

Call = Callable[[], object]


def hot_paths(folder: Path, on_disk: int = 4) -> dict[str, Call]:
    """The paths by name, warmed up; no threads but those of the tiers.

    Args:
        on_disk: chunks of a hit from disk. The calls of one chunk are the same on every machine; several are
            unpacked in batches that depend on the disk's speed.
    """
    torch.set_num_threads(1)
    memory, disk, stored = Case(THIN, 32, None), Case(SMOLLM2, on_disk, folder), Case(THIN, 32, None)
    job, record = Job(SMOLLM2, 4), sealed(FORM)
    fresh = itertools.count(1)

    def store() -> None:
        stored.cache.store(stored.tokens + next(fresh), stored.place)
        stored.cache.flush()

    paths: dict[str, Call] = {
        "lookup": lambda: memory.cache.lookup(memory.tokens),
        "hit from memory": memory.hit,
        "hit from disk": disk.hit,
        "store": store,
        "pack": lambda: pack(job.pages, job.records, blocks=job.blocks, threads=1),
        "unpack": lambda: unpack(job.pages, job.records, blocks=job.blocks, threads=1),
        "seal": lambda: records.seal(FORM, record, FORM.digest, KEY, TOKENS),
        "verify": lambda: records.verify(FORM, record, FORM.digest, KEY, TOKENS),
        "route": _route(),
    }
    for call in paths.values():
        for _ in range(3):
            call()
    return paths


def _route() -> Call:
    """A prompt that each of `ENGINES` holds another share of."""
    tokens = list(range(BLOCKS * BLOCK_TOKENS))
    indexes = [BlockIndex() for _ in range(ENGINES)]
    for number, index in enumerate(indexes):
        held = BLOCKS * (number + 1) // ENGINES
        index.apply(ClearedBlocks(complete=True))
        ids = tokens[: held * BLOCK_TOKENS]
        index.apply(StoredBlocks(list(range(held)), None, ids, BLOCK_TOKENS, "CPU", ownership="memory"))

    def route() -> None:
        held = [index.held_tokens(tokens, None, "", engine_cache=False) for index in indexes]
        candidates = [Candidate(str(number), held_tokens=count) for number, count in enumerate(held)]
        assert choose_decode(
            candidates, session="a", last_decode=None, limits=RoutingLimits()
        ).held_tokens == len(tokens)

    return route


class Calls:
    """Counts calls of Python and C functions, in all threads that are started after it; not those by which
    they wait for one another, as there are more where the machine is busy."""

    def __init__(self) -> None:
        self._on, self._next = False, itertools.count()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._on and event in ("call", "c_call") and frame.f_code.co_filename != threading.__file__:
            next(self._next)  # one instruction: threads cannot get between

    def of(self, call: Call) -> int:
        before = next(self._next)
        self._on = True
        call()
        self._on = False
        return next(self._next) - before - 1


def _allocated(call: Call) -> int:
    """KiB that Python and NumPy held at most, beyond what they held before."""
    tracemalloc.start()
    call()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return -(-most // 1024)


def _transfers() -> dict[str, int]:
    """What this process has asked of files and sockets so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}


def _moved(call: Call) -> dict[str, int]:
    before = _transfers()
    between = _transfers()
    call()
    after = _transfers()
    found = {name: after[name] - between[name] - (between[name] - before[name]) for name in before}
    return {
        "reads_and_writes": found["syscr"] + found["syscw"],
        "bytes_read_and_written": found["rchar"] + found["wchar"],
    }


def counts(folder: Path) -> dict[str, dict[str, int]]:
    """Of each path: calls of functions, KiB held at most, what it moved; the least of `REPEATS`."""
    calls = Calls()
    found = {}
    for name, call in hot_paths(folder, on_disk=1).items():
        measured = [
            {"calls": calls.of(call), "allocated_kib": _allocated(call)} | _moved(call)
            for _ in range(REPEATS)
        ]
        found[name] = {kind: min(each[kind] for each in measured) for kind in measured[0]}
    return found


def _times(folder: Path) -> None:
    paths = hot_paths(folder)
    print(json.dumps(list(paths)), flush=True)
    for line in sys.stdin:
        number, _, name = line.strip().partition(" ")
        call, seconds = paths[name], []
        for _ in range(int(number)):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[1:] == ["counts"]:
            print(json.dumps(counts(Path(place))), flush=True)
        else:
            _times(Path(place))
