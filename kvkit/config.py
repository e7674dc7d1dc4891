"""From one TOML file, and KVKIT_* environment variables for what it leaves out, to an open cache.

`docs/configuration.md` has an example and lists every setting, `docs/recipes.md` tiers on servers.
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
from kvkit.moving.policy import Policy
from kvkit.moving.policy import check as check_policy
from kvkit.moving.sequence import largest_record_bytes
from kvkit.observe.access import (
    DEFAULT_PORT,
    MIN_TOKEN_CHARS,
    default_token_file,
    make_token,
    read_token,
)
from kvkit.settings import ENVIRONMENT, TOO_DEEP, ConfigError, explain, read_toml
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.settings import TierConfig, open_tier

if TYPE_CHECKING:
    HashName = str
else:
    HashName = Literal[tuple(DIGEST_BYTES)]

log = logging.getLogger(__name__)

_PREFIX = "KVKIT_"


class PolicyConfig(BaseModel):
    """What goes where, by tier name. See `kvkit.moving.policy`."""

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
    """The HTTP endpoint. See `kvkit.observe.http`."""

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

    @property
    def idle(self) -> list[str]:
        """Settings that have no effect, as `enabled` is not given either way."""
        return [] if "enabled" in self.model_fields_set else sorted(self.model_fields_set)

    def of_rank(self, rank: int) -> ServerConfig:
        """That of one of several ranks: each has a port of its own."""
        if not self.enabled:
            return self
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
    hash: HashName = Field("xxh3_128", description="digest of the keys")
    staging: ByteSize = Field(
        ByteSize(512 << 20), description="bytes of slots that records pass through", gt=0
    )
    timeout_s: float = Field(30.0, description="longest single wait, in seconds", gt=0, le=3600)
    shutdown_timeout_s: float = Field(
        30.0,
        description="how long closing may take in all, in seconds; what is not saved by then is lost",
        gt=0,
        le=3600,
    )
    precision: Precision | None = Field(
        None, description="of KV in records and on its way to them; none: as the engine computes it"
    )
    unchecked_precision: bool = Field(
        False, description="whether to hold KV in fewer bits of a model that `kvkit doctor` has not passed"
    )
    tiers: dict[str, TierConfig] = Field(default_factory=dict, description="in the order they are sought")
    policy: PolicyConfig = PolicyConfig()
    server: ServerConfig = ServerConfig()
    handoff: HandoffConfig | None = Field(None, description="none: this engine hands no KV to others")

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
        try:
            policy = check_policy(self.resolved_policy(), (*self.tiers, *made))
            if self.handoff is not None:
                self.handoff.check_policy(policy, tuple(self.tiers))
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None
        return self

    def resolved_policy(self) -> Policy:
        """The policy with what was left out filled in."""
        handoff = self.handoff
        default = Policy.default(self.tiers) if handoff is None else handoff.default_policy(self.tiers)
        return replace(default, **self.policy.model_dump(exclude_none=True))

    def layout(self, engine: KVLayout) -> KVLayout:
        """An engine's layout with this file's `precision`: that of its namespace, its pages and `open_cache`.

        Raises:
            ConfigError: KV of some of its layers cannot be held in fewer bits.
        """
        try:
            groups = tuple(replace(group, precision=self.precision) for group in engine.groups)
            return replace(engine, groups=groups)
        except LayoutError as error:
            raise ConfigError(str(error)) from error

    def check_model(self, check: Callable[[Precision, str], object]) -> None:
        """Have `check` refuse a model that must not be held in a `precision`, or a tier's, unless that is not
        to be asked.

        Args:
            check: of the weights, given a precision and what to set instead: `kvkit.moving.precision.check`.
        """
        if not self.unchecked_precision:
            wanted = dict.fromkeys([self.precision, *(tier.precision for tier in self.tiers.values())])
            for precision in wanted:
                if precision is not None:
                    check(precision, "unchecked_precision = true")

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
    # pydantic merges the file into the environment, not the other way round, and tiers have an order
    tiers = {name: config.tiers[name] for name in [*values.get("tiers", ()), *config.tiers]}
    return config.model_copy(update={"tiers": tiers})


def open_cache(
    config: Config, layout: KVLayout, namespace: Namespace, namespace_of: SpaceOf | None = None
) -> Cache:
    """A cache with the tiers of `config` and, where `server.enabled`, an endpoint. Closing it closes them.

    Args:
        namespace_of: as in `Cache`.

    Raises:
        ConfigError: the layout has another precision; a size is too small for its records; a tier cannot be
            opened; or the endpoint cannot: its address is taken, the token's file is no such file, or a
            package is missing.
    """
    if not config.tiers and config.handoff is None:
        raise ConfigError("tiers: none given; want at least one, such as [tiers.disk] with a url")
    for found in {group.precision for group in layout.groups} - {config.precision}:
        raise ConfigError(
            f"precision = {config.precision!r}: the layout's is {found!r}; want one that `Config.layout` made"
        )
    slot_bytes = largest_record_bytes(layout, namespace)
    passing = config.staging // slot_bytes
    if passing < len(layout.groups):
        raise ConfigError(
            f"staging={config.staging.human_readable()}: a chunk of this model takes {len(layout.groups)} "
            f"slots of {ByteSize(slot_bytes).human_readable()}"
        )
    resident = {n: (t.capacities[0] or 0) // slot_bytes for n, t in config.tiers.items() if t.in_memory}
    slots = passing + sum(resident.values())
    with ExitStack() as opened:
        try:
            staging = Staging(slot_bytes, slots)
        except (OSError, OverflowError) as error:
            size = ByteSize(slot_bytes * slots).human_readable()
            raise ConfigError(f"staging and memory tiers: {size} cannot be had: {error}") from error
        opened.callback(staging.close)
        try:
            tiers = []
            for name, tier in config.tiers.items():
                tiers.append(open_tier(name, tier, staging, namespace.rank))
                opened.callback(tiers[-1].close)
            if config.handoff is not None:
                near = [tier for tier in tiers if tier.near]
                for made in _open_handoff(config.handoff, near, layout, namespace, config.timeout_s):
                    tiers.append(made)
                    opened.callback(made.close)
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
        elif config.server.idle:
            log.warning(
                "server: %s given, but not enabled, so there is no endpoint; want enabled = true or false",
                ", ".join(config.server.idle),
            )
        opened.pop_all()
    return cache


def _open_handoff(
    config: HandoffConfig, near: list[Tier], layout: KVLayout, namespace: Namespace, timeout_s: float
) -> list[Tier]:
    """The tiers of handoff; peers may ask of those that are `near`.

    Raises:
        ConfigError: a size, an address or a certificate is impossible, or the secret's file holds none.
    """
    secret = b"" if config.secret is None else config.secret.get_secret_value().encode()
    try:
        if config.secret_file is not None:
            secret = read_token(config.secret_file, "secret_file").encode()
        return open_handoff(config, near, layout, namespace, secret, timeout_s)
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
                    f"{ENVIRONMENT}: {variable}: unknown setting; did you mean {_PREFIX}{near[0].upper()}?"
                )
