"""The settings of the connector: what `kv_connector_extra_config` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvkit.blend.methods.registry import served
from kvkit.config import Config, load_config
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.moving.policy import PolicyError, check_named, in_effect
from kvkit.moving.requests import RequestLimits
from kvkit.settings import ConfigError, explain

WHERE = "kv_connector_extra_config"


class BlendSettings(BaseModel):
    """How requests may be blended: documents reused wherever they stand in a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    ratio: float = Field(
        default=0.15,
        description="share of reused tokens to compute again, if a request names none",
        ge=0,
        le=1,
    )
    least_ratio: float = Field(default=0.0, description="the least that a request may name", ge=0, le=1)
    coverage: float = Field(
        default=1.0,
        description="fewer are computed again where these have this share of the method's scores",
        ge=0,
        le=1,
    )
    methods: tuple[Annotated[str, AfterValidator(served)], ...] = Field(
        default=("question_attention", "first_n"),
        description="how requests may have tokens chosen, by methods that need the question's attention or "
        "nothing; the first is that of requests which name none",
    )
    max_documents: int = Field(default=256, description="a prompt with more documents is not blended", ge=1)
    unchecked: bool = Field(
        default=False, description="whether to blend a model that has not passed `kvkit doctor --blend`"
    )
    marks: tuple[str, str] | None = Field(
        default=None,
        description="what stands before and after a document in a prompt that does not say where they are; "
        "best two special tokens of the model",
    )
    split: bool = Field(
        default=False, description="whether prompts without documents are cut into some by their content"
    )

    @field_validator("methods")
    @classmethod
    def _some(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        if not methods:
            raise ValueError("want at least one")
        return methods


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
    record_ranks: int | None = Field(
        default=None,
        description="a record holds the KV heads of one of so many ranks, none: of this engine's; engines of "
        "every tensor-parallel size that divides it share records, larger ones read parts and store none",
        ge=1,
        le=1024,
    )
    record_stages: int | None = Field(
        default=None,
        description="a record holds the layers of one of so many pipeline stages; engines that have it share "
        "records, whatever their stages, where each has whole records; none: a pipeline shares with its like",
        ge=1,
        le=1024,
    )
    snapshot_every: int = Field(
        default=1,
        description="where a model has states: chunks from one stored snapshot of them to the next, besides "
        "that at a prompt's end; 0: that one alone",
        ge=0,
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
    blend: BlendSettings | None = Field(default=None, description="none: requests are not blended")
    requests: RequestLimits = RequestLimits()


def read_settings(extra: Mapping[str, Any]) -> tuple[Settings, Config]:
    """The connector's settings, and kvkit's configuration, of a `kv_connector_extra_config`.

    `requests` has the tiers of the policy where it names none.

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
    if settings.blend is not None and settings.load != "async":
        raise ConfigError(f"{WHERE}.load = {settings.load!r}: want 'async' with blend")
    return settings.model_copy(update={"requests": _limits(settings.requests, config)}), config


def _limits(given: RequestLimits, config: Config) -> RequestLimits:
    """`given` with what was left out filled in.

    Raises:
        ConfigError: it names a tier that does not exist.
    """
    policy = in_effect(config.resolved_policy(), [n for n, tier in config.tiers.items() if tier.in_memory])
    own = {"load_from": policy.retrieve_from, "store_to": policy.store_to}
    known = dict.fromkeys(tier for tier in (*config.tiers, *policy.retrieve_from) if tier != HANDOFF)
    for name, tiers in own.items():
        named = getattr(given, name)
        try:
            check_named(f"{WHERE}.requests.{name}", named or (), known)
        except PolicyError as error:
            raise ConfigError(str(error)) from error
        own[name] = tuple(tier for tier in tiers if tier != HANDOFF) if named is None else named
    return given.model_copy(update=own)
