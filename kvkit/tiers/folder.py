"""Objects as files below a local or network folder, with bare system calls: written once, renamed into place.

A file is written under a temporary name in its own folder, under a lock that its writer's death lifts, and
renamed when it is complete. So a record is whole or not there, and `Folder.clean` can tell what a killed
writer left from what another process is just writing.

Writes go past the page cache where the file system lets them (O_DIRECT): they take a fraction of the time and
of the processor, and leave the cache to others. Reads go through it: warm ones are much faster, cold ones no
slower. benchmarks/bench_files.py measures both choices.

KV tells what was said: files and folders are for their owner alone, whatever the umask, unless `Access` says
that others share the store.

Whoever can write to a store can put anything in a record's place. What is no regular file is not read, nor
waited for, and makes way for the record: a symbolic link, a pipe, a socket, a folder.

An NFS client remembers for up to a minute that a name is not there, whatever other clients create; `Folder`
asks the server before it believes that. tests/nfs proves it on a real mount.
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
"""Which users of the host, or of an NFS server, may read and write a store."""

TEMPORARY = ".tmp-"
ASIDE = ".aside-"
"""What a folder that lay in a record's place, and is not empty, is called from then on."""
_LEFT = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
_FILE_MODES: dict[Access, int] = {"user": 0o600, "group": 0o660, "all": 0o666}
_FOLDER_MODES: dict[Access, int] = {"user": 0o700, "group": 0o2770, "all": 0o777}
"""Of a group with setgid, so that what any member makes is the group's."""
_SPACE, _GROUP = re.compile(SPACE), re.compile(GROUP)
_LEVELS = (_SPACE, _GROUP)
"""Names of the folders above those with records."""
_OBJECT = re.compile(rf"{RECORD}|{SPACE}/{GROUP}/{re.escape(METADATA)}")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""A file is not there, or not any more: ESTALE, another NFS client removed it."""
_WHOLE_FILE = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_DENIED = (errno.EACCES, errno.EPERM)
_BAD_SECTORS = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""What a disk says of what it cannot read: in the last two, that checksums of the file system differ."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
"""Without O_NONBLOCK a pipe is opened when somebody opens its other end, and so never."""
_ESCAPE = re.compile(r"\\([0-7]{3})")
"""How /proc writes a blank in a path."""
_TRIES = 4
"""How often a write starts over when a cleaner takes its file for a dead writer's, which is rare already."""


def check_name(name: str) -> None:
    """Refuse whatever is neither a record nor an array's metadata, and so every name that leaves the root.

    Raises:
        TierError: it is neither.
    """
    if _OBJECT.fullmatch(name) is None:
        raise TierError(
            f"name={name!r}: want <namespace, hex>/<group>/c.<high>.<low>.<layers>.<heads>.0.0 or "
            f"<...>/{METADATA}"
        )


class Folder:
    """Files below `root`, which need not exist before the first write, as an `ObjectStore`.

    Thread-safe and process-safe.

    Args:
        root: a folder, absolute or relative to the current one.
        fsync: whether a write returns only when the file and its name would survive a power failure.
        access: who may read and write what this makes: the root, if it is missing, and all below it. What is
            there already keeps its mode.
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
            with self._blaming(name):
                status = self._find(path, os.lstat)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, buffer: memoryview) -> int:
        with self._opened(name) as file:
            size = os.fstat(file).st_size
            if size > len(buffer):
                raise too_large(name, size, len(buffer))
            return _read_at(file, buffer[:size], 0)  # cut short meanwhile: the record's own checks find that

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        with self._opened(name) as file:
            for (offset, size), buffer in zip(ranges, buffers, strict=True):
                count = _read_at(file, buffer[:size], offset)
                if count < size:
                    raise cut_short(name, count, offset, size)

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        with suppress(DamagedObject):  # what cannot be looked at may be replaced all the same
            if self.size(name) is not None:
                return
        for attempt in range(_TRIES):
            try:
                with _naming(name):
                    self._write(path, data)
                return
            except FileNotFoundError:
                if attempt == _TRIES - 1:
                    raise

    def _write(self, path: str, data: memoryview) -> None:
        folder = os.path.dirname(path)
        file, temporary = self._create(folder)
        try:
            try:
                _write_all(file, data)
                if self._fsync:
                    os.fsync(file)
                else:
                    # NFS sends what it buffered, and tells of a full disk, when a descriptor is closed: close
                    # one before the name is there for all to see, and keep the lock through the other
                    os.close(os.dup(file))
                try:
                    os.rename(temporary, path)
                except IsADirectoryError:
                    _clear_away(path)
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

    def _sync_names(self, folder: str) -> None:
        """Sync the name of `folder`, and those of all above it on its file system, whoever made them."""
        while folder != self.root:
            folder = os.path.dirname(folder)
            _sync_folder(folder)
        device, above = os.stat(folder).st_dev, os.path.dirname(folder)
        while above != folder and os.stat(above).st_dev == device:
            with suppress(PermissionError):  # what lies above the root may be nobody's to read
                _sync_folder(above)
            folder, above = above, os.path.dirname(above)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            try:
                self._find(path, os.unlink)
            except OSError:
                if not stat.S_ISDIR(_mode(path)):
                    raise
                _clear_away(path)

    def scan(self) -> Iterator[tuple[str, int]]:
        found = []
        for space in _folders(self.root, _SPACE):
            for group in _folders(space.path, _GROUP):
                for entry in _list(group.path):
                    name = f"{space.name}/{group.name}/{entry.name}"
                    if not is_record(name):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError as error:
                        _unlisted(error)
                        continue
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime_ns, name, status.st_size))
        found.sort()
        for _, name, size in found:
            yield name, size

    def clean(self) -> None:
        """Remove the temporary files of writers that were killed. Those of live writers stay.

        It goes down by descriptors, never through a symbolic link: nothing outside the root is touched.
        """
        root = os.path.realpath(self.root)
        try:
            for path, folders, names, folder in os.fwalk(root, onerror=_unlisted):
                depth = len(Path(path).relative_to(root).parts)
                if depth < len(_LEVELS):
                    folders[:] = filter(_LEVELS[depth].fullmatch, folders)
                    continue
                folders.clear()
                for name in filter(_LEFT.fullmatch, names):
                    _remove_if_dead(name, folder)
        except OSError as error:
            _unlisted(error)

    def opened_wider(self) -> list[str]:
        """Names of the namespaces here that more users can get into than `access` says: others made them."""
        wide = 0o777 & ~_FOLDER_MODES[self._access]
        if not wide & _mode(self.root, os.stat):
            return []
        return [
            space.name
            for space in _folders(self.root, _SPACE)
            if wide & _mode(space.path, os.stat)
            and any(wide & _mode(group.path, os.stat) for group in _folders(space.path, _GROUP))
        ]

    def _create(self, folder: str) -> tuple[int, str]:
        """A new temporary file in `folder`, open for writing and locked, and its path.

        Raises:
            FileNotFoundError: a cleaner came between opening and locking, and took it for a dead writer's.
        """
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODES[self._access]
        try:
            file = os.open(temporary, flags, mode)
        except FileNotFoundError:
            self._make(folder)
            file = os.open(temporary, flags, mode)
        try:
            if stat.S_IMODE(os.fstat(file).st_mode) != mode:  # the umask took from it
                with suppress(PermissionError):  # a file system with modes of its own
                    os.fchmod(file, mode)
            if _is_mine(file):
                return file, temporary
            raise FileNotFoundError(errno.ENOENT, "taken for a dead writer's", temporary)
        except BaseException:
            os.close(file)
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _make(self, folder: str) -> None:
        """Make `folder`, which is in the root or is it, and what is missing above it."""
        if folder == self.root:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        elif not os.path.isdir(os.path.dirname(folder)):
            self._make(os.path.dirname(folder))
        mode = _FOLDER_MODES[self._access]
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        else:
            with suppress(PermissionError):  # as in _create
                os.chmod(folder, mode)

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self.root}/{name}"

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A descriptor to read the file.

        Raises:
            FileNotFoundError: it is missing.
            DamagedObject: it is no regular file, or cannot be read.
        """
        path = self._path(name)
        with self._blaming(name), _naming(name):
            file = self._find(path, lambda path: os.open(path, _READ))
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise _foreign(name)
                yield file
            finally:
                os.close(file)

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Tell the errors of what lies in the place of a record from those of the whole folder.

        Raises:
            DamagedObject: the record is to blame; or it alone may be, in its subclass.
        """
        try:
            yield
        except (TierError, FileNotFoundError):
            raise
        except OSError as error:
            what = f"{error.strerror}: {name!r}"
            if error.errno in _BAD_SECTORS:
                raise UnreadableObject(what, name) from error
            if error.errno in _DENIED and _mode(f"{self.root}/."):  # what lies below may be reached
                raise DamagedObject(what, Damage.UNREADABLE) from error
            if (mode := _mode(f"{self.root}/{name}")) and not stat.S_ISREG(mode):
                raise _foreign(name) from error
            raise

    def _find(self, path: str, call: Callable[[str], T]) -> T:
        """call(path), on NFS once more with fresh eyes if the file seems missing.

        Raises:
            FileNotFoundError: it is missing, or became so.
        """
        if self._nfs:
            try:
                return call(path)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            _look_again(os.path.dirname(path))
        try:
            return call(path)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ESTALE):
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error


def file_system(path: str) -> str:
    """The type of the file system that `path` is on, or would be, as in /proc/mounts; "" if unknown."""
    os.path.exists(path)  # mounts what is mounted on demand
    path = os.path.realpath(path)
    found, kind = "", ""
    try:
        with open("/proc/self/mountinfo") as mounts:
            for mount in mounts:
                fields = mount.split()
                point = _ESCAPE.sub(lambda code: chr(int(code[1], 8)), fields[4])
                inside = point == "/" or path == point or path.startswith(f"{point}/")
                if inside and len(point) >= len(found):
                    found, kind = point, fields[fields.index("-") + 1]
    except OSError as error:
        log.warning("%s: its file system is not known, taken for a local one: %s", path, error)
    return kind


def _look_again(folder: str) -> None:
    """Make the NFS client ask the server whether `folder` changed, so that it forgets names it holds missing.

    Opening a folder does that, for one request to the server: close-to-open consistency. A folder that is
    missing itself may be so in the client's memory alone: then it is up to the one above.
    """
    while True:
        try:
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            return
        except OSError as error:
            if error.errno not in _GONE or folder == os.path.dirname(folder):
                return
        folder = os.path.dirname(folder)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Give errors the name of the file, which calls on descriptors do not tell.

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
    for entry in _list(folder):
        try:
            if pattern.fullmatch(entry.name) and entry.is_dir():
                yield entry
        except OSError as error:  # a link to itself
            _unlisted(error, entry.path)


def _list(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        _unlisted(error, folder)


def _unlisted(error: OSError, folder: str | None = None) -> None:
    if not isinstance(error, FileNotFoundError):
        log.warning("%s cannot be listed: %s", folder or error.filename, error)


def _foreign(name: str) -> DamagedObject:
    return DamagedObject(f"{name}: something else than a file lies in its place", Damage.FOREIGN)


def _clear_away(path: str) -> None:
    """Remove the folder in a record's place; one that is not empty gets another name: it is somebody's."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        aside = f"{os.path.dirname(path)}/{ASIDE}{secrets.token_hex(8)}"
        os.rename(path, aside)
        log.warning("%s: a folder lay in a record's place; it is %s now", path, aside)


def _mode(path: str, look: Callable[[str], os.stat_result] = os.lstat) -> int:
    """The type and permissions of what is at `path`; 0 where that cannot be told."""
    try:
        return look(path).st_mode
    except OSError:
        return 0


def _is_mine(file: int) -> bool:
    """Lock a new file; False if a cleaner has it, or removed it already. Never waits."""
    try:
        _lock(file)
    except BlockingIOError:
        return False
    except OSError:
        pass  # without locks the writer is safe all the same: cleaners cannot lock the file, and leave it
    return os.fstat(file).st_nlink > 0


def _lock(file: int) -> None:
    """Lock the file until it is closed.

    With a lock of the open file description, not flock: NFS servers turn both into record locks, and only the
    former conflicts with those when processes on the server's own machine use the folder as well.

    Raises:
        BlockingIOError: another has it.
        OSError: there are no locks here, or the file is gone.
    """
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)


def _read_at(file: int, buffer: memoryview, offset: int) -> int:
    """Read from `offset` on until the buffer is full, or the file ends; returns the bytes."""
    done = 0
    while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], offset + done)):
        done += count
    return done


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


def _remove_if_dead(name: str, folder: int) -> None:
    """Remove the file `name` of the folder with that descriptor, unless a writer has it locked."""
    with suppress(OSError):  # locked, gone by itself, no file, read-only, or on a file system without locks
        file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return
            _lock(file)
        finally:
            os.close(file)
        # only now: an NFS client renames what is still open, and removes it some time after the close; a
        # writer that locks the file in between starts over
        os.unlink(name, dir_fd=folder)


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
