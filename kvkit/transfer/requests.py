"""A request's `kv_cache` object: what it wants of the cache, within the server's limits."""

from __future__ import annotations

import reprlib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvkit.settings import ConfigError, read_object
from kvkit.tiers.eviction.policies import HIGHEST, NORMAL
from kvkit.transfer.policy import RequestPolicy

FIELD = "kv_cache"
_MAX_TOKENS = 2**53 - 1
"""Largest integer that every JSON parser represents exactly; vLLM's encoder takes at most 64 bits."""


class RequestLimits(BaseModel):
    """Limits of what requests may want of the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    load_from: tuple[str, ...] | None = Field(
        default=None, description="tiers that requests may load from; default: those of the engine's policy"
    )
    store_to: tuple[str, ...] | None = Field(
        default=None, description="tiers that requests may store to; default: those of the engine's policy"
    )
    max_keep_s: float = Field(
        default=0.0, description="longest `keep_s` that requests may set, in seconds", ge=0, le=31_536_000
    )
    max_priority: int = Field(
        default=NORMAL, description="highest priority that requests may set", ge=0, le=HIGHEST
    )


class _RequestFields(BaseModel):
    """The fields of `kv_cache`."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    store: bool = True
    store_to: list[str] | None = None
    load_from: list[str] | None = None
    max_load_tokens: int | None = Field(default=None, ge=0, le=_MAX_TOKENS)
    keep_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    priority: int = Field(default=NORMAL, ge=0, le=HIGHEST)


def read(given: Any, limits: RequestLimits, where: str, setting: str) -> RequestPolicy:
    """Read and check a request's `kv_cache` object.

    Args:
        given: the object, decoded from JSON.
        limits: limits of the server.
        where: name of the request's field, for messages.
        setting: name of the setting of `limits`, for messages.

    Raises:
        ConfigError: a field is unknown, invalid or beyond `limits`.
    """
    fields = read_object(given, _RequestFields, where)
    if fields.store_to and not fields.store:
        raise ConfigError(f"{where}.store_to = {reprlib.repr(fields.store_to)}: want none with store = false")
    for name in ("load_from", "store_to"):
        allowed = getattr(limits, name)
        for tier in getattr(fields, name) or ():
            if allowed is not None and tier not in allowed:
                choices = ", ".join(allowed) or "none"
                raise ConfigError(
                    f"{where}.{name} = {reprlib.repr(tier)}: want some of {setting}.{name}: {choices}"
                )
    for name in ("keep_s", "priority"):
        value, limit = getattr(fields, name), getattr(limits, f"max_{name}")
        if value > limit:
            raise ConfigError(f"{where}.{name} = {value}: want at most {setting}.max_{name} = {limit}")
    return RequestPolicy(
        load_from=_tiers(fields.load_from),
        store_to=_tiers(fields.store_to if fields.store else []),
        max_load_tokens=fields.max_load_tokens,
        keep_s=fields.keep_s,
        priority=fields.priority,
    )


def _tiers(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(dict.fromkeys(names))
