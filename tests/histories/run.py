"""One run: processes at work, one of which is killed, stopped or cut off at a time; then all is looked at."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from histories.client import CHUNK, Client, Member, look_at_all
from histories.history import PEER, History, read
from histories.network import Host
from histories.setups import SETUPS, Setup
from kvkit.kernels.pages.api import pack, unpack
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.lab.testbed.servers import die_with_parent

HANGS_S = 90.0
"""A process that has not ended so long after the end of a run hangs."""

PAUSE_S, STOPPED_S, CUT_S = (0.02, 0.15), (0.02, 0.5), (0.1, 1.0)
"""From and to: between two faults, and how long they last."""

IMPORTED_LATE = ("fsspec", "redis", "zarr")
"""What caches import when they first need it."""

LOOKED_S = 90.0
"""Within which the last process has looked at all."""


def run(
    name: str,
    seconds: float,
    seed: int,
    folder: Path,
    hosts: Sequence[Host],
    plant: Callable[[], object] | None = None,
) -> History:
    """The history of a run of a set-up, which stays in `folder`.

    Args:
        hosts: for processes whose links are cut; none: nothing is cut.
        plant: called in each process before its cache opens: plants a defect.
    """
    with SETUPS[name](folder, hosts) as setup:
        going = _Run(setup, seed, folder, plant)
        try:
            going.go(seconds)
            going.look()
        finally:
            going.end()
    return read(folder)


def warm_up() -> None:
    """Have in this process what its forks would compile or load each for themselves."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    torch.set_num_threads(1)
    engine = Engine(small_layout(), small_namespace(small_layout(), CHUNK))
    blocks = np.arange(CHUNK // engine.layout.groups[0].block_tokens)[None]
    payload = [np.zeros(engine.layout.groups[0].chunk_bytes(CHUNK), np.uint8)]
    pack(engine.pages[0], payload, blocks=blocks)
    unpack(engine.pages[0], payload, blocks=blocks)


@dataclass(eq=False)
class _Run:
    setup: Setup
    seed: int
    folder: Path
    plant: Callable[[], object] | None
    opened: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._alive: dict[str, tuple[str, int]] = {}  # by member: its process and that one's number
        self._lives: dict[str, int] = {}

    def go(self, seconds: float) -> None:
        """Have all work for so long, amid faults."""
        self.until_s = time.monotonic() + seconds
        for name in self.setup.members:
            self._start(name)
        faults = [self._kill, self._stop]
        if self.setup.hosts:
            faults += [self._cut, self._cut]
        if self.setup.server is not None:
            faults.append(self._stop_server)
        while time.monotonic() < self.until_s:
            time.sleep(self.chance.uniform(*PAUSE_S))
            self.chance.choice(faults)()
            for name in [*self._alive]:  # who ended by itself has failed, which its status says
                self._wait(name, os.WNOHANG)
                if name not in self._alive:
                    self._start(name)
        for name in [*self._alive]:
            self._join(name, self.until_s + HANGS_S)

    def look(self) -> None:
        """Have a new process look at what is there."""
        self._fork("last", self.setup.last, look_at_all)
        self._join("last", time.monotonic() + LOOKED_S)

    def end(self) -> None:
        """Leave no process, and note what is known of all."""
        for name in [*self._alive]:
            self._send(name, signal.SIGKILL)
            self._wait(name)
        known: dict[str, object] = {"opened": self.opened, "ended": self.ended, "statuses": self.statuses}
        known |= {"late": self.setup.late, "stale": self.setup.stale, "trouble": self.trouble}
        (self.folder / "run.json").write_text(json.dumps(known, indent=1))

    def _start(self, name: str) -> None:
        self._fork(name, self.setup.members[name], lambda client: client.live(self.until_s))

    def _fork(self, name: str, member: Member, work: Callable[[Client], object]) -> None:
        self._lives[name] = self._lives.get(name, 0) + 1
        process = f"{name}.{self._lives[name]}"
        if name == PEER:  # before anyone can reach it
            new = self.folder / f"{PEER}.new"
            new.write_text(process)
            new.rename(self.folder / PEER)
        self.opened[process] = time.monotonic_ns()
        (self.folder / f"{process}.jsonl").touch()
        pid = os.fork()
        if pid:
            self._alive[name] = process, pid
            return
        status = 1
        try:
            die_with_parent()
            log = os.open(self.folder / f"{process}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if name in self.setup.hosts:
                self.setup.hosts[name].move_in()
            if self.plant is not None:
                self.plant()
            work(Client(member, process, self.seed, self.folder))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _kill(self) -> None:
        name = self._anyone()
        self._send(name, signal.SIGKILL)
        self._wait(name)
        self._start(name)

    def _stop(self) -> None:
        name = self._anyone()
        self._send(name, signal.SIGSTOP)
        time.sleep(self.chance.uniform(*STOPPED_S))
        self._send(name, signal.SIGCONT)

    def _stop_server(self) -> None:
        assert self.setup.server is not None
        self.setup.server.stop()
        time.sleep(self.chance.uniform(*STOPPED_S))
        self.setup.server.resume()

    def _cut(self) -> None:
        host = self.setup.hosts[self.chance.choice([*self.setup.hosts])]
        host.set_cut(True, seen_here=self.chance.random() < 0.3)
        time.sleep(self.chance.uniform(*CUT_S))
        host.set_cut(False)

    def _anyone(self) -> str:
        return self.chance.choice([*self._alive])

    def _send(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._alive[name][1], number)

    def _wait(self, name: str, how: int = 0) -> None:
        """Note that a process ended, if it did."""
        process, number = self._alive[name]
        found, status = os.waitpid(number, how)
        if found:
            self.ended[process] = time.monotonic_ns()
            self.statuses[process] = os.waitstatus_to_exitcode(status)
            del self._alive[name]

    def _join(self, name: str, until_s: float) -> None:
        """Wait for a process to end, or note that it hangs."""
        while name in self._alive and time.monotonic() < until_s:
            self._wait(name, os.WNOHANG)
            time.sleep(0.005)
        if name in self._alive:
            self.trouble.append(f"{self._alive[name][0]} does not end")
