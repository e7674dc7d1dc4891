"""The settings of the connector: what `kv_connector_extra_config` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.config import Config, load_config
from kvkit.settings import ConfigError, explain

WHERE = "kv_connector_extra_config"


class Settings(BaseModel):
    """How the connector goes about it; the tiers are in kvkit's own configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    kvkit_config: str | None = Field(default=None, description="path of kvkit's TOML file")
    kvkit: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="the same settings in place; they win over the file's. vLLM logs its options, these "
        "among them: keep secrets in the file or the environment",
    )
    load: Literal["async", "sync", "layerwise"] = Field(
        default="async",
        description="async: others compute meanwhile; sync: the step waits; layerwise: each layer waits",
    )
    send: Literal["async", "sync"] = Field(
        default="async",
        description="async: others compute meanwhile; sync: a step of a prefill engine waits until what it "
        "computed has arrived, if there is room for it",
    )
    save_generated: bool = Field(default=True, description="store chunks with generated tokens, too")
    handoff_timeout_s: float = Field(
        default=30.0, description="seconds that a request waits for what a prefill engine sends", gt=0, le=600
    )
    prefill_tokens_per_s: float | None = Field(
        default=None,
        description="how fast the engine computes prompts, none: as measured; slower tiers are left out",
        gt=0,
    )
    lookup_timeout_s: float = Field(
        default=1.0, description="seconds that a request waits for a lookup", gt=0, le=60
    )


def read_settings(extra: Mapping[str, Any]) -> tuple[Settings, Config]:
    """The connector's settings, and kvkit's configuration, of a `kv_connector_extra_config`.

    Raises:
        ConfigError: a setting is unknown or impossible, or there are no tiers.
    """
    try:
        settings = Settings(**extra)
    except ValidationError as error:
        raise ConfigError(explain(error, Settings, f"{WHERE}.")) from error
    config = load_config(settings.kvkit_config, **settings.kvkit)
    if not config.tiers and config.handoff is None:
        raise ConfigError(f"{WHERE}: no tiers and no handoff; give kvkit_config, or kvkit with them in it")
    return settings, config
