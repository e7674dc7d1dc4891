"""A program: stores chunks under vLLM's offloading, is killed, and looks at what is there; prints JSON.

    python offloading_kills.py FOLDER KILLS SEED

Each turn forks a process that stores chunks until it is killed, then one that loads all chunks of all turns.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from offloading import ROWS, Offloading, files, keys

CAPACITY, AT_ONCE = "4MiB", 4


def in_a_fork(work: Callable[[], None]) -> int:
    """Start `work` in a fork; it ends with status 1 if it raises. Return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def opened(folder: Path) -> Offloading:
    disk = {"url": str(folder), "capacity": CAPACITY}
    return Offloading(folder, kvkit={"staging": "2MiB", "tiers": {"disk": disk}})


def main(folder: Path, kills: int, seed: int) -> None:
    rng, regions = random.Random(seed), Path("/dev/shm")
    before = set(regions.glob("vllm_offload_*"))
    found, bytes_held = [], []
    for turn in range(kills):
        chunks = keys(ROWS * 4, seed=turn % 3)  # some of them are there from earlier turns

        def store(chunks: list = chunks) -> None:
            engine = opened(folder)
            while True:
                for first in range(0, len(chunks), AT_ONCE):
                    engine.compute(chunks[first : first + AT_ONCE])
                    engine.forget()

        had = {file.name: file.stat().st_mtime_ns for file in files(folder)}
        goal = rng.randint(1, 30)
        pid = in_a_fork(store)
        while True:  # until so many files were written
            now = {}
            for file in files(folder):
                try:
                    now[file.name] = file.stat().st_mtime_ns
                except FileNotFoundError:  # evicted meanwhile
                    continue
            if len(now.items() - had.items()) >= goal:
                break
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the process ended by itself"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reader, writer = os.pipe()

        def check(writer: int = writer) -> None:
            engine = opened(folder)
            held = sum(engine.found([key]) for space in range(3) for key in keys(ROWS * 4, seed=space))
            engine.shutdown()
            os.write(writer, str(held).encode())

        _, status = os.waitpid(in_a_fork(check), 0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found.append(int(pipe.read() or -1))
        assert status == 0, f"turn {turn}"
        bytes_held.append(sum(file.stat().st_size for file in files(folder)))
    for region in set(regions.glob("vllm_offload_*")) - before:
        region.unlink()
    print(json.dumps({"found": found, "bytes": bytes_held}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
