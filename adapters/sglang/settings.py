"""Settings of kvkit's storage backend for SGLang, in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.config import Config, load_config
from kvkit.settings import ConfigError, explain

WHERE = "hicache-storage-backend-extra-config"


class StorageSettings(BaseModel):
    """Settings of the backend; kvkit's tiers are in kvkit's configuration, and other keys are SGLang's."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)
    kvkit_config: str | None = Field(default=None, description="path of kvkit's TOML file")
    kvkit: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="the same settings inline; they override the file. SGLang logs its options, including "
        "these: keep secrets in the file or the environment",
    )
    identity: str = Field(
        default="",
        description="name of the weights' contents; empty: by the model's files, and pages of a model that "
        "has none do not outlive the engine",
    )


def read_settings(extra: Mapping[str, Any]) -> tuple[StorageSettings, Config]:
    """Read the backend's settings and kvkit's configuration.

    Raises:
        ConfigError: a setting is impossible, or there are no tiers.
    """
    try:
        settings = StorageSettings(**extra)
    except ValidationError as error:
        raise ConfigError(explain(error, StorageSettings, f"{WHERE}: ")) from error
    config = load_config(settings.kvkit_config, **settings.kvkit)
    if not config.tiers:
        raise ConfigError(f"{WHERE}: no tiers; give kvkit_config, or kvkit with tiers in it")
    return settings, config
