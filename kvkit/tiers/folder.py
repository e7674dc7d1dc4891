"""Objects as files below a local or network folder, written once and renamed into place.

A file is written under a temporary name in its final folder and renamed when it is complete, so a record is
either complete or missing. The writer holds a lock that its death releases, so `Folder.clean` can distinguish
files left by killed writers from those still being written.

Writes bypass the page cache if the file system permits O_DIRECT: this takes a fraction of the time and CPU,
and keeps other files in the cache. Reads use the cache: warm reads are much faster, cold ones no slower.
benchmarks/micro/bench_files.py measures both choices.

KV reveals its prompts: only the owner may access files and folders, whatever the umask, unless `Access` lets
others share the store.

Anyone with write access to a store can put anything under a record's name. Symbolic links, pipes, sockets and
folders are neither read nor waited for, and the next write of the record replaces them.

An NFS client caches for up to a minute that a name is missing, even if another client creates it meanwhile;
`Folder` asks the server before it reports a name as missing. tests/nfs proves it on a real mount.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from kvkit.format.names import GROUP, METADATA, RECORD, SPACE, is_record
from kvkit.format.record import ALIGN, Damage
from kvkit.tiers.base import DamagedObject, Ranges, TierError, UnreadableObject, cut_short, too_large

log = logging.getLogger(__name__)
T = TypeVar("T")

Access = Literal["user", "group", "all"]
"""Users of the host, or of an NFS server, who may read and write a store."""

TEMPORARY = ".tmp-"
ASIDE = ".aside-"
"""Prefix of the new name of a non-empty folder that had a record's name."""
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
_FILE_MODES: dict[Access, int] = {"user": 0o600, "group": 0o660, "all": 0o666}
_FOLDER_MODES: dict[Access, int] = {"user": 0o700, "group": 0o2770, "all": 0o777}
"""Setgid for "group", so that all files that a member creates belong to the group."""
_SPACE, _GROUP = re.compile(SPACE), re.compile(GROUP)
"""Names of the two levels of folders between the root and the records."""
_OBJECT = re.compile(rf"{RECORD}|{SPACE}/{GROUP}/{re.escape(METADATA)}")
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors for a missing file; ESTALE: another NFS client removed it."""
_WHOLE_FILE = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_DENIED = (errno.EACCES, errno.EPERM)
_BAD_SECTORS = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""Errors for unreadable disk sectors; the last two are checksum mismatches in the file system."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
"""O_NONBLOCK, as opening a pipe without it blocks until another process opens the other end."""
_ESCAPE = re.compile(r"\\([0-7]{3})")
"""Octal escapes in paths of /proc, such as that of a blank."""
_WRITE_ATTEMPTS = 4
"""Maximum attempts of a write: rarely, a cleaner takes its temporary file for a dead writer's."""


def check_name(name: str) -> None:
    """Check that a name is that of a record or of an array's metadata, so that it stays below the root.

    Raises:
        TierError: it is neither.
    """
    if _OBJECT.fullmatch(name) is None:
        raise TierError(
            f"name={name!r}: want <namespace, hex>/<group>/c.<high>.<low>.<layers>.<heads>.0.0 or "
            f"<...>/{METADATA}"
        )


class Folder:
    """An `ObjectStore` of files below `root`. Thread-safe and process-safe.

    Args:
        root: folder, absolute or relative to the current one; the first write creates it if it is missing.
        fsync: True to return from a write only when the file and its name would survive a power failure.
        access: users who may read and write the files and folders that a write creates, the root included.
            Existing ones keep their modes.
    """

    def __init__(self, root: str, fsync: bool = False, access: Access = "user") -> None:
        self.root = os.path.abspath(root)
        self._fsync = fsync
        self._access: Access = access
        self._synced: set[str] = set()  # folders whose names survive a power failure
        self._nfs = file_system(self.root) in ("nfs", "nfs4")

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            with self._translate_errors(name):
                status = self._call_past_cache(path, os.lstat)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, buffer: memoryview) -> int:
        with self._opened(name) as file:
            size = os.fstat(file).st_size
            if size > len(buffer):
                raise too_large(name, size, len(buffer))
            # if truncated meanwhile, the record's checksums show it
            return self._read_bytes(file, buffer[:size], 0)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        with self._opened(name) as file:
            for (offset, size), buffer in zip(ranges, buffers, strict=True):
                count = self._read_bytes(file, buffer[:size], offset)
                if count < size:
                    raise cut_short(name, count, offset, size)

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        with suppress(DamagedObject):  # a file that cannot be inspected may still be replaced
            if self.size(name) is not None:
                return
        for attempt in range(_WRITE_ATTEMPTS):
            try:
                with _add_name(name):
                    self._write(path, data)
                return
            except FileNotFoundError:
                if attempt == _WRITE_ATTEMPTS - 1:
                    raise

    def _write(self, path: str, data: memoryview) -> None:
        folder = os.path.dirname(path)
        file, temporary = self._create_temporary(folder)
        try:
            try:
                self._write_bytes(file, data)
                if self._fsync:
                    os.fsync(file)
                else:
                    # NFS flushes its buffer, and reports a full disk, when a descriptor is closed: close one
                    # before the rename makes the file visible, and keep the lock through the other
                    os.close(os.dup(file))
                try:
                    os.rename(temporary, path)
                except IsADirectoryError:
                    _remove_folder(path)
                    os.rename(temporary, path)
            finally:
                os.close(file)
        except BaseException:
            # after the close, as in _remove_if_dead
            with suppress(OSError):
                os.unlink(temporary)
            raise
        if self._fsync:
            _sync_folder(folder)
            if folder not in self._synced:
                self._sync_names(folder)
                self._synced.add(folder)

    def _read_bytes(self, file: int, buffer: memoryview, offset: int) -> int:
        """Read from `offset` until the buffer is full or the file ends; return the number of bytes."""
        return _read_at(file, buffer, offset)

    def _write_bytes(self, file: int, data: memoryview) -> None:
        """Write a new file."""
        _write_all(file, data)

    def _sync_names(self, folder: str) -> None:
        """Sync the name of `folder` and of every folder above it on its file system."""
        while folder != self.root:
            folder = os.path.dirname(folder)
            _sync_folder(folder)
        device, above = os.stat(folder).st_dev, os.path.dirname(folder)
        while above != folder and os.stat(above).st_dev == device:
            with suppress(PermissionError):  # folders above the root may be unreadable
                _sync_folder(above)
            folder, above = above, os.path.dirname(above)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            try:
                self._call_past_cache(path, os.unlink)
            except OSError:
                if not stat.S_ISDIR(_mode(path)):
                    raise
                _remove_folder(path)

    def scan(self) -> Iterator[tuple[str, int]]:
        records = []
        for space in _folders(self.root, _SPACE):
            for group in _folders(space.path, _GROUP):
                for entry in _entries(group.path):
                    name = f"{space.name}/{group.name}/{entry.name}"
                    if not is_record(name):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError as error:
                        _warn_unlisted(error)
                        continue
                    if stat.S_ISREG(status.st_mode):
                        records.append((status.st_mtime_ns, name, status.st_size))
        for _, name, size in sorted(records):
            yield name, size

    def clean(self) -> None:
        """Remove the temporary files of killed writers, keeping those of live ones.

        The walk uses descriptors and follows no symbolic link, so nothing outside the root is removed.
        """
        root = os.path.realpath(self.root)
        try:
            for path, folders, names, folder in os.fwalk(root, onerror=_warn_unlisted):
                depth = len(Path(path).relative_to(root).parts)
                if depth < 2:
                    folders[:] = filter((_SPACE, _GROUP)[depth].fullmatch, folders)
                    continue
                folders.clear()
                for name in filter(_TEMPORARY_NAME.fullmatch, names):
                    _remove_if_dead(name, folder)
        except OSError as error:
            _warn_unlisted(error)

    def too_open_namespaces(self) -> list[str]:
        """Return the names of namespaces that are open to more users than `access` permits."""
        forbidden = 0o777 & ~_FOLDER_MODES[self._access]
        if not forbidden & _mode(self.root, os.stat):
            return []
        return [
            space.name
            for space in _folders(self.root, _SPACE)
            if forbidden & _mode(space.path, os.stat)
            and any(forbidden & _mode(group.path, os.stat) for group in _folders(space.path, _GROUP))
        ]

    def _create_temporary(self, folder: str) -> tuple[int, str]:
        """Create a temporary file in `folder`; return its descriptor, locked and writable, and its path.

        Raises:
            FileNotFoundError: a cleaner took the file for a dead writer's before it was locked.
        """
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODES[self._access]
        try:
            file = os.open(temporary, flags, mode)
        except FileNotFoundError:
            self._make_folder(folder)
            file = os.open(temporary, flags, mode)
        try:
            if stat.S_IMODE(os.fstat(file).st_mode) != mode:  # the umask removed permissions
                with suppress(PermissionError):  # the file system imposes its own modes
                    os.fchmod(file, mode)
            if _lock_own(file):
                return file, temporary
            raise FileNotFoundError(errno.ENOENT, "a cleaner took it for a dead writer's file", temporary)
        except BaseException:
            os.close(file)
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_folder(self, folder: str) -> None:
        """Create `folder`, which is the root or below it, and its missing parents."""
        if folder == self.root:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        elif not os.path.isdir(os.path.dirname(folder)):
            self._make_folder(os.path.dirname(folder))
        mode = _FOLDER_MODES[self._access]
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        else:
            with suppress(PermissionError):  # as in _create_temporary
                os.chmod(folder, mode)

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self.root}/{name}"

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open the file and yield a descriptor to read it.

        Raises:
            FileNotFoundError: the file is missing.
            DamagedObject: it is not a regular file, or cannot be read.
        """
        path = self._path(name)
        with self._translate_errors(name), _add_name(name):
            file = self._call_past_cache(path, lambda path: os.open(path, _READ))
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise _foreign_object(name)
                yield file
            finally:
                os.close(file)

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Raise DamagedObject for errors of one record; errors of the whole folder stay as they are.

        Raises:
            DamagedObject: the record is at fault.
            UnreadableObject: the record or the folder is at fault.
        """
        try:
            yield
        except (TierError, FileNotFoundError):
            raise
        except OSError as error:
            message = f"{error.strerror}: {name!r}"
            if error.errno in _BAD_SECTORS:
                raise UnreadableObject(message, name) from error
            if error.errno in _DENIED and _mode(f"{self.root}/."):  # the root itself is accessible
                raise DamagedObject(message, Damage.UNREADABLE) from error
            if (mode := _mode(f"{self.root}/{name}")) and not stat.S_ISREG(mode):
                raise _foreign_object(name) from error
            raise

    def _call_past_cache(self, path: str, call: Callable[[str], T]) -> T:
        """Return call(path); if the file seems missing on NFS, call again with the client's cache renewed.

        Raises:
            FileNotFoundError: the file is missing, or was removed meanwhile.
        """
        if self._nfs:
            try:
                return call(path)
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
            _renew_nfs_cache(os.path.dirname(path))
        try:
            return call(path)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ESTALE):
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error


def file_system(path: str) -> str:
    """Return the type of the file system of `path`, existing or not, as in /proc/mounts; "" if unknown."""
    os.path.exists(path)  # triggers automounts
    path = os.path.realpath(path)
    longest, kind = "", ""
    try:
        with open("/proc/self/mountinfo") as mounts:
            for mount in mounts:
                fields = mount.split()
                point = _ESCAPE.sub(lambda code: chr(int(code[1], 8)), fields[4])
                is_inside = point == "/" or path == point or path.startswith(f"{point}/")
                if is_inside and len(point) >= len(longest):
                    longest, kind = point, fields[fields.index("-") + 1]
    except OSError as error:
        log.warning("%s: cannot determine its file system, assuming a local one: %s", path, error)
    return kind


def _renew_nfs_cache(folder: str) -> None:
    """Make the NFS client ask the server for changes of `folder`, so that it drops cached missing names.

    Opening a folder does that with one request (close-to-open consistency). If the folder itself seems
    missing, that may be cached too, so its parents are opened.
    """
    while True:
        try:
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            return
        except OSError as error:
            if error.errno not in _MISSING or folder == os.path.dirname(folder):
                return
        folder = os.path.dirname(folder)


@contextmanager
def _add_name(name: str) -> Iterator[None]:
    """Add the file's name to errors of calls on descriptors, which lack it.

    Raises:
        FileNotFoundError: another NFS client removed the file while this one held it.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, name) from error


def _folders(folder: str, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the folders in `folder` whose names match a pattern."""
    for entry in _entries(folder):
        try:
            if pattern.fullmatch(entry.name) and entry.is_dir():
                yield entry
        except OSError as error:  # a link to itself
            _warn_unlisted(error, entry.path)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; if it cannot be listed, log a warning."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        _warn_unlisted(error, folder)


def _warn_unlisted(error: OSError, folder: str | None = None) -> None:
    if not isinstance(error, FileNotFoundError):
        log.warning("%s cannot be listed: %s", folder or error.filename, error)


def _foreign_object(name: str) -> DamagedObject:
    return DamagedObject(f"{name}: not a regular file; something else has this name", Damage.FOREIGN)


def _remove_folder(path: str) -> None:
    """Remove a folder that has a record's name; rename it if it is not empty, to keep its files."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        aside = f"{os.path.dirname(path)}/{ASIDE}{secrets.token_hex(8)}"
        os.rename(path, aside)
        log.warning("%s: a folder had a record's name; renamed it to %s", path, aside)


def _mode(path: str, inspect: Callable[[str], os.stat_result] = os.lstat) -> int:
    """Return the mode (type and permissions) of `path`; 0 if it is missing or cannot be inspected."""
    try:
        return inspect(path).st_mode
    except OSError:
        return 0


def _lock_own(file: int) -> bool:
    """Lock a file that this writer created, without waiting; return False if a cleaner was faster."""
    try:
        _lock(file)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks: cleaners cannot lock the file either, and leave it
    return os.fstat(file).st_nlink > 0


def _lock(file: int) -> None:
    """Lock the file until it is closed, without waiting.

    The lock is one of the open file description, not flock: NFS servers turn both into record locks, and only
    the former also conflicts with locks of processes on the server's own machine.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file system has no locks, or the file is gone.
    """
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)


def _read_at(file: int, buffer: memoryview, offset: int) -> int:
    """Read from `offset` until the buffer is full or the file ends; return the number of bytes."""
    done = 0
    while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], offset + done)):
        done += count
    return done


def _write_all(file: int, data: memoryview) -> None:
    """Write `data`, whole pages with O_DIRECT if the file system and the memory permit it."""
    pages = len(data) - len(data) % ALIGN
    for remaining, flags in ((data[:pages], os.O_DIRECT), (data[pages:], 0)):
        # not given to open: a file system that refuses O_DIRECT there creates the file nonetheless
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        while remaining:
            try:
                remaining = remaining[os.write(file, remaining) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not flags:
                    raise
                flags = 0
                fcntl.fcntl(file, fcntl.F_SETFL, flags)


def _remove_if_dead(name: str, folder: int) -> None:
    """Remove the file `name` in the folder with descriptor `folder`, unless a writer has it locked."""
    with suppress(OSError):  # locked, removed meanwhile, not a file, read-only, or no locks there
        file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return
            _lock(file)
        finally:
            os.close(file)
        # after the close: an NFS client renames a file that is still open and removes it later; a writer that
        # locks the file in between starts over
        os.unlink(name, dir_fd=folder)


def _sync_folder(folder: str) -> None:
    """Make the names in a folder survive a power failure."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
