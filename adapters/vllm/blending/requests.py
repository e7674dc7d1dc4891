"""Blends of requests, on the scheduler's side: their documents, plans and results.

The documents are named by `kv_transfer_params.blend`, or the settings find them in the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvkit.adapters.engine.lookup_request import LookupRequest
from kvkit.adapters.engine.lookup_request import Sequence as TokenSequence
from kvkit.adapters.vllm.marks import Marks
from kvkit.adapters.vllm.settings import WHERE as SETTINGS
from kvkit.adapters.vllm.settings import BlendSettings
from kvkit.adapters.vllm.step import Arrival, BlendDone, BlendTask, LoadTask, Tables
from kvkit.blend import requests
from kvkit.blend.plan import BlendPlan, Selection, Span, plan_blend, split
from kvkit.blend.requests import WHERE, BlendFields
from kvkit.format.keys import as_tokens
from kvkit.settings import ConfigError


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """The documents of a prompt with reusable KV, and the selection of tokens to recompute.

    Args:
        documents: (start, stop) of each document, ascending and disjoint.
        prefix: number of leading tokens of the prompt after which each document was computed.
        selection: the way to choose tokens to recompute.
        joints: per document, the tokens between the prefix and the document when it was computed; empty:
            none for any document.
    """

    documents: tuple[tuple[int, int], ...]
    prefix: int
    selection: Selection
    joints: tuple[tuple[int, ...], ...] = ()

    @property
    def documents_with_joints(self) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
        """Pairs of each document and its joint."""
        return zip(self.documents, self.joints or ((),) * len(self.documents), strict=True)


@dataclass(eq=False, slots=True)
class Blend:
    """The blend of one request.

    Attributes:
        blend_request: the documents and the selection that the request, or the settings, name.
        spans: spans of its documents; after its first blend, the spans that were loaded then.
        exact: number of leading tokens that the last plan leaves as they are.
        plan: the last plan; None: nothing to blend.
        private: index of the first token with approximate KV; None: there is none.
        lookup_number: number of the lookup that it was planned from.
        local_tokens: number of tokens that vLLM had itself.
        arrivals: the ranks' loaded tokens.
        done: result of its first blend; None: not done yet.
    """

    blend_request: BlendRequest
    spans: tuple[Span, ...] = field(init=False)
    exact: int = 0
    plan: BlendPlan | None = None
    private: int | None = None
    lookup_number: int = 0
    local_tokens: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    done: BlendDone | None = None

    def __post_init__(self) -> None:
        prefix = self.blend_request.prefix  # a document right after it is part of the true prefix
        self.spans = tuple(
            Span(*document, prefix + len(joint), exact=document[0] == prefix and not joint)
            for document, joint in self.blend_request.documents_with_joints
        )

    def has_reusable_after(self, computed: int) -> bool:
        """Return whether a document ends after the first `computed` tokens."""
        return self.spans[-1].stop > computed

    def documents(self, prompt: TokenSequence) -> tuple[TokenSequence, ...]:
        """Return the text in which each document was computed, up to the document's end."""
        before = prompt.tokens[: self.blend_request.prefix]
        texts = (
            np.concatenate([before, as_tokens(joint), prompt.tokens[start:stop]])
            for (start, stop), joint in self.blend_request.documents_with_joints
        )
        return tuple(replace(prompt, tokens=text, rest="") for text in texts)

    def with_documents(self, lookup: LookupRequest, prompt: TokenSequence) -> LookupRequest:
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

    def task(
        self, prompt: TokenSequence, found: tuple[int, ...], load: LoadTask, blocks: Tables
    ) -> BlendTask:
        """Return the workers' task for the plan; `load`, which may be empty, loads the exact tokens."""
        self.lookup_number, self.arrivals = load.number, []
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
        """Note a rank's loaded tokens; return those that all ranks have, or None until all have reported."""
        if arrival.number != self.lookup_number:
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

    def output_params(self) -> dict[str, Any] | None:
        """Return the numbers of tokens by kind for the request's output; None: it was not blended."""
        if self.done is None:
            return None
        done, recomputed = self.done, len(self.done.selected)
        counts = {"exact": done.exact, "blended": done.reused - recomputed, "recomputed": recomputed}
        return {"blend": counts | {"computed": done.computed}}

    def _spans_found(self, found: tuple[int, ...]) -> tuple[Span, ...]:
        return tuple(span.found(n, self.exact) for span, n in zip(self.spans, found, strict=True))

    def _count_cached(self, request: Any, cached: int) -> None:
        if request.prefill_stats is not None:
            local = self.local_tokens
            request.prefill_stats.set(request.num_prompt_tokens, local, max(0, cached - local))


def read(
    request: Any, settings: BlendSettings, marks: Marks | None = None, lead: Sequence[int] | None = None
) -> BlendRequest | None:
    """Read the blend request of vLLM's `Request`; None: it is not blended.

    `false` turns blending off. Without `blend`, the documents are found by `marks` or `settings.split`.

    Args:
        lead: first tokens of every text; documents between marks were computed behind them alone. None: they
            were computed behind what stands before the first one. Requests that state a `prefix` decide.

    Raises:
        ConfigError: the `blend` of the request is invalid, or the request cannot be blended.
    """
    params: Mapping[str, Any] = request.kv_transfer_params or {}
    blend_param = params.get("blend")
    if blend_param is False or (blend_param is None and marks is None and not settings.split):
        return None
    obstacle = _obstacle(request, params)
    if obstacle and blend_param is None:
        return None
    if obstacle:
        raise ConfigError(f"{WHERE}: not with {obstacle}")
    fields = requests.read({} if blend_param is None else blend_param, settings.least_ratio, settings.methods)
    requests.check_spans(fields, len(request.prompt_token_ids))
    documents, prefix = _documents(request.prompt_token_ids, fields, settings, marks, lead)
    if not documents:
        return None
    if len(documents) > settings.max_documents:
        raise ConfigError(
            f"{WHERE}: {len(documents)} documents: want at most {SETTINGS}.blend.max_documents = "
            f"{settings.max_documents}"
        )
    joints = tuple(map(tuple, fields.joints))
    return BlendRequest(documents, prefix, _selection(fields, settings), joints)


def _obstacle(request: Any, params: Mapping[str, Any]) -> str:
    """Return the feature of a request that rules out blending; "" if there is none."""
    features = {
        "a handoff": params.get("do_remote_decode") or params.get("do_remote_prefill"),
        "images or other media": request.mm_features,
        "embeddings in place of token ids": request.prompt_embeds is not None,
        "pooling": request.pooling_params is not None,
        "streamed input": request.resumable,
        "logprobs of the prompt": request.skip_reading_prefix_cache,
    }
    return next((name for name, is_used in features.items() if is_used), "")


def _documents(
    prompt: Sequence[int],
    fields: BlendFields,
    settings: BlendSettings,
    marks: Marks | None,
    lead: Sequence[int] | None,
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (start, stop) of each document, and the number of prefix tokens of each when computed."""
    if fields.documents is None:
        documents = () if marks is None else tuple(marks.documents(prompt))
        prefix = fields.prefix or 0
        if documents and fields.prefix is None:
            prefix = documents[0][0] if lead is None else _shared(prompt, lead)
        if not documents and settings.split:
            documents = tuple(itertools.pairwise(split(prompt).tolist()))
        elif marks is None:
            raise ConfigError(f"{WHERE}.documents: want [[start, stop], ...]: {SETTINGS}.blend has no marks")
        return tuple(span for span in documents if span[0] >= prefix), prefix
    return tuple((start, stop) for start, stop in fields.documents), fields.prefix or 0


def _shared(prompt: Sequence[int], lead: Sequence[int]) -> int:
    """Return how many tokens of `lead` a prompt begins with: all or none."""
    return len(lead) if list(prompt[: len(lead)]) == list(lead) else 0


def _selection(fields: BlendFields, settings: BlendSettings) -> Selection:
    """Return the selection. With ratio 0 and no `first_n`, no token is computed again."""
    ratio = settings.ratio if fields.ratio is None else fields.ratio
    method = fields.method or settings.methods[0]
    drift = settings.drift if fields.drift is None else fields.drift
    selection = Selection(method, ratio, drift=drift, coverage=settings.coverage)
    if fields.first_n is None and ratio:
        return selection
    return replace(selection, first_n=fields.first_n or 0)
