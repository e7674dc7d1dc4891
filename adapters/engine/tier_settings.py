"""Settings that every engine's adapter has: where kvkit's own configuration is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.config import Config, load_config
from kvkit.settings import ConfigError, explain

S = TypeVar("S", bound="AdapterSettings")


class AdapterSettings(BaseModel):
    """Settings of an adapter; the tiers are in kvkit's own configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    kvkit_config: str | None = Field(default=None, description="path of kvkit's TOML file")
    kvkit: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="the same settings inline; they override the file. Engines log their options, including "
        "these: keep secrets in the file or the environment",
    )


class SleepSettings(AdapterSettings):
    """Settings of an adapter for an engine that can sleep."""

    keep_over_sleep: bool = Field(
        default=False,
        description="whether KV in the tiers stays valid over a `sleep` at level 1: for engines whose "
        "weights do not change, or only by vLLM's own calls",
    )


class PageSettings(AdapterSettings):
    """Settings of an adapter that keeps an engine's pages under the engine's keys."""

    identity: str = Field(
        default="",
        description="name of the weights' contents, and of the adapters' if requests use any; empty: by the "
        "weights' files, and pages do not outlive an engine whose weights or adapters are not known by them",
    )


def read(kind: type[S], values: Mapping[str, Any], where: str) -> tuple[S, Config]:
    """Read an adapter's settings and kvkit's configuration.

    Args:
        where: name of the engine's option that has them, for errors.

    Raises:
        ConfigError: a setting is unknown or impossible, or there are neither tiers nor a handoff.
    """
    try:
        settings = kind(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, where)) from error
    config = load_config(settings.kvkit_config, **settings.kvkit)
    if not config.tiers and config.handoff is None:
        raise ConfigError(f"{where.rstrip('.: ')}: no tiers; give kvkit_config, or kvkit with tiers in it")
    return settings, config
