"""What files hold, as digests, remembered for as long as the file system says that a file is the same."""

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
"""What one thread reads at a time. A file's digest is that of its pieces' digests, so this stays as it is."""
READ_BYTES = 1 << 20
MAX_THREADS = 8
SETTLED_S = 2.0
"""A file that changed later than this before it was read is not remembered: file systems count time in ticks,
and the next change may bear the same time."""
PROGRESS_S = 10.0
STALLED_S = 60.0
"""How long to wait for another process that reads the same file after it last got further: it may have been
stopped. Then the file is read here, too."""
MAX_ENTRY_BYTES = 4096
REMEMBERED_BYTES = 1 << 20
"""Smaller files are read again."""
PRUNED = 64
"""Entries that are looked at when one is written: those of files that are gone or have changed go."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the file system says of a file. Whoever writes to it, or replaces it, changes this."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(file: Path | int) -> Stamp:
        """Of a path or a descriptor; symbolic links are followed.

        Raises:
            OSError: there is no such file, or it is not a regular one.
        """
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file} is no regular file")
        return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether any change from now on shows: in `ctime`, which nobody sets, while `mtime` may be anything.

        An image that is mounted may have no `ctime` of its own: all its files bear one time in whole seconds,
        and so do those of the next image under the same numbers.
        """
        of_an_image = self.ctime_ns == self.mtime_ns and not self.ctime_ns % 10**9
        return not of_an_image and time.time_ns() - self.ctime_ns > SETTLED_S * 1e9


def default_folder() -> Path | None:
    """Where digests are remembered: kvkit/digests below $XDG_CACHE_HOME or ~/.cache; None without a home."""
    try:
        return cache_folder() / "digests"
    except FileNotFoundError:
        return None


def digests(files: Sequence[Path], folder: Path | None) -> list[str]:
    """The digest of what each file holds, in 64 hex digits: BLAKE3 of the digests of its pieces.

    Several threads read, and say in the log how far they are. Of a user's processes one reads a file, and the
    others wait for it.

    Args:
        folder: where digests are remembered, in a small file for each; None: nowhere.

    Raises:
        OSError: a file cannot be read, is no regular one, or is written to meanwhile.
    """
    progress = _Progress(sum(Stamp.of(file).size for file in files))
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [_digest(file, folder, pool, progress) for file in files]


class _Progress:
    """Says in the log how much of `whole` bytes is read, now and then."""

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
                    os.utime(entry)  # who waits for the lock sees that this goes on
                progress.add(min(PIECE_BYTES, stamp.size - start))
            if Stamp.of(descriptor) != stamp:
                raise OSError(f"{path} was written to while it was read")
            digest: str = whole.hexdigest()
            if entry is not None and folder is not None:
                _remember(entry, path, stamp, digest)
                _prune(folder)
            return digest


def _piece(descriptor: int, start: int) -> bytes:
    """The digest of PIECE_BYTES of a file from `start` on, or of what there is."""
    digest, stop = blake3(), start + PIECE_BYTES
    buffer = memoryview(bytearray(READ_BYTES))
    while start < stop and (count := os.preadv(descriptor, [buffer[: stop - start]], start)):
        digest.update(buffer[:count])
        start += count
    found: bytes = digest.digest()
    return found


@contextmanager
def _entry(path: Path, stamp: Stamp, folder: Path | None) -> Iterator[int | None]:
    """The file that remembers a digest, locked; None where there cannot be one, or it is not this user's."""
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
            os.close(descriptor)  # and so unlocks it


def _is_private(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _lock(descriptor: int, path: Path) -> bool:
    """Whether this process has the entry for itself; waits for one that reads the file, while it gets on."""
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
            log.info("fingerprint: another process reads %s, and is waited for", path)
        if touched != seen:
            seen, until = touched, now + STALLED_S
        if now >= until:
            log.warning("fingerprint: another process got no further with %s in %s s", path, STALLED_S)
            return False
        time.sleep(0.05)


def _told(entry: int) -> dict[str, Any]:
    """What an entry remembers; nothing where it is empty, damaged or another version's."""
    try:
        found = json.loads(os.pread(entry, MAX_ENTRY_BYTES, 0))
        return dict(found["told"]) if found["check"] == _check(found["told"]) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _remember(entry: int, path: Path, stamp: Stamp, digest: str) -> None:
    told = {"stamp": asdict(stamp), "digest": digest, "path": os.path.abspath(path)}
    with suppress(OSError):  # a full disk: the check tells what was cut off
        os.ftruncate(entry, 0)
        os.pwrite(entry, json.dumps({"told": told, "check": _check(told)}).encode(), 0)


def _prune(folder: Path) -> None:
    """Delete what some entries, picked at random, remember in vain; none that a process has locked."""
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
    """Whether the file that an entry is of is as it was."""
    try:
        return bool(told["stamp"] == asdict(Stamp.of(Path(told["path"]))))
    except (OSError, LookupError):
        return False


def _check(told: object) -> str:
    digest: str = blake3(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return digest
