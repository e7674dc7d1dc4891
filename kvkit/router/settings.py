"""The settings of `kvkit router`: one TOML file, and what the command line adds, engines among it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvkit.blend.methods.registry import served
from kvkit.handoff.transport import addresses
from kvkit.moving.requests import RequestLimits
from kvkit.router.routing import RoutingLimits
from kvkit.settings import ConfigError, explain, read_toml

DEFAULT_PORT = 8000


def _base_url(url: str) -> str:
    """`url` without the slashes, and the /v1, at its end."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("want http://HOST:PORT or https://HOST:PORT")
    if parts.port == 0:  # (one that is none at all raises by itself)
        raise ValueError("want a port from 1 to 65535")
    if parts.username is not None:
        raise ValueError("it has a user name or password, and URLs are shown")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _handoff_address(address: str) -> str:
    """`address`, or the name that prefill engines have for it in `peers`."""
    if "/" in address or ":" in address:
        addresses.parse(addresses.of_rank(address, 0))
    return address


def _marks(marks: tuple[str, str] | None) -> tuple[str, str] | None:
    """`marks`, if neither can be taken for the other."""
    if marks is not None and (marks[0] in marks[1] or marks[1] in marks[0]):
        raise ValueError("want two texts, neither of which is in the other")
    return marks


def _events_address(address: str) -> str:
    """`address`, if ZeroMQ can connect to it."""
    if not re.fullmatch(r"tcp://[^/\s*]+:[0-9]+|ipc://\S+", address):
        raise ValueError("want tcp://HOST:PORT or ipc://PATH")
    return address


EventsAddress = Annotated[str, AfterValidator(_events_address)]
Url = Annotated[str, AfterValidator(_base_url)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class EngineConfig(BaseModel):
    """One engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    url: Url = Field(description="of its OpenAI-compatible server")
    cache: Url | None = Field(
        default=None, description="kvkit's HTTP endpoint in it, to ask what it holds; none: it is not asked"
    )
    token_file: Path | None = Field(
        default=None, description="holds the token of that endpoint; none: as `kvkit top`"
    )
    events: EventsAddress | None = Field(
        default=None, description="where it publishes KV events, vLLM's endpoint; none: they are not followed"
    )
    replay: EventsAddress | None = Field(
        default=None, description="vLLM's replay_endpoint; none: events that are missed are lost"
    )
    data_parallel: int = Field(
        default=1,
        description="its ranks of data parallelism: requests are sent to one of them, and `events`, `replay` "
        "and `cache` are the first one's, whose ports the others' follow",
        ge=1,
        le=1024,
    )
    workers: int = Field(
        default=1, description="of each of these ranks: so far apart are the ports of `cache`", ge=1, le=1024
    )
    handoff: Annotated[str, AfterValidator(_handoff_address)] | None = Field(
        default=None,
        description="of a decode engine: the address in its handoff.listen, or that one's name in P's "
        "handoff.peers; none: P must know by itself where to send",
    )

    def ranks(self, name: str) -> list[tuple[str, EngineConfig, int | None]]:
        """Each rank of data parallelism: what it is called, its settings and number (None: it is alone)."""
        if self.data_parallel == 1:
            return [(name, self, None)]
        apart = {"cache": self.workers, "events": 1, "replay": 1}
        return [
            (
                f"{name}/{rank}",
                self.model_copy(update={n: _moved(getattr(self, n), rank * by) for n, by in apart.items()}),
                rank,
            )
            for rank in range(self.data_parallel)
        ]


def _moved(address: str | None, ports: int) -> str | None:
    """The address whose port is so many higher."""
    if address is None or not ports:
        return address
    before, _, port = address.rpartition(":")
    return f"{before}:{int(port) + ports}"


class BlendLimits(BaseModel):
    """What requests may ask of blending; the engines have limits and defaults of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    least_ratio: float = Field(
        default=0.0, description="requests may have no smaller share of reused tokens recomputed", ge=0, le=1
    )
    methods: tuple[Annotated[str, AfterValidator(served)], ...] = Field(
        default=("question_attention", "first_n"),
        description="how requests may have tokens chosen, of what the engines know",
    )
    marks: Annotated[tuple[str, str] | None, AfterValidator(_marks)] = Field(
        default=None,
        description="what stands before and after a document in a text, and is taken out of it; "
        "none: texts have no marks",
    )
    first_use: int = Field(
        default=0,
        description="so many documents at a time are computed because answered prompts carried them and no "
        "engine held them; 0: none",
        ge=0,
        le=64,
    )


class RouterConfig(RoutingLimits):
    """Every setting of the router."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=DEFAULT_PORT, description="0: any that is free", ge=0, le=65535)
    prefill: dict[str, EngineConfig] = Field(default_factory=dict, description="engines by name")
    decode: dict[str, EngineConfig] = Field(default_factory=dict, description="engines by name")
    blend: BlendLimits | None = Field(default=None, description="none: no request is blended")
    requests: RequestLimits | None = Field(
        default=None, description="none: requests may want nothing of the engines' caches"
    )
    connect_timeout_s: PositiveSeconds = Field(default=5.0, description="to reach an engine")
    lookup_timeout_s: PositiveSeconds = Field(default=1.0, description="to ask the engines what they hold")
    prefill_timeout_s: PositiveSeconds = Field(default=120.0, description="for a prompt on a prefill engine")
    first_token_timeout_s: PositiveSeconds = Field(default=300.0, description="until a stream's first event")
    idle_timeout_s: PositiveSeconds = Field(
        default=60.0, description="between a stream's events, and for a client to take one"
    )
    request_timeout_s: PositiveSeconds = Field(default=3600.0, description="for a whole request")
    health_interval_s: PositiveSeconds = Field(
        default=2.0, description="between questions for an engine's health"
    )
    health_timeout_s: PositiveSeconds = Field(
        default=5.0, description="for the answer; three that are missing in a row: the engine is down"
    )

    @model_validator(mode="after")
    def _engines_are_told_apart(self) -> RouterConfig:
        if not self.decode:
            raise ValueError("decode: no engine given; want at least one --decode URL or [decode.NAME]")
        for name, engine in self.prefill.items():
            if name in self.decode:
                raise ValueError(f"prefill.{name}: there is a decode.{name}, too; want names of their own")
            if engine.handoff is not None:
                raise ValueError(f"prefill.{name}.handoff: only a decode engine has one")
        for name, engine in (self.prefill | self.decode).items():
            if engine.token_file is not None and engine.cache is None:
                raise ValueError(f"{name}.token_file: given without {name}.cache")
            if engine.replay is not None and engine.events is None:
                raise ValueError(f"{name}.replay: given without {name}.events")
            for field in ("cache", "events", "replay") if engine.data_parallel > 1 else ():
                if (given := getattr(engine, field)) and not re.search(r":[0-9]+$", given):
                    raise ValueError(f"{name}.{field} = {given!r}: want HOST:PORT with data_parallel")
            if engine.data_parallel > 1 and engine.handoff is not None:
                raise ValueError(f"{name}.handoff: want none with data_parallel: its ranks would share it")
        return self

    @property
    def doubts(self) -> list[str]:
        """What is not likely to be meant so, in words."""
        return [
            f"decode.{name}.handoff is not given: prefill engines hand nothing off to it unless they know by "
            f"themselves where to send; want --decode {name}={engine.url},handoff=ADDRESS"
            for name, engine in self.decode.items()
            if self.prefill and engine.handoff is None
        ]


def read_router_config(path: Path | None = None, **settings: Any) -> RouterConfig:
    """The settings in a TOML file (none: the defaults). `settings` win; engines among them are added.
    Raises ConfigError: the file cannot be read, or a setting is unknown or impossible."""
    values = {} if path is None else read_toml(path)
    for name, value in settings.items():
        added = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        values[name] = {**values[name], **value} if added else value
    try:
        return RouterConfig(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, RouterConfig, f"{path or 'settings'}: ")) from error


def engines(given: list[str], role: str) -> dict[str, dict[str, str]]:
    """Engines of the command line by name: each is [NAME=]URL[,SETTING=VALUE]...
    Raises ConfigError: two have the same name, or something after a comma is no setting."""
    found: dict[str, dict[str, str]] = {}
    for text in given:
        where, *settings = text.split(",")
        named = "=" in where.partition("://")[0]
        name, _, url = where.partition("=") if named else (_address(where), "", where)
        if name in found:
            raise ConfigError(f"--{role} {text}: there is a {name!r} already")
        found[name] = {"url": url}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or key in found[name]:
                known = ", ".join(EngineConfig.model_fields)
                raise ConfigError(f"--{role} {text}: {setting!r}: want SETTING=VALUE once each, of {known}")
            found[name][key] = value
    return found


def _address(url: str) -> str:
    """HOST:PORT of a URL; all of one that has none, which is refused later, with what it lacks."""
    try:
        return urlsplit(url).netloc or url
    except ValueError:
        return url
