"""The tier of objects behind a URL: a folder at the speed of the disk, any other store through fsspec."""

from __future__ import annotations

import itertools
import logging
import mmap
import posixpath
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, get_args

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from kvkit import eviction
from kvkit.codecs import compress, decompress
from kvkit.record import CODEC_OFFSET, CODECS, HEADER, MAGIC, Damage
from kvkit.staging import Lease
from kvkit.tiers.base import DamagedObject, Scope, ThreadedTier, TierFull, default_threads
from kvkit.tiers.files import METADATA, TEMPORARY, Folder, check_name, is_record

log = logging.getLogger(__name__)

_ATOMIC = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs"}
"""Protocols whose single put is visible when complete, or never."""


class Store(Protocol):
    """What `ObjectTier` needs of a store, as in `kvkit.tiers.files.Folder`. Thread-safe."""

    def size(self, name: str) -> int | None: ...
    def read(self, name: str, buffer: memoryview) -> int: ...
    def write(self, name: str, data: memoryview) -> None: ...
    def delete(self, name: str) -> None: ...
    def scan(self) -> Iterator[tuple[str, int]]: ...


class ObjectTier(ThreadedTier):
    """Records in a folder or an object store, which other processes may use at the same time.

    What the store holds is known from one scan at the start, and by a look at the store for each lookup's
    first unknown name. A store that cannot be listed or written opens all the same: reads are tried, puts
    complete with the error.

    Args:
        url: a path, file://..., memory://..., or what fsspec knows else.
        capacity_bytes: least recently used records that this process knows of are deleted beyond this; None
            for no limit.
        threads: reads and writes at a time; None for what keeps a disk busy.
        fsync: for folders, whether a put completes only when it would survive a power failure.
        codec: how the records in it are compressed, one of `kvkit.record.CODECS`.

    Raises:
        ValueError: a setting is not what it may be; the message names the choices.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "disk",
        capacity_bytes: int | None = None,
        threads: int | None = None,
        fsync: bool = False,
        codec: str = "none",
        scope: Scope = "node",
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ValueError(f"tier {name!r}: capacity_bytes={capacity_bytes}, want at least 1, or None")
        if codec not in CODECS:
            raise ValueError(f"tier {name!r}: codec={codec!r}, want one of {', '.join(CODECS)}")
        if scope not in get_args(Scope):
            raise ValueError(f"tier {name!r}: scope={scope!r}, want one of {', '.join(get_args(Scope))}")
        self._store = _open_store(name, url, fsync)
        super().__init__(name, default_threads() if threads is None else threads)
        self.scope = scope
        self.codec = codec
        self._local = threading.local()
        self._lock = threading.Lock()
        self._reservations = itertools.count()
        self._index = eviction.LruState(capacity_bytes)
        try:
            for record, size in self._store.scan():
                self._found(record, size)
        except OSError as error:
            log.warning("tier %r: %s cannot be listed: %s", name, url, error)

    def run(self, names: Sequence[str]) -> int:
        count = 0
        while True:
            with self._lock:
                known = self._index.entries
                while count < len(names) and names[count] in known:
                    count += 1
            size = self._store.size(names[count]) if count < len(names) else None
            if size is None:
                break
            with self._lock:
                self._found(names[count], size)
            count += 1
        with self._lock:
            # the head of a chain is worth most: without it the rest cannot be used
            eviction.touch(self._index, reversed(names[:count]))
        return count

    def read(self, name: str, buffer: memoryview) -> int:
        try:
            return self._store.read(name, buffer)
        except FileNotFoundError:
            self._forget(name)
            raise

    def write(self, name: str, record: memoryview) -> None:
        size = self._store.size(name)
        if size is not None:
            with self._lock:
                self._found(name, size)
            return
        reservation = self._reserve(name, len(record))
        try:
            self._store.write(name, record)
        except BaseException:
            self._forget(reservation)
            raise
        with self._lock:
            eviction.remove(self._index, reservation)
            self._found(name, len(record))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.delete(name)
            self._forget(name)

    def _put_one(self, name: str, lease: Lease) -> None:
        if self.codec == "none" or self._store.size(name) is not None:
            super()._put_one(name, lease)
            return
        scratch = self._scratch(len(lease.buffer))
        size = compress(lease.buffer[: lease.used], self.codec, scratch)
        self.write(name, scratch[:size])

    def _get_one(self, name: str, lease: Lease) -> None:
        if self.codec == "none":
            super()._get_one(name, lease)
            if not _is_compressed(lease.buffer[: lease.used]):
                return
            packed = self._scratch(lease.used)[: lease.used]  # written when the tier had a codec
            packed[:] = lease.buffer[: lease.used]
        else:
            scratch = self._scratch(len(lease.buffer))
            packed = scratch[: self.read(name, scratch)]
        restored = decompress(packed, lease.buffer)
        if isinstance(restored, Damage):
            raise DamagedObject(f"tier {self.name!r}: {name} is damaged ({restored})", restored)
        lease.used = restored

    def _scratch(self, size: int) -> memoryview:
        """This thread's own memory for a compressed record, which may be longer than the restored one."""
        want = size + size // 8 + (1 << 20)
        held: memoryview | None = getattr(self._local, "scratch", None)
        if held is None or len(held) < want:
            held = self._local.scratch = memoryview(mmap.mmap(-1, want))  # page-aligned, for O_DIRECT
        return held

    def size(self, name: str) -> int | None:
        return self._store.size(name)

    def scan(self) -> Iterator[tuple[str, int]]:
        return self._store.scan()

    def describe(self, array: str, metadata: bytes) -> None:
        name = f"{array}/{METADATA}"
        if self._store.size(name) is None:
            self._store.write(name, memoryview(metadata))

    def _reserve(self, name: str, size: int) -> str:
        """Make room for `size` bytes and hold it under a name of its own, so that nobody takes it for a hit.

        Raises:
            TierFull: they do not fit.
            OSError: a victim could not be deleted.
        """
        reservation = f"{TEMPORARY}{next(self._reservations)}"
        with self._lock:
            victims = eviction.add(self._index, reservation, size, may_evict=is_record)
        if victims is None:
            raise TierFull(
                f"tier {self.name!r}: {name}, {size} bytes, does not fit "
                f"capacity_bytes={self._index.capacity_bytes}"
            )
        try:
            for victim in victims:
                self._store.delete(victim)
        except BaseException:
            self._forget(reservation)
            raise
        return reservation

    def _found(self, name: str, size: int) -> None:
        """Note, under the lock, what the store holds, be it beyond the capacity: the next put makes room."""
        if name in self._index.entries:
            eviction.touch(self._index, [name])
        else:
            self._index.entries[name] = size
            self._index.used_bytes += size

    def _forget(self, name: str) -> None:
        with self._lock:
            eviction.remove(self._index, name)


class _Remote:
    """Objects of any fsspec file system. Each read and write is one call, and one copy."""

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")
        protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
        self._atomic = bool(protocols & _ATOMIC)

    def size(self, name: str) -> int | None:
        try:
            return int(self._files.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str, buffer: memoryview) -> int:
        data = self._files.cat_file(self._path(name))
        if len(data) > len(buffer):
            raise DamagedObject(
                f"{name}: {len(data)} bytes do not fit the slot's {len(buffer)}", Damage.OVERSIZE
            )
        buffer[: len(data)] = data
        return len(data)

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        if self._atomic:
            self._files.pipe_file(path, bytes(data))
            return
        folder = posixpath.dirname(path)
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        self._files.makedirs(folder, exist_ok=True)
        try:
            self._files.pipe_file(temporary, bytes(data))
            self._files.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(temporary)
            raise

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def scan(self) -> Iterator[tuple[str, int]]:
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            name = path[len(self._root) :].lstrip("/")
            if is_record(name):
                yield name, int(info["size"])

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._root}/{name}"


def _is_compressed(record: memoryview) -> bool:
    return len(record) >= HEADER.size and record[: len(MAGIC)] == MAGIC and record[CODEC_OFFSET] != 0


def _open_store(tier: str, url: str, fsync: bool) -> Store:
    """The store behind `url`.

    Raises:
        ValueError: it is not a URL that fsspec opens here.
    """
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except Exception as error:  # each protocol has its own
        known = ", ".join(fsspec.available_protocols())
        raise ValueError(
            f"tier {tier!r}: url={url!r}: {error}; want a folder, or <protocol>://... with one of {known}"
        ) from error
    if isinstance(files, LocalFileSystem):
        folder = Folder(root, fsync)
        folder.clean()
        return folder
    return _Remote(files, root)
