"""What the scheduler's side of the connector knows of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer
from kvkit.adapters.vllm.blending.scheduling import Blend
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.moving.policy import RequestPolicy


@dataclass(slots=True)
class PendingLookup:
    """A lookup of a request, and what ranks have answered.

    Attributes:
        chunks: that are asked for.
        computed: leading tokens that vLLM has itself.
        answers: by rank.
        known_at: when the last rank answered.
    """

    number: int
    chunks: int
    computed: int = 0
    answers: dict[int, LookupAnswer] = field(default_factory=dict)
    known_at: float = math.inf


@dataclass(slots=True)
class RequestState:
    """What is known of a request. `saved` is None until it computes for the first time after an admission.

    Attributes:
        handoff: with whom its KV is exchanged.
        sent: tokens of its prompt that were told to be sent; None before the first.
        no_prefetch: there is nothing to bring near for it, until it is admitted.
        blend: what of it is to be blended, or was; None: nothing, for good.
        private: the first token whose KV is, or will be, approximate for a tier's fewer bits; None: none is.
        policy: what it wants of the cache.
        epoch: the scheduler's when it was last without blocks: what it has may be of then.
        computed: tokens that vLLM's own prefix cache had of it then.
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
