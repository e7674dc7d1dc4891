"""Objects as files below a local or network folder, with bare system calls: written once, renamed into place.

A file is written under a temporary name in its own folder, under a lock that its writer's death lifts, and
renamed when it is complete. So a record is whole or not there, and `Folder.clean` can tell what a killed
writer left from what another process is just writing.

Writes go past the page cache where the file system lets them (O_DIRECT): they take a fraction of the time and
of the processor, and leave the cache to others. Reads go through it: warm ones are much faster, cold ones no
slower. benchmarks/bench_files.py measures both choices.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress

from kvkit.record import ALIGN, Damage
from kvkit.tiers.base import DamagedObject, TierError

log = logging.getLogger(__name__)

METADATA = "zarr.json"
TEMPORARY = ".tmp-"
_SPACE, _GROUP = re.compile("[0-9a-f]+"), re.compile("[0-9]+")
_RECORD = re.compile(r"[0-9a-f]+/[0-9]+/c(\.[0-9]+){6}")
_OBJECT = re.compile(r"[0-9a-f]+/[0-9]+/(c(\.[0-9]+){6}|zarr\.json)")


def is_record(name: str) -> bool:
    """Whether `name` is that of a record (`kvkit.record`), so that a scan passes over what is not kvkit's."""
    return _RECORD.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Refuse whatever is neither a record nor an array's metadata, and so every name that leaves the root.

    Raises:
        TierError: it is neither.
    """
    if _OBJECT.fullmatch(name) is None:
        raise TierError(
            f"name={name!r}: want <namespace, hex>/<group>/c.<high>.<low>.0.0.0.0 or <...>/{METADATA}"
        )


class Folder:
    """Files below `root`, which need not exist before the first write. Thread-safe and process-safe.

    Args:
        root: a folder, absolute or relative to the current one.
        fsync: whether a write returns only when the file and its name would survive a power failure.
    """

    def __init__(self, root: str, fsync: bool = False) -> None:
        self.root = os.path.abspath(root)
        self._fsync = fsync

    def size(self, name: str) -> int | None:
        """Bytes of the file, None if it is missing."""
        try:
            status = os.stat(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, buffer: memoryview) -> int:
        """Read the file into `buffer`; returns its bytes. Mutates `buffer`.

        Raises:
            FileNotFoundError: it is missing.
            DamagedObject: it is larger than the buffer.
        """
        file = os.open(self._path(name), os.O_RDONLY)
        try:
            size = os.fstat(file).st_size
            if size > len(buffer):
                raise DamagedObject(
                    f"{name}: {size} bytes do not fit the slot's {len(buffer)}", Damage.OVERSIZE
                )
            done = 0
            while done < size:
                count = os.preadv(file, [buffer[done:size]], done)
                if count == 0:  # cut short meanwhile: the record's own checks find that
                    break
                done += count
            return done
        finally:
            os.close(file)

    def write(self, name: str, data: memoryview) -> None:
        """Make the file, complete at once; done already if it exists.

        Raises:
            OSError: it could not be written, and nothing is left behind.
        """
        path = self._path(name)
        if self.size(name) is not None:
            return
        folder = os.path.dirname(path)
        file, temporary = _create(folder)
        try:
            _write_all(file, data)
            if self._fsync:
                os.fsync(file)
            else:
                # NFS sends what it buffered, and tells of a full disk, when a descriptor is closed: close one
                # before the name is there for all to see, and keep the lock through the other
                os.close(os.dup(file))
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(file)
        if self._fsync:
            _sync_folder(folder)

    def delete(self, name: str) -> None:
        """Remove the file; missing is fine."""
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path(name))

    def scan(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every record, oldest first."""
        found = []
        for name, entry in self._entries():
            if is_record(name):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    status = entry.stat()
                    found.append((status.st_mtime_ns, name, status.st_size))
        found.sort()
        for _, name, size in found:
            yield name, size

    def clean(self) -> None:
        """Remove the temporary files of writers that were killed. Those of live writers stay."""
        for _, entry in self._entries():
            if entry.name.startswith(TEMPORARY):
                _remove_if_dead(entry.path)

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self.root}/{name}"

    def _entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """(path below the root, entry) of every file in an array's folder."""
        for space in _folders(self.root, _SPACE):
            for group in _folders(space.path, _GROUP):
                for entry in _list(group.path):
                    if entry.is_file():
                        yield f"{space.name}/{group.name}/{entry.name}", entry


def _folders(folder: str, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _list(folder) if pattern.fullmatch(entry.name) and entry.is_dir())


def _list(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be listed: %s", folder, error)


def _create(folder: str) -> tuple[int, str]:
    """A new temporary file in `folder`, open for writing and locked, and its path."""
    while True:
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            continue
        # without locks the writer is safe all the same: cleaners cannot lock the file either, and leave it
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink > 0:
            return file, temporary
        os.close(file)  # a cleaner came between opening and locking, and took it for a dead writer's


def _write_all(file: int, data: memoryview) -> None:
    """Write `data`: whole pages past the page cache if file system and memory allow it, else through."""
    pages = len(data) - len(data) % ALIGN
    for part, flags in ((data[:pages], os.O_DIRECT), (data[pages:], 0)):
        # not given to open: a file system that refuses it there makes the file all the same
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        while part:
            try:
                part = part[os.write(file, part) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not flags:
                    raise
                flags = 0
                fcntl.fcntl(file, fcntl.F_SETFL, flags)


def _remove_if_dead(path: str) -> None:
    with suppress(OSError):  # locked, gone by itself, read-only, or on a file system without locks
        file = os.open(path, os.O_WRONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(file)


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
