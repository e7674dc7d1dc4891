"""State of one request on the scheduler's side of the connector."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer
from kvkit.adapters.vllm.blending.blend import Blend
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.transfer.policy import RequestPolicy


@dataclass(slots=True)
class PendingLookup:
    """A lookup of a request, and the ranks' answers so far.

    Attributes:
        number: number of the lookup.
        chunks: number of chunks to look up.
        answers: answers by rank.
        answered_at: time of the last rank's answer.
    """

    number: int
    chunks: int
    answers: dict[int, LookupAnswer] = field(default_factory=dict)
    answered_at: float = math.inf

    def common_answer(self, same_length: bool) -> LookupAnswer:
        """Return what every rank can load.

        Args:
            same_length: whether nothing can be loaded unless all ranks found the same (with states).
        """
        answers = self.answers.values()
        minimum = min(answers, key=lambda answer: (answer.tokens, answer.rank))
        if same_length and any(answer.tokens != minimum.tokens for answer in answers):
            minimum = replace(minimum, tokens=0, segments=())  # not all have a snapshot there
        documents = zip(*(answer.documents for answer in answers), strict=True)
        return replace(minimum, documents=tuple(map(min, documents)))

    def exact_tokens(self, approximate: Container[str]) -> int:
        """Return how many leading tokens every rank can load exactly: up to the first with fewer bits."""
        return min(
            sum(size for _, size in takewhile(lambda s: s[0] not in approximate, answer.segments))
            for answer in self.answers.values()
        )


@dataclass(slots=True)
class RequestState:
    """The scheduler's state of a request.

    Attributes:
        request: vLLM's `Request`.
        policy: the request policy.
        handoff: the request's side of a handoff; None: none.
        sent: prompt tokens that the workers were given to send; None before the first.
        lookup: the lookup since the last admission; None: none.
        admitted: answer to the lookup of the last admission; None: nothing was loaded.
        start: first token of the last load.
        saved: chunks up to which saves were planned; None from an admission until the first step after it.
        no_external_kv: whether the request loads nothing for the rest of its life.
        no_prefetch: whether there is nothing to prefetch until the request is admitted.
        blend: what is to be blended, or was; None: nothing, for good.
        private: first token whose KV is, or will be, approximate because a tier keeps fewer bits; None: none.
        epoch: the scheduler's epoch when the request last had no blocks. Its KV may be as old as that.
        computed: tokens that vLLM's own prefix cache had of the request then.
    """

    request: Any
    policy: RequestPolicy
    handoff: RemoteDecode | RemotePrefill | None = None
    sent: int | None = None
    lookup: PendingLookup | None = None
    admitted: LookupAnswer | None = None
    start: int = 0
    saved: int | None = None
    no_external_kv: bool = False
    no_prefetch: bool = False
    blend: Blend | None = None
    private: int | None = None
    epoch: str = ""
    computed: int = 0

    @property
    def request_id(self) -> str:
        """Id of the request."""
        request_id: str = self.request.request_id
        return request_id

    @property
    def remote_prefill(self) -> RemotePrefill | None:
        """The transfer from a prefill engine; None: none."""
        return self.handoff if isinstance(self.handoff, RemotePrefill) else None

    @property
    def remote_decode(self) -> RemoteDecode | None:
        """The transfer to a decode engine; None: none."""
        return self.handoff if isinstance(self.handoff, RemoteDecode) else None

    @property
    def blended_from(self) -> int | None:
        """First token whose KV is approximate because it was blended; None: none."""
        return None if self.blend is None else self.blend.private

    @property
    def will_blend(self) -> bool:
        """Whether the next load is that of a blend. After a reset between match and blocks, none is."""
        return self.blend is not None and self.blend.plan is not None and self.lookup is not None
