"""Digests of the contents of files, remembered while the file system reports that a file is unchanged."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from kvkit.environment import cache_folder

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Bytes that one thread reads at a time. Part of the digest's definition (see `digests`): never changes."""
READ_BYTES = 1 << 20
MAX_THREADS = 8
SETTLED_S = 2.0
"""Seconds since its last change after which a file's digest is remembered. File systems count time in ticks:
a change within this time may leave the file's times as they are."""
PROGRESS_S = 10.0
MAX_ENTRY_BYTES = 4096
REMEMBERED_BYTES = 1 << 20
"""Minimum size of files with remembered digests; smaller files are read again."""


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
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{file} is not a regular file")
        return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """True if any later change will show in `ctime`, which programs cannot set, unlike `mtime`.

        A mounted image may have no `ctime` of its own: all its files have the same time in whole seconds, and
        files of the next image may have the same time and inode numbers.
        """
        is_of_image = self.ctime_ns == self.mtime_ns and not self.ctime_ns % 10**9
        return not is_of_image and time.time_ns() - self.ctime_ns > SETTLED_S * 1e9


def default_folder() -> Path | None:
    """Return the default folder, kvkit/digests in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    try:
        return cache_folder() / "digests"
    except FileNotFoundError:
        return None


def digests(files: Sequence[Path], folder: Path | None) -> list[str]:
    """Return the digest of each file's contents, in 64 hex digits: BLAKE3 of the digests of its pieces.

    Several threads read, and log their progress.

    Args:
        folder: folder of remembered digests, a small JSON file for each; None: none are remembered.

    Raises:
        OSError: a file cannot be read, is not a regular file, or is written to meanwhile.
    """
    progress = _Progress(sum(Stamp.of(file).size for file in files))
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [_digest(file, folder, pool, progress) for file in files]


class _Progress:
    """Logs from time to time how many of `total` bytes were read."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._logged_at = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._logged_at > PROGRESS_S:
            self._logged_at = time.monotonic()
            log.info("fingerprint: read %.1f of %.1f GB", self._done / 1e9, self._total / 1e9)


def _digest(path: Path, folder: Path | None, pool: ThreadPoolExecutor, progress: _Progress) -> str:
    with open(path, "rb") as file:
        descriptor = file.fileno()
        stamp = Stamp.of(descriptor)
        entry = None
        if folder is not None and stamp.settled and stamp.size >= REMEMBERED_BYTES:
            entry = folder / f"{stamp.device:x}-{stamp.inode:x}"
            if (known := _recall(entry, stamp)) is not None:
                progress.add(stamp.size)
                return known
        file_hash = blake3()
        starts = range(0, stamp.size, PIECE_BYTES)
        for start, piece in zip(starts, pool.map(partial(_digest_piece, descriptor), starts), strict=True):
            file_hash.update(piece)
            progress.add(min(PIECE_BYTES, stamp.size - start))
        if Stamp.of(descriptor) != stamp:
            raise OSError(f"{path} was written to while it was read")
        digest: str = file_hash.hexdigest()
        if entry is not None:
            _remember(entry, stamp, digest)
        return digest


def _digest_piece(descriptor: int, start: int) -> bytes:
    """Return the digest of PIECE_BYTES of a file from `start`, or of fewer at its end."""
    digest, stop = blake3(), start + PIECE_BYTES
    buffer = memoryview(bytearray(READ_BYTES))
    while start < stop and (count := os.preadv(descriptor, [buffer[: stop - start]], start)):
        digest.update(buffer[:count])
        start += count
    piece_digest: bytes = digest.digest()
    return piece_digest


def _recall(entry: Path, stamp: Stamp) -> str | None:
    """Return the digest in an entry; None if it is of another stamp, damaged, or not this user's alone."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            content = json.loads(file.read(MAX_ENTRY_BYTES))
        return content["digest"] if content == _entry(stamp, content["digest"]) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _remember(entry: Path, stamp: Stamp, digest: str) -> None:
    """Write an entry, completely or not at all. Errors are ignored."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=entry.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(_entry(stamp, digest), file)
            os.replace(temporary, entry)
        except OSError:
            os.unlink(temporary)


def _entry(stamp: Stamp, digest: str) -> dict[str, object]:
    """Return the contents of an entry, with a checksum."""
    content: dict[str, object] = {"stamp": asdict(stamp), "digest": digest}
    return content | {"check": blake3(json.dumps(content).encode()).hexdigest()}
