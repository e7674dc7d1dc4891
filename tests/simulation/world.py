"""The product's surroundings while it is simulated: threads, clock, kernels, a store, and what goes wrong."""

from __future__ import annotations

import concurrent.futures._base as futures
import errno
import functools
import importlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvkit.format.layout import LayerGroup
from kvkit.format.names import METADATA
from kvkit.tiers.base import Ranges, UnreadableObject, cut_short, too_large
from simulation.primitives import SimulatedThreading, SimulatedTime
from simulation.scheduler import Over, Scheduler

Bytes = npt.NDArray[np.uint8]


class World:
    """One simulation's: made before the product is, and in effect within `installed`.

    Attributes:
        faults: what goes wrong.
        stores: by the path of their URL.
        instead: what stands for names of modules, besides.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.random = scheduler.random
        self.threading = SimulatedThreading(scheduler)
        self.time = SimulatedTime(scheduler)
        self.faults = Faults(scheduler)
        self.threading.refuses = self.faults.refuses_thread
        self.stores: dict[str, SimulatedStore] = {}
        self.instead: dict[tuple[str, str], Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have every module of the product see this world, and any error that it logs end the simulation."""
        values = {"threading": self.threading, "time": self.time}
        changes = [(module, name, values[name]) for module, name in users_of_threads()]
        changes += [(importlib.import_module(m), name, value) for (m, name), value in self.instead.items()]
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        hook, sys.unraisablehook = sys.unraisablehook, _ignored
        log, handler = logging.getLogger("kvkit"), _Errors(self.scheduler)
        level, propagate = log.level, log.propagate
        for module, name, value in changes:
            setattr(module, name, value)
        log.setLevel(logging.ERROR)
        log.propagate = False
        log.addHandler(handler)
        try:
            yield
        finally:
            sys.unraisablehook = hook
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate
            for module, name, value in reversed(before):
                setattr(module, name, value)


@functools.cache
def users_of_threads() -> list[tuple[Any, str]]:
    """Modules of the product, and of futures, that have `threading` or `time`, by these names."""
    real = {"threading": threading, "time": time}
    product = [module for name, module in sorted(sys.modules.items()) if name.startswith("kvkit.")]
    return [
        (module, name)
        for module in [*product, futures]
        for name, value in real.items()
        if getattr(module, name, None) is value
    ]


def _ignored(raised: Any) -> None:
    """What an abandoned generator raises when it is collected, at the end of a simulation."""
    if not isinstance(raised.exc_value, Over):
        sys.__unraisablehook__(raised)


class _Errors(logging.Handler):
    """What is logged as an error is a defect: an exception came where none may."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(logging.ERROR)
        self._scheduler = scheduler

    def emit(self, entry: logging.LogRecord) -> None:
        error = entry.exc_info[1] if entry.exc_info else None
        self._scheduler.check(False, "logged: {} ({!r})", entry.getMessage(), error)


@dataclass
class Faults:
    """What goes wrong, as shares of what is tried; all of it ends with `stop`."""

    scheduler: Scheduler
    slow: float = 0.0
    hangs: float = 0.0
    fails: float = 0.0
    damages: float = 0.0
    loses: float = 0.0
    threads: float = 0.0
    sparing: int = 0

    @contextmanager
    def threads_start(self) -> Iterator[None]:
        """Every thread starts while any such block lasts, whoever entered it."""
        self.sparing += 1
        try:
            yield
        finally:
            self.sparing -= 1

    def stop(self) -> None:
        self.slow = self.hangs = self.fails = self.damages = self.loses = self.threads = 0.0
        self.scheduler.haste = 0.0

    @property
    def any(self) -> bool:
        shares = self.slow, self.hangs, self.fails, self.damages, self.loses, self.threads
        return any((*shares, self.scheduler.haste))

    def happens(self, share: float) -> bool:
        return share > 0 and self.scheduler.random.random() < share

    def refuses_thread(self) -> bool:
        return not self.sparing and self.happens(self.threads)

    def delay(self) -> None:
        """Take time, or much of it."""
        scheduler = self.scheduler
        scheduler.pause()
        if self.happens(self.hangs):
            scheduler.say("hangs")
            scheduler.sleep(scheduler.random.uniform(5.0, 900.0))
        elif self.happens(self.slow):
            scheduler.sleep(scheduler.random.choice((0.001, 0.05, 1.5)))


class SimulatedStore:
    """An `ObjectStore` in memory: an object is there when all of it is, or not at all.

    Attributes:
        objects: what is there.
        complete: names of all that ever was.
        used: bytes of records.
        room: for how many there is: more are a defect of who writes.
        expect: checks what is written.
    """

    def __init__(self, scheduler: Scheduler, name: str, faults: Faults) -> None:
        self.scheduler = scheduler
        self.name = name
        self.faults = faults
        self.room: Callable[[], float] = lambda: math.inf
        self.expect: Callable[[str, bytes], None] = lambda name, data: None
        self.objects: dict[str, bytes] = {}
        self.complete: set[str] = set()
        self.used = 0

    def size(self, name: str) -> int | None:
        self._meet("looks for", name)
        found = self.objects.get(name)
        return None if found is None else len(found)

    def read(self, name: str, buffer: memoryview) -> int:
        self._meet("reads", name)
        data = self._found(name)
        if len(data) > len(buffer):
            raise too_large(name, len(data), len(buffer))
        self._copy(data, buffer[: len(data)])
        if self.faults.happens(self.faults.damages):
            self.scheduler.say(f"{self.name}: what was read of {short(name)} is damaged")
            if self.scheduler.random.random() < 0.5:
                return len(data) // 2
            buffer[self.scheduler.random.randrange(len(data))] ^= 1
        return len(data)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        self._meet("reads parts of", name)
        data = self._found(name)
        for (offset, size), buffer in zip(ranges, buffers, strict=True):
            if offset + size > len(data):
                raise cut_short(name, max(0, len(data) - offset), offset, size)
            self._copy(data[offset : offset + size], buffer[:size])
        if buffers and self.faults.happens(self.faults.damages):
            buffers[-1][0] ^= 1

    def write(self, name: str, data: memoryview) -> None:
        if name in self.objects:
            return
        self._meet("writes", name)
        taken = bytearray(len(data))
        self._copy(data, memoryview(taken))
        self.expect(name, bytes(taken))  # the product's lines within it may be interrupted
        if name in self.objects:
            return
        self.objects[name] = bytes(taken)
        self.complete.add(name)
        if not name.endswith(METADATA):
            self.used += len(taken)
            room = self.room()
            self.scheduler.check(self.used <= room, "{}: {} bytes, room for {}", self.name, self.used, room)
        self.scheduler.say(f"{self.name} has {short(name)}")

    def delete(self, name: str) -> None:
        self._meet("deletes", name)
        self.lose(name)

    def lose(self, name: str) -> None:
        """Have an object no longer, at once."""
        gone = self.objects.pop(name, None)
        if gone is not None and not name.endswith(METADATA):
            self.used -= len(gone)

    def scan(self) -> Iterator[tuple[str, int]]:
        yield from [(n, len(data)) for n, data in self.objects.items() if not n.endswith(METADATA)]

    def _found(self, name: str) -> bytes:
        if self.faults.happens(self.faults.loses):
            self.lose(name)
        data = self.objects.get(name)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", name)
        return data

    def _copy(self, data: bytes | memoryview, buffer: memoryview) -> None:
        half = len(data) // 2
        buffer[:half] = data[:half]
        self.scheduler.pause()
        buffer[half : len(data)] = data[half:]

    def _meet(self, does: str, name: str) -> None:
        scheduler, faults = self.scheduler, self.faults
        if scheduler.trace is not None:
            scheduler.say(f"{self.name} {does} {short(name)}")
        faults.delay()
        if faults.happens(faults.fails):
            scheduler.say(f"{self.name} fails")
            if does != "writes" and scheduler.random.random() < 0.5:
                raise UnreadableObject(f"simulated: {name}", name)
            raise OSError(errno.EIO, "simulated", name)


def short(name: str) -> str:
    """A record's name, as people can tell it from others."""
    return name.rpartition("/")[2].removeprefix("c.")[:12]


@dataclass(frozen=True)
class SimulatedPages:
    """Pages of one group, of which a chunk has one block: uint8 [blocks, layers, bytes of a layer]."""

    group: LayerGroup
    data: Bytes
    device: ClassVar[torch.device] = torch.device("cpu")

    def layer(self, place: int) -> SimulatedPages:
        alone = replace(self.group, layers=self.group.layers[place : place + 1])
        return SimulatedPages(alone, self.data[:, place : place + 1])


class SimulatedKernels:
    """`pack` and `unpack`: copies within which others have their turn, as compiled ones let them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def pack(self, pages: SimulatedPages, payloads: Sequence[Bytes], blocks: Any, **_: object) -> None:
        for payload, row in zip(payloads, blocks, strict=True):
            self._copy(pages.data[row[0]].reshape(-1), payload)

    def unpack(self, pages: SimulatedPages, payloads: Sequence[Bytes], blocks: Any, **_: object) -> None:
        for payload, row in zip(payloads, blocks, strict=True):
            self._copy(payload, pages.data[row[0]].reshape(-1))

    def _copy(self, source: Bytes, target: Bytes) -> None:
        half = len(target) // 2
        self._scheduler.pause()
        target[:half] = source[:half]
        self._scheduler.pause()
        target[half:] = source[half:]
