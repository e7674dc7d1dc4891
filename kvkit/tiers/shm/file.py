"""The file of a pool in /dev/shm: access rights, layout, and locks that end with their holder's process.

    [head, a page][columns: log, held, names, used, last, pins, parents][zeros to 2 MiB][slots]

A column has an entry for each slot. `held` is 0 for an empty slot, else 1 + the record's priority. `parents`
is 0 without a parent, else 1 + the slot of the parent record. Locks are on single bytes and belong to open
file descriptions: the byte at a slot's number for that slot, `_MUTEX` for all memory outside the slots, and
`_USERS`, shared by all processes that have mapped the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkit.staging import PAGE_BYTES, keep_from_forks, map_shared
from kvkit.tiers.base import TierError

log = logging.getLogger(__name__)

_MAGIC = int.from_bytes(b"KVKITSH3", "little")
"""Mark that the creator writes last. The digit is the version."""
_HEAD = np.dtype([(name, "<u8") for name in ("magic", "slot_bytes", "capacity_bytes", "clock", "changes")])
_COLUMNS = [np.dtype(kind) for kind in ("<u4", "u1", "S112", "<u8", "<u8", "<f8", "<u4")]
_MUTEX = 1 << 40
_USERS = _MUTEX + 1
_HUGE_PAGE = 2 << 20
_CREATION_TIMEOUT_S = 120.0
_RETRY_DELAYS_S = 20e-6, 1e-3
"""First and longest delay between two attempts to lock the mutex, in seconds."""
_OPEN_ATTEMPTS = 4
_FULL_SHARE = 0.9
"""Share of a file system's memory in use above which its pools log a warning."""
_BLOCK_BYTES = 512
"""Bytes per block in `st_blocks`."""
_NAME = re.compile(r"shm://([A-Za-z0-9._-]{1,64})")


class PoolRemoved(TierError):
    """The file of a pool was removed: opening its path now gives another pool."""


def pool_path(url: str) -> str:
    """Return the path of this user's pool at `url`.

    Raises:
        ValueError: `url` is not shm://<name>.
    """
    match = _NAME.fullmatch(url)
    if match is None:
        raise ValueError(f"url={url!r}: want shm://<name>, of 1 to 64 letters, digits, '.', '_' and '-'")
    return f"/dev/shm/kvkit-{os.geteuid()}-{match[1]}"


def capacity_at(path: str) -> int:
    """Return the bytes of all slots of the pool at `path`, from its head.

    Raises:
        OSError: there is no pool, or it is incomplete.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD.itemsize).ljust(_HEAD.itemsize, b"\0")
    fields = np.frombuffer(head, _HEAD)[0]
    if fields["magic"] != _MAGIC:
        raise _incomplete(path)
    return int(fields["capacity_bytes"])


class PoolFile:
    """The mapped file of a pool, created if it is missing. A forked process gets neither memory nor locks.

    Logs a warning if the file system is nearly full.

    Args:
        path: path of the file.
        slot_bytes: bytes of a slot, whole pages; the slots of an existing file may be larger.
        capacity_bytes: bytes of all slots.

    Attributes:
        slot_bytes, slots: values of the file.
        clock, changes: uint64 [1], counters of the pool.
        log, held, names, used, last, pins, parents: columns [slots]: uint32, uint8, bytes, uint64, uint64,
            float64, uint32.
        records: memory of the slots.

    Raises:
        ValueError: the file has another capacity, or smaller slots.
        OSError: the file has another owner, is open to other users, or is damaged; or memory is short.
    """

    def __init__(self, path: str, slot_bytes: int, capacity_bytes: int) -> None:
        self.path = path
        self._file: int | None = None
        # a fork that outlives this process would keep its locks
        os.register_at_fork(after_in_child=partial(_close_in_fork, weakref.ref(self)))
        try:
            self._file = self._open()
            head = os.pread(self._file, _HEAD.itemsize, 0).ljust(_HEAD.itemsize, b"\0")
            fields = np.frombuffer(head, _HEAD)[0]
            if fields["magic"]:
                _check_pool(path, self._file, fields, slot_bytes, capacity_bytes)
                slot_bytes = int(fields["slot_bytes"])
                _fill_holes(path, self._file)
            elif self._lock(fcntl.F_WRLCK, _USERS):  # new, or its creator died
                _create_pool(path, self._file, slot_bytes, capacity_bytes)
            else:  # damaged and in use: recreating it would crash the processes that have it mapped
                raise _incomplete(path)
            self._lock(fcntl.F_RDLCK, _USERS)
            self._map(slot_bytes, capacity_bytes // slot_bytes)
            self.unlock_mutex()
            _warn_if_full(path, self._file)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Check that the file is still at its path.

        Raises:
            PoolRemoved: it is not.
        """
        if not self._is_at_path():
            raise PoolRemoved(f"the pool {self.path} was removed")

    def lock(self, slot: int, *, shared: bool) -> bool:
        """Lock the byte of a slot without waiting; return False if another open file has it locked."""
        return self._lock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, slot)

    def unlock(self, slot: int) -> None:
        """Unlock the byte of a slot."""
        self._lock(fcntl.F_UNLCK, slot)

    def lock_mutex(self, timeout_s: float) -> None:
        """Lock the mutex against other processes; callers exclude their own threads by another lock.

        Raises:
            TierError: another process held the mutex for `timeout_s`.
        """
        pause, longest = _RETRY_DELAYS_S
        until = time.monotonic() + timeout_s
        while not self._lock(fcntl.F_WRLCK, _MUTEX):
            if time.monotonic() > until:
                raise TierError(f"{self.path}: another process has had it locked for {timeout_s} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def unlock_mutex(self) -> None:
        """Unlock the mutex."""
        self._lock(fcntl.F_UNLCK, _MUTEX)

    def close(self) -> None:
        """Close the file and release all locks. The memory stays mapped until its last array is gone."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self) -> int:
        """Open or create the file and lock the mutex; return its descriptor."""
        for _ in range(_OPEN_ATTEMPTS):
            file = self._file = _open_file(self.path)
            self._opened = os.fstat(file)
            self.lock_mutex(_CREATION_TIMEOUT_S)
            if self._is_at_path():
                return file
            self.close()  # removed meanwhile
        raise _unstable(self.path)

    def _is_at_path(self) -> bool:
        """Return whether the file is still at its path; True if that is unknown."""
        try:
            return os.path.samestat(self._opened, os.lstat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _lock(self, kind: int, byte: int) -> bool:
        """Lock or unlock a byte without waiting; return False if another open file has it locked."""
        if self._file is None:
            raise TierError(f"{self.path} is closed")
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _map(self, slot_bytes: int, slots: int) -> None:
        """Map the file and set the attributes that view its memory."""
        self.slot_bytes, self.slots = slot_bytes, slots
        head = _head_bytes(slots)
        # a mapping keeps a duplicate of its descriptor: a duplicate of `_file` would keep the locks
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, head)
            self.records = map_shared(file, slots * slot_bytes, offset=head)
        finally:
            os.close(file)
        keep_from_forks(memory)
        keep_from_forks(self.records)
        fields = np.frombuffer(memory, _HEAD, 1)
        self.clock, self.changes = fields["clock"], fields["changes"]
        columns: list[npt.NDArray[Any]] = []
        offset = PAGE_BYTES
        for kind in _COLUMNS:
            columns.append(np.frombuffer(memory, kind, slots, offset))
            offset += _column_bytes(kind, slots)
        self.log, self.held, self.names, self.used, self.last, self.pins, self.parents = columns


def _open_file(path: str) -> int:
    """Open the file, creating it if it is missing; return its descriptor.

    Raises:
        OSError: it is a link or not a file, has another owner, or is open to other users.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    for _ in range(_OPEN_ATTEMPTS):
        # no O_CREAT for an existing file: with it, the kernel would refuse another user's file with no reason
        with suppress(FileNotFoundError):
            file = os.open(path, flags)
            break
        with suppress(FileExistsError):
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(file, 0o600)  # whatever the umask
            break
    else:
        raise _unstable(path)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(file)
        raise PermissionError(
            errno.EPERM,
            f"of user {status.st_uid}, mode {stat.filemode(status.st_mode)}: want a file of user "
            f"{os.geteuid()} that no other user may open",
            path,
        )
    return file


def _unstable(path: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, "other processes keep creating and removing it", path)


def _check_pool(path: str, file: int, fields: Any, slot_bytes: int, capacity_bytes: int) -> None:
    """Check that an existing pool is intact and fits the settings.

    Raises:
        ValueError: the pool has another capacity, or smaller slots.
        OSError: the pool is damaged.
    """
    capacity, slot = int(fields["capacity_bytes"]), int(fields["slot_bytes"])
    valid = fields["magic"] == _MAGIC and slot > 0 and not slot % PAGE_BYTES
    if not valid or os.fstat(file).st_size != _head_bytes(capacity // slot) + capacity // slot * slot:
        raise _incomplete(path)
    if capacity != capacity_bytes:
        raise ValueError(
            f"capacity={capacity_bytes}: the pool in {path} has {capacity} bytes; want the same capacity, "
            "another name, or the file removed"
        )
    if slot < slot_bytes:
        raise ValueError(
            f"url: the pool in {path} is for records of up to {slot} bytes, and this cache's have "
            f"{slot_bytes}; want another name, or the file removed"
        )


def _incomplete(path: str) -> OSError:
    return OSError(errno.EBADMSG, "it is not a complete pool of this version; remove it", path)


def _create_pool(path: str, file: int, slot_bytes: int, capacity_bytes: int) -> None:
    """Allocate all memory of the file and write its head.

    Raises:
        OSError: there is not enough memory; none stays allocated.
    """
    slots = capacity_bytes // slot_bytes
    os.ftruncate(file, 0)
    try:
        os.posix_fallocate(file, 0, _head_bytes(slots) + slots * slot_bytes)
    except OSError as error:
        raise OSError(error.errno, f"{capacity_bytes} bytes: {error.strerror}", path) from error
    os.pwrite(file, struct.pack("<QQQ", 0, slot_bytes, capacity_bytes), 0)
    os.pwrite(file, struct.pack("<Q", _MAGIC), 0)


def _fill_holes(path: str, file: int) -> None:
    """Allocate the file's missing memory: access to a hole is fatal to a process if memory is short.

    Raises:
        OSError: there is not enough memory.
    """
    status = os.fstat(file)
    missing = status.st_size - _BLOCK_BYTES * status.st_blocks
    if missing > 0:
        try:
            os.posix_fallocate(file, 0, status.st_size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{missing} bytes of the pool have lost their memory, and too little is free to replace it: "
                f"{error.strerror}; remove the pool, or other files in its file system",
                path,
            ) from error


def _warn_if_full(path: str, file: int) -> None:
    status = os.fstatvfs(file)
    if status.f_bavail < (1 - _FULL_SHARE) * status.f_blocks:
        log.warning(
            "pool %s: its file system has %d of %d MiB left; when it is full, other processes that share "
            "memory there crash with SIGBUS: set a smaller capacity, or remount it with a larger size",
            path,
            status.f_bavail * status.f_frsize >> 20,
            status.f_blocks * status.f_frsize >> 20,
        )


def _head_bytes(slots: int) -> int:
    """Return the bytes of the head and the columns, padded to whole huge pages."""
    size = PAGE_BYTES + sum(_column_bytes(kind, slots) for kind in _COLUMNS)
    return -(-size // _HUGE_PAGE) * _HUGE_PAGE


def _column_bytes(kind: np.dtype[Any], slots: int) -> int:
    return -(-kind.itemsize * slots // 8) * 8


def _close_in_fork(reference: weakref.ref[PoolFile]) -> None:
    """Close the file in a forked process, which must not keep the locks."""
    file = reference()
    if file is not None:
        file.close()
