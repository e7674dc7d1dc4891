"""Lookup requests from an engine's scheduler to its workers, and the workers' answers: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter, as requests to the engine describe it.

    Args:
        number: the engine's id of the adapter in memory.
        path: folder of its files.
        name: name of the adapter in requests; not part of the keys.
        fused_experts: True if the weights of its experts are one tensor per layer.
        load_inplace: True if the engine reads the files again for each request.
    """

    number: int
    path: str
    name: str = ""
    fused_experts: bool = False
    load_inplace: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """The tokens of a request, and everything else that distinguishes their keys from other requests'.

    Args:
        tokens: int32 [T], the ids that stand for the tokens in keys.
        lora: adapter of the request, None for none.
        salt: the request's cache salt, empty for none.
        rest: digest of what else determines the KV of the unfilled chunk at the end, empty for nothing.
    """

    tokens: TokenIds
    lora: Lora | None = None
    salt: str = ""
    rest: str = ""


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """A request for the number of tokens of `sequence` that can be loaded.

    Args:
        number: distinguishes the lookups of one request.
        computed: number of leading tokens that the engine has computed already.
        transfer: id of a prefill engine's transfer to wait for; empty for none.
        computed_remotely: True if the prefill engine reported that it has computed what it sends.
        documents: further sequences to look up.
        recomputed_share: share of the documents' tokens that is recomputed after the load.
        policy: request policy; `sequence` is no longer than the policy allows to load.
    """

    request_id: str
    number: int
    sequence: Sequence
    computed: int = 0
    transfer: str = ""
    computed_remotely: bool = False
    documents: tuple[Sequence, ...] = ()
    recomputed_share: float = 0.0
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The answer of one rank: it found the first `tokens` tokens.

    Args:
        segments: (tier, number of tokens) pairs, in the order of the tokens.
        documents: number of leading tokens found of each document of the lookup.
    """

    request_id: str
    number: int
    rank: int
    tokens: int
    segments: tuple[tuple[str, int], ...] = ()
    documents: tuple[int, ...] = ()
