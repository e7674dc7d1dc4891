"""Settings of tiers, and opening tiers from a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    Secret,
    SecretStr,
    ValidationError,
    field_serializer,
    model_validator,
)

from kvkit.format.layout import Precision
from kvkit.format.record import CODECS
from kvkit.format.urls import has_password, shown
from kvkit.settings import ConfigError, explain
from kvkit.staging import Staging
from kvkit.tiers.base import Scope, Tier
from kvkit.tiers.eviction.plugins import CHOICES, PolicyName
from kvkit.tiers.folder import Access
from kvkit.tiers.plugins import check_kind, open_plugin
from kvkit.tiers.registry import FOLDERS, TierKind, check_settings, kind_of
from kvkit.tiers.spread import SpreadTier

if TYPE_CHECKING:
    CodecName = str
else:
    CodecName = Literal[tuple(CODECS)]

PositiveBytes = Annotated[ByteSize, Field(gt=0)]


class TierConfig(BaseModel):
    """Settings of one tier. See `kvkit.config`. Its repr and its JSON show URLs without their secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    url: str | tuple[str, ...] | None = Field(
        None,
        description="a folder, nixl+file://, shm://, s3://, redis://, redis+cluster://, mooncake://, any of "
        "fsspec's; none: in memory",
    )
    kind: str | None = Field(None, description="a tier of another package, which gets the other settings")
    spread: Literal["by_key", "by_rank", "stripe"] = Field(
        "by_key",
        description="use of several urls: spread records by key, use one per rank, or stripe each record",
    )
    eviction: PolicyName = Field("lru", description=f"eviction policy beyond the capacity: {CHOICES}")
    quota: ByteSize | None = Field(
        None, description="limit in bytes for each pair of model and cache salt; none: no limit", gt=0
    )
    keep_s: float = Field(
        0.0, description="seconds before a memory tier may evict a new record", ge=0, le=86400
    )
    capacity: PositiveBytes | tuple[PositiveBytes, ...] | None = Field(
        None, description="size in bytes, or one value per url; none: no limit"
    )
    codec: CodecName = Field("none", description="compression of records")
    precision: Precision | None = Field(
        None, description="quantisation of KV, which makes loads from this tier approximate; none: exact KV"
    )
    threads: int | None = Field(None, description="parallel reads and writes", ge=1, le=256)
    fsync: bool = Field(False, description="complete a put only when it would survive a power failure")
    access: Access = Field(
        "user", description="users of the host who may read and write the files of a folder tier"
    )
    scope: Scope = Field("node", description="whether this host alone uses the tier, or other hosts do too")
    timeout_s: float = Field(10.0, description="longest request to a server, in seconds", gt=0, le=3600)
    username: str | None = Field(None, description="user of a Redis server")
    password: SecretStr | None = Field(None, description="password of that user or of the server")
    options: dict[str, Secret[Any]] = Field(
        default_factory=dict, description="settings of a store's client, such as endpoint and access_key_id"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_kind(cls, values: Any) -> Any:
        """Add defaults of the URL's kind of tier; move settings of another package's kind to options."""
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("url"), str):
            values = {**kind_of(values["url"]).defaults, **values}
        if values.get("kind") is None:
            return values
        known = {name: value for name, value in values.items() if name in cls.model_fields}
        unknown = {name: value for name, value in values.items() if name not in cls.model_fields}
        options = known.get("options", {})
        return known | {"options": options | unknown if isinstance(options, dict) else options}

    @model_validator(mode="after")
    def _check_combination(self) -> TierConfig:
        """Check that the settings apply to the kinds of tier, and to the number of URLs."""
        if self.kind is not None:
            check_kind(self.kind)
            return self
        if isinstance(self.capacity, tuple) and len(self.capacity) != len(self.urls):
            raise ValueError(f"capacity: {len(self.capacity)} values for {len(self.urls)} urls")
        check_settings(self.kinds, {name: getattr(self, name) for name in self.model_fields_set})
        if self.capacity is None and self.kinds[0].sized:
            where = "without a url is kept in memory and" if self.url is None else self.kinds[0].where
            raise ValueError(f"a tier {where} needs a capacity")
        self._check_locations()
        if any(map(has_password, self.urls)):
            raise ValueError("url: it has a password; want it as a setting of its own, or among the options")
        if "spread" in self.model_fields_set and len(self.urls) < 2:
            raise ValueError(f"spread = {self.spread!r}: {len(self.urls)} url, want at least 2")
        for kind in self.kinds:
            if len(self.urls) > 1 and "spread" not in kind.settings:
                raise ValueError(f"url: a tier {kind.where} has one")
        return self

    def _check_locations(self) -> None:
        """Check that no folder has an empty name (the current folder), and that no two URLs are the same."""
        urls_by_location: dict[str, str] = {}
        for url in self.urls:
            folder = url.partition("://")[2] if "://" in url else url
            if kind_of(url) not in FOLDERS:
                location = url
            elif not folder.strip():
                raise ValueError(
                    f"url = {url!r}: it names nothing, perhaps because a variable is not set; want a folder "
                    "or <protocol>://..., or no url at all for memory"
                )
            elif len(self.urls) < 2:
                return  # nothing to compare with, and realpath would block for ever in a dead mount
            else:
                location = os.path.realpath(os.path.expanduser(folder))
            first = urls_by_location.setdefault(location, url)
            if first != url or self.urls.count(url) > 1:
                raise ValueError(f"url: {shown(first)} and {shown(url)} are one location; want two")

    @field_serializer("url", when_used="json")
    def _url_without_secrets(self, url: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return shown(url) if isinstance(url, str) else url and tuple(map(shown, url))

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._url_without_secrets(value) if name == "url" else value

    @property
    def in_memory(self) -> bool:
        return self.url is None and self.kind is None

    @property
    def shared_by_ranks(self) -> bool:
        """True if each rank of an engine on one host finds the records that any other rank puts."""
        return self.kind is None and not self.in_memory and (len(self.urls) < 2 or self.spread != "by_rank")

    @property
    def in_stores(self) -> bool:
        """True if each URL is that of a `kvkit.tiers.base.ObjectStore`."""
        return self.kind is None and all("spread" in kind.settings for kind in self.kinds)

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @property
    def kinds(self) -> tuple[TierKind, ...]:
        """Kinds of tier, one for each URL; without a URL, the kind of a memory tier."""
        return tuple(map(kind_of, self.urls or (None,)))

    @property
    def capacities(self) -> tuple[int | None, ...]:
        """Capacities in bytes, one for each URL; without a URL, the capacity of the memory tier."""
        if isinstance(self.capacity, tuple):
            return tuple(int(size) for size in self.capacity)
        return (None if self.capacity is None else int(self.capacity),) * max(1, len(self.urls))

    def at_url(self, index: int) -> TierConfig:
        """Return the settings of the tier at one of several URLs."""
        capacity = self.capacities[index]
        size = None if capacity is None else ByteSize(capacity)
        return self.model_copy(update={"url": self.urls[index], "capacity": size})

    def given_settings(self) -> dict[str, Any]:
        """Return the settings that are set, with secrets in plain text, for another package's factory."""
        settings = self.model_dump(exclude_unset=True, exclude={"kind", "password", "options"})
        if self.password is not None:
            settings["password"] = self.plain_password()
        return settings | self.plain_options()

    def plain_password(self) -> str | None:
        return None if self.password is None else self.password.get_secret_value()

    def plain_options(self) -> dict[str, Any]:
        return {name: value.get_secret_value() for name, value in self.options.items()}


def tier_at(url: str) -> TierConfig:
    """Return the settings of a tier at `url`, all others at their defaults.

    Raises:
        ConfigError: the URL is invalid for a tier, for example because it has a password.
    """
    try:
        return TierConfig.model_validate({"url": url})
    except ValidationError as error:
        raise ConfigError(explain(error, TierConfig)) from None


def open_tier(name: str, config: TierConfig, staging: Staging, rank: int = 0) -> Tier:
    """Open one tier of a configuration.

    Raises:
        ValueError: a setting is invalid, or a package is missing.
        OSError: the tier cannot be opened.
    """
    count = len(config.urls)
    if config.kind is not None:
        tier = open_plugin(config.kind, name, staging, config.given_settings())
    elif count < 2 or config.spread == "stripe":
        tier = _open_one(name, config, staging)
    elif config.spread == "by_rank":
        tier = _open_one(name, config.at_url(rank % count), staging)
    else:
        with ExitStack() as opened:
            paths: list[Tier] = []
            for i in range(count):
                paths.append(_open_one(f"{name}[{i}]", config.at_url(i), staging))
                opened.callback(paths[-1].close)
            opened.pop_all()
        tier = SpreadTier(name, paths)
    tier.shared_by_ranks = config.shared_by_ranks
    return tier


def _open_one(name: str, config: TierConfig, staging: Staging) -> Tier:
    """Open a tier of the kind of its first URL. Raises as `open_tier` does."""
    kind = config.kinds[0]
    try:
        tier: Tier = resolve_name(kind.opens).open(name, config, staging)
    except ModuleNotFoundError as error:
        raise ValueError(f"tier {name!r}: {error.name} is missing: {kind.install}") from error
    return tier
