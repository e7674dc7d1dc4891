"""Tiers by what a configuration says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

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

from kvkit.format.urls import has_password, shown
from kvkit.settings import ConfigError, explain
from kvkit.staging import Staging
from kvkit.tiers.base import Scope, Tier
from kvkit.tiers.folder import Access
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.mooncake import SCHEMES as MOONCAKE_SCHEMES
from kvkit.tiers.mooncake import MooncakeTier
from kvkit.tiers.objects import ObjectTier, is_folder
from kvkit.tiers.plugins import check_kind, open_plugin
from kvkit.tiers.redis import SCHEMES as REDIS_SCHEMES
from kvkit.tiers.redis import RedisTier
from kvkit.tiers.spread import SpreadTier

_ON_STORES = ("capacity", "codec", "fsync", "eviction", "quota")
_NOT_ON = {
    None: ("username", "password"),
    "Redis": (*_ON_STORES, "options"),
    "Mooncake": (*_ON_STORES, "username", "password"),
}
_LIMITS = {
    "Redis": "the server's maxmemory",
    "Mooncake": "what its clients give (options.global_segment_size)",
}

PositiveBytes = Annotated[ByteSize, Field(gt=0)]


class TierConfig(BaseModel):
    """One tier. See `kvkit.config`. Its repr and its JSON show URLs without their secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    url: str | tuple[str, ...] | None = Field(
        None,
        description="where records are: a folder, s3://, redis://, mooncake://, any fsspec URL; none: memory",
    )
    kind: str | None = Field(None, description="a tier of another package, which the other settings are for")
    spread: Literal["by_key", "by_rank", "stripe"] = Field(
        "by_key", description="of several urls: records over them, one for each rank, or parts of each record"
    )
    eviction: Literal["lru", "fifo", "lfu", "s3fifo", "arc"] = Field(
        "lru", description="which records are let go beyond the capacity"
    )
    quota: ByteSize | None = Field(
        None, description="bytes that one model and cache salt may have, none: no limit", gt=0
    )
    keep_s: float = Field(
        0.0, description="memory lets nothing go that came in so few seconds ago", ge=0, le=86400
    )
    capacity: PositiveBytes | tuple[PositiveBytes, ...] | None = Field(
        None, description="bytes kept, or a value per url; none: no limit"
    )
    codec: Literal["none", "zstd", "bitshuffle-zstd"] = Field("none", description="compression of records")
    threads: int | None = Field(None, description="parallel reads and writes", ge=1, le=256)
    fsync: bool = Field(False, description="a put completes only when it would survive a power cut")
    access: Access = Field(
        "user", description="of a folder: which users of the host may read and write what is made in it"
    )
    scope: Scope = Field("node", description="whether other hosts use it too")
    timeout_s: float = Field(10.0, description="longest request to a server, in seconds", gt=0, le=3600)
    username: str | None = Field(None, description="of a Redis server's user")
    password: SecretStr | None = Field(None, description="of that user, or of the server")
    options: dict[str, Secret[Any]] = Field(
        default_factory=dict, description="settings of a store's client, such as endpoint and access_key_id"
    )

    @model_validator(mode="before")
    @classmethod
    def _what_a_kind_needs_is_its_own(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("kind") is None:
            return values
        known = {name: value for name, value in values.items() if name in cls.model_fields}
        free = {name: value for name, value in values.items() if name not in cls.model_fields}
        return known | {"options": known.get("options", {}) | free}

    @model_validator(mode="before")
    @classmethod
    def _a_pool_is_shared(cls, values: Any) -> Any:
        url = values.get("url") if isinstance(values, dict) else None
        if isinstance(url, str) and url.partition("://")[0] in MOONCAKE_SCHEMES:
            return {"scope": "shared"} | values
        return values

    @model_validator(mode="after")
    def _settings_go_together(self) -> TierConfig:
        if self.kind is not None:
            check_kind(self.kind)
            return self
        if isinstance(self.capacity, tuple) and len(self.capacity) != len(self.urls):
            raise ValueError(f"capacity: {len(self.capacity)} values for {len(self.urls)} urls")
        if "access" in self.model_fields_set and not any(map(is_folder, self.urls)):
            raise ValueError(f"access = {self.access!r}: only a tier in a folder has one")
        if self.url is None:
            if self.capacity is None:
                raise ValueError("a tier without a url is kept in memory and needs a capacity")
            return self
        if "keep_s" in self.model_fields_set:
            raise ValueError("keep_s: only a tier in memory has one")
        if any(map(has_password, self.urls)):
            raise ValueError("url: it has a password; want it as a setting of its own, or among the options")
        if "spread" in self.model_fields_set and len(self.urls) < 2:
            raise ValueError(f"spread = {self.spread!r}: {len(self.urls)} url, want at least 2")
        if self.server is not None and len(self.urls) > 1:
            raise ValueError(f"url: a tier on {self.server} has one")
        for name in _NOT_ON[self.server]:
            if name in self.model_fields_set:
                if self.server is None:
                    raise ValueError(f"{name}: only a tier on Redis has one")
                if name == "capacity":
                    raise ValueError(
                        f"capacity: a tier on {self.server} has none: {_LIMITS[self.server]} limits it"
                    )
                raise ValueError(f"{name}: no tier on {self.server} has one")
        return self

    @field_serializer("url", when_used="json")
    def _shown(self, url: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return shown(url) if isinstance(url, str) else url and tuple(map(shown, url))

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._shown(value) if name == "url" else value

    @property
    def in_memory(self) -> bool:
        return self.url is None and self.kind is None

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @property
    def capacities(self) -> tuple[int | None, ...]:
        """Of each url; of the memory, where there is none."""
        if isinstance(self.capacity, tuple):
            return tuple(int(size) for size in self.capacity)
        return (None if self.capacity is None else int(self.capacity),) * max(1, len(self.urls))

    @property
    def server(self) -> Literal["Redis", "Mooncake"] | None:
        """What keeps the records, where it has settings of its own."""
        schemes = {url.partition("://")[0] for url in self.urls}
        if schemes.intersection(REDIS_SCHEMES):
            return "Redis"
        return "Mooncake" if schemes.intersection(MOONCAKE_SCHEMES) else None

    def all_set(self) -> dict[str, Any]:
        """What was given, for the factory of another package's tier. Secrets are plain."""
        given = self.model_dump(exclude_unset=True, exclude={"kind", "password", "options"})
        if self.password is not None:
            given["password"] = self.password.get_secret_value()
        return given | self.plain_options()

    def plain_options(self) -> dict[str, Any]:
        return {name: value.get_secret_value() for name, value in self.options.items()}


def tier_at(url: str) -> TierConfig:
    """The tier at `url`, with no other setting.

    Raises:
        ConfigError: a tier cannot be there, such as for a password in the URL.
    """
    try:
        return TierConfig.model_validate({"url": url})
    except ValidationError as error:
        raise ConfigError(
            "\n".join(explain(e, list(TierConfig.model_fields)) for e in error.errors())
        ) from None


def open_tier(name: str, config: TierConfig, staging: Staging, rank: int = 0) -> Tier:
    """One tier of a configuration.

    Raises:
        ValueError: a setting is not what it may be, or a package is missing.
        OSError: it cannot be opened.
    """
    if config.kind is not None:
        return open_plugin(config.kind, name, staging, config.all_set())
    quota = None if config.quota is None else int(config.quota)
    urls, capacities = config.urls, config.capacities
    if not urls:
        return MemoryTier(
            staging,
            capacities[0] or 0,
            name=name,
            policy=config.eviction,
            quota_bytes=quota,
            keep_s=config.keep_s,
        )
    if config.server == "Mooncake":
        return MooncakeTier(
            urls[0],
            staging,
            name=name,
            options=config.plain_options(),
            threads=config.threads,
            timeout_s=config.timeout_s,
            scope=config.scope,
        )
    if config.server == "Redis":
        return RedisTier(
            urls[0],
            name=name,
            username=config.username,
            password=None if config.password is None else config.password.get_secret_value(),
            threads=config.threads,
            timeout_s=config.timeout_s,
            scope=config.scope,
        )

    def store(url: str | Sequence[str], capacity: int | None, within: str = name) -> ObjectTier:
        return ObjectTier(
            url,
            name=within,
            capacity_bytes=capacity,
            threads=config.threads,
            fsync=config.fsync,
            codec=config.codec,
            scope=config.scope,
            policy=config.eviction,
            quota_bytes=quota,
            access=config.access,
            options=config.plain_options(),
            timeout_s=config.timeout_s,
        )

    if len(urls) == 1 or config.spread == "by_rank":
        path = rank % len(urls)
        return store(urls[path], capacities[path])
    if config.spread == "stripe":
        limits = [capacity for capacity in capacities if capacity is not None]
        return store(urls, min(limits) * len(urls) if limits else None)
    paths = zip(urls, capacities, strict=True)
    return SpreadTier(name, [store(url, size, f"{name}[{i}]") for i, (url, size) in enumerate(paths)])
