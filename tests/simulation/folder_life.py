"""Lives of a folder that processes share: errors at every call, short reads and writes, deaths, power cuts.

Two processes write, read, delete and tidy the same few records. One of them is killed at some call, or the
power is cut, or neither; then a new process looks at what is there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

from kvkit.format.record import ALIGN
from kvkit.tiers.folder import TEMPORARY, Folder
from simulation.files import Killed, Process, SimulatedFiles
from simulation.scheduler import Violation
from simulation.world import World

ROOT = "/srv/store"
NAMES = [f"{'18758dd34c64ec23' * 2}/{group}/c.1.{i}.0.0.0.0" for group in (0, 1) for i in (1, 2)]
SIZE = 2 * ALIGN + 100
"""Of a record: whole pages, which are written past the page cache, and a rest."""


@functools.cache
def record_of(name: str) -> bytes:
    return bytes((sum(name.encode()) + i // 50) % 251 for i in range(SIZE))


class FolderLife:
    """A disk, and who uses it.

    Attributes:
        synced: whether what was written survives a power cut.
        whole: whether records are whole after it: a process that dies leaves no part of one, ever.
    """

    def __init__(self, world: World) -> None:
        self.scheduler, self.world, self.check = world.scheduler, world, world.scheduler.check
        r = self.random = world.random
        self.files = SimulatedFiles(world.scheduler, world.faults, ("/", "/srv"))
        world.faults.fails = r.choice((0.0, 0.0, 0.02, 0.15))
        world.faults.slow = r.choice((0.0, 0.1))
        self.failing = world.faults.fails > 0
        self.synced = r.random() < 0.6
        self.end = r.choice(("none", "kill", "power"))
        self.deletes = r.random() < 0.3
        self.writers: Counter[str] = Counter()
        self.written: set[str] = set()
        kind = r.choice(("ext4", "nfs"))
        module = "kvkit.tiers.folder"
        world.instead |= {
            (module, "os"): self.files.os,
            (module, "fcntl"): self.files.fcntl,
            (module, "file_system"): lambda path: kind,
            (module, "_mode"): self.files.mode,
            (module, "secrets"): SimpleNamespace(token_hex=lambda n: f"{r.getrandbits(8 * n):0{2 * n}x}"),
        }

    @property
    def whole(self) -> bool:
        return self.synced or self.end != "power"

    def live(self) -> None:
        """The whole of it, as the first thread."""
        processes = [Process("one"), Process("two")]
        threads = [
            self.world.threading.Thread(
                target=functools.partial(self.use, process), name=f"{process.name}-{i}"
            )
            for process in processes
            for i in range(self.random.choice((1, 1, 2)))
        ]
        self.files.all_die = self.end == "power"
        if self.end != "none":
            self.files.calls_left = self.random.randrange(self.random.choice((20, 60, 200)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        died = any(process.dead for process in processes)
        if self.end == "power" and died:
            self.scheduler.say("the power is cut")
            self.files.cut_power()
        self.world.faults.stop()
        self.files.calls_left = -1
        left = [path for path in self.files.names() if TEMPORARY in path]
        self.check(died or not left, "left behind: {}", left)
        open_ = len(self.files.descriptors)
        self.check(died or not open_, "{} descriptors are left open", open_)
        self.look_again()

    def look_again(self) -> None:
        """What a new process finds."""
        self.files.processes[self.scheduler.current] = Process("after")
        folder = Folder(ROOT, self.synced)
        folder.clean()
        left = [path for path in self.files.names() if TEMPORARY in path]
        self.check(not left, "not tidied: {}", left)
        listed = dict(folder.scan())
        for name in NAMES:
            size = folder.size(name)
            self.check(
                listed.get(name) == size, "{} is listed with {} bytes, has {}", name, listed.get(name), size
            )
            if size is not None and self.whole:
                self.check(self.read(folder, name) == record_of(name), "{} is there in part", name)
            if name in self.written and self.whole and not self.deletes and self.writers[name] == 1:
                self.check(size == SIZE, "{} was written, and is gone", name)
            if size is None or self.whole:
                folder.write(name, memoryview(record_of(name)))
                self.check(self.read(folder, name) == record_of(name), "{} cannot be written", name)
        open_ = [opened for opened in self.files.descriptors.values() if opened.process.name == "after"]
        self.check(not open_, "{} descriptors are left open", len(open_))

    def use(self, process: Process) -> None:
        """A thread of a process."""
        self.files.processes[self.scheduler.current] = process
        steps: list[Callable[[Folder, str], object]] = [self.write, self.write, self.read_whole, self.tidy]
        steps += [self.delete] if self.deletes else [self.look]
        try:
            folder = Folder(ROOT, self.synced)
            for _ in range(self.random.randint(1, 4)):
                step, name = self.random.choice(steps), self.random.choice(NAMES)
                self.scheduler.say(f"{step.__name__}: {name}")
                try:
                    step(folder, name)
                except FileNotFoundError:
                    self.check(step != self.write or self.failing, "{} cannot be written", name)
                except OSError as error:
                    if not self.failing:
                        self.scheduler.fail(Violation(f"{step.__name__} of {name}: {error!r}"))
        except Killed:
            pass

    # steps

    def write(self, folder: Folder, name: str) -> None:
        self.writers[name] += 1
        folder.write(name, memoryview(record_of(name)))
        self.written.add(name)
        if not self.deletes and not self.failing:
            self.check(folder.size(name) == SIZE, "{} is written, and not there", name)

    def read_whole(self, folder: Folder, name: str) -> None:
        found = self.read(folder, name)
        self.check(found == record_of(name), "{} is read in part: {} bytes", name, len(found))

    def look(self, folder: Folder, name: str) -> None:
        size = folder.size(name)
        self.check(size in (None, SIZE), "{} is there with {} bytes", name, size)
        part = memoryview(bytearray(300))
        folder.read_ranges(name, [(ALIGN, 300)], [part])
        self.check(bytes(part) == record_of(name)[ALIGN : ALIGN + 300], "{} is read wrongly", name)

    def delete(self, folder: Folder, name: str) -> None:
        folder.delete(name)

    def tidy(self, folder: Folder, name: str) -> None:
        folder.clean()

    @staticmethod
    def read(folder: Folder, name: str) -> bytes:
        buffer = memoryview(bytearray(SIZE + 10))
        return bytes(buffer[: folder.read(name, buffer)])


def folder_life(world: World) -> Callable[[], None]:
    """What the first thread of a simulation is to do."""
    return FolderLife(world).live
