"""The tier of objects behind a URL: a folder, a bucket, or any other store that fsspec knows."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import posixpath
import secrets
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, get_args

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from kvkit.format import arrays
from kvkit.format.codecs import compress, decompress
from kvkit.format.record import (
    CODEC_OFFSET,
    CODECS,
    HEADER,
    MAGIC,
    Damage,
    RecordError,
    parent_name,
    read_header,
)
from kvkit.format.urls import hide, shown
from kvkit.staging import Lease
from kvkit.tiers import bucket, eviction
from kvkit.tiers.base import (
    DamagedObject,
    Ranges,
    Scope,
    Store,
    ThreadedTier,
    TierError,
    TierFull,
    UnreadableObject,
    copy_ranges,
    default_threads,
    owner_of,
)
from kvkit.tiers.folder import METADATA, TEMPORARY, Access, Folder, check_name, is_record
from kvkit.tiers.striped import StripedStore
from kvkit.workers import Closed

log = logging.getLogger(__name__)

_ATOMIC = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs"}
"""Protocols whose single put is visible when complete, or never."""


class ObjectTier(ThreadedTier):
    """Records in a folder or an object store, which other processes may use at the same time.

    What the store holds is known from one scan at the start, and by a look at the store for each lookup's
    first unknown name. A store that cannot be listed or written opens all the same: reads are tried, puts
    complete with the error.

    Args:
        url: a path, file://...; s3://..., gs://..., az://...; memory://..., or what fsspec knows else.
            Several of them: each record is striped over all (`kvkit.tiers.striped`).
        capacity_bytes: records that this process knows of are deleted beyond this, as `policy` says; None for
            no limit.
        threads: reads and writes at a time; None for what keeps a disk, or a network, busy.
        fsync: for folders, whether a put completes only when it would survive a power failure.
        codec: how the records in it are compressed, one of `kvkit.format.record.CODECS`.
        policy: one of `eviction.POLICIES`.
        quota_bytes: what one namespace may hold; None for no limit.
        access: for folders, which users of the host may read and write what this makes
            (`kvkit.tiers.folder.Access`).
        options: for buckets, settings as in `kvkit.tiers.bucket.Bucket`, such as endpoint and access_key_id;
            for other stores, by the names of their fsspec class. They are never shown.
        timeout_s: for buckets, how long one request may take, in seconds, with its retries.

    Raises:
        ValueError: a setting is not what it may be; the message names the choices.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        name: str = "disk",
        capacity_bytes: int | None = None,
        threads: int | None = None,
        fsync: bool = False,
        codec: str = "none",
        scope: Scope = "node",
        policy: eviction.Policy = "lru",
        quota_bytes: int | None = None,
        access: Access = "user",
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ValueError(f"tier {name!r}: capacity_bytes={capacity_bytes}, want at least 1, or None")
        if codec not in CODECS:
            raise ValueError(f"tier {name!r}: codec={codec!r}, want one of {', '.join(CODECS)}")
        if scope not in get_args(Scope):
            raise ValueError(f"tier {name!r}: scope={scope!r}, want one of {', '.join(get_args(Scope))}")
        urls = [url] if isinstance(url, str) else list(url)
        stores = [open_store(name, one, fsync, access, options or {}, timeout_s) for one in urls]
        for store in stores:
            if isinstance(store, Folder):
                _tidy(name, store, access)
        self._store: Store = stores[0] if len(stores) == 1 else StripedStore(name, stores)
        local = isinstance(stores[0], Folder)
        if threads is None:
            threads = (default_threads() if local else bucket.THREADS) * len(stores)
        self._looks = 1 if local else threads
        super().__init__(name, threads)
        self.scope = scope
        self.codec = codec
        self.reads_parts = codec == "none"
        self._compressed: set[str] = set()  # those found in a tier without a codec
        self._local = threading.local()
        self._lock = threading.Lock()
        self._writing: Counter[str] = Counter()
        self._index = eviction.State(capacity_bytes, policy, quota_bytes)
        try:
            for record, size in self._store.scan():
                self._note(record, size)
        except OSError as error:
            log.warning("tier %r: %s cannot be listed: %s", name, ", ".join(map(shown, urls)), error)

    def count_leading(self, names: Sequence[str]) -> int:
        count, looks = 0, 1
        while True:
            with self._lock:
                known, writing = self._index.entries, self._writing
                while count < len(names) and names[count] in known and names[count] not in writing:
                    count += 1
            # one look costs a store far away a round trip: after a find, several at a time
            asked = names[count : count + looks]
            sizes = self._sizes(asked, first=count == 0)
            found = next((i for i, size in enumerate(sizes) if size is None), len(sizes))
            with self._lock:
                for name, size in zip(asked[:found], sizes, strict=False):
                    self._note(name, size or 0)
            count += found
            if not asked or found < len(asked):
                break
            looks = self._looks
        with self._lock:
            return eviction.use_run(self._index, names[:count])

    def _sizes(self, names: Sequence[str], first: bool) -> list[int | None]:
        """Bytes of each object, None if it is missing or damaged, asked at the same time.

        Raises:
            UnreadableObject: there is none before them (`first`) that would be held all the same.
        """
        look = partial(self._size_held, first)
        if len(names) < 2:
            return [look(name) for name in names]
        try:
            looks = [self._workers.submit(partial(look, name), urgent=True) for name in names]
        except Closed as error:
            raise TierError(f"tier {self.name!r} is closed") from error
        return [one.result() for one in looks]

    def _size_held(self, first: bool, name: str) -> int | None:
        try:
            return self._store.size(name)
        except DamagedObject as error:
            if first and isinstance(error, UnreadableObject):
                raise
            log.debug("tier %r: %s", self.name, error)
            return None

    def read(self, name: str, buffer: memoryview) -> int:
        try:
            return self._store.read(name, buffer)
        except FileNotFoundError:
            self._forget(name)
            raise

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        if self.codec == "none" and name not in self._compressed:
            try:
                self._store.read_ranges(name, ranges, buffers)
            except FileNotFoundError:
                self._forget(name)
                raise
            except DamagedObject as error:
                if error.damage is not Damage.TRUNCATED or not self._is_stored_compressed(name):
                    raise
            else:
                heads = [b[:size] for (offset, size), b in zip(ranges, buffers, strict=True) if offset == 0]
                if not any(_is_compressed(head) for head in heads):
                    return
            self._compressed.add(name)  # written when the tier had a codec
        size = self._store.size(name)
        if size is None:
            self._forget(name)
            raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        if size > _packed_bytes(self.largest):
            raise DamagedObject(f"{name}: {size} bytes are no record of {self.largest}", Damage.OVERSIZE)
        packed = self._scratch(size)[:size]
        packed = packed[: self.read(name, packed)]
        copy_ranges(name, self._restored(name, packed), ranges, buffers)

    def _is_stored_compressed(self, name: str) -> bool:
        head = memoryview(bytearray(HEADER.size))
        try:
            self._store.read_ranges(name, [(0, len(head))], [head])
        except OSError:
            return False
        return _is_compressed(head)

    def _restored(self, name: str, packed: memoryview) -> memoryview:
        """The record that `packed` was made of.

        Raises:
            DamagedObject: it is damaged.
        """
        try:
            size = read_header(packed).plain_bytes
        except RecordError:
            damage = Damage.HEADER
        else:
            if size <= self.largest:
                record = memoryview(bytearray(size))
                restored = decompress(packed, record)
                if not isinstance(restored, Damage):
                    return record
                damage = restored
            else:
                damage = Damage.OVERSIZE
        raise DamagedObject(f"tier {self.name!r}: {name} is damaged ({damage})", damage)

    def write(self, name: str, record: memoryview) -> None:
        size = self._size_replaceable(name)
        if size is not None:
            with self._lock:
                self._note(name, size)
            return
        self._reserve(name, len(record), parent_name(record, name))
        try:
            self._store.write(name, record)
        except BaseException:
            self._written(name, failed=True)
            raise
        self._written(name, failed=False)

    def _size_replaceable(self, name: str) -> int | None:
        """Bytes of an object; None if there is none, or one that cannot be looked at and may be replaced."""
        try:
            return self._store.size(name)
        except DamagedObject:
            return None

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.delete(name)
            self._forget(name)

    def _put_one(self, name: str, lease: Lease) -> None:
        if self.codec == "none" or self._size_replaceable(name) is not None:
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
        want = _packed_bytes(size)
        held: memoryview | None = getattr(self._local, "scratch", None)
        if held is None or len(held) < want:
            held = self._local.scratch = memoryview(mmap.mmap(-1, want))  # page-aligned, for O_DIRECT
        return held

    def size(self, name: str) -> int | None:
        return self._store.size(name)

    def scan(self) -> Iterator[tuple[str, int]]:
        return self._store.scan()

    def describe(self, array: str, metadata: bytes) -> None:
        """As in `Tier`. What is there stays, with a warning where it says something else; but what is no
        zarr.json is written anew."""
        name = f"{array}/{METADATA}"
        try:
            found = self._metadata(name)
            if found is not None and found != metadata:
                differing = arrays.differences(found, metadata)
                if differing:
                    log.warning(
                        "tier %r: %s differs in %s from what this cache stores there: Zarr readers will "
                        "misread one or the other",
                        self.name,
                        name,
                        ", ".join(differing),
                    )
        except (DamagedObject, arrays.MetadataError) as error:
            log.warning("tier %r: %s is written anew, as it is damaged: %s", self.name, name, error)
            self._store.delete(name)
            found = None
        if found is None:
            self._store.write(name, memoryview(metadata))

    def _metadata(self, name: str) -> bytes | None:
        """The zarr.json of that name; None if there is none."""
        size = self._store.size(name)
        if size is None:
            return None
        buffer = bytearray(min(size, arrays.MAX_METADATA_BYTES))
        return bytes(buffer[: self._store.read(name, memoryview(buffer))])

    def pin(self, names: Sequence[str], seconds: float) -> int:
        with self._lock:
            return eviction.pin(self._index, names, time.monotonic() + seconds)

    def _reserve(self, name: str, size: int, parent: str | None) -> None:
        """Make room for a record that is about to be written; until `_written`, it is no hit.

        Raises:
            TierFull: it does not fit.
            OSError: a victim could not be deleted.
        """
        with self._lock:
            victims = eviction.add(
                self._index,
                name,
                size,
                parent=parent,
                owner=owner_of(name),
                now=time.monotonic(),
                may_evict=lambda victim: victim not in self._writing,
            )
            if victims is None:
                raise TierFull(
                    f"tier {self.name!r}: {name}, {size} bytes, does not fit "
                    f"capacity_bytes={self._index.capacity_bytes}"
                )
            self._writing[name] += 1
        self.evicted += len(victims)
        try:
            for victim in victims:
                self._store.delete(victim)
        except BaseException:
            self._written(name, failed=True)
            raise

    def _written(self, name: str, failed: bool) -> None:
        with self._lock:
            self._writing[name] -= 1
            if not self._writing[name]:
                del self._writing[name]
            if failed:
                eviction.remove(self._index, name)

    def _note(self, name: str, size: int, parent: str | None = None) -> None:
        """Note, under the lock, what the store holds, be it beyond the capacity: the next put makes room."""
        eviction.note(self._index, name, size, parent=parent, owner=owner_of(name))

    def _forget(self, name: str) -> None:
        self._compressed.discard(name)
        with self._lock:
            eviction.remove(self._index, name)


class _Remote:
    """Objects of any fsspec file system. Each read and write is one call, and one copy.

    Args:
        hide: takes the secrets out of the text of an error.
    """

    def __init__(self, files: Any, root: str, hide: Callable[[str], str]) -> None:
        self._files: Any = _OnlyOSErrors(files, hide)
        self._root = root.rstrip("/")
        protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
        self._atomic = bool(protocols & _ATOMIC)

    def size(self, name: str) -> int | None:
        try:
            with _blaming(name):
                found = self._files.info(self._path(name))
        except FileNotFoundError:
            return None
        return None if found.get("type") == "directory" else int(found["size"])

    def read(self, name: str, buffer: memoryview) -> int:
        with _blaming(name):  # no more than one byte that does not fit, whatever lies there
            data = self._files.cat_file(self._path(name), start=0, end=len(buffer) + 1)
        if len(data) > len(buffer):
            raise DamagedObject(f"{name}: it does not fit the slot's {len(buffer)} bytes", Damage.OVERSIZE)
        buffer[: len(data)] = data
        return len(data)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        starts, ends = [offset for offset, _ in ranges], [offset + size for offset, size in ranges]
        with _blaming(name):
            parts = self._files.cat_ranges([self._path(name)] * len(ranges), starts, ends, on_error="raise")
        for part, (offset, size), buffer in zip(parts, ranges, buffers, strict=True):
            if len(part) < size:
                raise DamagedObject(
                    f"{name}: {len(part)} of the {size} bytes from {offset} on are there", Damage.TRUNCATED
                )
            buffer[:size] = part

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


def _packed_bytes(size: int) -> int:
    """Bytes that a record of `size` may take compressed: what does not compress grows a little."""
    return size + size // 8 + (1 << 20)


def _is_compressed(record: memoryview) -> bool:
    return len(record) >= HEADER.size and record[: len(MAGIC)] == MAGIC and record[CODEC_OFFSET] != 0


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Tell the errors of one object from those of its store, as far as fsspec's libraries do.

    Raises:
        DamagedObject: it ends before a range does, or is no file; or it is unreadable, if it alone is so.
    """
    try:
        yield
    except IsADirectoryError as error:
        raise DamagedObject(f"{name}: {error}", Damage.FOREIGN) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # what fsspec makes of "416 Range Not Satisfiable"
            raise DamagedObject(f"{name}: it ends before a range does", Damage.TRUNCATED) from error
        if isinstance(error, PermissionError) or error.errno == errno.EIO:
            raise UnreadableObject(f"{name}: {error}", name) from error
        raise


class _OnlyOSErrors:
    """An fsspec file system whose calls raise no errors but OSErrors, without a secret in them.

    Each library behind fsspec has errors of its own, which may quote the URL, as may what caused them: they
    are raised anew, alone.
    """

    def __init__(self, files: Any, hide: Callable[[str], str]) -> None:
        self._files = files
        self._hide = hide

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._files, method)

        def checked(*args: Any, **settings: Any) -> Any:
            try:
                return call(*args, **settings)
            except OSError as error:
                kind = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
                told: OSError = kind(self._hide(str(error)))
                told.errno = error.errno
            except Exception as error:
                told = TierError(self._hide(f"{method}: {error or type(error).__name__}"))
            raise told

        return checked


def _s3fs_options(options: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """What s3fs calls the options of an S3 bucket, with one try per request and a limit to each wait.

    Raises:
        ValueError: s3fs has none of a name.
    """
    names = {
        "endpoint": "endpoint_url",
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "region": "region",
    }
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(f"options: {unknown[0]!r} needs obstore; s3fs takes {', '.join(names)}")
    settings = {names[name]: value for name, value in options.items()}
    region = settings.pop("region", None)
    return settings | {
        "client_kwargs": {"region_name": region} if region else {},
        "config_kwargs": {
            "connect_timeout": timeout_s,
            "read_timeout": timeout_s,
            "retries": {"total_max_attempts": 1},
        },
        "skip_instance_cache": True,
    }


def is_folder(url: str) -> bool:
    """Whether `url` is of a local folder."""
    return get_protocol(url) in LocalFileSystem.protocol


def _cache_folders(options: Mapping[str, Any]) -> Iterator[str]:
    """The folders in which fsspec is told to keep copies of records (simplecache::, filecache::)."""
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _cache_folders(value)
    given = options.get("cache_storage", ())
    yield from (folder for folder in ([given] if isinstance(given, str) else given) if folder != "TMP")


def open_store(
    tier: str, url: str, fsync: bool, access: Access, options: Mapping[str, Any], timeout_s: float
) -> Store:
    """The store behind `url`, in which this changes nothing.

    Raises:
        ValueError: it is not a URL that obstore or fsspec opens here, an option is unknown, or `access` is.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme in bucket.SCHEMES and find_spec("obstore") is not None:
        try:
            return bucket.Bucket(url, options, timeout_s)
        except ValueError as error:
            raise ValueError(f"tier {tier!r}: {error}") from None
    if "::" in url and is_folder(url.rpartition("::")[2]):
        raise ValueError(
            f"tier {tier!r}: url={shown(url)!r}: a folder behind another store; want the folder itself"
        )
    settings = dict(options)
    if scheme in ("s3", "s3a"):
        settings = _s3fs_options(options, timeout_s)
    try:
        for copies in _cache_folders(options):
            os.makedirs(copies, mode=0o700, exist_ok=True)
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **settings)
    except Exception as error:  # each protocol has its own
        known = ", ".join(fsspec.available_protocols())
        package = "pip install 'kvkit[s3]', or " if scheme in bucket.SCHEMES else ""
        raise ValueError(
            f"tier {tier!r}: url={shown(url)!r}: {hide(str(error), url, options=options)}; {package}want a "
            f"folder, or <protocol>://... with one of {known}"
        ) from None
    if isinstance(files, LocalFileSystem):
        if options:
            raise ValueError(f"tier {tier!r}: options: {', '.join(options)}: a folder has none")
        try:
            return Folder(root, fsync, access)
        except ValueError as error:
            raise ValueError(f"tier {tier!r}: {error}") from None
    if hasattr(files, "retries"):  # s3fs repeats a request by itself, five times
        files.retries = 1
    return _Remote(files, root, partial(hide, url=url, options=options))


def _tidy(tier: str, folder: Folder, access: Access) -> None:
    """Remove what killed writers left in a folder, and warn where it is open to too many."""
    folder.clean()
    wide = folder.opened_wider()
    if wide:
        log.warning(
            "tier %r: %s: %d of its namespaces, such as %s, are open to others than access=%r says; "
            "to close them: chmod -R %s= %s",
            *(tier, folder.root, len(wide), wide[0], access),
            *("go" if access == "user" else "o", shlex.quote(folder.root)),
        )
