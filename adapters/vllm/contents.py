"""Digests of the contents of files, remembered while the file system reports that a file is unchanged."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvkit.environment import cache_folder

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Bytes that one thread reads at a time. Part of the digest's definition (see `digests`): never changes."""
READ_BYTES = 1 << 20
MAX_THREADS = 8
SETTLED_S = 2.0
"""The digest of a file that changed less than this before it was read is not remembered: file systems count
time in ticks, and the next change may have the same time."""
PROGRESS_S = 10.0
STALLED_S = 60.0
"""Timeout of the wait for another process that reads the same file, since its last progress: it may have been
stopped. The file is then read here, too."""
MAX_ENTRY_BYTES = 4096
REMEMBERED_BYTES = 1 << 20
"""Minimum size of files with remembered digests; smaller files are read again."""
PRUNED = 64
"""Entries checked when one is written; those of deleted or changed files are deleted."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file's state as reported by the file system. It changes when the file is written or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(file: Path | int) -> Stamp:
        """Return the stamp of a path or descriptor; symbolic links are followed.

        Raises:
            OSError: there is no such file, or it is not a regular file.
        """
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file} is not a regular file")
        return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """True if any later change will show in `ctime`, which programs cannot set, unlike `mtime`.

        A mounted image may have no `ctime` of its own: all its files have the same time in whole seconds, and
        files of the next image may have the same time and inode numbers.
        """
        of_an_image = self.ctime_ns == self.mtime_ns and not self.ctime_ns % 10**9
        return not of_an_image and time.time_ns() - self.ctime_ns > SETTLED_S * 1e9


def default_folder() -> Path | None:
    """Return the default folder, kvkit/digests in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    try:
        return cache_folder() / "digests"
    except FileNotFoundError:
        return None


def digests(files: Sequence[Path], folder: Path | None) -> list[str]:
    """Return the digest of each file's contents, in 64 hex digits: BLAKE3 of the digests of its pieces.

    Several threads read, and log their progress. If several processes of a user need a file's digest, one
    reads the file and the others wait.

    Args:
        folder: folder of remembered digests, a small file for each; None: none are remembered.

    Raises:
        OSError: a file cannot be read, is not a regular file, or is written to meanwhile.
    """
    progress = _Progress(sum(Stamp.of(file).size for file in files))
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [_digest(file, folder, pool, progress) for file in files]


class _Progress:
    """Logs from time to time how many of `whole` bytes are read."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._done = 0
        self._told = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            log.info("fingerprint: read %.1f of %.1f GB", self._done / 1e9, self._whole / 1e9)


def _digest(path: Path, folder: Path | None, pool: ThreadPoolExecutor, progress: _Progress) -> str:
    with open(path, "rb") as file:
        descriptor = file.fileno()
        stamp = Stamp.of(descriptor)
        with _entry(path, stamp, folder if stamp.settled else None) as entry:
            known = {} if entry is None else _told(entry)
            if known.get("stamp") == asdict(stamp):
                progress.add(stamp.size)
                return str(known["digest"])
            whole = blake3()
            starts = range(0, stamp.size, PIECE_BYTES)
            for start, piece in zip(starts, pool.map(partial(_piece, descriptor), starts), strict=True):
                whole.update(piece)
                if entry is not None:
                    os.utime(entry)  # shows progress to processes that wait for the lock
                progress.add(min(PIECE_BYTES, stamp.size - start))
            if Stamp.of(descriptor) != stamp:
                raise OSError(f"{path} was written to while it was read")
            digest: str = whole.hexdigest()
            if entry is not None and folder is not None:
                _remember(entry, path, stamp, digest)
                _prune(folder)
            return digest


def _piece(descriptor: int, start: int) -> bytes:
    """Return the digest of PIECE_BYTES of a file from `start`, or of fewer at its end."""
    digest, stop = blake3(), start + PIECE_BYTES
    buffer = memoryview(bytearray(READ_BYTES))
    while start < stop and (count := os.preadv(descriptor, [buffer[: stop - start]], start)):
        digest.update(buffer[:count])
        start += count
    found: bytes = digest.digest()
    return found


@contextmanager
def _entry(path: Path, stamp: Stamp, folder: Path | None) -> Iterator[int | None]:
    """Yield the entry of a digest, locked; None if there can be none, or it is not private to this user."""
    descriptor = None
    try:
        if folder is not None and stamp.size >= REMEMBERED_BYTES:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(folder / f"{stamp.device:x}-{stamp.inode:x}", flags, 0o600)
        mine = descriptor is not None and _is_private(descriptor) and _lock(descriptor, path)
        yield descriptor if mine else None
    finally:
        if descriptor is not None:
            os.close(descriptor)  # unlocks it, too


def _is_private(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _lock(descriptor: int, path: Path) -> bool:
    """Lock an entry, waiting while its holder makes progress; return whether it is locked."""
    seen, until = 0, 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            touched, now = os.fstat(descriptor).st_mtime_ns, time.monotonic()
        except OSError:  # a file system without locks
            return False
        if not seen:
            log.info("fingerprint: waiting for another process that reads %s", path)
        if touched != seen:
            seen, until = touched, now + STALLED_S
        if now >= until:
            log.warning("fingerprint: another process made no progress with %s in %s s", path, STALLED_S)
            return False
        time.sleep(0.05)


def _told(entry: int) -> dict[str, Any]:
    """Return the contents of an entry; {} if it is empty, damaged or of another version."""
    try:
        found = json.loads(os.pread(entry, MAX_ENTRY_BYTES, 0))
        return dict(found["told"]) if found["check"] == _check(found["told"]) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _remember(entry: int, path: Path, stamp: Stamp, digest: str) -> None:
    told = {"stamp": asdict(stamp), "digest": digest, "path": os.path.abspath(path)}
    with suppress(OSError):  # a full disk: the check reveals a truncated entry
        os.ftruncate(entry, 0)
        os.pwrite(entry, json.dumps({"told": told, "check": _check(told)}).encode(), 0)


def _prune(folder: Path) -> None:
    """Check some entries, picked at random, and delete outdated ones; skips entries that are locked."""
    names = os.listdir(folder)
    for name in random.sample(names, min(PRUNED, len(names))):
        with suppress(OSError):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_current(_told(descriptor)):
                    os.unlink(folder / name)
            finally:
                os.close(descriptor)


def _is_current(told: dict[str, Any]) -> bool:
    """Return whether an entry's file is unchanged."""
    try:
        return bool(told["stamp"] == asdict(Stamp.of(Path(told["path"]))))
    except (OSError, LookupError):
        return False


def _check(told: object) -> str:
    digest: str = blake3(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return digest
