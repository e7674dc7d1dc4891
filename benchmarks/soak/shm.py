"""A pool in shared memory under engines that are killed and stopped: nothing is wrong, and no room is lost.

    python -m benchmarks.soak.shm --minutes 30 --json FILE

Four processes have a cache each over one pool `shm://`, two of them with memory before it. They store
prompts that begin alike, ask for them, load and compare every byte, delete, pin and clear. Three of them
are killed with -9 or stopped at random, and others take their place; one lives on. After each phase all but
that one are killed at the same time: then every record must be that of its prompt, every slot can be had,
and the one that lives has none of its own in use. The exit status is 1 if anything was wrong, or that one
grew.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.soak.leaks import Flat
from benchmarks.soak.phases import Phases, options, phases_of, report
from kvkit.cache import Cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.lab.testbed.pool_integrity import check_room
from kvkit.lab.testbed.servers import die_with_parent
from kvkit.staging import Staging
from kvkit.tiers.base import TierError
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.shm.file import pool_path
from kvkit.tiers.shm.pool import Pool
from kvkit.tiers.shm.tier import ShmTier
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import largest_record_bytes

CHUNK, SLOTS = 16, 96
"""Tokens of a chunk, and slots of the pool: about half of the chunks that prompts have."""
PROMPTS, CHUNKS, SHARED = 48, 6, 8
"""Prompts; chunks of the longest; and how many different beginnings of two chunks they have."""
STAGING, MEMORY = 24, 6
"""Slots of a cache, and those of its memory tier, if it has one."""
MEMBERS = ("kept", "a", "b", "c")
"""The first one lives on."""
WITH_MEMORY = ("kept", "b")
CALLS = {"store": 6, "load": 8, "ask": 2, "delete": 1, "pin": 1, "clear": 0.02}
TIMEOUT_S = 60.0
"""Of a cache."""
HANGS_S = 900.0
"""A process that does not answer for so long hangs. Others may have nearly all of the machine."""
FATES = {"kill": 0.6, "stop": 0.4}
FATED = {"kill": "killed", "stop": "stopped"}
ROW = len(MEMBERS), len(CALLS) + 1
"""Of what is counted: calls by process, and the chunks that were loaded and compared."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast all goes, in seconds: from and to.

    Attributes:
        pause_s: between two calls of a process.
        fate_s: between two that are killed or stopped.
        stopped_s: how long one is stopped; others wait for two seconds for what it has locked.
    """

    pause_s: tuple[float, float] = (0.0, 0.06)
    fate_s: tuple[float, float] = (0.3, 2.0)
    stopped_s: tuple[float, float] = (0.05, 3.0)


QUICK, QUICK_CALLS = Pace((0.0, 0.005), (0.1, 0.5), (0.02, 0.3)), 300
"""With `--quick`."""


def prompts() -> list[npt.NDArray[np.int32]]:
    """The same every time; several begin alike."""
    rng = np.random.default_rng(0)
    beginnings = rng.integers(0, 1000, (SHARED, 2 * CHUNK))
    found = []
    for number in range(PROMPTS):
        rest = rng.integers(0, 1000, CHUNK * int(rng.integers(1, CHUNKS - 1)))
        found.append(np.concatenate([beginnings[number % SHARED], rest]).astype(np.int32))
    return found


class Member:
    """One engine over the pool.

    Args:
        counts: a row of what it did: calls, then chunks that were loaded.
    """

    def __init__(self, url: str, name: str, seed: str, counts: npt.NDArray[np.int64], pace: Pace) -> None:
        layout = small_layout()
        self.engine = Engine(layout, small_namespace(layout, CHUNK), 2 * CHUNKS * CHUNK // 4)
        self.url, self.name = url, name
        self.chance = random.Random(seed)
        self.counts = counts
        self.pace = pace
        self.prompts = prompts()
        self.cache = self.open(name in WITH_MEMORY)

    def open(self, memory: bool = False) -> Cache:
        """Another cache over the same pool."""
        staging = Staging(record_bytes(), STAGING)
        tiers: list[Any] = [MemoryTier(staging, MEMORY * staging.slot_bytes)] if memory else []
        tiers.append(ShmTier(pool_path(self.url), staging, SLOTS * staging.slot_bytes))
        names = tuple(tier.name for tier in tiers)
        policy = Policy(retrieve_from=names, store_to=names)
        space = self.engine.namespace
        return Cache(self.engine.layout, space, tiers, staging=staging, policy=policy, timeout_s=TIMEOUT_S)

    def call(self) -> None:
        """One call of the cache, at random. Raises AssertionError: it is wrong."""
        (what,) = self.chance.choices([*CALLS], [*CALLS.values()])
        self.counts[[*CALLS].index(what)] += 1
        tokens = self.chance.choice(self.prompts)
        table = self.engine.table(len(tokens))
        if what == "store":
            self.engine.compute(tokens, table)
            self.cache.store(tokens, self.engine.places(table))
            if self.chance.random() < 0.5:  # else they are put while it goes on
                self.cache.flush()
        elif what == "load":
            self.load(self.cache, tokens)
        elif what == "ask":
            self.cache.query(tokens)
        elif what == "delete":
            names = self.cache.chunks(tokens).names
            self.cache.tiers["shm"].delete(self.chance.sample(names, 1))
        elif what == "pin":
            self.cache.pin(tokens, 0.05)
        else:
            self.cache.clear("shm")
        self.engine.wipe()

    def load(self, cache: Cache, tokens: npt.NDArray[np.int32]) -> int:
        """Load what there is of a prompt, and compare it; how many chunks that was."""
        self.engine.wipe()
        table = self.engine.table(len(tokens))
        hit = cache.lookup(tokens)
        loaded = cache.load(hit, self.engine.places(table))
        assert loaded.tokens <= hit.tokens
        self.engine.assert_loaded(tokens, table, loaded.tokens // CHUNK)
        self.counts[-1] += loaded.tokens // CHUNK
        return int(loaded.tokens // CHUNK)

    def live(self, asked: socket.socket | None) -> None:
        """Call until told otherwise: `asked`, which only the one that lives on has, has it rest and check."""
        while True:
            time.sleep(self.chance.uniform(*self.pace.pause_s))
            if asked is not None and (told := _heard(asked)):
                if told == b"end":
                    self.cache.close()
                    self.cache.staging.check_integrity()
                    return
                asked.sendall(json.dumps(self.rest()).encode() + b"\n")
                asked.setblocking(True)
                asked.recv(16)  # told to go on
                asked.setblocking(False)
            with suppress(TimeoutError, TierError):  # another process was stopped with what this one needs
                self.call()

    def rest(self) -> dict[str, Any]:
        """What is wrong when nobody else is there; `chunks`: those that there were."""
        wrong, chunks = [], 0
        try:
            self.cache.flush()
            self.cache.check_integrity()
            staging = self.cache.staging
            taken = staging.slots - staging.free
            if taken > (MEMORY if self.name in WITH_MEMORY else 0):
                wrong.append(f"{taken} slots are in use")
            with self.open() as cache:
                chunks = sum(self.load(cache, tokens) for tokens in self.prompts)
                damaged = sum(cache.counts().damaged.values())
                if damaged:
                    wrong.append(f"{damaged} records are damaged")
            size = record_bytes()
            pool = Pool(pool_path(self.url), size, SLOTS * size)
            try:
                check_room(pool, SLOTS, _fill)
            finally:
                pool.close()
        except Exception:
            wrong.append(traceback.format_exc())
        return {"wrong": wrong, "chunks": chunks}


def record_bytes() -> int:
    """Of a slot."""
    layout = small_layout()
    return largest_record_bytes(layout, small_namespace(layout, CHUNK))


def _fill(pool: Pool, name: str) -> None:
    lease = pool.take(name, 64, None)
    assert lease is not None
    with lease:
        lease.record[:] = 7
        pool.publish(name, lease)


def _heard(asked: socket.socket) -> bytes:
    with suppress(BlockingIOError):
        return asked.recv(16)
    return b""


class Soak:
    """All of it. It has no thread, or it could not be forked."""

    def __init__(self, phases: Phases, folder: Path, pace: Pace) -> None:
        self.phases = phases
        self.folder = folder
        self.pace = pace
        self.url = f"shm://soak-{uuid.uuid4().hex}"
        self.chance = random.Random(0)
        self.counts = np.memmap(folder / "counts", np.int64, "w+", shape=ROW)
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.pids: dict[str, int] = {}
        self.lives = 0
        self.kept, self._told = socket.socketpair()
        self._told.setblocking(False)

    def run(self) -> dict[str, Any]:
        """What was done, and what was wrong."""
        seconds, chunks = 0.0, 0
        try:
            for name in MEMBERS:
                self.start(name)
            flat = Flat(self.pids["kept"])
            for _ in self.phases:
                began = time.monotonic()
                self.work()
                seconds += time.monotonic() - began
                found = self.rest()
                self.wrong += found["wrong"]
                chunks += found["chunks"]
                flat.rest()
                self.kept.sendall(b"go on")
                for name in MEMBERS[1:]:
                    self.start(name)
            self.kept.sendall(b"end")
            self.ended("kept", 0)
        finally:
            for name in [*self.pids]:
                self.kill(name)
            with suppress(FileNotFoundError):
                os.unlink(pool_path(self.url))
        calls = self.counts.sum(0).tolist()
        *calls, loaded = calls
        return {
            "seconds": round(seconds, 1),
            "calls": dict(zip(CALLS, calls, strict=True)),
            "done": {
                "calls": sum(calls),
                "chunks loaded and compared": loaded,
                "of them when all rested": chunks,
            },
            "processes": self.lives,
            "faults": {
                f"processes {FATED[outcome]}": count for outcome, count in sorted(self.faults.items())
            },
            "wrong": self.wrong,
            "flat": {"the process that lives on": flat.result()},
        }

    def work(self) -> None:
        """A phase: one after another is killed or stopped."""
        while self.phases.goes_on(int(self.counts[:, :-1].sum())):
            time.sleep(self.chance.uniform(*self.pace.fate_s))
            name = self.chance.choice(MEMBERS[1:])
            (outcome,) = self.chance.choices([*FATES], [*FATES.values()])
            self.faults[outcome] += 1
            if outcome == "kill":
                self.kill(name)
                self.start(name)
            else:
                os.kill(self.pids[name], signal.SIGSTOP)
                time.sleep(self.chance.uniform(*self.pace.stopped_s))
                os.kill(self.pids[name], signal.SIGCONT)

    def rest(self) -> dict[str, Any]:
        """What is found when all others are killed at once."""
        for name in MEMBERS[1:]:
            os.kill(self.pids[name], signal.SIGKILL)
        for name in MEMBERS[1:]:
            self.ended(name, -signal.SIGKILL)
        self.faults["kill"] += len(MEMBERS) - 1
        self.kept.sendall(b"rest")
        self.kept.settimeout(HANGS_S)
        found = b""
        while not found.endswith(b"\n"):
            more = self.kept.recv(1 << 16)
            if not more:
                self.ended("kept", 0)
                raise RuntimeError(f"the process that lives on has ended: {self.wrong[-1:]}")
            found += more
        said: dict[str, Any] = json.loads(found)
        return said

    def start(self, name: str) -> None:
        """Fork a process."""
        self.lives += 1
        pid = os.fork()
        if pid:
            self.pids[name] = pid
            return
        status = 1
        try:
            die_with_parent()
            log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # for the parent alone
            self.kept.close()
            row = self.counts[MEMBERS.index(name)]
            told = self._told if name == "kept" else None
            Member(self.url, name, f"{name}-{self.lives}", row, self.pace).live(told)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)
        self.ended(name, -signal.SIGKILL)

    def ended(self, name: str, want: int) -> None:
        """Wait for a process; it must end so."""
        _, status = os.waitpid(self.pids.pop(name), 0)
        found = os.waitstatus_to_exitcode(status)
        if found != want:
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            self.wrong.append(f"{name} ended with {found}: {log[-2000:]}")


def main() -> int:
    given = options(__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvkit-soak-") as folder:
        soak = Soak(phases_of(given, QUICK_CALLS), Path(folder), QUICK if given.quick else Pace())
        return report(given, "soak.shm", soak.run())


if __name__ == "__main__":
    sys.exit(main())
