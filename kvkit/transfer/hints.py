"""The action `kv.retain` of `kv_hints`, the envelope in which orchestrators advise vLLM and SGLang about KV.

Source: vLLM's RFC 53421 has the envelope, the pull request that follows its RFC 37003 the action's payload:

    {"scope": null, "directives": [{"start": 0, "end": 900, "priority": 80, "duration": 600},
                                   {"covers_output": true, "priority": 50, "duration": null}]}
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvkit.settings import ConfigError, read_object
from kvkit.tiers.eviction.policies import HIGHEST, NORMAL
from kvkit.transfer.policy import Retention
from kvkit.transfer.requests import RequestLimits

WHERE = "kv_hints"
RETAIN, MAJOR = "kv.retain", "1"


class _Directive(BaseModel):
    """A range of tokens and how long to keep its KV, or how strongly."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    priority: int = Field(ge=0, le=HIGHEST)
    start: int = Field(default=0, ge=0)
    end: int | None = Field(default=None, ge=1)
    duration: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    covers_output: bool = False


class _Payload(BaseModel):
    """The payload of the action. Its `scope` does not matter, as nothing is released."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    scope: str | None = None
    directives: list[_Directive] = Field(max_length=128)


def read(envelope: Any, limits: RequestLimits) -> tuple[tuple[Retention, ...], tuple[str, ...]]:
    """Return what an envelope asks to retain, cut to the limits, and the reasons why actions are ignored.

    Other actions are not read. A range is retained with all tokens before it, as it is useless without them.

    Args:
        envelope: a `KvHintsEnvelope` of vLLM or SGLang; None: no hints.
    """
    retained, ignored = list[Retention](), list[str]()
    for action in () if envelope is None else envelope.actions:
        if action.action_type != RETAIN:
            continue
        where = f"{WHERE}.actions.{action.action_id}"
        version = action.action_version
        if version.partition(".")[0] != MAJOR:
            ignored.append(f"{where}.action_version = {version!r}: want {MAJOR}.x for {RETAIN}")
            continue
        try:
            payload = read_object(action.payload, _Payload, f"{where}.payload")
        except ConfigError as error:
            ignored.append(str(error))
        else:
            retained += (_retention(each, limits) for each in payload.directives if each.priority)
    return tuple(each for each in retained if each != Retention(each.tokens)), tuple(ignored)


def _retention(directive: _Directive, limits: RequestLimits) -> Retention:
    """Return what a directive asks for: for a limited time records are kept, otherwise they have priority."""
    tokens = None if directive.covers_output else directive.end
    if directive.duration is not None:
        return Retention(tokens, keep_s=min(directive.duration, limits.max_keep_s))
    return Retention(
        tokens, priority=max(NORMAL, min(max(directive.priority, NORMAL + 1), limits.max_priority))
    )
