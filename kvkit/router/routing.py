"""Which engines serve a request: plain functions over what the router knows of them.

A request goes to one decode engine (D), and before that to a prefill engine (P) unless D may as well compute
the prompt itself: little of it is new for D, or the way over P is measured to take too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from pydantic import BaseModel, ConfigDict, Field

MIN_SAMPLE_TOKENS = 64
"""Fewer tokens in one request say little about a speed."""
_NEWEST = 0.2


class RouteReason(StrEnum):
    """Why a request goes over P, or does not."""

    MUCH_NEW = "much-new"
    """Over P: D would have to compute much."""
    LITTLE_NEW = "little-new"
    """Straight to D: it holds nearly all of the prompt, or the prompt is short."""
    SLOW_PREFILL = "slow-prefill"
    """Straight to D: the way over any P takes too long."""
    NO_PREFILL = "no-prefill"
    """Straight to D: no P is there, or every one has failed at this request."""
    UNSUITABLE = "unsuitable"
    """Straight to D: several answers, or logprobs of the prompt, want it computed where they are made; so
    does a prompt that is blended."""


def measured(tokens_per_s: float | None, tokens: int, seconds: float) -> float | None:
    """A speed after one more sample, of which the newest weigh most; None: none was large enough to count."""
    if tokens < MIN_SAMPLE_TOKENS or seconds <= 0:
        return tokens_per_s
    seen = tokens / seconds
    return seen if tokens_per_s is None else tokens_per_s + _NEWEST * (seen - tokens_per_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a request.

    Attributes:
        requests: under way at it.
        waiting_tokens: of their prompts, those that it is yet to compute.
        held_tokens: leading run of this request's prompt that it can have without computing; None: not known.
        prefill: how fast it computes prompts, in tokens per second; None: not measured.
        handoff: how fast it takes in what P computed, P's sending included; of a D only.
    """

    name: str
    requests: int = 0
    waiting_tokens: int = 0
    held_tokens: int | None = None
    prefill: float | None = None
    handoff: float | None = None

    def new_tokens(self, prompt_tokens: int) -> int:
        """Tokens of the prompt that it would have to compute."""
        return max(0, prompt_tokens - (self.held_tokens or 0))


class RoutingLimits(BaseModel):
    """When the way over P is not worth it, and how even the load must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    direct_tokens: int = Field(
        default=256, description="a decode engine computes up to so many new tokens itself", ge=0
    )
    direct_share: float = Field(
        default=0.1, description="a decode engine computes up to this share of a prompt itself", ge=0, le=1
    )
    max_slowdown: float = Field(
        default=2.0,
        description="the way over a prefill engine may take so many times as long as without, as measured",
        gt=0,
        le=1000,
    )
    spread: int = Field(
        default=4,
        description="a conversation stays where it is up to so many requests more than the least loaded has",
        ge=0,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes.

    Attributes:
        prefill: P's name; None: straight to D.
        new_tokens: what is to be computed for it, on P where there is one, else on D.
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
    last: str | None,
    suitable: bool,
    limits: RoutingLimits,
) -> Decision:
    """Choose engines for one request.

    Args:
        prompt_tokens: of the request.
        prefills: may be empty.
        decodes: at least one.
        session: the conversation; equally good engines are told apart by it, the same way each time.
        last: the D that served this conversation before.
        suitable: whether the answer can be made by another engine than the prompt's.

    Raises:
        ValueError: there is no D.
    """
    if not decodes:
        raise ValueError("decodes: none given, want at least one")
    decode = choose_decode(decodes, session=session, last=last, limits=limits)
    new = decode.new_tokens(prompt_tokens)
    if not suitable:
        return Decision(decode.name, None, RouteReason.UNSUITABLE, new)
    if new <= max(limits.direct_tokens, limits.direct_share * prompt_tokens):
        return Decision(decode.name, None, RouteReason.LITTLE_NEW, new)
    if not prefills:
        return Decision(decode.name, None, RouteReason.NO_PREFILL, new)
    prefill = choose_prefill(prefills, prompt_tokens, session=session)
    alone_s = direct_seconds(decode, prompt_tokens)
    over_s = prefill_seconds(prefill, decode, prompt_tokens)
    if alone_s is not None and over_s is not None and over_s > limits.max_slowdown * alone_s:
        return Decision(decode.name, None, RouteReason.SLOW_PREFILL, new)
    return Decision(decode.name, prefill.name, RouteReason.MUCH_NEW, prefill.new_tokens(prompt_tokens))


def choose_decode(
    decodes: Sequence[Candidate], *, session: str, last: str | None, limits: RoutingLimits
) -> Candidate:
    """The D for a conversation: where it was before, unless that one is busier than `limits.spread` allows or
    another holds over `limits.direct_tokens` more of it; a new one goes where most of it is, then where the
    fewest requests are."""
    least = min(d.requests for d in decodes)
    even = [d for d in decodes if d.requests - least <= limits.spread]
    best = max(even, key=lambda d: (d.held_tokens or 0, -d.requests, _rank(session, d.name)))
    before = next((d for d in even if d.name == last), None)
    if before is None:
        return best
    known = before.held_tokens is not None and best.held_tokens is not None
    moves = known and (best.held_tokens or 0) - (before.held_tokens or 0) > limits.direct_tokens
    return best if moves else before


def choose_prefill(prefills: Sequence[Candidate], prompt_tokens: int, *, session: str) -> Candidate:
    """The P that is done first, by what it is yet to compute and how fast it is. One that was not measured
    counts as fast as the others are on average."""
    speeds = [p.prefill for p in prefills if p.prefill is not None]
    usual = sum(speeds) / len(speeds) if speeds else 1.0

    def done(p: Candidate) -> tuple[float, int, int]:
        tokens = p.waiting_tokens + p.new_tokens(prompt_tokens)
        return tokens / (p.prefill or usual), p.requests, -_rank(session, p.name)

    return min(prefills, key=done)


def direct_seconds(decode: Candidate, prompt_tokens: int) -> float | None:
    """Time until D alone has computed the prompt; None: not measured."""
    speed = decode.prefill
    return None if speed is None else (decode.waiting_tokens + decode.new_tokens(prompt_tokens)) / speed


def prefill_seconds(prefill: Candidate, decode: Candidate, prompt_tokens: int) -> float | None:
    """Time until P has computed the prompt and D has taken it in; None: not measured."""
    speed, handoff = prefill.prefill, decode.handoff
    if speed is None or handoff is None:
        return None
    computing = prefill.waiting_tokens + prefill.new_tokens(prompt_tokens)
    return computing / speed + decode.new_tokens(prompt_tokens) / handoff


def _rank(session: str, name: str) -> int:
    """A number for a conversation at an engine: as good as random, but the same in every process."""
    return int.from_bytes(blake2b(f"{session}\0{name}".encode(), digest_size=8).digest())
