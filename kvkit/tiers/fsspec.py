"""Objects in any file system of fsspec. Each read or write is one call and one copy."""

from __future__ import annotations

import errno
import os
import posixpath
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from fsspec.core import url_to_fs

from kvkit.format.names import is_folder, is_record
from kvkit.format.record import Damage
from kvkit.tiers.base import DamagedObject, Ranges, TierError, UnreadableObject, cut_short
from kvkit.tiers.folder import TEMPORARY, check_name
from kvkit.workers import submit, within

FsspecRoot = tuple[Any, str]
"""A file system of fsspec, and a path in it."""
_CONNECTION_LOST = (TimeoutError, ConnectionError, EOFError)
"""Errors after which a connection cannot be used again."""
_NOT_FOUND = (404, 410)
"""HTTP statuses of a missing object."""
_THREADS = "kvkit-fsspec"
"""Name of the threads that wait for a file system."""


class FsspecStore:
    """Objects below the root of an fsspec file system. As thread-safe as that file system."""

    def __init__(self, files: FsspecCalls) -> None:
        self._files = files

    def size(self, name: str) -> int | None:
        try:
            with self._translate_errors(name):
                info = self._files.info(self._path(name))
        except FileNotFoundError:
            return None
        return None if info.get("type") == "directory" else int(info["size"])

    def read(self, name: str, buffer: memoryview) -> int:
        with self._translate_errors(name):  # one byte more than fits shows that an object is too large
            data = self._files.cat_file(self._path(name), start=0, end=len(buffer) + 1)
        if len(data) > len(buffer):
            raise DamagedObject(f"{name}: it does not fit the slot's {len(buffer)} bytes", Damage.OVERSIZE)
        buffer[: len(data)] = data
        return len(data)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        starts, ends = [offset for offset, _ in ranges], [offset + size for offset, size in ranges]
        with self._translate_errors(name):
            pieces = self._files.cat_ranges([self._path(name)] * len(ranges), starts, ends, on_error="raise")
        for piece, (offset, size), buffer in zip(pieces, ranges, buffers, strict=True):
            if len(piece) < size:
                raise cut_short(name, len(piece), offset, size)
            buffer[:size] = piece

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
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
        return self._walk("")

    def _walk(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield the records below a folder, with an `ls` of each folder: fsspec's `find` hides errors."""
        try:
            entries = self._files.ls(f"{self._files.root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            name = entry["name"].rstrip("/")[len(self._files.root) :].lstrip("/")
            if entry["type"] == "directory":
                if is_folder(name) and name.startswith(folder) and name != folder:
                    yield from self._walk(name)
            elif is_record(name):
                size = self.size(name) if entry["size"] is None else int(entry["size"])
                if size is not None:
                    yield name, size

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._files.root}/{name}"

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Turn errors of one object into DamagedObject, as far as fsspec's libraries distinguish them.

        Raises:
            DamagedObject: the object ends before a range does, or is not a file.
            UnreadableObject: the object cannot be read, or no object can.
            FileNotFoundError: it is missing.
        """
        try:
            yield
        except IsADirectoryError as error:
            raise DamagedObject(f"{name}: {error}", Damage.FOREIGN) from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # fsspec's error for "416 Range Not Satisfiable"
                raise DamagedObject(f"{name}: it ends before a range does", Damage.TRUNCATED) from error
            if isinstance(error, PermissionError) or error.errno == errno.EIO:
                raise UnreadableObject(f"{name}: {error}", name) from error
            raise


class FsspecCalls:
    """The methods of an fsspec file system, limited to `timeout_s`. They raise only OSErrors without secrets.

    Many libraries behind fsspec wait for minutes or for ever, so each call runs in a thread of its own. Their
    errors and the causes of these may quote the URL, so each call raises a new error without a cause. The
    first call connects, and so does one after a call that timed out or lost its connection.

    Args:
        connect: function that returns the file system and the root in it.
        hide: function that removes secrets from the text of an error.
        timeout_s: longest call to the file system, in seconds.
        connection: result of an earlier `connect`; None if not connected yet.
    """

    def __init__(
        self,
        connect: Callable[[], FsspecRoot],
        hide: Callable[[str], str],
        timeout_s: float,
        connection: FsspecRoot | None,
    ) -> None:
        self._connect = connect
        self._hide = hide
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Future[FsspecRoot] | None = None
        if connection is not None:
            self._connection = Future()
            self._connection.set_result(connection)

    @property
    def root(self) -> str:
        """Path of the root. Connects if necessary."""
        return self._connected()[1].rstrip("/")

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    def _call(self, method: str, *args: Any, **settings: Any) -> Any:
        files, _ = self._connected()
        try:
            return within(self._timeout_s, lambda: getattr(files, method)(*args, **settings), _THREADS)
        except Exception as error:
            reported = self._without_secrets(method, _actual_error(error))
            if isinstance(error, _CONNECTION_LOST):
                self._disconnect(files)
        raise reported

    def _connected(self) -> FsspecRoot:
        """Return the file system and the root in it; concurrent callers share one attempt to connect."""
        connection = None
        try:
            with self._lock:
                connection = self._connection = self._connection or submit(self._connect, _THREADS)
            return connection.result(self._timeout_s)
        except Exception as error:
            reported = self._without_secrets("connect", error)
        with self._lock:
            if self._connection is connection:
                self._connection = None
        raise reported

    def _disconnect(self, files: Any) -> None:
        """Make the next call connect again, unless another thread has done so."""
        with self._lock:
            ended = self._connection if self._connection and self._connection.done() else None
            if ended is not None and not ended.exception() and ended.result()[0] is files:
                self._connection = None

    def _without_secrets(self, method: str, error: Exception) -> OSError:
        """Return the error to raise for an error of `method`."""
        if isinstance(error, TimeoutError):
            return TimeoutError(f"{method}: no answer within timeout_s={self._timeout_s}")
        if not isinstance(error, OSError):
            return TierError(self._hide(f"{method}: {str(error) or type(error).__name__}"))
        kind = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
        reported: OSError = kind(self._hide(str(error)))
        reported.errno = error.errno
        return reported


def _actual_error(error: Exception) -> Exception:
    """Return the actual error behind a FileNotFoundError: fsspec's http raises that for every error."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    status = getattr(cause, "status", None)  # of an HTTP response
    is_http = type(cause).__module__.startswith("aiohttp") or isinstance(cause, OSError)
    is_missing = status in _NOT_FOUND or isinstance(cause, FileNotFoundError)
    return cause if is_http and not is_missing else error


def file_system_at(url: str, options: Mapping[str, Any], timeout_s: float) -> FsspecRoot:
    """Return fsspec's file system for `url`, not shared with other callers, and the path in it.

    Raises:
        Exception: an error of fsspec or the library behind it; the message may show a secret.
    """
    settings = {"skip_instance_cache": True, **options}
    if url.startswith("ftp://"):
        settings.setdefault("timeout", 2 * timeout_s)
    files, root = url_to_fs(url, use_listings_cache=False, **settings)
    if "webhdfs" in files.protocol:
        files.session.request = partial(files.session.request, timeout=2 * timeout_s)
    return files, root


def make_cache_folders(options: Mapping[str, Any]) -> None:
    """Create the folders for fsspec's cached copies of records, with access for their owner alone.

    Raises:
        OSError: a folder cannot be created.
    """
    for folder in _cache_folders(options):
        os.makedirs(folder, mode=0o700, exist_ok=True)


def _cache_folders(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the folders in which the options make fsspec cache records (simplecache::, filecache::)."""
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _cache_folders(value)
    storage = options.get("cache_storage", ())
    yield from (folder for folder in ([storage] if isinstance(storage, str) else storage) if folder != "TMP")
