"""The store behind a URL: a folder, a bucket, or any other that fsspec knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from fsspec import available_protocols
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from kvkit.format.urls import hide, shown
from kvkit.tiers.base import ObjectStore, Scope
from kvkit.tiers.folder import Access, Folder
from kvkit.tiers.fsspec import FsspecStore, file_system_at
from kvkit.tiers.registry import TIERS, kind_of
from kvkit.tiers.settings import TierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How a store is used.

    Attributes:
        options: of buckets, settings as in `kvkit.tiers.bucket.Bucket`, such as endpoint and access_key_id;
            of other stores, by the names of their fsspec class; a folder has none. They are never shown.
        timeout_s: of buckets, how long one request may take, in seconds, with its retries.
        scope: whether other hosts use it too.
        fsync: of folders, whether a put completes only when it would survive a power failure.
        access: of folders, which users of the host may read and write what is made in it
            (`kvkit.tiers.folder.Access`).
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0
    scope: Scope = "node"
    fsync: bool = False
    access: Access = "user"

    @staticmethod
    def of(config: TierConfig) -> StoreSettings:
        return StoreSettings(
            options=config.plain_options(),
            timeout_s=config.timeout_s,
            scope=config.scope,
            fsync=config.fsync,
            access=config.access,
        )


def open_store(tier: str, url: str, settings: StoreSettings) -> ObjectStore:
    """The store behind `url`, in which this changes nothing.

    Raises:
        ValueError: it is not a URL that obstore or fsspec opens here, an option is unknown, or `access` is.
    """
    options = settings.options
    try:
        if kind_of(url) is TIERS["bucket"] and find_spec("obstore") is not None:
            from kvkit.tiers.bucket import Bucket

            return Bucket(url, options, settings.timeout_s)
        if "::" in url and get_protocol(url.rpartition("::")[2]) in LocalFileSystem.protocol:
            raise ValueError(f"url={shown(url)!r}: a folder behind another store; want the folder itself")
        try:
            files, root = file_system_at(url, options, settings.timeout_s)
        except Exception as error:  # each protocol has its own
            install = kind_of(url).install
            raise ValueError(
                f"url={shown(url)!r}: {hide(str(error), url, options=options)}; "
                f"{install}{', or ' if install else ''}want a folder, or <protocol>://... with one of "
                f"{', '.join(available_protocols())}"
            ) from None
        if not isinstance(files, LocalFileSystem):
            return FsspecStore(files, root, partial(hide, url=url, options=options))
        if options:
            raise ValueError(f"options: {', '.join(options)}: a folder has none")
        return Folder(root, settings.fsync, settings.access)
    except ValueError as error:
        raise ValueError(f"tier {tier!r}: {error}") from None
