"""Scenarios of `kvkit prove` as data, and their prompts. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

ANSWER_TOKENS = 16
TAIL_TOKENS = 24
"""Tokens of a prompt after its last whole chunk."""
_IDS = 300, 1000
"""Token ids [start, stop) of prompts: every vocabulary has them, and few are special."""

Doing = Literal[
    "ask", "forget", "crowd", "preempt", "abort", "restart", "kill", "change weights", "kill store"
]
Loads = Literal["any", "fresh", "some", "none"]
"""KV that an act may load.

`any`: any amount; `fresh`: nothing, as none is stored yet; `some`: at least one token; `none`: nothing, as
the stored KV is that of another tenant, adapter or weights."""


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt of a request, by name."""

    name: str
    salt: str = ""  # of the tenant
    adapter: bool = False  # whether it is computed with the LoRA adapter


@dataclass(frozen=True, slots=True)
class Act:
    """One action on the engine. Prompts of `ask`, `preempt`, `abort` and `kill` are sent together."""

    do: Doing
    prompts: tuple[AskedPrompt, ...] = ()
    loads: Loads = "any"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A sequence of acts with a name and a description.

    Attributes:
        unlike: two prompts whose answers must differ; otherwise a mix-up of their KV would go unnoticed. If
            an act changes the weights, the second prompt is answered with the changed weights.
    """

    name: str
    meaning: str
    acts: tuple[Act, ...]
    unlike: tuple[AskedPrompt, AskedPrompt] | None = None

    def all_prompts(self) -> list[AskedPrompt]:
        """Return the prompts of all acts."""
        return [prompt for act in self.acts for prompt in act.prompts]


def _ask(*prompts: AskedPrompt, loads: Loads = "any") -> Act:
    return Act("ask", prompts, loads)


_SHORT, _HEAD, _TWIN = AskedPrompt("short"), AskedPrompt("head"), AskedPrompt("twin")
_LONG, _CUT, _SHARED = AskedPrompt("long"), AskedPrompt("cut"), AskedPrompt("shared")
_FIRST_TENANT, _SECOND_TENANT = AskedPrompt("short", salt="one"), AskedPrompt("short", salt="other")
_TUNED = AskedPrompt("short", adapter=True)
_FORGET, _LEAVE = Act("forget"), Act("abort", (_CUT,))
SCENARIOS = (
    Scenario("cold", "a new prompt", (_ask(_SHORT, loads="fresh"),)),
    Scenario("warm", "the same prompt again", (_ask(_SHORT), _FORGET, _ask(_SHORT, loads="some"))),
    Scenario(
        "prefix caching",
        "the engine's own cache has a prompt's first chunk, then all of it",
        (_ask(_SHORT), _FORGET, _ask(_HEAD), _ask(_SHORT, loads="some"), _ask(_SHORT)),
    ),
    Scenario(
        "eviction",
        "other prompts fill the engine's blocks in between",
        (_ask(_SHORT), Act("crowd"), _ask(_SHORT, loads="some")),
    ),
    Scenario(
        "chunked prefill",
        "a prompt computed in several steps",
        (_ask(_LONG), _FORGET, _ask(_LONG, loads="some")),
    ),
    Scenario(
        "preemption",
        "requests lose their blocks while they decode",
        (_ask(_SHORT, _LONG), Act("preempt", (_SHORT, _LONG), "some")),
    ),
    Scenario(
        "abort",
        "a request is aborted while it is computed, and while it may be loading",
        (_LEAVE, _ask(_CUT), _FORGET, _LEAVE, _ask(_CUT), _FORGET, _ask(_CUT, loads="some")),
    ),
    Scenario(
        "duplicates",
        "the same prompt several times at once",
        (_ask(*[_SHARED] * 4), _FORGET, _ask(*[_SHARED] * 4, loads="some")),
    ),
    Scenario(
        "one token",
        "prompts that share all but the last token of a chunk",
        (_ask(_SHORT), _FORGET, _ask(_TWIN), _FORGET, _ask(_SHORT, _TWIN, loads="some")),
        unlike=(_SHORT, _TWIN),
    ),
    Scenario(
        "tenants",
        "two tenants with different salts send the same prompt",
        (
            _ask(_FIRST_TENANT),
            _FORGET,
            _ask(_SECOND_TENANT, loads="none"),
            _FORGET,
            _ask(_SECOND_TENANT, loads="some"),
        ),
    ),
    Scenario(
        "LoRA",
        "a prompt with and without an adapter",
        (
            *(_ask(_SHORT), _FORGET, _ask(_TUNED, loads="none"), _FORGET, _ask(_TUNED, loads="some")),
            *(_FORGET, _ask(_SHORT, loads="some")),
        ),
        unlike=(_SHORT, _TUNED),
    ),
    Scenario(
        "restart",
        "the engine is restarted",
        (_ask(_SHORT), Act("restart"), _ask(_SHORT), _FORGET, _ask(_SHORT, loads="some")),
    ),
    Scenario(
        "engine killed",
        "kill -9 while it computes",
        (_ask(_SHORT), Act("kill", (_CUT,)), _ask(_SHORT, _CUT), _FORGET, _ask(_SHORT, _CUT, loads="some")),
    ),
    Scenario(
        "weights changed",
        "the engine is restarted with another tensor under the same name",
        (
            *(_ask(_SHORT), Act("change weights"), _ask(_SHORT, loads="none")),
            *(_FORGET, _ask(_SHORT, loads="some")),
        ),
        unlike=(_SHORT, _SHORT),
    ),
    Scenario(
        "store killed",
        "kill -9 of the connector's store",
        (
            *(_ask(_LONG), _FORGET, _ask(_LONG, loads="some"), _FORGET),
            *(Act("kill store"), _ask(_LONG), _ask(_CUT)),  # no prompt that changed weights may have stored
        ),
    ),
)
"""All scenarios in the order in which they run: those that end the engine or the store come last."""


def prompts_of(seed: int, chunk_tokens: int) -> dict[str, list[int]]:
    """Make token ids by prompt name; each prompt has a few chunks and `TAIL_TOKENS` more."""
    rng = np.random.default_rng(seed)

    def prompt(chunks: int) -> list[int]:
        tokens: list[int] = rng.integers(*_IDS, chunks * chunk_tokens + TAIL_TOKENS).tolist()
        return tokens

    short, last = prompt(2), 2 * chunk_tokens - 1
    twin = _IDS[0] + (short[last] + 1 - _IDS[0]) % (_IDS[1] - _IDS[0])
    return {
        "short": short,
        "head": short[: chunk_tokens + TAIL_TOKENS],
        "twin": [*short[:last], twin, *short[last + 1 :]],
        "long": prompt(4),
        "cut": prompt(4),
        "shared": prompt(2),
    }


def crowd_of(seed: int, tokens: int, each: int) -> list[list[int]]:
    """Make other prompts, `tokens` long in total, each at most `each` long."""
    rng = np.random.default_rng([seed, tokens])
    return [rng.integers(*_IDS, min(each, tokens - start)).tolist() for start in range(0, tokens, each)]
