"""State of one request on the scheduler's side of the connector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer
from kvkit.adapters.vllm.blending.scheduling import Blend
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.transfer.policy import RequestPolicy


@dataclass(slots=True)
class PendingLookup:
    """A lookup of a request, and the ranks' answers so far.

    Attributes:
        number: number of the lookup.
        chunks: number of chunks to look up.
        computed: leading tokens that vLLM has itself.
        answers: answers by rank.
        known_at: time of the last rank's answer.
    """

    number: int
    chunks: int
    computed: int = 0
    answers: dict[int, LookupAnswer] = field(default_factory=dict)
    known_at: float = math.inf


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
