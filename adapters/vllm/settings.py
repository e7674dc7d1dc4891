"""Settings of the connector, given in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from kvkit.adapters.engine import tier_settings
from kvkit.adapters.engine.tier_settings import SleepSettings
from kvkit.blend.methods.registry import served
from kvkit.config import Config
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.settings import ConfigError
from kvkit.tiers.eviction.policies import HIGHEST, NORMAL
from kvkit.transfer.policy import PolicyError, check_named, in_effect
from kvkit.transfer.requests import RequestLimits

NAME, WHERE = "KVKitConnector", "kv_connector_extra_config"


class BlendSettings(BaseModel):
    """Settings of blending, which reuses documents at any position in a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    ratio: float = Field(
        default=0.15,
        description="share of reused tokens to recompute, for requests that name none",
        ge=0,
        le=1,
    )
    least_ratio: float = Field(default=0.0, description="lowest ratio that a request may name", ge=0, le=1)
    coverage: float = Field(
        default=1.0,
        description="share of the method's scores at which selection stops, even below the ratio",
        ge=0,
        le=1,
    )
    drift: float = Field(
        default=0.5,
        description="share of their estimated change by which reused tokens that are not recomputed are "
        "corrected, for requests that name none; 0: they stay as found",
        ge=0,
        le=1,
    )
    methods: tuple[Annotated[str, AfterValidator(served)], ...] = Field(
        default=("prophetkv", "question_attention", "first_n"),
        description="methods that a request may name for selecting the tokens to recompute: those that need "
        "the question's attention or nothing; the first is the default",
    )
    max_documents: int = Field(default=256, description="prompts with more documents are not blended", ge=1)
    unchecked: bool = Field(
        default=False, description="whether to blend a model that has not passed `kvkit doctor --blend`"
    )
    marks: tuple[str, str] | None = Field(
        default=None,
        description="texts before and after each document, for prompts whose requests do not name documents; "
        "two special tokens of the model work best",
    )
    context: Literal["auto", "prefix", "alone"] = Field(
        default="auto",
        description="what documents between marks are computed behind if requests do not state a prefix: "
        "`prefix`, what stands before the first one; `alone`, nothing; `auto`, what `kvkit doctor --blend` "
        "found better for the model, and `prefix` if unchecked",
    )
    split: bool = Field(
        default=False, description="whether to cut prompts without documents into documents, by content"
    )

    @field_validator("methods")
    @classmethod
    def _some(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        if not methods:
            raise ValueError("want at least one")
        return methods


class SessionSettings(BaseModel):
    """Retention of requests with a `session_id`: how long a session's KV is kept after each of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    keep_s: float = Field(
        default=0.0,
        description="`keep_s` of requests with a `session_id` that set none, in seconds",
        ge=0,
        le=31_536_000,
    )
    priority: int = Field(
        default=NORMAL,
        description="`priority` of requests with a `session_id` that set none",
        ge=0,
        le=HIGHEST,
    )


class Settings(SleepSettings):
    """Settings of the connector; the tiers are in kvkit's own configuration."""

    load: Literal["async", "sync", "layerwise"] = Field(
        default="async",
        description="async: other requests compute meanwhile; sync: the step waits for its loads; layerwise: "
        "each layer waits for its own",
    )
    send: Literal["async", "sync"] = Field(
        default="async",
        description="async: other requests compute meanwhile; sync: a prefill engine's step waits until the "
        "KV that it computed has arrived, if the receiver has room for it",
    )
    record_ranks: int | None = Field(
        default=None,
        description="number of ranks to divide the KV heads by: a record holds the heads of one; none: this "
        "engine's number of ranks. Engines share records if their tensor-parallel size divides this number; "
        "larger engines read parts of records and store none",
        ge=1,
        le=1024,
    )
    record_stages: int | None = Field(
        default=None,
        description="number of stages to divide the layers by: a record holds the layers of one. Engines "
        "with the same value share records, whatever their own number of stages, if each stage has whole "
        "records; none: pipelines share records only with pipelines like theirs",
        ge=1,
        le=1024,
    )
    snapshot_every: int = Field(
        default=1,
        description="for models with states: chunks from one stored snapshot to the next, in addition to the "
        "snapshot at a prompt's end; 0: only that one",
        ge=0,
    )
    save_generated: bool = Field(default=True, description="whether to store chunks with generated tokens")
    handoff_timeout_s: float = Field(
        default=30.0, description="seconds that a request waits for a prefill engine's KV", gt=0, le=600
    )
    prefill_tokens_per_s: float | None = Field(
        default=None,
        description="speed at which the engine computes prompts; none: as measured. Tiers that load more "
        "slowly are left out",
        gt=0,
    )
    lookup_timeout_s: float = Field(
        default=1.0, description="seconds that a request waits for a lookup", gt=0, le=60
    )
    blend: BlendSettings | None = Field(default=None, description="none: requests are not blended")
    tool_calls: tuple[str, ...] = Field(
        default=(),
        description="texts that an answer has if it calls a tool, such as `<tool_call>`; special tokens of "
        "the model work best. Tiers with eviction `sessions` learn how soon a tool's result comes",
    )
    requests: RequestLimits = RequestLimits()
    sessions: SessionSettings = SessionSettings()


def read_settings(extra: Mapping[str, Any]) -> tuple[Settings, Config]:
    """Read the connector's settings and kvkit's configuration from a `kv_connector_extra_config`.

    If `requests` names no tiers, it gets the policy's.

    Raises:
        ConfigError: a setting is unknown or impossible, or there are neither tiers nor a handoff.
    """
    settings, config = tier_settings.read(Settings, extra, f"{WHERE}.")
    if settings.blend is not None and settings.load != "async":
        raise ConfigError(f"{WHERE}.load = {settings.load!r}: want 'async' with blend")
    limits = complete_limits(settings.requests, config, f"{WHERE}.requests")
    return settings.model_copy(update={"requests": limits}), config


def complete_limits(requested: RequestLimits, config: Config, where: str) -> RequestLimits:
    """Return `requested` with missing tiers filled in from the policy.

    Args:
        where: name of the option that has them, for errors.

    Raises:
        ConfigError: `requested` names a tier that does not exist.
    """
    policy = in_effect(config.resolved_policy(), [n for n, tier in config.tiers.items() if tier.in_memory])
    completed = {"load_from": policy.retrieve_from, "store_to": policy.store_to}
    known = dict.fromkeys(tier for tier in (*config.tiers, *policy.retrieve_from) if tier != HANDOFF)
    for name, tiers in completed.items():
        named = getattr(requested, name)
        try:
            check_named(f"{where}.{name}", named or (), known)
        except PolicyError as error:
            raise ConfigError(str(error)) from error
        completed[name] = tuple(tier for tier in tiers if tier != HANDOFF) if named is None else named
    return requested.model_copy(update=completed)
