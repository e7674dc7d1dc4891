"""Open the store at a URL: a folder, also by NIXL, a bucket, or any other store of fsspec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsspec import available_protocols
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from kvkit.format.urls import hide, shown
from kvkit.tiers.base import ObjectStore
from kvkit.tiers.folder import Folder
from kvkit.tiers.fsspec import FsspecCalls, FsspecRoot, FsspecStore, file_system_at, make_cache_folders
from kvkit.tiers.registry import TIERS, kind_of
from kvkit.tiers.settings import TierConfig
from kvkit.workers import within


def open_store(tier: str, url: str, config: TierConfig) -> ObjectStore:
    """Open the store at `url`, one of the URLs of `config`, without changing the store.

    Raises:
        ValueError: obstore or fsspec cannot open the URL here, or an option is unknown.
        ModuleNotFoundError: obstore is missing.
    """
    options = config.plain_options()
    try:
        if kind_of(url) is TIERS["bucket"]:
            from kvkit.tiers.bucket import Bucket

            return Bucket(url, options, config.timeout_s)
        if kind_of(url) is TIERS["nixl"]:
            from kvkit.tiers.nixl import NixlFolder

            root = LocalFileSystem._strip_protocol(url.removeprefix("nixl+"))
            return NixlFolder(root, options, config.fsync, config.access)
        if "::" in url and get_protocol(url.rpartition("::")[2]) in LocalFileSystem.protocol:
            raise ValueError(f"url={shown(url)!r}: a folder behind another store; want the folder itself")
        connect = partial(file_system_at, url, options, config.timeout_s)
        connection = None
        try:
            make_cache_folders(options)
            connection = _connect_or_none(connect, config.timeout_s)
        except Exception as error:  # each protocol has its own
            raise ValueError(
                f"url={shown(url)!r}: {hide(str(error), url, options=options)}; want a folder, or "
                f"<protocol>://... with one of {', '.join(available_protocols())}"
            ) from None
        if connection is None or not isinstance(connection[0], LocalFileSystem):
            hidden = partial(hide, url=url, options=options)
            return FsspecStore(FsspecCalls(connect, hidden, config.timeout_s, connection))
        if options:
            raise ValueError(f"options: {', '.join(options)}: a folder has none")
        return Folder(connection[1], config.fsync, config.access)
    except ValueError as error:
        raise ValueError(f"tier {tier!r}: {error}") from None


def _connect_or_none(connect: Callable[[], FsspecRoot], timeout_s: float) -> FsspecRoot | None:
    """Return the result of `connect`; None if the server cannot be reached at present."""
    try:
        return within(timeout_s, connect, "kvkit-connect")
    except (OSError, EOFError):
        return None
