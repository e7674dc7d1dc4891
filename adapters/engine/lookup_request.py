"""What an engine's scheduler asks its workers about a prompt, and what they answer: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkit.moving.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter as the engine is told of it.

    Args:
        number: the engine's id of what it has in memory.
        path: where its files are.
        name: what requests call it. It is not part of the keys.
        fused_experts: whether the weights of its experts are in one tensor a layer.
        read_anew: whether the engine reads its files again for each request.
    """

    number: int
    path: str
    name: str = ""
    fused_experts: bool = False
    read_anew: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """Whose KV it is: all that goes into the keys and differs between requests.

    Args:
        tokens: int32 [T], the ids that stand for them in keys.
        lora: adapter of the request, None for none.
        salt: the request's cache salt, empty for none.
        rest: what decides the KV of the unfilled chunk at the end besides these, empty for nothing.
    """

    tokens: TokenIds
    lora: Lora | None = None
    salt: str = ""
    rest: str = ""


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """How much of `sequence` can be loaded. `number` tells it from the request's earlier lookups.

    Args:
        computed: tokens that the engine has.
        transfer: what a prefill engine sends, to be waited for; empty for none.
        computed_there: whether that engine said that it has computed what it sends.
        documents: what is looked up besides, each a sequence of its own.
        recomputed: the share of the documents' tokens that will be computed all the same.
        policy: what the request wants; the sequence is no longer than it wants to load.
    """

    request_id: str
    number: int
    sequence: Sequence
    computed: int = 0
    transfer: str = ""
    computed_there: bool = False
    documents: tuple[Sequence, ...] = ()
    recomputed: float = 0.0
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What one rank found: the first `tokens` tokens, in (tier, number of tokens) segments in their order.

    Args:
        documents: leading tokens found of each of the lookup's.
    """

    request_id: str
    number: int
    rank: int
    tokens: int
    segments: tuple[tuple[str, int], ...] = ()
    documents: tuple[int, ...] = ()
