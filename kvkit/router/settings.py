"""Settings of `kvkit router`: a TOML file, and command line options, which may add engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvkit.blend.methods.registry import served
from kvkit.handoff.transport import addresses
from kvkit.router.routing import RoutingLimits
from kvkit.settings import ConfigError, explain, read_toml
from kvkit.transfer.requests import RequestLimits

DEFAULT_PORT = 8000


def _base_url(url: str) -> str:
    """Return `url` without trailing slashes and without a final /v1."""
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname or split.query or split.fragment:
        raise ValueError("want http://HOST:PORT or https://HOST:PORT")
    if split.port == 0:  # (`split.port` itself raises for any other invalid port)
        raise ValueError("want a port from 1 to 65535")
    if split.username is not None:
        raise ValueError("it has a user name or password, which logs and /health would show")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _handoff_address(address: str) -> str:
    """Return `address` if it is valid; a name from the prefill engines' `peers` is not checked."""
    if "/" in address or ":" in address:
        addresses.parse(addresses.of_rank(address, 0))
    return address


def _distinct_marks(marks: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return `marks` if neither contains the other."""
    if marks is not None and (marks[0] in marks[1] or marks[1] in marks[0]):
        raise ValueError("want two texts, neither containing the other")
    return marks


def _events_address(address: str) -> str:
    """Return `address` if ZeroMQ can connect to it."""
    if not re.fullmatch(r"tcp://[^/\s*]+:[0-9]+|ipc://\S+", address):
        raise ValueError("want tcp://HOST:PORT or ipc://PATH")
    return address


EventsAddress = Annotated[str, AfterValidator(_events_address)]
Url = Annotated[str, AfterValidator(_base_url)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class EngineConfig(BaseModel):
    """Settings of one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    url: Url = Field(description="base URL of its OpenAI-compatible server")
    cache: Url | None = Field(
        default=None, description="kvkit's HTTP endpoint in it, for lookups and pins; none: it is not asked"
    )
    token_file: Path | None = Field(
        default=None, description="file with the token of that endpoint; none: as for `kvkit top`"
    )
    events: EventsAddress | None = Field(
        default=None, description="address at which vLLM publishes KV events; none: they are not followed"
    )
    replay: EventsAddress | None = Field(
        default=None, description="vLLM's replay_endpoint; none: missed events are lost"
    )
    data_parallel: int = Field(
        default=1,
        description="number of data parallel ranks: each request goes to one of them; `events`, `replay` and "
        "`cache` are those of the first rank, and the other ranks have the next ports",
        ge=1,
        le=1024,
    )
    workers: int = Field(
        default=1,
        description="workers of each data parallel rank: the distance between the ranks' `cache` ports",
        ge=1,
        le=1024,
    )
    handoff: Annotated[str, AfterValidator(_handoff_address)] | None = Field(
        default=None,
        description="of a decode engine: the address in its handoff.listen, or its name in the prefill "
        "engines' handoff.peers; none: prefill engines need settings of their own for where to send",
    )

    def ranks(self, name: str) -> list[tuple[str, EngineConfig, int | None]]:
        """Return (name, settings, rank) of each data parallel rank; rank None: there is only one."""
        if self.data_parallel == 1:
            return [(name, self, None)]
        port_steps = {"cache": self.workers, "events": 1, "replay": 1}
        return [
            (
                f"{name}/{rank}",
                self.model_copy(
                    update={n: _shifted(getattr(self, n), rank * step) for n, step in port_steps.items()}
                ),
                rank,
            )
            for rank in range(self.data_parallel)
        ]


def _shifted(address: str | None, ports: int) -> str | None:
    """Return `address` with its port raised by `ports`."""
    if address is None or not ports:
        return address
    before, _, port = address.rpartition(":")
    return f"{before}:{int(port) + ports}"


class BlendLimits(BaseModel):
    """Limits on the blend options of requests; engines have limits and defaults of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    least_ratio: float = Field(
        default=0.0,
        description="smallest share of reused tokens to recompute that requests may set",
        ge=0,
        le=1,
    )
    methods: tuple[Annotated[str, AfterValidator(served)], ...] = Field(
        default=("prophetkv", "question_attention", "first_n"),
        description="methods of choosing tokens to recompute that requests may name, if engines know them",
    )
    marks: Annotated[tuple[str, str] | None, AfterValidator(_distinct_marks)] = Field(
        default=None,
        description="texts that mark the start and the end of a document in a prompt; the router removes "
        "them; none: prompts have no marks",
    )
    context: Literal["auto", "system", "alone"] = Field(
        default="auto",
        description="what documents of chats are computed behind unless requests state a prefix: `system`, "
        "the system prompt; `alone`, nothing; `auto`, what `kvkit doctor --blend` found better for the "
        "engines' model, if their `cache` tells it, and nothing otherwise",
    )
    first_use: int = Field(
        default=0,
        description="number of documents to compute at a time, of those that answered prompts carried and no "
        "engine held; 0: none",
        ge=0,
        le=64,
    )


class RouterConfig(RoutingLimits):
    """All settings of the router."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=DEFAULT_PORT, description="port to listen on; 0: any free port", ge=0, le=65535)
    prefill: dict[str, EngineConfig] = Field(default_factory=dict, description="prefill engines by name")
    decode: dict[str, EngineConfig] = Field(default_factory=dict, description="decode engines by name")
    blend: BlendLimits | None = Field(
        default=None, description="limits on blending; none: no request is blended"
    )
    requests: RequestLimits | None = Field(
        default=None, description="limits on request policies; none: requests may have no policy"
    )
    otlp_traces_endpoint: Url | None = Field(
        default=None, description="URL to send OpenTelemetry spans to, as vLLM's option; none: no spans"
    )
    connect_timeout_s: PositiveSeconds = Field(default=5.0, description="time to connect to an engine")
    lookup_timeout_s: PositiveSeconds = Field(default=1.0, description="time for engines to answer a lookup")
    prefill_timeout_s: PositiveSeconds = Field(
        default=120.0, description="time for a prefill engine to compute a prompt"
    )
    first_token_timeout_s: PositiveSeconds = Field(
        default=300.0, description="time until a stream's first event"
    )
    idle_timeout_s: PositiveSeconds = Field(
        default=60.0,
        description="time between a stream's events; also for a client to send its request or take an event",
    )
    request_timeout_s: PositiveSeconds = Field(default=3600.0, description="time for a whole request")
    health_interval_s: PositiveSeconds = Field(
        default=2.0, description="time between health checks of an engine"
    )
    health_timeout_s: PositiveSeconds = Field(
        default=5.0, description="time for a health check; after three timeouts in a row the engine is down"
    )

    @model_validator(mode="after")
    def _check_engines(self) -> RouterConfig:
        if not self.decode:
            raise ValueError("decode: no engine given; want at least one --decode URL or [decode.NAME]")
        for name, engine in self.prefill.items():
            if name in self.decode:
                raise ValueError(f"prefill.{name}: there is a decode.{name}, too; want different names")
            if engine.handoff is not None:
                raise ValueError(f"prefill.{name}.handoff: only a decode engine has one")
        for name, engine in (self.prefill | self.decode).items():
            if engine.token_file is not None and engine.cache is None:
                raise ValueError(f"{name}.token_file: given without {name}.cache")
            if engine.replay is not None and engine.events is None:
                raise ValueError(f"{name}.replay: given without {name}.events")
            for field in ("cache", "events", "replay") if engine.data_parallel > 1 else ():
                if (address := getattr(engine, field)) and not re.search(r":[0-9]+$", address):
                    raise ValueError(f"{name}.{field} = {address!r}: want HOST:PORT with data_parallel")
            if engine.data_parallel > 1 and engine.handoff is not None:
                raise ValueError(f"{name}.handoff: want none with data_parallel: its ranks would share it")
        return self

    @property
    def warnings(self) -> list[str]:
        """Warnings about settings that are probably mistakes."""
        return [
            f"decode.{name}.handoff is not given: prefill engines hand nothing off to it unless their own "
            f"settings say where to send; want --decode {name}={engine.url},handoff=ADDRESS"
            for name, engine in self.decode.items()
            if self.prefill and engine.handoff is None
        ]


def read_router_config(path: Path | None = None, **settings: Any) -> RouterConfig:
    """Read the settings of a TOML file (None: the defaults); `settings` override them, and add engines.
    Raises ConfigError if the file cannot be read, or a setting is unknown or impossible."""
    values = {} if path is None else read_toml(path)
    for name, value in settings.items():
        merges = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        values[name] = {**values[name], **value} if merges else value
    try:
        return RouterConfig(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, RouterConfig, f"{path or 'settings'}: ")) from error


def parse_engine_options(given: list[str], role: str) -> dict[str, dict[str, str]]:
    """Parse engines of the command line, each [NAME=]URL[,SETTING=VALUE]..., into settings by name.
    Raises ConfigError if two have the same name, or text after a comma is not a setting."""
    parsed: dict[str, dict[str, str]] = {}
    for text in given:
        target, *settings = text.split(",")
        has_name = "=" in target.partition("://")[0]
        name, _, url = target.partition("=") if has_name else (_host_and_port(target), "", target)
        if name in parsed:
            raise ConfigError(f"--{role} {text}: there is a {name!r} already")
        parsed[name] = {"url": url}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or key in parsed[name]:
                known = ", ".join(EngineConfig.model_fields)
                raise ConfigError(f"--{role} {text}: {setting!r}: want SETTING=VALUE once each, of {known}")
            parsed[name][key] = value
    return parsed


def _host_and_port(url: str) -> str:
    """Return HOST:PORT of a URL, or all of an invalid URL, which validation refuses later."""
    try:
        return urlsplit(url).netloc or url
    except ValueError:
        return url
