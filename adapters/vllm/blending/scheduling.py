"""The scheduler's part of blending: what a request is promised, what workers are told of it, what came of it.

A blended request claims its whole prompt as external tokens. The first reused token and all behind it are its
own, what is computed and generated included: other requests never see them. Those before are as exact as any.

After a preemption, what vLLM has lost of a request is blended again as it was the first time: from the same
tokens of the same documents, with the same tokens computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.blending.private import PrivateBlocks
from kvkit.adapters.vllm.blending.requests import BlendRequest
from kvkit.adapters.vllm.blending.scratch import Scratch
from kvkit.adapters.vllm.step import Arrival, BlendDone, BlendTask, LoadTask, Tables
from kvkit.blend.plan import BlendPlan, Span, plan_blend
from kvkit.format.keys import as_tokens
from kvkit.settings import ConfigError

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Blend:
    """The blend of one request.

    Attributes:
        spans: where its documents stand; since its first blend, as far as they were placed then.
        exact: leading tokens of what was promised last that stay as they are.
        plan: what was promised last; None: nothing.
        private: the first token whose KV is approximate; None: none is.
        number: of the lookup whose answer is blended.
        local: tokens that vLLM had itself.
        arrivals: what ranks have loaded.
        done: what its first blend took.
    """

    asked: BlendRequest
    spans: tuple[Span, ...] = field(init=False)
    exact: int = 0
    plan: BlendPlan | None = None
    private: int | None = None
    number: int = 0
    local: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    done: BlendDone | None = None

    def __post_init__(self) -> None:
        prefix = self.asked.prefix  # a document that stands right behind it is part of the true prefix
        self.spans = tuple(
            Span(*where, prefix + len(joint), exact=where[0] == prefix and not joint)
            for where, joint in self.asked.parts
        )

    def wants(self, computed: int) -> bool:
        """Whether a document ends behind the first `computed` tokens."""
        return self.spans[-1].stop > computed

    def documents(self, prompt: Sequence) -> tuple[Sequence, ...]:
        """What its documents were computed in, each from its first token on."""
        before = prompt.tokens[: self.asked.prefix]
        texts = (
            np.concatenate([before, as_tokens(joint), prompt.tokens[start:stop]])
            for (start, stop), joint in self.asked.parts
        )
        return tuple(replace(prompt, tokens=text, rest="") for text in texts)

    def ask(self, lookup: LookupRequest, prompt: Sequence) -> LookupRequest:
        """The lookup with the documents in it."""
        return replace(lookup, documents=self.documents(prompt), recomputed=self.asked.selection.ratio)

    def promise(self, tokens: int, exact: int, found: tuple[int, ...]) -> bool:
        """Whether a prompt of `tokens` tokens is to be blended; notes how.

        Args:
            exact: leading tokens that vLLM has or that can be loaded.
            found: leading tokens of each of the documents that can be loaded.
        """
        self.exact = exact
        plan = plan_blend(tokens, exact, self._found(found))
        self.plan = plan if plan.reused.any() else None
        return self.plan is not None

    def task(self, prompt: Sequence, found: tuple[int, ...], load: LoadTask, blocks: Tables) -> BlendTask:
        """What workers are told of what was promised; `load`, perhaps empty, is that of what is exact."""
        self.number, self.arrivals = load.number, []
        return BlendTask(
            load.request_id,
            load.number,
            prompt,
            load if load.start < load.stop else None,
            self.exact,
            self._found(found),
            self.asked.selection,
            None if self.done is None else self.done.selected,
            blocks,
        )

    def arrive(self, arrival: Arrival, ranks: int) -> Arrival | None:
        """Note what a rank has loaded; what all of them have, once all have told."""
        if arrival.number != self.number:
            return None
        self.arrivals.append(arrival)
        if len(self.arrivals) < ranks:
            return None
        least = tuple(min(sizes) for sizes in zip(*(a.documents for a in self.arrivals), strict=True))
        return replace(arrival, rank=-1, exact=min(a.exact for a in self.arrivals), documents=least)

    def finish(self, request: Any, done: BlendDone) -> None:
        """Note what the first blend of vLLM's request took, in vLLM's figures of its prefill, too."""
        if self.done is None:
            self.done, self.spans = done, done.spans
            self._count(request, done.exact + done.reused - len(done.selected))

    def fail(self, request: Any) -> None:
        """Note that vLLM computes what was promised."""
        if self.plan is not None and self.done is None:
            self._count(request, self.exact)

    def answer(self) -> dict[str, Any] | None:
        """How many tokens were exact, reused, recomputed and computed; None: it was not blended."""
        if self.done is None:
            return None
        done, again = self.done, len(self.done.selected)
        counts = {"exact": done.exact, "blended": done.reused - again, "recomputed": again}
        return {"blend": counts | {"computed": done.computed}}

    def _found(self, found: tuple[int, ...]) -> tuple[Span, ...]:
        return tuple(span.found(n, self.exact) for span, n in zip(self.spans, found, strict=True))

    def _count(self, request: Any, cached: int) -> None:
        if request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, self.local, max(0, cached - self.local))


@dataclass(eq=False, slots=True)
class Blends:
    """What blending takes of vLLM's scheduler.

    Args:
        read: what vLLM's `Request` asks for; may raise ConfigError, which costs it no more than its blend.
    """

    read: Callable[[Any], BlendRequest | None]
    private: PrivateBlocks
    scratch: Scratch

    def begin(self, request: Any) -> Blend | None:
        """The blend of a new request; None: it has none."""
        try:
            asked = self.read(request)
        except ConfigError as error:
            log.warning("%s is not blended: %s", request.request_id, error)
            return None
        return None if asked is None else Blend(asked)

    def admit(self, request: Any, blend: Blend, computed: int, blocks: Tables) -> Tables:
        """Keep what will be approximate to the request, which got its blocks; those of the blend.

        Args:
            computed: tokens that vLLM has.
        """
        assert blend.plan is not None
        if blend.private is None:
            blend.private, blend.local = int(blend.plan.reused.argmax()), computed
            self.private.begin(request, blend.private)
        return self.scratch.fill(request, blocks, computed)
