"""Choice of engines for a request: pure functions of what the router knows about the engines.

A request goes to one decode engine (D). A prefill engine (P) computes the prompt before, unless D may as well
compute it: little of the prompt is new to D, or the route through P is measured to take too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from pydantic import BaseModel, ConfigDict, Field

MIN_SAMPLE_TOKENS = 64
"""Minimum number of tokens in a sample of a speed; smaller samples are too noisy."""
_NEWEST_WEIGHT = 0.2


class RouteReason(StrEnum):
    """Reason for a request's route."""

    MUCH_NEW = "much-new"
    """Through P: D would have to compute much."""
    LITTLE_NEW = "little-new"
    """Straight to D: it holds nearly all of the prompt, or the prompt is short."""
    SLOW_PREFILL = "slow-prefill"
    """Straight to D: the route through any P takes too long."""
    NO_PREFILL = "no-prefill"
    """Straight to D: no P is up, or every P has failed this request."""
    UNSUITABLE = "unsuitable"
    """Straight to D: for several answers, logprobs of the prompt, or blending, D must compute the prompt."""


def update_speed(tokens_per_s: float | None, tokens: int, seconds: float) -> float | None:
    """Return a speed updated with a sample; new samples weigh most. None: no sample was large enough."""
    if tokens < MIN_SAMPLE_TOKENS or seconds <= 0:
        return tokens_per_s
    sample = tokens / seconds
    return sample if tokens_per_s is None else tokens_per_s + _NEWEST_WEIGHT * (sample - tokens_per_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a request.

    Attributes:
        requests: number of requests in flight in the engine.
        waiting_tokens: prompt tokens of these that the engine has yet to compute.
        held_tokens: prompt tokens of this request that the engine need not compute; None: not known.
        prefill_speed: speed of computing prompts, in tokens per second; None: not measured.
        handoff_speed: speed of receiving KV from P, P's sending included, in tokens per second; only for a D.
    """

    name: str
    requests: int = 0
    waiting_tokens: int = 0
    held_tokens: int | None = None
    prefill_speed: float | None = None
    handoff_speed: float | None = None

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return how many prompt tokens the engine would have to compute."""
        return max(0, prompt_tokens - (self.held_tokens or 0))


class RoutingLimits(BaseModel):
    """Limits on routes through P, and on uneven load."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    direct_tokens: int = Field(
        default=256,
        description="a decode engine computes a prompt itself up to this number of new tokens",
        ge=0,
    )
    direct_share: float = Field(
        default=0.1,
        description="a decode engine computes a prompt itself up to this share of new tokens",
        ge=0,
        le=1,
    )
    max_slowdown: float = Field(
        default=2.0,
        description="maximum measured time through a prefill engine, as a multiple of the time without",
        gt=0,
        le=1000,
    )
    spread: int = Field(
        default=4,
        description="a conversation stays on its decode engine up to this number of requests above the least "
        "loaded one's",
        ge=0,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """Engines chosen for a request.

    Attributes:
        decode: name of D.
        prefill_speed: name of P; None: straight to D.
        new_tokens: prompt tokens to compute, on P if there is one, else on D.
    """

    decode: str
    prefill: str | None
    reason: RouteReason
    new_tokens: int


def decide(
    prompt_tokens: int,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    *,
    session: str,
    last_decode: str | None,
    can_disaggregate: bool,
    limits: RoutingLimits,
) -> Decision:
    """Choose engines for one request.

    Args:
        prompt_tokens: number of prompt tokens.
        prefills: candidates for P; may be empty.
        decodes: candidates for D; at least one.
        session: name of the conversation; breaks ties between engines, always in the same way.
        last_decode: D that served the conversation last; None: none.
        can_disaggregate: whether P may compute the prompt.

    Raises:
        ValueError: there is no D.
    """
    if not decodes:
        raise ValueError("decodes: none given, want at least one")
    decode = choose_decode(decodes, session=session, last_decode=last_decode, limits=limits)
    new_tokens = decode.new_tokens(prompt_tokens)
    if not can_disaggregate:
        return Decision(decode.name, None, RouteReason.UNSUITABLE, new_tokens)
    if new_tokens <= max(limits.direct_tokens, limits.direct_share * prompt_tokens):
        return Decision(decode.name, None, RouteReason.LITTLE_NEW, new_tokens)
    if not prefills:
        return Decision(decode.name, None, RouteReason.NO_PREFILL, new_tokens)
    prefill = choose_prefill(prefills, prompt_tokens, session=session)
    direct_s = direct_seconds(decode, prompt_tokens)
    prefill_s = prefill_seconds(prefill, decode, prompt_tokens)
    if direct_s is not None and prefill_s is not None and prefill_s > limits.max_slowdown * direct_s:
        return Decision(decode.name, None, RouteReason.SLOW_PREFILL, new_tokens)
    return Decision(decode.name, prefill.name, RouteReason.MUCH_NEW, prefill.new_tokens(prompt_tokens))


def choose_decode(
    decodes: Sequence[Candidate], *, session: str, last_decode: str | None, limits: RoutingLimits
) -> Candidate:
    """Choose the D for a conversation.

    The conversation stays on its D, unless that one is busier than `limits.spread` allows, or another holds
    over `limits.direct_tokens` more of the prompt. A new conversation goes to the D that holds most of the
    prompt, and among equals to the one with the fewest requests.
    """
    min_requests = min(d.requests for d in decodes)
    eligible = [d for d in decodes if d.requests - min_requests <= limits.spread]
    best = max(eligible, key=lambda d: (d.held_tokens or 0, -d.requests, _tie_break(session, d.name)))
    previous = next((d for d in eligible if d.name == last_decode), None)
    if previous is None:
        return best
    both_known = previous.held_tokens is not None and best.held_tokens is not None
    moves = both_known and (best.held_tokens or 0) - (previous.held_tokens or 0) > limits.direct_tokens
    return best if moves else previous


def choose_prefill(prefills: Sequence[Candidate], prompt_tokens: int, *, session: str) -> Candidate:
    """Choose the P that finishes first, by its waiting tokens and its speed.
    A P without a measured speed counts as fast as the others on average."""
    speeds = [p.prefill_speed for p in prefills if p.prefill_speed is not None]
    mean_speed = sum(speeds) / len(speeds) if speeds else 1.0

    def finish_key(p: Candidate) -> tuple[float, int, int]:
        tokens = p.waiting_tokens + p.new_tokens(prompt_tokens)
        return tokens / (p.prefill_speed or mean_speed), p.requests, -_tie_break(session, p.name)

    return min(prefills, key=finish_key)


def direct_seconds(decode: Candidate, prompt_tokens: int) -> float | None:
    """Estimate the seconds until D alone has computed the prompt; None: not measured."""
    speed = decode.prefill_speed
    return None if speed is None else (decode.waiting_tokens + decode.new_tokens(prompt_tokens)) / speed


def prefill_seconds(prefill: Candidate, decode: Candidate, prompt_tokens: int) -> float | None:
    """Estimate the seconds until P has computed the prompt and D received its KV; None: not measured."""
    speed, handoff = prefill.prefill_speed, decode.handoff_speed
    if speed is None or handoff is None:
        return None
    computing = prefill.waiting_tokens + prefill.new_tokens(prompt_tokens)
    return computing / speed + decode.new_tokens(prompt_tokens) / handoff


def _tie_break(session: str, name: str) -> int:
    """Return a pseudo-random number for a conversation and an engine, the same in every process."""
    return int.from_bytes(blake2b(f"{session}\0{name}".encode(), digest_size=8).digest())
