"""Retention that orchestrators ask for in `kv_hints` is read within limits; what is invalid is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvkit.transfer.hints import read
from kvkit.transfer.policy import Retention
from kvkit.transfer.requests import RequestLimits

LIMITS = RequestLimits(max_keep_s=60, max_priority=80)


@dataclass(frozen=True)
class Action:
    """What vLLM's and SGLang's structures have of it."""

    payload: Any
    action_type: str = "kv.retain"
    action_version: str = "1.0"
    action_id: str = "a"


@dataclass(frozen=True)
class Envelope:
    actions: list[Action]
    protocol_version: str = "0.1"
    message_id: str = "m"


def asking(*directives: Any, **action: Any) -> Envelope:
    return Envelope([Action({"directives": list(directives)}, **action)])


def test_no_hints_retain_nothing() -> None:
    assert read(None, LIMITS) == read(Envelope([]), LIMITS) == ((), ())
    other = [Action({"anything": 1}, action_type=kind) for kind in ("kv.fetch", "kv.demote")]
    assert read(Envelope(other), LIMITS) == ((), ()), "others are for others to read"


@pytest.mark.parametrize(
    ("directive", "retained"),
    [
        ({"end": 900, "priority": 70}, [Retention(900, priority=70)]),
        ({"start": 500, "end": 900, "priority": 70}, [Retention(900, priority=70)]),
        ({"priority": 90}, [Retention(priority=80)]),
        ({"priority": 1}, [Retention(priority=36)]),
        ({"end": 900, "priority": 1, "duration": 30}, [Retention(900, keep_s=30.0)]),
        ({"priority": 100, "duration": 600.5}, [Retention(keep_s=60.0)]),
        ({"covers_output": True, "priority": 50, "duration": None}, [Retention(priority=50)]),
        ({"priority": 0}, []),
        ({"priority": 50, "duration": 0}, []),
    ],
)
def test_what_a_directive_asks_for(directive: dict[str, Any], retained: list[Retention]) -> None:
    assert read(asking(directive), LIMITS) == (tuple(retained), ())


def test_without_limits_of_the_operator_hints_retain_nothing() -> None:
    asked = asking({"priority": 100}, {"priority": 100, "duration": 3600})
    assert read(asked, RequestLimits()) == ((), ())


@pytest.mark.parametrize(
    ("envelope", "told"),
    [
        (asking(action_version="2.0"), r"kv_hints.actions.a.action_version = '2.0': want 1.x for kv.retain"),
        (asking({"priority": 101}), "kv_hints.actions.a.payload.directives.0.priority = 101: "),
        (asking({"priority": True}), "payload.directives.0.priority = True: "),
        (asking({"start": 3}), "payload.directives.0.priority: "),
        (asking({"priority": 5, "until": 3}), "payload.directives.0.until: unknown setting"),
        (asking({"priority": 5, "duration": float("nan")}), "payload.directives.0.duration = nan: "),
        (asking(*[{"priority": 5}] * 129), "payload.directives = "),
        (Envelope([Action([])]), r"kv_hints.actions.a.payload = \[\]: want an object of scope, directives"),
        (Envelope([Action({})]), "kv_hints.actions.a.payload.directives: "),
    ],
)
def test_an_invalid_action_is_named_and_others_are_read(envelope: Envelope, told: str) -> None:
    valid = asking({"priority": 50}).actions
    retained, (reason,) = read(Envelope(envelope.actions + valid), LIMITS)
    assert retained == (Retention(priority=50),)
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(reason)
