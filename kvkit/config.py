"""Configuration: one TOML file, completed by KVKIT_* environment variables, opens a cache.

`docs/reference/configuration.md` has an example and lists every setting; `docs/serve/recipes.md` covers
tiers on servers.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from kvkit.cache import Cache, CacheServer, SpaceOf
from kvkit.environment import is_loopback
from kvkit.format.keys import DIGEST_BYTES
from kvkit.format.layout import KVLayout, LayoutError, Namespace, Precision
from kvkit.handoff.settings import HandoffConfig, open_handoff
from kvkit.observe.access import DEFAULT_PORT, MIN_TOKEN_CHARS, default_token_file, make_token, read_token
from kvkit.settings import ENVIRONMENT, TOO_DEEP, ConfigError, explain, read_toml
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.settings import TierConfig, open_tier
from kvkit.transfer.policy import Policy
from kvkit.transfer.policy import check as check_policy
from kvkit.transfer.sequence import largest_record_bytes

if TYPE_CHECKING:
    HashName = str
else:
    HashName = Literal[tuple(DIGEST_BYTES)]

log = logging.getLogger(__name__)

_PREFIX = "KVKIT_"


class PolicyConfig(BaseModel):
    """Names of the tiers to retrieve from, store to and write back to. See `kvkit.transfer.policy`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    retrieve_from: tuple[str, ...] | None = Field(
        default=None, description="tiers to look up, in this order; default: all, in the file's order"
    )
    store_to: tuple[str, ...] | None = Field(
        default=None, description="tiers that get the engine's finished chunks; default: all"
    )
    write_back_to: tuple[str, ...] | None = Field(
        default=None, description="tiers that get chunks loaded from another tier; default: the first"
    )
    staging_only: bool = Field(default=False, description="host memory passes records through and keeps none")


class ServerConfig(BaseModel):
    """Settings of the HTTP endpoint. See `kvkit.observe.http`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    enabled: bool = Field(default=False, description="whether to run the endpoint")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=DEFAULT_PORT,
        description="port of rank 0; further ranks use the next ones; 0: any free port",
        ge=0,
        le=65535,
    )
    token: SecretStr | None = Field(
        default=None, description="bearer token that clients must send", min_length=MIN_TOKEN_CHARS
    )
    token_file: Path | None = Field(default=None, description="file with the token; created if missing")

    @model_validator(mode="after")
    def _check_token_given(self) -> ServerConfig:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; want one of the two")
        if not is_loopback(self.host) and self.token is None and self.token_file is None:
            raise ValueError(f"host = {self.host!r} is open to other hosts: give token or token_file")
        return self

    @property
    def unused_settings(self) -> list[str]:
        """The settings that have no effect because `enabled` is not set at all."""
        return [] if "enabled" in self.model_fields_set else sorted(self.model_fields_set)

    def of_rank(self, rank: int) -> ServerConfig:
        """Return the settings of one of several ranks; each rank has its own port."""
        if not self.enabled:
            return self
        return self.model_copy(update={"port": self.port + rank if self.port else 0})


class Config(BaseSettings):
    """All settings. The file takes precedence over the environment."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )
    chunk_tokens: int = Field(256, description="tokens per chunk", ge=1, le=2**20)
    hash: HashName = Field("xxh3_128", description="digest of the keys")
    staging: ByteSize = Field(
        ByteSize(512 << 20), description="bytes of slots that records pass through", gt=0
    )
    timeout_s: float = Field(30.0, description="longest single wait, in seconds", gt=0, le=3600)
    shutdown_timeout_s: float = Field(
        30.0,
        description="longest total time to close, in seconds; records not saved by then are lost",
        gt=0,
        le=3600,
    )
    precision: Precision | None = Field(
        None, description="format of KV in records and in transit; none: the engine's dtype"
    )
    unchecked_precision: bool = Field(
        False, description="whether to quantise the KV of a model that `kvkit doctor` has not passed"
    )
    tiers: dict[str, TierConfig] = Field(default_factory=dict, description="tiers, in lookup order")
    policy: PolicyConfig = PolicyConfig()
    server: ServerConfig = ServerConfig()
    handoff: HandoffConfig | None = Field(None, description="settings of KV handoff; none: no handoff")

    @model_validator(mode="after")
    def _check_tier_names(self) -> Config:
        handoff_tiers = () if self.handoff is None else self.handoff.tiers
        for name in handoff_tiers:
            if name in self.tiers or handoff_tiers.count(name) > 1:
                raise ValueError(
                    f"handoff: tier name {name!r} is used twice; want distinct names for peers and tiers"
                )
        if self.handoff is not None:
            self.handoff.check_tiers(self.tiers)
        try:
            policy = check_policy(self.resolved_policy(), (*self.tiers, *handoff_tiers))
            if self.handoff is not None:
                self.handoff.check_policy(policy, tuple(self.tiers))
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None
        return self

    def resolved_policy(self) -> Policy:
        """Return the policy, with defaults for the fields not set."""
        handoff = self.handoff
        default = Policy.default(self.tiers) if handoff is None else handoff.default_policy(self.tiers)
        return replace(default, **self.policy.model_dump(exclude_none=True))

    def layout(self, engine: KVLayout) -> KVLayout:
        """Return an engine's layout with this file's `precision`, for its namespace, pages and `open_cache`.

        Raises:
            ConfigError: the KV of some layers cannot be quantised.
        """
        try:
            groups = tuple(replace(group, precision=self.precision) for group in engine.groups)
            return replace(engine, groups=groups)
        except LayoutError as error:
            raise ConfigError(str(error)) from error

    def check_model(self, check: Callable[[Precision, str], object]) -> None:
        """Run `check` for each precision in use, unless `unchecked_precision` is set.

        Args:
            check: function of a precision and the setting that overrides it, which raises if the model's
                weights must not be quantised: `kvkit.transfer.precision.check`.
        """
        if not self.unchecked_precision:
            precisions = dict.fromkeys([self.precision, *(tier.precision for tier in self.tiers.values())])
            for precision in precisions:
                if precision is not None:
                    check(precision, "unchecked_precision = true")

    def namespace(self, layout: KVLayout, *, model: str, dtype: str, **fields: Any) -> Namespace:
        """Return the namespace of `model` with this file's chunk size and digest.

        Args:
            fields: other fields of `Namespace`.
        """
        return Namespace(
            model=model,
            layout=layout.fingerprint(),
            dtype=dtype,
            chunk_tokens=self.chunk_tokens,
            hash=self.hash,
            **fields,
        )


def load_config(path: str | Path | None = None, **settings: Any) -> Config:
    """Read a TOML file (None: the environment alone).

    `settings` override both; a table in them replaces the file's whole table.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or invalid.
    """
    source = os.fspath(path) if path is not None else "settings" if settings else ENVIRONMENT
    values = ({} if path is None else read_toml(path)) | settings
    _refuse_misspelt_variables()
    try:
        config = Config(**values)
    except SettingsError as error:
        raise ConfigError(f"{ENVIRONMENT}: {error}: {error.__cause__}") from error
    except RecursionError as error:
        raise ConfigError(f"{ENVIRONMENT}: a {_PREFIX}* variable: {TOO_DEEP}") from error
    except ValidationError as error:
        raise ConfigError(explain(error, Config, f"{source}: ", values)) from error
    # pydantic merges the file into the environment and puts the environment's tiers first
    tiers = {name: config.tiers[name] for name in [*values.get("tiers", ()), *config.tiers]}
    return config.model_copy(update={"tiers": tiers})


def open_cache(
    config: Config, layout: KVLayout, namespace: Namespace, namespace_of: SpaceOf | None = None
) -> Cache:
    """Open a cache with the tiers of `config` and, if `server.enabled`, an endpoint; `close` closes both.

    Args:
        namespace_of: see `Cache`.

    Raises:
        ConfigError: the layout has another precision, a size is too small for its records, a tier cannot be
            opened, or the endpoint cannot (address in use, unusable token file, missing package).
    """
    if not config.tiers and config.handoff is None:
        raise ConfigError("tiers: none given; want at least one, such as [tiers.disk] with a url")
    for other in {group.precision for group in layout.groups} - {config.precision}:
        raise ConfigError(
            f"precision = {config.precision!r}: the layout's is {other!r}; want one that `Config.layout` made"
        )
    with ExitStack() as opened:
        staging = _open_staging(config, layout, namespace)
        opened.callback(staging.close)
        try:
            tiers = []
            for name, tier in config.tiers.items():
                tiers.append(open_tier(name, tier, staging, namespace.rank))
                opened.callback(tiers[-1].close)
            if config.handoff is not None:
                in_memory = [tier for tier in tiers if tier.in_memory]
                for handoff_tier in _open_handoff(
                    config.handoff, in_memory, layout, namespace, config.timeout_s
                ):
                    tiers.append(handoff_tier)
                    opened.callback(handoff_tier.close)
            cache = Cache(
                layout,
                namespace,
                tiers,
                staging=staging,
                policy=config.resolved_policy(),
                timeout_s=config.timeout_s,
                shutdown_timeout_s=config.shutdown_timeout_s,
                namespace_of=namespace_of,
            )
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(f"tiers: {error}") from error
        opened.pop_all()
        opened.callback(cache.close)
        if config.server.enabled:
            cache.server = _open_server(config, cache)
        elif config.server.unused_settings:
            log.warning(
                "server: %s given, but not enabled, so there is no endpoint; want enabled = true or false",
                ", ".join(config.server.unused_settings),
            )
        opened.pop_all()
    return cache


def _open_staging(config: Config, layout: KVLayout, namespace: Namespace) -> Staging:
    """Allocate the slots of staging and of memory tiers, each of the size of the largest record."""
    slot_bytes = largest_record_bytes(layout, namespace)
    staging_slots = config.staging // slot_bytes
    if staging_slots < len(layout.groups):
        raise ConfigError(
            f"staging={config.staging.human_readable()}: a chunk of this model takes {len(layout.groups)} "
            f"slots of {ByteSize(slot_bytes).human_readable()}"
        )
    memory_capacities = (tier.capacities[0] or 0 for tier in config.tiers.values() if tier.in_memory)
    slots = staging_slots + sum(capacity // slot_bytes for capacity in memory_capacities)
    try:
        return Staging(slot_bytes, slots)
    except (OSError, OverflowError) as error:
        size = ByteSize(slot_bytes * slots).human_readable()
        raise ConfigError(f"staging and memory tiers: {size} cannot be allocated: {error}") from error


def _open_handoff(
    config: HandoffConfig, in_memory: list[Tier], layout: KVLayout, namespace: Namespace, timeout_s: float
) -> list[Tier]:
    """Open the tiers of handoff; peers may read from the `in_memory` tiers.
    Raises ConfigError if a size, an address or a certificate is invalid, or no secret is in its file."""
    secret = b"" if config.secret is None else config.secret.get_secret_value().encode()
    try:
        if config.secret_file is not None:
            secret = read_token(config.secret_file, "secret_file").encode()
        return open_handoff(config, in_memory, layout, namespace, secret, timeout_s)
    except (ValueError, OSError) as error:
        raise ConfigError(f"handoff: {error}") from error


def _open_server(config: Config, cache: Cache) -> CacheServer:
    try:
        from kvkit.observe.http import Server
    except ImportError as error:
        raise ConfigError(f"server: {error.name} is missing: pip install 'kvkit-llm[server]'") from error
    settings = config.server
    token = (
        settings.token.get_secret_value()
        if settings.token is not None
        else make_token(settings.token_file or default_token_file())
    )
    return Server(cache, token=token, host=settings.host, port=settings.port, timeout_s=config.timeout_s)


def _refuse_misspelt_variables() -> None:
    """Refuse variables with names that resemble a setting's.
    Other programs may set KVKIT_*, too, such as Kubernetes for a service "kvkit".
    Raises ConfigError if there is one."""
    known = list(Config.model_fields)
    for variable in os.environ:
        name = variable.lower().removeprefix(_PREFIX.lower()).partition("__")[0]
        if variable.upper().startswith(_PREFIX) and name not in known:
            matches = difflib.get_close_matches(name, known, 1, cutoff=0.75)
            if matches:
                raise ConfigError(
                    f"{ENVIRONMENT}: {variable}: unknown setting; did you mean {_PREFIX}{matches[0].upper()}?"
                )
