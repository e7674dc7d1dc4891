"""Blocks that no other request can hit: how approximate KV stays out of vLLM's prefix cache and its events.

vLLM names a block by a hash of its tokens and of the name before it (`vllm.v1.core.kv_cache_utils`). Where a
request's KV is approximate from some token on, the names of that token's block and of all behind it are
replaced by keyed hashes of themselves: of what was blended, of what is computed behind it, and of what is
generated. The blocks before keep the names that others share. The request finds all of its own again after it
was preempted.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from kvkit.adapters.vllm import compat


@dataclass(eq=False)
class _Namer:
    """Stands in for the hasher of a request whose blocks are its own from block `first` on.

    Args:
        hasher: vLLM's, of a request's next blocks.
        told: where each of its names goes, as events have it.
    """

    hasher: Any
    first: int
    told: set[Any]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    names: list[Any] = field(default_factory=list)

    def rename(self, name: bytes) -> Any:
        found: Any = hashlib.blake2b(name, key=self.secret, digest_size=min(len(name), 64)).digest()
        self.names.append(found)
        self.told.add(compat.event_hash(found))
        return found

    def __call__(self, request: Any) -> list[Any]:
        new: list[Any] = self.hasher(request)
        shared = max(0, self.first - len(request.block_hashes))
        return new[:shared] + [self.rename(name) for name in new[shared:]]


@dataclass(eq=False)
class PrivateBlocks:
    """The requests of one engine that have blocks of their own.

    Args:
        manager: vLLM's `KVCacheManager`.
        hash_tokens: tokens that one of vLLM's block hashes stands for.

    Raises:
        MissingName: this vLLM has no such blocks or hashes.
    """

    manager: Any
    hash_tokens: int
    _told: set[Any] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        compat.check_private_blocks(self.manager)
        # blocks are cached all through a step
        compat.before_events(self.manager, self._withhold_events)

    def begin(self, request: Any, tokens: int) -> None:
        """Keep a request's blocks from token `tokens` on to itself. Mutates its hashes and its hasher.

        Called before any of them is cached. A second time it does nothing: tokens are exact or not for good.
        """
        hasher = compat.block_hasher(request)
        if hasher is None or isinstance(hasher, _Namer):
            return
        namer = _Namer(hasher, tokens // self.hash_tokens, self._told)
        compat.name_blocks(request, namer)
        hashes = request.block_hashes
        hashes[namer.first :] = [namer.rename(name) for name in hashes[namer.first :]]

    def end(self, request: Any) -> None:
        """Have vLLM forget its blocks, so that they are reused first. The request is over."""
        namer = compat.block_hasher(request)
        if not isinstance(namer, _Namer):
            return
        for name in namer.names:
            compat.drop_block(self.manager, name)
        self._withhold_events()
        self._told.difference_update(map(compat.event_hash, namer.names))

    def _withhold_events(self) -> None:
        """Take what is told of private blocks out of vLLM's queue of events."""
        queue = compat.event_queue(self.manager)
        if queue and self._told:
            queue[:] = [event for event in queue if _without(event, self._told)]


def _without(event: KVCacheEvent, private: set[Any]) -> bool:
    """Whether anything of an event is left without these blocks. Mutates it."""
    if not isinstance(event, BlockStored | BlockRemoved):
        return True
    names = event.block_hashes
    kept = [name for name in names if name not in private]
    if len(kept) < len(names) and isinstance(event, BlockStored):
        if len(names) * event.block_size != len(event.token_ids):  # it does not say which tokens are whose
            return False
        event.token_ids = event.token_ids[: len(kept) * event.block_size]  # private ones come last
        for told in ("extra_keys", "lookahead_token_ids"):  # 0.32 has none of the latter
            if getattr(event, told, None):
                setattr(event, told, getattr(event, told)[: len(kept)])
    event.block_hashes = kept
    return bool(kept)
