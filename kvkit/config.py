"""Configuration: one TOML file, with KVKIT_* environment variables for what the file leaves out.

    chunk_tokens = 256
    staging = "512MiB"            # slots that records pass through

    [tiers.memory]                # in the order in which they are sought
    capacity = "4GiB"

    [tiers.disk]
    url = "file:///var/cache/kvkit"
    capacity = "200GiB"

    [policy]                      # optional: all tiers, in the order above
    retrieve_from = ["memory", "disk"]
    store_to = ["memory", "disk"]
    write_back_to = ["memory"]

    [server]                      # optional: the HTTP endpoint that `kvkit top` and Prometheus read
    enabled = true

A tier without a `url` keeps records in this process's memory. Sizes are bytes, or have a unit ("4GiB").
Tiers on servers:

    [tiers.bucket]
    url = "s3://records/kv"       # or gs://..., az://...
    scope = "shared"
    options = { endpoint = "https://s3.example.com", access_key_id = "me", secret_access_key = "..." }

    [tiers.redis]
    url = "redis://127.0.0.1:6379/0"
    username = "me"
    password = "..."

    [tiers.pool]
    url = "mooncake://10.0.0.1:50051"
    options = { protocol = "rdma", global_segment_size = "64GiB" }

Engines that hand KV to each other (`kvkit.handoff.settings`) have a tier "handoff", and one for each peer:

    [handoff]
    role = "decode"
    listen = ["unix:///run/kvkit/decode.sock"]
    buffer = "4GiB"
    peers = { prefill = "unix:///run/kvkit/prefill.sock" }

What `options` leaves out, the client takes from its usual environment (AWS_ACCESS_KEY_ID, ...). A tier on
Mooncake is shared where nothing else is said. A tier with a `kind` is another package's, and has settings of
its own: `kvkit.tiers.plugins`.
In the environment a nested setting has two underscores: KVKIT_TIERS__DISK__URL, KVKIT_CHUNK_TOKENS.
The endpoint's token is `server.token`, or what `server.token_file` holds, which is made where there is none;
where neither is set, that file is ~/.local/state/kvkit/token.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
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
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvkit.cache import Cache, SpaceOf
from kvkit.handoff.settings import HandoffConfig, listen, open_handoff
from kvkit.layout import KVLayout, Namespace
from kvkit.policy import Policy
from kvkit.policy import check as check_policy
from kvkit.record import RecordFormat
from kvkit.server import (
    DEFAULT_PORT,
    MIN_TOKEN_CHARS,
    Server,
    ServerError,
    default_token_file,
    is_loopback,
    make_token,
    read_token,
)
from kvkit.staging import Staging
from kvkit.tiers.base import Scope, Tier
from kvkit.tiers.files import Access
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.mooncake import SCHEMES as MOONCAKE_SCHEMES
from kvkit.tiers.mooncake import MooncakeTier
from kvkit.tiers.objects import ObjectTier, is_folder
from kvkit.tiers.paths import SpreadTier
from kvkit.tiers.plugins import check_kind, open_plugin
from kvkit.tiers.redis import SCHEMES as REDIS_SCHEMES
from kvkit.tiers.redis import RedisTier
from kvkit.tiers.urls import has_password, shown

_PREFIX = "KVKIT_"
_ENVIRONMENT = "environment"
_SECRET = {"token", "password", "options", "secret"}
"""Settings whose values no message shows."""

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


class ConfigError(ValueError):
    """A setting is unknown or impossible. The message names the setting, the value and the choices."""


PositiveBytes = Annotated[ByteSize, Field(gt=0)]


class TierConfig(BaseModel):
    """One tier. See the module's text. Its repr and its JSON show URLs without their secrets."""

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


class PolicyConfig(BaseModel):
    """What goes where, by tier name. See `kvkit.policy`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    retrieve_from: tuple[str, ...] | None = Field(
        default=None, description="tiers, sought in this order; none given: all, in the file's order"
    )
    store_to: tuple[str, ...] | None = Field(
        default=None, description="what gets finished chunks; none given: all"
    )
    write_back_to: tuple[str, ...] | None = Field(
        default=None, description="what gets chunks that came from another tier; none given: the first"
    )
    staging_only: bool = Field(default=False, description="memory is only passed through, and keeps nothing")


class ServerConfig(BaseModel):
    """The HTTP endpoint. See `kvkit.server`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    enabled: bool = Field(default=False, description="whether there is one")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=DEFAULT_PORT,
        description="of rank 0, the next ones of further ranks; 0: any that is free",
        ge=0,
        le=65535,
    )
    token: SecretStr | None = Field(
        default=None, description="what clients must show", min_length=MIN_TOKEN_CHARS
    )
    token_file: Path | None = Field(default=None, description="holds the token; made where there is none")

    @model_validator(mode="after")
    def _the_token_is_known(self) -> ServerConfig:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; want one of the two")
        if not is_loopback(self.host) and self.token is None and self.token_file is None:
            raise ValueError(f"host = {self.host!r} is open to other hosts: give token or token_file")
        return self

    def of_rank(self, rank: int) -> ServerConfig:
        """That of one of several ranks: each has a port of its own."""
        return self.model_copy(update={"port": self.port + rank if self.port else 0})


class Config(BaseSettings):
    """Every setting. The file wins over the environment."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )
    chunk_tokens: int = Field(256, description="tokens per chunk", ge=1, le=2**20)
    hash: Literal["xxh3_128", "blake3", "sha256"] = Field("xxh3_128", description="digest of the keys")
    staging: ByteSize = Field(
        ByteSize(512 << 20), description="bytes of slots that records pass through", gt=0
    )
    timeout_s: float = Field(30.0, description="longest single wait, in seconds", gt=0, le=3600)
    tiers: dict[str, TierConfig] = Field(default_factory=dict, description="in the order they are sought")
    policy: PolicyConfig = PolicyConfig()
    server: ServerConfig = ServerConfig()
    handoff: HandoffConfig | None = Field(None, description="none: this engine hands no KV to others")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @model_validator(mode="after")
    def _policy_names_tiers(self) -> Config:
        made = () if self.handoff is None else self.handoff.tiers
        for name in made:
            if name in self.tiers or made.count(name) > 1:
                raise ValueError(
                    f"handoff: tier {name!r} is there twice; want other names for peers and tiers"
                )
        if self.handoff is not None:
            self.handoff.check_tiers(self.tiers)
        policy = check_policy(self.resolved_policy(), (*self.tiers, *made))
        if self.handoff is not None:
            self.handoff.check_policy(policy, tuple(self.tiers))
        return self

    def resolved_policy(self) -> Policy:
        """The policy with what was left out filled in."""
        handoff = self.handoff
        default = Policy.default(self.tiers) if handoff is None else handoff.default_policy(self.tiers)
        given = {k: v for k, v in self.policy.model_dump().items() if v is not None}
        return Policy(
            retrieve_from=given.get("retrieve_from", default.retrieve_from),
            store_to=given.get("store_to", default.store_to),
            write_back_to=given.get("write_back_to", default.write_back_to),
            staging_only=given.get("staging_only", False),
        )

    def namespace(self, layout: KVLayout, *, model: str, dtype: str, **fields: Any) -> Namespace:
        """The namespace of `model` with this file's chunk size and digest; `fields` as in `Namespace`."""
        return Namespace(
            model=model,
            layout=layout.fingerprint(),
            dtype=dtype,
            chunk_tokens=self.chunk_tokens,
            hash=self.hash,
            **fields,
        )


def load_config(path: str | Path | None = None, **settings: Any) -> Config:
    """Read a TOML file (none: the environment alone).

    `settings` win over both; a table among them replaces the file's as a whole.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or impossible.
    """
    values: dict[str, Any] = {}
    source = "settings" if settings else _ENVIRONMENT
    if path is not None:
        source = os.fspath(path)
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{source}: {error}") from error
    values |= settings
    _refuse_misspelt_variables()
    try:
        config = Config(**values)
    except SettingsError as error:
        raise ConfigError(f"{_ENVIRONMENT}: {error}: {error.__cause__}") from error
    except ValidationError as error:
        lines = [f"{_source(e['loc'], values, source)}: {_explain(e)}" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from error
    # pydantic merges the file into the environment, not the other way round, and tiers have an order
    tiers = {name: config.tiers[name] for name in [*values.get("tiers", ()), *config.tiers]}
    return config.model_copy(update={"tiers": tiers})


def tier_at(url: str) -> TierConfig:
    """The tier at `url`, with no other setting.

    Raises:
        ConfigError: a tier cannot be there, such as for a password in the URL.
    """
    try:
        return TierConfig.model_validate({"url": url})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def open_cache(
    config: Config, layout: KVLayout, namespace: Namespace, space_of: SpaceOf | None = None
) -> Cache:
    """A cache with the tiers of `config` and, where `server.enabled`, an endpoint. Closing it closes them.

    Args:
        space_of: as in `Cache`.

    Raises:
        ConfigError: a size is too small for this layout's records; a tier cannot be opened; or the endpoint
            cannot: its address is taken, the token's file is no such file, or a package is missing.
    """
    if not config.tiers and config.handoff is None:
        raise ConfigError("tiers: none given; want at least one, such as [tiers.disk] with a url")
    groups = range(len(layout.groups))
    slot_bytes = max(RecordFormat.of(layout, g, namespace).record_bytes for g in groups)
    passing = config.staging // slot_bytes
    if passing < len(layout.groups):
        raise ConfigError(
            f"staging={config.staging.human_readable()}: a chunk of this model takes {len(layout.groups)} "
            f"slots of {ByteSize(slot_bytes).human_readable()}"
        )
    resident = {n: (t.capacities[0] or 0) // slot_bytes for n, t in config.tiers.items() if t.in_memory}
    slots = passing + sum(resident.values())
    try:
        staging = Staging(slot_bytes, slots)
    except (OSError, OverflowError) as error:
        size = ByteSize(slot_bytes * slots).human_readable()
        raise ConfigError(f"staging and memory tiers: {size} cannot be had: {error}") from error
    tiers: list[Tier] = []
    try:
        for name, tier in config.tiers.items():
            tiers.append(open_tier(name, tier, staging, namespace.rank))
        if config.handoff is not None:
            _open_handoff(config.handoff, tiers, layout, namespace, config.timeout_s)
        cache = Cache(
            layout,
            namespace,
            tiers,
            staging=staging,
            policy=config.resolved_policy(),
            timeout_s=config.timeout_s,
            space_of=space_of,
        )
    except (ValueError, OSError) as error:
        for opened in tiers:
            opened.close()
        staging.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"tiers: {error}") from error
    if config.server.enabled:
        try:
            cache.endpoint = _open_server(config, cache)
        except ServerError as error:
            cache.close()
            raise ConfigError(str(error)) from error
    return cache


def _open_handoff(
    config: HandoffConfig, tiers: list[Tier], layout: KVLayout, namespace: Namespace, timeout_s: float
) -> None:
    """Add the tiers of handoff to `tiers`, and have peers reach this node.

    Raises:
        ConfigError: a size, an address or a certificate is impossible, or the secret's file holds none.
    """
    secret = b"" if config.secret is None else config.secret.get_secret_value().encode()
    try:
        if config.secret_file is not None:
            secret = read_token(config.secret_file, "secret_file").encode()
        tiers += open_handoff(config, layout, namespace, secret, timeout_s)
        listen(config, tiers, layout, namespace, secret, timeout_s)
    except (ValueError, OSError) as error:
        raise ConfigError(f"handoff: {error}") from error


def _open_server(config: Config, cache: Cache) -> Server:
    settings = config.server
    token = (
        settings.token.get_secret_value()
        if settings.token is not None
        else make_token(settings.token_file or default_token_file())
    )
    return Server(cache, token=token, host=settings.host, port=settings.port, timeout_s=config.timeout_s)


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


def _explain(entry: Any) -> str:
    """One pydantic error as "setting = value: what is wrong; the choices"."""
    where = ".".join(str(part) for part in entry["loc"]) or "policy"
    if entry["type"] == "extra_forbidden":
        known = _choices(entry["loc"][:-1])
        near = difflib.get_close_matches(str(entry["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: unknown setting; {hint}the settings here are {', '.join(known)}"
    secret = not _SECRET.isdisjoint(entry["loc"])
    value = "" if secret or isinstance(entry["input"], dict) else f" = {shown(repr(entry['input']))}"
    hint = "; want bytes, or a number with a unit such as '4GiB'" if "byte_size" in entry["type"] else ""
    return f"{where}{value}: {entry['msg'].removeprefix('Value error, ')}{hint}"


def _source(path: tuple[int | str, ...], values: Any, source: str) -> str:
    """Where the setting at `path` came from: `source`, if its `values` have it."""
    for part in path:
        if isinstance(values, dict):
            if part not in values:
                return _ENVIRONMENT
            values = values[part]
    return source


def _refuse_misspelt_variables() -> None:
    """Only names near a setting are errors: others set KVKIT_* too (Kubernetes, for a service "kvkit").

    Raises:
        ConfigError: there is one.
    """
    known = list(Config.model_fields)
    for variable in os.environ:
        name = variable.lower().removeprefix(_PREFIX.lower()).partition("__")[0]
        if variable.upper().startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.75)
            if near:
                raise ConfigError(
                    f"{_ENVIRONMENT}: {variable}: unknown setting; did you mean {_PREFIX}{near[0].upper()}?"
                )


def _choices(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    if path[:1] == ("tiers",):
        model = TierConfig
    elif path[:1] == ("policy",):
        model = PolicyConfig
    elif path[:1] == ("server",):
        model = ServerConfig
    elif path[:1] == ("handoff",):
        model = HandoffConfig
    return list(model.model_fields)
