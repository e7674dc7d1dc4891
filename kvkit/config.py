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

A tier without a `url` keeps records in this process's memory. Sizes are bytes, or have a unit ("4GiB").
In the environment a nested setting has two underscores: KVKIT_TIERS__DISK__URL, KVKIT_CHUNK_TOKENS.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvkit.cache import Cache
from kvkit.layout import KVLayout, Namespace
from kvkit.policy import Policy
from kvkit.policy import check as check_policy
from kvkit.record import RecordFormat
from kvkit.staging import Staging
from kvkit.tiers.base import Scope, Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier

_PREFIX = "KVKIT_"
_ENVIRONMENT = "environment"


class ConfigError(ValueError):
    """A setting is unknown or impossible. The message names the setting, the value and the choices."""


class TierConfig(BaseModel):
    """One tier. See the module's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    url: str | None = Field(None, description="where records are kept: any fsspec URL; none: this process")
    capacity: ByteSize | None = Field(None, description="bytes kept, none: no limit", gt=0)
    codec: Literal["none", "zstd", "bitshuffle-zstd"] = Field("none", description="compression of records")
    threads: int | None = Field(None, description="parallel reads and writes", ge=1, le=256)
    fsync: bool = Field(False, description="a put completes only when it would survive a power cut")
    scope: Scope = Field("node", description="whether other hosts use it too")

    @model_validator(mode="after")
    def _memory_has_a_capacity(self) -> TierConfig:
        if self.url is None and self.capacity is None:
            raise ValueError("a tier without a url is kept in memory and needs a capacity")
        return self


class PolicyConfig(BaseModel):
    """What goes where, by tier name. See `kvkit.policy`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    retrieve_from: tuple[str, ...] | None = None
    store_to: tuple[str, ...] | None = None
    write_back_to: tuple[str, ...] | None = None


class Config(BaseSettings):
    """Every setting. The file wins over the environment."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )
    chunk_tokens: int = Field(256, description="tokens per chunk", ge=1, le=2**20)
    hash: Literal["xxh3_128", "blake3", "sha256"] = Field("xxh3_128", description="digest of the keys")
    staging: ByteSize = Field(
        ByteSize(512 << 20), description="bytes of slots that records pass through", gt=0
    )
    timeout_s: float = Field(30.0, description="longest single wait, in seconds", gt=0, le=3600)
    tiers: dict[str, TierConfig] = Field(default_factory=dict, description="in the order they are sought")
    policy: PolicyConfig = PolicyConfig()

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
        check_policy(self.resolved_policy(), self.tiers)
        return self

    def resolved_policy(self) -> Policy:
        """The policy with what was left out filled in."""
        default = Policy.default(self.tiers)
        given = {k: v for k, v in self.policy.model_dump().items() if v is not None}
        return Policy(
            retrieve_from=given.get("retrieve_from", default.retrieve_from),
            store_to=given.get("store_to", default.store_to),
            write_back_to=given.get("write_back_to", default.write_back_to),
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
    """Read a TOML file (none: the environment alone); `settings` win over both.

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


def open_cache(config: Config, layout: KVLayout, namespace: Namespace) -> Cache:
    """A cache with the tiers of `config`. Closing it closes them.

    Raises:
        ConfigError: a size is too small for this layout's records, or a tier cannot be opened.
    """
    if not config.tiers:
        raise ConfigError("tiers: none given; want at least one, such as [tiers.disk] with a url")
    groups = range(len(layout.groups))
    slot_bytes = max(RecordFormat.of(layout, g, namespace).record_bytes for g in groups)
    passing = config.staging // slot_bytes
    if passing < len(layout.groups):
        raise ConfigError(
            f"staging={config.staging.human_readable()}: a chunk of this model takes {len(layout.groups)} "
            f"slots of {ByteSize(slot_bytes).human_readable()}"
        )
    resident = {n: t.capacity // slot_bytes for n, t in config.tiers.items() if t.url is None and t.capacity}
    slots = passing + sum(resident.values())
    try:
        staging = Staging(slot_bytes, slots)
    except (OSError, OverflowError) as error:
        size = ByteSize(slot_bytes * slots).human_readable()
        raise ConfigError(f"staging and memory tiers: {size} cannot be had: {error}") from error
    tiers: list[Tier] = []
    try:
        for name, tier in config.tiers.items():
            tiers.append(_open_tier(name, tier, staging))
        return Cache(
            layout,
            namespace,
            tiers,
            staging=staging,
            policy=config.resolved_policy(),
            timeout_s=config.timeout_s,
        )
    except (ValueError, OSError) as error:
        for opened in tiers:
            opened.close()
        staging.close()
        raise ConfigError(f"tiers: {error}") from error


def _open_tier(name: str, config: TierConfig, staging: Staging) -> Tier:
    if config.url is None:
        return MemoryTier(staging, int(config.capacity or 0), name=name)
    return ObjectTier(
        config.url,
        name=name,
        capacity_bytes=None if config.capacity is None else int(config.capacity),
        threads=config.threads,
        fsync=config.fsync,
        codec=config.codec,
        scope=config.scope,
    )


def _explain(entry: Any) -> str:
    """One pydantic error as "setting = value: what is wrong; the choices"."""
    where = ".".join(str(part) for part in entry["loc"]) or "policy"
    if entry["type"] == "extra_forbidden":
        known = _choices(entry["loc"][:-1])
        near = difflib.get_close_matches(str(entry["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: unknown setting; {hint}the settings here are {', '.join(known)}"
    value = "" if isinstance(entry["input"], dict) else f" = {entry['input']!r}"
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
    return list(model.model_fields)
