"""Private blocks, which keep approximate KV out of vLLM's shared prefix cache and its events.

vLLM names a block by a hash of its tokens and of the name before it (`vllm.v1.core.kv_cache_utils`). If a
request's KV is approximate from some token on, kvkit replaces the name of that token's block, and those of
all later blocks (blended, computed or generated), by keyed hashes of the names. Earlier blocks keep their
shared names. After a preemption, the request finds all its blocks again.
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
    """Replacement for the hasher of a request with private blocks.

    Args:
        hasher: vLLM's hasher of a request's next blocks.
        first: index of the first private block.
        event_names: set to which it adds each of its names, in the form that events use.
        secret: key of its hashes.
        names: the private names so far.
    """

    hasher: Any
    first: int
    event_names: set[Any]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    names: list[Any] = field(default_factory=list)

    def rename(self, name: bytes) -> Any:
        private_name: Any = hashlib.blake2b(name, key=self.secret, digest_size=min(len(name), 64)).digest()
        self.names.append(private_name)
        self.event_names.add(compat.event_hash(private_name))
        return private_name

    def __call__(self, request: Any) -> list[Any]:
        new: list[Any] = self.hasher(request)
        shared = max(0, self.first - len(request.block_hashes))
        return new[:shared] + [self.rename(name) for name in new[shared:]]


@dataclass(eq=False)
class PrivateBlocks:
    """The private blocks of one engine's requests.

    Args:
        manager: vLLM's `KVCacheManager`.
        hash_tokens: number of tokens per block hash of vLLM.

    Raises:
        MissingName: this vLLM lacks the blocks or hashes that private blocks need.
    """

    manager: Any
    hash_tokens: int
    _event_names: set[Any] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        compat.check_private_blocks(self.manager)
        # vLLM caches blocks throughout a step, so filter just before it takes their events
        compat.before_events(self.manager, self._withhold_events)

    def begin(self, request: Any, tokens: int) -> None:
        """Make a request's blocks private from token `tokens` on. Mutates its hashes and its hasher.

        Call it before any of these blocks is cached. A second call does nothing, as exact tokens stay exact.
        """
        hasher = compat.block_hasher(request)
        if hasher is None or isinstance(hasher, _Namer):
            return
        namer = _Namer(hasher, tokens // self.hash_tokens, self._event_names)
        compat.name_blocks(request, namer)
        hashes = request.block_hashes
        hashes[namer.first :] = [namer.rename(name) for name in hashes[namer.first :]]

    def end(self, request: Any) -> None:
        """Drop the private blocks of a request that ended from vLLM's cache; vLLM reuses them first."""
        namer = compat.block_hasher(request)
        if not isinstance(namer, _Namer):
            return
        for name in namer.names:
            compat.drop_block(self.manager, name)
        self._withhold_events()
        self._event_names.difference_update(map(compat.event_hash, namer.names))

    def _withhold_events(self) -> None:
        """Remove private blocks from vLLM's queue of events."""
        queue = compat.event_queue(self.manager)
        if queue and self._event_names:
            queue[:] = [event for event in queue if _without(event, self._event_names)]


def _without(event: KVCacheEvent, private: set[Any]) -> bool:
    """Remove private blocks from an event; return whether any block is left. Mutates the event."""
    if not isinstance(event, BlockStored | BlockRemoved):
        return True
    names = event.block_hashes
    kept = [name for name in names if name not in private]
    if len(kept) < len(names) and isinstance(event, BlockStored):
        if len(names) * event.block_size != len(event.token_ids):  # tokens cannot be assigned to blocks
            return False
        event.token_ids = event.token_ids[: len(kept) * event.block_size]  # private ones come last
        for name in ("extra_keys", "lookahead_token_ids"):  # vLLM 0.32 lacks the latter
            if getattr(event, name, None):
                setattr(event, name, getattr(event, name)[: len(kept)])
    event.block_hashes = kept
    return bool(kept)
