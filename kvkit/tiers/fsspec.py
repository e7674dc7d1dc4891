"""Objects of any file system that fsspec knows. Each read and write is one call, and one copy."""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fsspec.core import url_to_fs

from kvkit.format.names import is_record
from kvkit.format.record import Damage
from kvkit.tiers.base import DamagedObject, Ranges, TierError, UnreadableObject, cut_short
from kvkit.tiers.folder import TEMPORARY, check_name

_ATOMIC = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs"}
"""Protocols whose single put is visible when complete, or never."""
log = logging.getLogger(__name__)


class FsspecStore:
    """Objects below `root` of `files`, an fsspec file system. Thread-safe as that is.

    Args:
        hide: takes the secrets out of the text of an error.
    """

    def __init__(self, files: Any, root: str, hide: Callable[[str], str]) -> None:
        self._files: Any = _OnlyOSErrors(files, hide)
        self._root = root.rstrip("/")
        self._shown = hide(self._root)
        protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
        self._atomic = bool(protocols & _ATOMIC)
        self._denies: bool | None = None  # what is missing; None: not known

    def size(self, name: str) -> int | None:
        try:
            with self._blaming(name):
                found = self._files.info(self._path(name))
        except FileNotFoundError:
            return None
        return None if found.get("type") == "directory" else int(found["size"])

    def read(self, name: str, buffer: memoryview) -> int:
        with self._blaming(name):  # no more than one byte that does not fit, whatever lies there
            data = self._files.cat_file(self._path(name), start=0, end=len(buffer) + 1)
        if len(data) > len(buffer):
            raise DamagedObject(f"{name}: it does not fit the slot's {len(buffer)} bytes", Damage.OVERSIZE)
        buffer[: len(data)] = data
        return len(data)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        starts, ends = [offset for offset, _ in ranges], [offset + size for offset, size in ranges]
        with self._blaming(name):
            parts = self._files.cat_ranges([self._path(name)] * len(ranges), starts, ends, on_error="raise")
        for part, (offset, size), buffer in zip(parts, ranges, buffers, strict=True):
            if len(part) < size:
                raise cut_short(name, len(part), offset, size)
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

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Tell the errors of one object from those of its store, as far as fsspec's libraries do.

        Raises:
            DamagedObject: it ends before a range does, or is no file; or it is unreadable, if it alone is so.
            FileNotFoundError: it is missing, or denied by a store that denies what is missing.
        """
        try:
            yield
        except IsADirectoryError as error:
            raise DamagedObject(f"{name}: {error}", Damage.FOREIGN) from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # what fsspec makes of "416 Range Not Satisfiable"
                raise DamagedObject(f"{name}: it ends before a range does", Damage.TRUNCATED) from error
            if isinstance(error, PermissionError) and self._denies_missing():
                raise FileNotFoundError(f"{name} is missing, or denied") from error
            if isinstance(error, PermissionError) or error.errno == errno.EIO:
                raise UnreadableObject(f"{name}: {error}", name) from error
            raise

    def _denies_missing(self) -> bool:
        """Whether the store denies objects that are missing, as S3 does without s3:ListBucket."""
        if self._denies is None:
            try:
                self._files.info(f"{self._root}/missing-{secrets.token_hex(16)}")
            except FileNotFoundError:
                self._denies = False
            except PermissionError:
                self._denies = True
                log.warning(
                    "%s: what is missing is denied, as without s3:ListBucket: a record that is denied is "
                    "taken for a missing one",
                    self._shown,
                )
            except OSError:
                return False
        return bool(self._denies)


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
                told = TierError(self._hide(f"{method}: {str(error) or type(error).__name__}"))
            raise told

        return checked


def file_system_at(url: str, options: Mapping[str, Any], timeout_s: float) -> tuple[Any, str]:
    """fsspec's file system for `url`, and the path in it. What it caches is for its user alone.

    Raises:
        Exception: fsspec, or the library behind it, refuses; the message may show a secret.
    """
    on_s3 = url.startswith(("s3://", "s3a://"))
    settings = _s3fs_options(options, timeout_s) if on_s3 else options
    for copies in _cache_folders(options):
        os.makedirs(copies, mode=0o700, exist_ok=True)
    files, root = url_to_fs(url, use_listings_cache=False, **settings)
    if hasattr(files, "retries"):  # s3fs repeats a request by itself, five times
        files.retries = 1
    return files, root


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


def _cache_folders(options: Mapping[str, Any]) -> Iterator[str]:
    """The folders in which fsspec is told to keep copies of records (simplecache::, filecache::)."""
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _cache_folders(value)
    given = options.get("cache_storage", ())
    yield from (folder for folder in ([given] if isinstance(given, str) else given) if folder != "TMP")
