"""What `kvkit prove` has an engine go through: scenarios as data, and their prompts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

ANSWER_TOKENS = 16
TAIL_TOKENS = 24
"""Of a prompt, after its last whole chunk."""
_IDS = 300, 1000
"""Token ids [start, stop) that prompts have: every vocabulary has them, and few are special."""

Doing = Literal[
    "ask", "forget", "crowd", "preempt", "abort", "restart", "kill", "change weights", "kill store"
]
Loads = Literal["any", "fresh", "some", "none"]
"""Of the tokens of prompts: whatever is loaded; none can be there yet; some must be loaded; none may be, for
what is there is another's."""


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt by its name, as a request has it."""

    name: str
    salt: str = ""  # the tenant's
    adapter: bool = False  # computed with the LoRA adapter


@dataclass(frozen=True, slots=True)
class Act:
    """One thing done to the engine. The prompts of `ask`, `preempt`, `abort` and `kill` come together."""

    do: Doing
    prompts: tuple[AskedPrompt, ...] = ()
    loads: Loads = "any"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Acts, and what they are about.

    Attributes:
        unlike: two prompts whose answers must differ, with the weights changed for the second if there is
            such an act: else a mistaken one for the other would not be seen.
    """

    name: str
    meaning: str
    acts: tuple[Act, ...]
    unlike: tuple[AskedPrompt, AskedPrompt] | None = None

    def asked(self) -> list[AskedPrompt]:
        """Every prompt whose answer is compared."""
        return [one for act in self.acts for one in act.prompts]


def _ask(*prompts: AskedPrompt, loads: Loads = "any") -> Act:
    return Act("ask", prompts, loads)


_SHORT, _HEAD, _TWIN = AskedPrompt("short"), AskedPrompt("head"), AskedPrompt("twin")
_LONG, _CUT, _SHARED = AskedPrompt("long"), AskedPrompt("cut"), AskedPrompt("shared")
_ONE, _OTHER = AskedPrompt("short", salt="one"), AskedPrompt("short", salt="other")
_TUNED = AskedPrompt("short", adapter=True)
_FORGET, _LEAVE = Act("forget"), Act("abort", (_CUT,))
SCENARIOS = (
    Scenario("cold", "a prompt that is new", (_ask(_SHORT, loads="fresh"),)),
    Scenario("warm", "it comes again", (_ask(_SHORT), _FORGET, _ask(_SHORT, loads="some"))),
    Scenario(
        "prefix caching",
        "the engine's own cache has a prompt's first chunk, then all of it",
        (_ask(_SHORT), _FORGET, _ask(_HEAD), _ask(_SHORT, loads="some"), _ask(_SHORT)),
    ),
    Scenario(
        "eviction",
        "other prompts have filled the engine's blocks in between",
        (_ask(_SHORT), Act("crowd"), _ask(_SHORT, loads="some")),
    ),
    Scenario(
        "chunked prefill",
        "a prompt that is computed in several steps",
        (_ask(_LONG), _FORGET, _ask(_LONG, loads="some")),
    ),
    Scenario(
        "preemption",
        "requests lose their blocks while they decode",
        (_ask(_SHORT, _LONG), Act("preempt", (_SHORT, _LONG), "some")),
    ),
    Scenario(
        "abort",
        "a request is given up while it is computed, and while it may be loaded",
        (_LEAVE, _ask(_CUT), _FORGET, _LEAVE, _ask(_CUT), _FORGET, _ask(_CUT, loads="some")),
    ),
    Scenario(
        "duplicates",
        "a prompt comes several times at once",
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
        "two tenants with salts ask the same",
        (_ask(_ONE), _FORGET, _ask(_OTHER, loads="none"), _FORGET, _ask(_OTHER, loads="some")),
    ),
    Scenario(
        "LoRA",
        "a prompt with an adapter, and without",
        (
            *(_ask(_SHORT), _FORGET, _ask(_TUNED, loads="none"), _FORGET, _ask(_TUNED, loads="some")),
            *(_FORGET, _ask(_SHORT, loads="some")),
        ),
        unlike=(_SHORT, _TUNED),
    ),
    Scenario(
        "restart",
        "the engine is ended and started again",
        (_ask(_SHORT), Act("restart"), _ask(_SHORT), _FORGET, _ask(_SHORT, loads="some")),
    ),
    Scenario(
        "engine killed",
        "kill -9 while it computes",
        (_ask(_SHORT), Act("kill", (_CUT,)), _ask(_SHORT, _CUT), _FORGET, _ask(_SHORT, _CUT, loads="some")),
    ),
    Scenario(
        "weights changed",
        "the engine is started again with another tensor under the same name",
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
            *(Act("kill store"), _ask(_LONG), _ask(_CUT)),  # not what changed weights may have stored
        ),
    ),
)
"""In the order in which they are gone through: what ends the engine comes last."""


def prompts_of(seed: int, chunk_tokens: int) -> dict[str, list[int]]:
    """Token ids of each prompt by its name; a few chunks and `TAIL_TOKENS` more each."""
    made = np.random.default_rng(seed)

    def prompt(chunks: int) -> list[int]:
        found: list[int] = made.integers(*_IDS, chunks * chunk_tokens + TAIL_TOKENS).tolist()
        return found

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
    """Prompts that nobody else asks, of `tokens` in all, `each` of them at most `each` long."""
    made = np.random.default_rng([seed, tokens])
    return [made.integers(*_IDS, min(each, tokens - at)).tolist() for at in range(0, tokens, each)]
