"""Processes that share a pool and are killed: at every instruction of theirs, or at any moment.

python tests/support/shm_deaths.py instructions|moments|outlived ROUNDS: a process of its own, for forks lack
threads. It says how many were killed, and ends with an error where a record differs, or room is lost.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import numpy as np

from kvkit.lab.testbed.pool_integrity import check_room
from kvkit.tiers.base import TierFull
from kvkit.tiers.eviction.policies import NORMAL
from kvkit.tiers.shm.file import PoolFile
from kvkit.tiers.shm.pool import Pool
from kvkit.tiers.testing.contract import record_bytes, record_names

SLOT_BYTES, SLOTS = 8192, 6
CHAIN = record_names(20)
WRITERS = 4
LEAST = 0
"""The priority of what goes first."""


def size_of(name: str) -> int:
    return 1 + zlib.crc32(name.encode()) % SLOT_BYTES


def open_pool(path: str) -> Pool:
    return Pool(path, SLOT_BYTES, SLOTS * SLOT_BYTES)


def open_file(path: str) -> PoolFile:
    return PoolFile(path, SLOT_BYTES, SLOTS * SLOT_BYTES)


def write(pool: Pool, name: str, parent: str | None = None) -> None:
    lease = pool.take(name, size_of(name), parent)
    if lease is not None:
        with lease:
            lease.record[:] = record_bytes(name, size_of(name))
            pool.publish(name, lease)


def read(pool: Pool, name: str) -> bool:
    """Whether it is held; it is what was written, and stays so while it is lent."""
    lease = pool.lend(name)
    if lease is None:
        return False
    with lease:
        for _ in range(2):
            assert np.array_equal(lease.record, record_bytes(name, size_of(name))), f"{name} differs"
    return True


def check(path: str, survivor: Pool) -> None:
    """Every record is whole, whoever asks; every slot without one can be had, and then every slot."""
    fresh = open_pool(path)
    held = dict(fresh.listed())
    assert held == dict(survivor.listed())
    with closing(open_file(path)) as file:
        assert {*file.held.tolist()} <= {0, 1 + NORMAL, 1 + LEAST}
    assert all(read(survivor, name) and size_of(name) == size for name, size in held.items())
    check_room(fresh, SLOTS, write)
    assert dict(fresh.listed()) == dict(survivor.listed())  # it has the next changes by the log
    fresh.close()


def life(path: str) -> None:
    """A short one, in which all is called that a pool has."""
    pool = open_pool(path)
    for parent, name in zip((None, *CHAIN), CHAIN[:3], strict=False):
        write(pool, name, parent)
    pool.use_run(CHAIN)
    pool.pin(CHAIN[:2], 0.0)
    pool.prioritise(CHAIN[:2], LEAST)
    lent = pool.lend(CHAIN[0])
    pool.remove(CHAIN[1:2])
    write(pool, CHAIN[7])  # evicts, where it starts with a full pool
    assert pool.size(CHAIN[7])
    if lent is not None:
        lent.release()
    pool.close()


def trace(each: Callable[[], None]) -> None:
    """Have `each` called before every instruction of a pool's code."""

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        if "/tiers/shm/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            each()
        return step

    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks any frame for it when tracing begins
    sys.settrace(step)


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    """How a child ended: -9 is SIGKILL."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def instructions(path: str) -> int:
    """Those of `life`."""
    reads, writes = os.pipe()

    def work() -> None:
        numbers = count()
        trace(lambda: next(numbers) and None)
        life(path)
        sys.settrace(None)
        os.write(writes, str(next(numbers)).encode())

    assert ended(fork(work)) == 0
    os.close(writes)
    with open(reads) as pipe:
        return int(pipe.read())


def at_instructions(path: str, rounds: int) -> int:
    """Kill one at every so many instructions, in a pool that is being made, and in one that is full."""
    killed = 0
    for fresh in (True, False):
        total = instructions(path)
        survivor = open_pool(path)
        check(path, survivor)
        for number in range(0, total, max(1, 2 * total // rounds)):
            if fresh:
                survivor.close()
                os.unlink(path)

            def work(number: int = number) -> None:
                left = iter(range(number))

                def each() -> None:
                    if next(left, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)

                trace(each)
                life(path)

            killed += ended(fork(work)) == -signal.SIGKILL
            if fresh:
                survivor = open_pool(path)
            check(path, survivor)
        survivor.close()
    return killed


def kill(writer: int) -> None:
    os.kill(writer, signal.SIGKILL)
    assert ended(writer) == -signal.SIGKILL, "it had an error"


def at_moments(path: str, rounds: int) -> int:
    """Kill one of several after another, while this process reads."""
    survivor = open_pool(path)
    assert survivor.ready.wait(60)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        pool = open_pool(path)
        while True:
            at = chance.randrange(1, len(CHAIN))
            action = chance.random()
            try:
                if action < 0.6:
                    write(pool, CHAIN[at], CHAIN[at - 1])
                elif action < 0.9:
                    read(pool, CHAIN[at])
                elif action < 0.95:
                    pool.remove([CHAIN[at]])
                elif action < 0.98:
                    pool.use_run(CHAIN)
                else:
                    pool.prioritise(CHAIN[:at], LEAST)
            except TierFull:
                pass

    chance, writers, killed = random.Random(0), list[int](), 0
    try:
        while killed < rounds:
            while len(writers) < WRITERS:
                writers.append(fork(partial(work, killed + len(writers))))
            until = time.monotonic() + chance.uniform(0, 0.01)
            while time.monotonic() < until:
                read(survivor, chance.choice(CHAIN))
            kill(writers.pop(chance.randrange(len(writers))))
            killed += 1
    finally:  # or who reads what this process prints waits for them
        for writer in writers:
            kill(writer)
    check(path, survivor)
    survivor.close()
    return killed + len(writers)


def outlived(path: str, rounds: int) -> int:
    """Kill processes that have locked all there is, and whose forks live on."""
    reads, writes = os.pipe()

    def work() -> None:
        pool = open_pool(path)
        write(pool, CHAIN[0])
        leases = [pool.lend(CHAIN[0]), pool.take(CHAIN[1], 1, None)]
        file = open_file(path)
        file.lock_mutex(60)
        left = fork(signal.pause)
        os.write(writes, left.to_bytes(4, "little"))
        signal.pause()
        del leases, file

    for _ in range(rounds):
        parent = fork(work)
        left = int.from_bytes(os.read(reads, 4), "little")
        os.kill(parent, signal.SIGKILL)
        assert ended(parent) == -signal.SIGKILL
        survivor = open_pool(path)
        check(path, survivor)
        survivor.close()
        os.kill(left, signal.SIGKILL)
    return rounds


def main() -> None:
    way, rounds = sys.argv[1:]
    path = f"/dev/shm/kvkit-deaths-{os.getpid()}"
    ways = {"instructions": at_instructions, "moments": at_moments, "outlived": outlived}
    try:
        print(ways[way](path, int(rounds)))
    finally:
        os.unlink(path)


if __name__ == "__main__":
    main()
