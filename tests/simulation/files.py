"""A file system in memory, as `kvkit.tiers.folder` calls it: it fails, and forgets what was not synced.

Each call is one step, at which others have their turn, an error may come, and the life of a process may end.
After a power cut the data of a file that was not synced is there, in part, or not at all; and each change of
a folder that was not synced is there or not, whatever was changed after it.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvkit.tiers.folder import TEMPORARY
from simulation.scheduler import Scheduler
from simulation.world import Faults

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR, errno.ESTALE, errno.EMFILE)
NEVER_DENIED = tuple(number for number in ERRORS if number != errno.EACCES)


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@dataclass(eq=False)
class Inode:
    """A file or a folder.

    Attributes:
        durable: what of the data a power cut leaves; None: nothing was ever synced.
        entries: of a folder, what it holds by name.
        changes: those of the entries that no sync made durable: (name, inode or None).
        lock: the open file that has it.
    """

    mode: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None
    entries: dict[str, Inode] = field(default_factory=dict)
    durable_entries: dict[str, Inode] = field(default_factory=dict)
    changes: list[tuple[str, Inode | None]] = field(default_factory=list)
    links: int = 0
    lock: object = None


@dataclass(eq=False)
class OpenFile:
    """What descriptors, made by `dup`, share: the place that is written next."""

    inode: Inode
    process: Process
    at: int = 0
    uses: int = 1


@dataclass(eq=False)
class Process:
    """Who calls: after its death each call raises `Killed`."""

    name: str
    dead: bool = False


class SimulatedFiles:
    """The disk, and the calls of the processes that use it.

    Args:
        above: folders above the one that they share, which are never denied.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults, above: Collection[str]) -> None:
        self.scheduler = scheduler
        self.faults = faults
        self.above = above
        self.root = Inode(stat.S_IFDIR | 0o755, links=1)
        self.descriptors: dict[int, OpenFile] = {}
        self.processes: dict[object, Process] = {}
        self.calls_left = -1  # until the process that calls then dies, or all
        self.all_die = False
        self._last = 100
        self.os = SimpleNamespace(
            **{name: getattr(os, name) for name in dir(os) if name.startswith(("O_", "SEEK_"))},
            **{name: getattr(os, name) for name in ("strerror", "stat_result", "DirEntry")},
            **{name: self._call(name) for name in CALLS},
            path=SimpleNamespace(
                **{name: getattr(posixpath, name) for name in ("dirname", "abspath", "join", "basename")},
                isdir=self._is_dir,
                realpath=lambda path: path,
            ),
        )
        self.fcntl = SimpleNamespace(F_SETFL=4, F_OFD_SETLK=37, F_WRLCK=1, fcntl=self._call("fcntl"))

    # processes

    @property
    def process(self) -> Process:
        """Of the current thread."""
        return self.processes[self.scheduler.current]

    def kill(self, process: Process) -> None:
        """Have a process end at once: its files are closed, and its locks lifted."""
        process.dead = True
        for number, opened in list(self.descriptors.items()):
            if opened.process is process:
                self._close(number)

    def cut_power(self) -> None:
        """Lose what was not synced, as the seed says; every process is gone."""
        for process in dict.fromkeys(self.processes.values()):
            self.kill(process)
        random = self.scheduler.random

        def lose(inode: Inode, seen: set[Inode]) -> None:
            if inode in seen:
                return
            seen.add(inode)
            if stat.S_ISDIR(inode.mode):
                kept = dict(inode.durable_entries)
                for name, entry in inode.changes:
                    if random.random() < 0.6:
                        kept.pop(name, None)
                        if entry is not None:
                            kept[name] = entry
                inode.entries, inode.durable_entries, inode.changes = kept, dict(kept), []
                for entry in kept.values():
                    lose(entry, seen)
            elif inode.durable != bytes(inode.data):
                left = random.randrange(len(inode.data) + 1)
                torn = inode.data[:left] + bytes(random.choice((0, len(inode.data) - left)))
                whole = random.choice((inode.durable or b"", bytes(torn), bytes(inode.data)))
                inode.data, inode.durable = bytearray(whole), whole

        lose(self.root, set())

    def names(self) -> Iterator[str]:
        """Paths of all files."""

        def below(path: str, inode: Inode) -> Iterator[str]:
            for name, entry in inode.entries.items():
                if stat.S_ISDIR(entry.mode):
                    yield from below(f"{path}/{name}", entry)
                else:
                    yield f"{path}/{name}"

        yield from below("", self.root)

    # calls

    def _call(self, name: str) -> Callable[..., Any]:
        does = getattr(self, f"_{name}")
        fails = name not in ("close", "fwalk", "scandir")

        def call(*arguments: Any, **named: Any) -> Any:
            scheduler, process = self.scheduler, self.process
            if process.dead:
                raise Killed
            if scheduler.trace is not None:
                scheduler.say(f"{process.name}: {name} {', '.join(map(_shown, arguments))}")
            self.faults.delay()
            if self.calls_left >= 0 and not process.dead:
                self.calls_left -= 1
                if self.calls_left < 0:
                    for dying in dict.fromkeys(self.processes.values()) if self.all_die else (process,):
                        scheduler.say(f"{dying.name} dies")
                        self.kill(dying)
            if process.dead:
                raise Killed
            tidies = name == "unlink" and TEMPORARY in arguments[0]  # who cannot tidy leaves things behind
            if fails and not tidies and self.faults.happens(self.faults.fails):
                number = scheduler.random.choice(NEVER_DENIED if arguments[0] in self.above else ERRORS)
                scheduler.say(os.strerror(number))
                raise OSError(number, os.strerror(number))
            return does(*arguments, **named)

        return call

    def _open(self, path: str, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
        folder, name = self._parent(path, dir_fd)
        inode = folder.entries.get(name) if name else folder
        if inode is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            inode = Inode(stat.S_IFREG | mode, links=1)
            self._enter(folder, name, inode)
        elif flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        self._last += 1
        self.descriptors[self._last] = OpenFile(inode, self.process)
        return self._last

    def _close(self, number: int) -> None:
        opened = self.descriptors.pop(number)
        opened.uses -= 1
        if not opened.uses and opened.inode.lock is opened:
            opened.inode.lock = None

    def _dup(self, number: int) -> int:
        opened = self.descriptors[number]
        opened.uses += 1
        self._last += 1
        self.descriptors[self._last] = opened
        return self._last

    def _write(self, number: int, data: memoryview) -> int:
        opened = self.descriptors[number]
        count = len(data) if self.scheduler.random.random() < 0.7 else self._less(len(data))
        opened.inode.data[opened.at : opened.at + count] = data[:count]
        opened.at += count
        return count

    def _preadv(self, number: int, buffers: list[memoryview], offset: int) -> int:
        data, (buffer,) = self.descriptors[number].inode.data, buffers
        count = max(0, min(len(buffer), len(data) - offset))
        if count and self.scheduler.random.random() < 0.3:
            count = self._less(count)
        buffer[:count] = data[offset : offset + count]
        return count

    def _fsync(self, number: int) -> None:
        inode = self.descriptors[number].inode
        if stat.S_ISDIR(inode.mode):
            inode.durable_entries, inode.changes = dict(inode.entries), []
        else:
            inode.durable = bytes(inode.data)

    def _fstat(self, number: int) -> Any:
        return _status(self.descriptors[number].inode)

    def _lstat(self, path: str) -> Any:
        return _status(self._found(path))

    def _stat(self, path: str) -> Any:
        return _status(self._found(path))

    def _fchmod(self, number: int, mode: int) -> None:
        pass

    def _chmod(self, path: str, mode: int) -> None:
        self._found(path)

    def _rename(self, old: str, new: str) -> None:
        (source, name), (target, other) = self._parent(old), self._parent(new)
        if name not in source.entries:
            raise _error(errno.ENOENT, old)
        before = target.entries.get(other)
        if before is not None:
            before.links -= 1
        inode = source.entries.pop(name)
        target.entries[other] = inode
        source.changes.append((name, None))
        target.changes.append((other, inode))

    def _unlink(self, path: str, dir_fd: int | None = None) -> None:
        folder, name = self._parent(path, dir_fd)
        inode = folder.entries.get(name)
        if inode is None:
            raise _error(errno.ENOENT, path)
        if stat.S_ISDIR(inode.mode):
            raise _error(errno.EISDIR, path)
        inode.links -= 1
        del folder.entries[name]
        folder.changes.append((name, None))

    def _mkdir(self, path: str, mode: int = 0o777) -> None:
        folder, name = self._parent(path)
        if name in folder.entries:
            raise _error(errno.EEXIST, path)
        self._enter(folder, name, Inode(stat.S_IFDIR | mode, links=1))

    def _rmdir(self, path: str) -> None:
        raise _error(errno.ENOTEMPTY, path)

    def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        folder = self.root
        for name in filter(None, path.split("/")):
            if name not in folder.entries:
                self._enter(folder, name, Inode(stat.S_IFDIR | 0o755, links=1))
            folder = folder.entries[name]

    def _fcntl(self, number: int, command: int, argument: object) -> None:
        opened = self.descriptors[number]
        if command == self.fcntl.F_OFD_SETLK:
            if opened.inode.lock not in (None, opened):
                raise BlockingIOError(errno.EAGAIN, "locked")
            opened.inode.lock = opened

    @contextmanager
    def _scandir(self, path: str) -> Iterator[Iterator[Any]]:
        folder = self._found(path)
        yield iter(
            [
                SimpleNamespace(
                    name=name,
                    path=f"{path}/{name}",
                    is_dir=lambda inode=inode: stat.S_ISDIR(inode.mode),
                    stat=lambda inode=inode, follow_symlinks=True: _status(inode),
                )
                for name, inode in list(folder.entries.items())
            ]
        )

    def _fwalk(self, top: str, onerror: Callable[[OSError], object]) -> Iterator[Any]:
        try:
            number = self.os.open(top, os.O_RDONLY)
        except OSError as error:
            onerror(error)
            return
        try:
            entries = dict(self.descriptors[number].inode.entries)
            folders = [name for name, inode in entries.items() if stat.S_ISDIR(inode.mode)]
            yield top, folders, [name for name in entries if name not in folders], number
            for name in folders:
                yield from self._fwalk(f"{top}/{name}", onerror)
        finally:
            if not self.process.dead:
                self._close(number)

    # what calls have in common

    def _is_dir(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._found(path).mode)
        except OSError:
            return False

    def mode(self, path: str, look: object = None) -> int:
        """Of what is at `path`, 0 where there is nothing: what the folder asks about what it cannot read."""
        try:
            return self._found(path).mode
        except OSError:
            return 0

    def _parent(self, path: str, dir_fd: int | None = None) -> tuple[Inode, str]:
        if dir_fd is not None:
            return self.descriptors[dir_fd].inode, path
        folder, name = posixpath.split(path.removesuffix("/."))
        return (self._found(folder), name) if name else (self.root, "")

    def _found(self, path: str) -> Inode:
        inode = self.root
        for name in filter(None, path.removesuffix("/.").split("/")):
            if not stat.S_ISDIR(inode.mode):
                raise _error(errno.ENOTDIR, path)
            if name not in inode.entries:
                raise _error(errno.ENOENT, path)
            inode = inode.entries[name]
        return inode

    @staticmethod
    def _enter(folder: Inode, name: str, inode: Inode) -> None:
        folder.entries[name] = inode
        folder.changes.append((name, inode))

    def _less(self, count: int) -> int:
        return 1 + self.scheduler.random.randrange(count) if count else 0


CALLS = (
    *("open", "close", "dup", "write", "preadv", "fsync", "fstat", "lstat", "fchmod", "chmod", "rename"),
    *("unlink", "mkdir", "rmdir", "makedirs", "scandir", "fwalk", "stat"),
)


def _status(inode: Inode) -> Any:
    return SimpleNamespace(
        st_mode=inode.mode,
        st_size=len(inode.data),
        st_nlink=inode.links,
        st_mtime_ns=0,
        st_ino=id(inode),
        st_dev=0,
    )


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _shown(argument: object) -> str:
    if isinstance(argument, str):
        return argument.rpartition("/")[2]
    if isinstance(argument, list):
        return ", ".join(map(_shown, argument))
    return f"{len(argument)} bytes" if isinstance(argument, memoryview | bytes) else str(argument)
