"""Requests go to engines as the stated properties of the routing functions say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvkit.router.routing import (
    MIN_SAMPLE_TOKENS,
    Candidate,
    Decision,
    RouteReason,
    RoutingLimits,
    decide,
    direct_seconds,
    prefill_seconds,
    update_speed,
)

TOKENS = st.integers(1, 100_000)
SPEEDS = st.none() | st.floats(1.0, 1e6)


def candidates(role: str, least: int) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        Candidate,
        name=st.integers(0, 9).map(lambda i: f"{role}{i}"),
        requests=st.integers(0, 20),
        waiting_tokens=st.integers(0, 100_000),
        held_tokens=st.none() | st.integers(0, 100_000),
        prefill_speed=SPEEDS,
        handoff_speed=SPEEDS,
    )
    return st.lists(one, min_size=least, max_size=5, unique_by=lambda c: c.name)


LIMITS = st.builds(
    RoutingLimits,
    direct_tokens=st.integers(0, 5000),
    direct_share=st.floats(0, 1),
    max_slowdown=st.floats(0.1, 10),
    spread=st.integers(0, 10),
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt_tokens": TOKENS,
        "prefills": candidates("p", 0),
        "decodes": candidates("d", 1),
        "session": st.text(max_size=5),
        "last_decode": st.none() | st.integers(0, 9).map(lambda i: f"d{i}"),
        "can_disaggregate": st.booleans(),
        "limits": LIMITS,
    }
)


def named(engines: list[Candidate], name: str | None) -> Candidate:
    (found,) = [engine for engine in engines if engine.name == name]
    return found


def little(decode: Candidate, tokens: int, limits: RoutingLimits) -> bool:
    new = max(0, tokens - (decode.held_tokens or 0))
    return new <= limits.direct_tokens or new <= limits.direct_share * tokens


def chosen(**changed: Any) -> Decision:
    """Of two of each, 10,000 tokens, with the usual limits."""
    request = {
        "prompt_tokens": 10_000,
        "prefills": [Candidate("p0"), Candidate("p1")],
        "decodes": [Candidate("d0"), Candidate("d1")],
        "session": "s",
        "last_decode": None,
        "can_disaggregate": True,
        "limits": RoutingLimits(),
    }
    return decide(**(request | changed))


@given(REQUESTS, st.randoms(use_true_random=False))
def test_a_decision_does_not_depend_on_the_order_of_engines(request: dict[str, Any], random: Any) -> None:
    shuffled = dict(request)
    for role in ("prefills", "decodes"):
        shuffled[role] = random.sample(request[role], len(request[role]))
    assert decide(**shuffled) == decide(**request)


@given(REQUESTS)
def test_the_reason_holds(request: dict[str, Any]) -> None:
    """Each reason is true of the decision, and no earlier one is."""
    tokens, limits = request["prompt_tokens"], request["limits"]
    found = decide(**request)
    decode = named(request["decodes"], found.decode)
    assert (found.prefill is not None) == (found.reason is RouteReason.MUCH_NEW)
    assert (found.reason is RouteReason.UNSUITABLE) == (not request["can_disaggregate"])
    if not request["can_disaggregate"]:
        return
    assert (found.reason is RouteReason.LITTLE_NEW) == little(decode, tokens, limits)
    if little(decode, tokens, limits):
        return
    assert (found.reason is RouteReason.NO_PREFILL) == (not request["prefills"])
    if found.prefill is not None:
        prefill = named(request["prefills"], found.prefill)
        assert found.new_tokens == max(0, tokens - (prefill.held_tokens or 0))
        alone, over = direct_seconds(decode, tokens), prefill_seconds(prefill, decode, tokens)
        assert alone is None or over is None or over <= limits.max_slowdown * alone
    elif found.reason is RouteReason.SLOW_PREFILL:
        alone = direct_seconds(decode, tokens)
        assert alone is not None
        waits = [
            (p.waiting_tokens + p.new_tokens(tokens)) / p.prefill_speed
            for p in request["prefills"]
            if p.prefill_speed is not None
        ]
        assert max(waits) + decode.new_tokens(tokens) / (decode.handoff_speed or 1) > (
            limits.max_slowdown * alone
        )


@given(REQUESTS)
def test_no_decode_is_overloaded_for_the_sake_of_what_it_holds(request: dict[str, Any]) -> None:
    found = named(request["decodes"], decide(**request).decode)
    assert found.requests - min(d.requests for d in request["decodes"]) <= request["limits"].spread


@given(REQUESTS)
def test_a_conversation_stays_unless_there_is_a_reason(request: dict[str, Any]) -> None:
    last_decode = request["decodes"][0]
    request["last_decode"] = last_decode.name
    found = named(request["decodes"], decide(**request).decode)
    busy = last_decode.requests - min(d.requests for d in request["decodes"]) > request["limits"].spread
    known = found.held_tokens is not None and last_decode.held_tokens is not None
    more = (found.held_tokens or 0) - (last_decode.held_tokens or 0) > request["limits"].direct_tokens
    assert (found == last_decode) or busy or (known and more)


@given(REQUESTS, st.integers(0, 100_000))
def test_holding_more_never_sends_a_request_over_p(request: dict[str, Any], more: int) -> None:
    found = decide(**request)
    assume(found.prefill is None)
    assume(found.reason is not RouteReason.SLOW_PREFILL)  # how slow the way is depends on what is new
    request["decodes"] = [
        replace(d, held_tokens=(d.held_tokens or 0) + more) if d.name == found.decode else d
        for d in request["decodes"]
    ]
    request["last_decode"] = found.decode
    assume(decide(**request).decode == found.decode)
    assert decide(**request).prefill is None


@given(st.text(max_size=5))
def test_equal_engines_share_the_conversations_and_each_stays(session: str) -> None:
    decodes = [Candidate(f"d{i}") for i in range(3)]
    found = chosen(decodes=decodes, session=session)
    assert found == chosen(decodes=decodes[::-1], session=session)
    others = [d for d in decodes if d.name != found.decode]
    for gone in others:  # it moves only when its own is gone
        assert chosen(decodes=[d for d in decodes if d != gone], session=session).decode == found.decode


def test_conversations_spread_over_equal_engines() -> None:
    found = [chosen(session=str(i)) for i in range(400)]
    for role in ("decode", "prefill"):
        share = sum(getattr(decision, role).endswith("0") for decision in found) / 400
        assert 0.4 < share < 0.6


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"prompt_tokens": 256}, (None, RouteReason.LITTLE_NEW)),
        ({"prompt_tokens": 257}, ("p", RouteReason.MUCH_NEW)),
        ({"decodes": [Candidate("d0", held_tokens=9000)]}, (None, RouteReason.LITTLE_NEW)),
        ({"decodes": [Candidate("d0", held_tokens=8999)]}, ("p", RouteReason.MUCH_NEW)),
        ({"prefills": []}, (None, RouteReason.NO_PREFILL)),
        ({"can_disaggregate": False}, (None, RouteReason.UNSUITABLE)),
    ],
)
def test_limits(changed: dict[str, Any], expected: tuple[str | None, RouteReason]) -> None:
    found = chosen(**changed)
    assert (found.prefill and found.prefill[0], found.reason) == expected


def test_a_p_with_a_long_queue_is_passed_over() -> None:
    decodes = [Candidate("d0", prefill_speed=1000.0, handoff_speed=10_000.0)]
    busy = Candidate("p0", waiting_tokens=9_000, prefill_speed=1000.0)
    assert chosen(decodes=decodes, prefills=[busy]).prefill == "p0"  # 19 + 1 s against 10 s
    busier = replace(busy, waiting_tokens=9_001)
    assert chosen(decodes=decodes, prefills=[busier]).reason is RouteReason.SLOW_PREFILL
    assert chosen(decodes=decodes, prefills=[busier, replace(busy, name="p1")]).prefill == "p1"
    faster = replace(busier, name="p2", prefill_speed=2000.0)
    assert chosen(decodes=decodes, prefills=[busy, faster]).prefill == "p2"


def test_a_conversation_moves_only_for_much() -> None:
    def at(held: int) -> str:
        decodes = [Candidate("d0", held_tokens=1000), Candidate("d1", held_tokens=held)]
        return chosen(decodes=decodes, last_decode="d0").decode

    assert (at(1256), at(1257)) == ("d0", "d1")
    unknown = [Candidate("d0", held_tokens=None), Candidate("d1", held_tokens=9999)]
    assert chosen(decodes=unknown, last_decode="d0").decode == "d0"


def test_without_a_decode_there_is_no_decision() -> None:
    with pytest.raises(ValueError, match="decodes: none given"):
        chosen(decodes=[])


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3)), min_size=1))
def test_a_speed_lies_between_its_samples(samples: list[tuple[int, float]]) -> None:
    speed: float | None = None
    for tokens, seconds in samples:
        speed = update_speed(speed, tokens, seconds)
    counted = [tokens / seconds for tokens, seconds in samples if tokens >= MIN_SAMPLE_TOKENS]
    if not counted:
        assert speed is None
    else:
        assert speed is not None
        assert min(counted) * 0.999 <= speed <= max(counted) * 1.001
