"""The kinds of tier, their classes and their settings. A new kind needs a class and a row of `TIERS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ON_STORES = frozenset({"capacity", "codec", "eviction", "fsync", "options", "precision", "quota", "spread"})


@dataclass(frozen=True, slots=True)
class TierKind:
    """A row of `TIERS`.

    Attributes:
        where: place of such tiers in error messages: "in a folder", "on Redis".
        opens: class as "module:Class", imported when such a tier is opened. Its method
            `open(name, config, staging)` returns a `Tier` and raises ValueError or OSError.
        schemes: URL schemes of the kind; fsspec gets all other schemes.
        settings: fields of `TierConfig` that apply to it. Fields in no row of `TIERS` apply to every tier.
        defaults: defaults of settings that differ from those of `TierConfig`.
        sized: True if a capacity is required.
        limit: what limits the tier's size, for kinds without a capacity.
        install: command that installs a missing package.
    """

    where: str
    opens: str
    schemes: tuple[str, ...] = ()
    settings: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sized: bool = False
    limit: str = ""
    install: str = ""


TIERS: Mapping[str, TierKind] = {
    "memory": TierKind(
        where="in memory",
        opens="kvkit.tiers.memory:MemoryTier",
        settings=frozenset({"capacity", "eviction", "keep_s", "quota"}),
        sized=True,
    ),
    "shm": TierKind(
        where="in shared memory",
        opens="kvkit.tiers.shm.tier:ShmTier",
        schemes=("shm",),
        settings=frozenset({"capacity"}),
        sized=True,
    ),
    "folder": TierKind(
        where="in a folder",
        opens="kvkit.tiers.objects:ObjectTier",
        schemes=("file", "local"),
        settings=_ON_STORES | {"access"},
    ),
    "nixl": TierKind(
        where="in a folder by NIXL",
        opens="kvkit.tiers.objects:ObjectTier",
        schemes=("nixl+file",),
        settings=_ON_STORES | {"access"},
        install="pip install 'kvkit-llm[nixl]'",
    ),
    "bucket": TierKind(
        where="in a bucket",
        opens="kvkit.tiers.objects:ObjectTier",
        schemes=("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"),
        settings=_ON_STORES,
        install="pip install 'kvkit-llm[s3]'",
    ),
    "fsspec": TierKind(
        where="in a store of fsspec",
        opens="kvkit.tiers.objects:ObjectTier",
        settings=_ON_STORES,
    ),
    "redis": TierKind(
        where="on Redis",
        opens="kvkit.tiers.redis:RedisTier",
        schemes=("redis", "rediss"),
        settings=frozenset({"username", "password"}),
        limit="the server's maxmemory",
        install="pip install 'kvkit-llm[redis]'",
    ),
    "redis cluster": TierKind(
        where="on a Redis Cluster",
        opens="kvkit.tiers.redis_cluster:RedisClusterTier",
        schemes=("redis+cluster", "rediss+cluster"),
        settings=frozenset({"username", "password"}),
        limit="the servers' maxmemory",
        install="pip install 'kvkit-llm[redis]'",
    ),
    "mooncake": TierKind(
        where="on Mooncake",
        opens="kvkit.tiers.mooncake:MooncakeTier",
        schemes=("mooncake",),
        settings=frozenset({"options"}),
        defaults={"scope": "shared"},
        limit="what its clients give (options.global_segment_size)",
        install="pip install 'kvkit-llm[mooncake]'",
    ),
}
FOLDERS = (TIERS["folder"], TIERS["nixl"])
"""Kinds whose records are files of a mounted folder."""


def kind_of(url: str | None) -> TierKind:
    """Return the kind of the tier at `url`: memory for None, a folder for a plain path."""
    if url is None:
        return TIERS["memory"]
    scheme, separator, _ = url.partition("://")
    if not separator and "::" not in url:
        return TIERS["folder"]
    return next((kind for kind in TIERS.values() if scheme in kind.schemes), TIERS["fsspec"])


def check_settings(kinds: tuple[TierKind, ...], given: Mapping[str, Any]) -> None:
    """Check that settings apply to a tier of these kinds, one for each of its URLs.

    Raises:
        ValueError: a setting applies to none of them. The message names it, and its value unless that may be
            a secret.
    """
    for name, value in given.items():
        supporting = [kind for kind in TIERS.values() if name in kind.settings]
        if not supporting or any(kind in supporting for kind in kinds):
            continue
        shown = f" = {value!r}" if isinstance(value, str | int | float) else ""
        if name == "capacity":
            raise ValueError(f"capacity: a tier {kinds[0].where} has none: {kinds[0].limit} limits it")
        if len(supporting) <= 2:
            places = " or ".join(kind.where for kind in supporting)
            raise ValueError(f"{name}{shown}: only a tier {places} has one")
        raise ValueError(f"{name}{shown}: no tier {kinds[0].where} has one")
