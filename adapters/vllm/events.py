"""KV events: tells whoever listens to vLLM (a router) what a tier holds, once it is there on every rank."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkit.tiers.settings import TierConfig

KEPT = 16_384
"""Chunks that are remembered while their records are on the way; the oldest give way."""


@dataclass(eq=False)
class Events:
    """Events of the chunks that were given to workers to save.

    Args:
        tiers: of the configuration, by name.
        hash_tokens: tokens that one of vLLM's block hashes stands for.
        ranks: workers that save.
    """

    tiers: Mapping[str, TierConfig]
    chunk_tokens: int
    hash_tokens: int
    ranks: int
    _chunks: OrderedDict[tuple[str, int], dict[str, Any]] = field(default_factory=OrderedDict, init=False)
    _counts: Counter[tuple[str, str, int]] = field(default_factory=Counter, init=False)
    _ready: list[KVCacheEvent] = field(default_factory=list, init=False)

    def saved(self, request: Any, start: int, stop: int) -> None:
        """Note that chunks [start, stop) of vLLM's request are on their way."""
        lora, hashes = request.lora_request, request.block_hashes
        for chunk in range(start, stop):
            begin, end = chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens
            first, last = begin // self.hash_tokens, end // self.hash_tokens
            self._chunks[request.request_id, chunk] = {
                "block_hashes": [maybe_convert_block_hash(h) for h in hashes[first:last]],
                "parent_block_hash": maybe_convert_block_hash(hashes[first - 1]) if first else None,
                "token_ids": list(request.all_token_ids[begin:end]),
                "block_size": self.hash_tokens,
                "lora_id": None if lora is None else lora.adapter_id,
                "lora_name": None if lora is None else lora.lora_name,
            }
            if len(self._chunks) > KEPT:
                self._chunks.popitem(last=False)

    def stored(self, request: str, tier: str, chunk: int) -> None:
        """Note that a rank has stored a chunk in a tier."""
        key = request, tier, chunk
        self._counts[key] += 1
        if self._counts[key] < self.ranks:
            return
        del self._counts[key]
        told = self._chunks.get((request, chunk))
        if told is None:
            return
        config = self.tiers[tier]
        self._ready.append(
            BlockStored(
                **told,
                medium=MEDIUM_CPU if config.in_memory else MEDIUM_STORAGE,
                locality="REMOTE" if config.scope == "shared" else "LOCAL",
                ownership=tier,
            )
        )

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        ready, self._ready = self._ready, []
        return ready
