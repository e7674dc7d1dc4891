"""Settings of kvkit's tier under vLLM's own offloading: an entry of `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.config import Config, load_config
from kvkit.settings import ConfigError, explain

WHERE = "secondary_tiers"


class TierSettings(BaseModel):
    """Settings of the tier; kvkit's own tiers are in kvkit's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    kvkit_config: str | None = Field(default=None, description="path of kvkit's TOML file")
    kvkit: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="the same settings inline; they override the file. vLLM logs its options, including "
        "these: keep secrets in the file or the environment",
    )
    identity: str = Field(
        default="",
        description="name of the weights' contents, and of the adapters' if requests use any; empty: by the "
        "weights' files, as the connector's, and no page outlives an engine with adapters",
    )
    locality: Literal["LOCAL", "REMOTE"] | None = Field(
        default=None, description="for vLLM's filters and events; none: by the tiers, if all are alike"
    )


def read_settings(values: Mapping[str, Any]) -> tuple[TierSettings, Config]:
    """Read an entry of `secondary_tiers`, without vLLM's own fields, and kvkit's configuration.

    Raises:
        ConfigError: a setting is unknown or impossible, or there are no tiers.
    """
    try:
        settings = TierSettings(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, TierSettings, f"{WHERE}: ")) from error
    config = load_config(settings.kvkit_config, **settings.kvkit)
    if not config.tiers:
        raise ConfigError(f"{WHERE}: no tiers; give kvkit_config, or kvkit with tiers in it")
    return settings, config
