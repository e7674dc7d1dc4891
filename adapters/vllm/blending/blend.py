"""The blend of one request, on the scheduler's side.

After a preemption, the KV that vLLM has lost is blended again as the first time: from the same tokens of the
same documents, with the same tokens computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.blending.requests import BlendRequest
from kvkit.adapters.vllm.step import Arrival, BlendDone, BlendTask, LoadTask, Tables
from kvkit.blend.plan import BlendPlan, Span, plan_blend
from kvkit.format.keys import as_tokens


@dataclass(eq=False, slots=True)
class Blend:
    """The blend of one request.

    Attributes:
        blend_request: what the request, or the settings, ask for.
        spans: spans of its documents; after its first blend, the parts that were placed then.
        exact: number of leading tokens that the last plan leaves as they are.
        plan: the last plan; None: nothing to blend.
        private: index of the first token with approximate KV; None: there is none.
        number: number of the lookup that it was planned from.
        local: number of tokens that vLLM had itself.
        arrivals: what ranks have loaded.
        done: result of its first blend; None: not done yet.
    """

    blend_request: BlendRequest
    spans: tuple[Span, ...] = field(init=False)
    exact: int = 0
    plan: BlendPlan | None = None
    private: int | None = None
    number: int = 0
    local: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    done: BlendDone | None = None

    def __post_init__(self) -> None:
        prefix = self.blend_request.prefix  # a document right after it is part of the true prefix
        self.spans = tuple(
            Span(*document, prefix + len(joint), exact=document[0] == prefix and not joint)
            for document, joint in self.blend_request.parts
        )

    def has_reusable_after(self, computed: int) -> bool:
        """Return whether a document ends after the first `computed` tokens."""
        return self.spans[-1].stop > computed

    def documents(self, prompt: Sequence) -> tuple[Sequence, ...]:
        """Return the text in which each document was computed, up to the document's end."""
        before = prompt.tokens[: self.blend_request.prefix]
        texts = (
            np.concatenate([before, as_tokens(joint), prompt.tokens[start:stop]])
            for (start, stop), joint in self.blend_request.parts
        )
        return tuple(replace(prompt, tokens=text, rest="") for text in texts)

    def with_documents(self, lookup: LookupRequest, prompt: Sequence) -> LookupRequest:
        """Return the lookup with the documents added."""
        return replace(
            lookup, documents=self.documents(prompt), recomputed_share=self.blend_request.selection.ratio
        )

    def plan_reuse(self, tokens: int, exact: int, found: tuple[int, ...]) -> bool:
        """Plan the blend of a prompt of `tokens` tokens; return whether it reuses any token.

        Args:
            tokens: number of tokens of the prompt.
            exact: number of leading tokens that vLLM has or that can be loaded.
            found: per document, the number of leading tokens of its text that can be loaded.
        """
        self.exact = exact
        plan = plan_blend(tokens, exact, self._spans_found(found))
        self.plan = plan if plan.reused.any() else None
        return self.plan is not None

    def task(self, prompt: Sequence, found: tuple[int, ...], load: LoadTask, blocks: Tables) -> BlendTask:
        """Return the workers' task for the plan; `load`, which may be empty, loads the exact tokens."""
        self.number, self.arrivals = load.number, []
        return BlendTask(
            load.request_id,
            load.number,
            prompt,
            load if load.start < load.stop else None,
            self.exact,
            self._spans_found(found),
            self.blend_request.selection,
            None if self.done is None else self.done.selected,
            blocks,
        )

    def add_arrival(self, arrival: Arrival, ranks: int) -> Arrival | None:
        """Note what a rank has loaded; return what all ranks have, None until all have reported."""
        if arrival.number != self.number:
            return None
        self.arrivals.append(arrival)
        if len(self.arrivals) < ranks:
            return None
        loaded = tuple(min(sizes) for sizes in zip(*(a.documents for a in self.arrivals), strict=True))
        return replace(arrival, rank=-1, exact=min(a.exact for a in self.arrivals), documents=loaded)

    def record_result(self, request: Any, done: BlendDone) -> None:
        """Note the result of a request's first blend, also in vLLM's prefill stats of the request."""
        if self.done is None:
            self.done, self.spans = done, done.spans
            self._count_cached(request, done.exact + done.reused - len(done.selected))

    def record_failure(self, request: Any) -> None:
        """Note in vLLM's prefill stats that vLLM computes the tokens of the plan itself."""
        if self.plan is not None and self.done is None:
            self._count_cached(request, self.exact)

    def answer(self) -> dict[str, Any] | None:
        """Return the numbers of exact, reused, recomputed and computed tokens; None: it was not blended."""
        if self.done is None:
            return None
        done, recomputed = self.done, len(self.done.selected)
        counts = {"exact": done.exact, "blended": done.reused - recomputed, "recomputed": recomputed}
        return {"blend": counts | {"computed": done.computed}}

    def _spans_found(self, found: tuple[int, ...]) -> tuple[Span, ...]:
        return tuple(span.found(n, self.exact) for span, n in zip(self.spans, found, strict=True))

    def _count_cached(self, request: Any, cached: int) -> None:
        if request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, self.local, max(0, cached - self.local))
