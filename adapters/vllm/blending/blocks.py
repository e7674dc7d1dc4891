"""Blocks of blended requests in vLLM: private names for those with approximate KV, and scratch blocks."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.step import Tables


@dataclass(eq=False)
class _PrivateHasher:
    """Replacement for the hasher of a request with private blocks.

    Args:
        hasher: vLLM's hasher of a request's next blocks.
        first: index of the first private block.
        event_names: set to which it adds each of its names, as events carry them.
        secret: key of its hashes.
        names: the private names so far.
    """

    hasher: Any
    first: int
    event_names: set[Any]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    names: list[Any] = field(default_factory=list)

    def rename(self, name: bytes) -> Any:
        """Return the private name that replaces vLLM's `name` of a block."""
        private_name: Any = hashlib.blake2b(name, key=self.secret, digest_size=min(len(name), 64)).digest()
        self.names.append(private_name)
        self.event_names.add(compat.event_hash(private_name))
        return private_name

    def __call__(self, request: Any) -> list[Any]:
        """Return the hashes of a request's next blocks, as vLLM's hasher does."""
        new: list[Any] = self.hasher(request)
        shared = max(0, self.first - len(request.block_hashes))
        return new[:shared] + [self.rename(name) for name in new[shared:]]


@dataclass(eq=False)
class PrivateBlocks:
    """Private blocks, which keep approximate KV out of vLLM's shared prefix cache and its events.

    vLLM names a block by a hash of its tokens and of the name before it (`vllm.v1.core.kv_cache_utils`). If a
    request's KV is approximate from some token on, kvkit replaces the name of that token's block, and those
    of all later blocks (blended, computed or generated), by keyed hashes of the names. Earlier blocks keep
    their shared names. After a preemption, the request finds all its blocks again.

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

    def make_private(self, request: Any, tokens: int) -> None:
        """Make a request's blocks private from token `tokens` on. Mutates its hashes and its hasher.

        Call it before any of these blocks is cached. A second call does nothing, as exact tokens stay exact.
        """
        hasher = compat.block_hasher(request)
        if hasher is None or isinstance(hasher, _PrivateHasher):
            return
        private_hasher = _PrivateHasher(hasher, tokens // self.hash_tokens, self._event_names)
        compat.name_blocks(request, private_hasher)
        hashes, first = request.block_hashes, private_hasher.first
        hashes[first:] = [private_hasher.rename(name) for name in hashes[first:]]

    def drop_private(self, request: Any) -> None:
        """Drop the private blocks of a request that ended from vLLM's cache; vLLM reuses them first."""
        hasher = compat.block_hasher(request)
        if not isinstance(hasher, _PrivateHasher):
            return
        for name in hasher.names:
            compat.drop_block(self.manager, name)
        self._withhold_events()
        self._event_names.difference_update(map(compat.event_hash, hasher.names))

    def _withhold_events(self) -> None:
        """Remove private blocks from vLLM's queue of events."""
        queue = compat.event_queue(self.manager)
        if queue and self._event_names:
            queue[:] = [event for event in queue if _remove_private(event, self._event_names)]


def _remove_private(event: KVCacheEvent, private: set[Any]) -> bool:
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


@dataclass(eq=False)
class ScratchBlocks:
    """Blocks that replace the blocks outside of a sliding window while a request is blended.

    Rows may be anywhere in the prompt, and each attends to the window before it. vLLM keeps only the blocks
    of a request's last window:

        computed           |
        tokens     |  0  |  1  |  2  |  3  |  4  |  5  |
        vLLM's     |  -  |  -  |  -  |  -  |  14 |  15 |
        a blend's  |  -  |  9  |  31 |  32 |  14 |  15 |     9: found in vLLM's cache and pinned; 31, 32: new

    Args:
        manager: vLLM's `KVCacheManager`.
        block_tokens: tokens per block, per KV cache group.
        windows: tokens that a token attends to, itself included, per KV cache group; None: all.
    """

    manager: Any
    block_tokens: tuple[int, ...]
    windows: tuple[int | None, ...]
    _pinned: dict[str, dict[tuple[int, int], Any]] = field(default_factory=dict, init=False)
    _held: dict[str, list[Any]] = field(default_factory=dict, init=False)

    def has_room(self, tokens: int) -> bool | None:
        """Return whether enough blocks are free to blend `tokens` tokens; None: there can never be enough."""
        if not any(self.windows):
            return True
        pool = self.manager.block_pool
        needed = sum(-(-tokens // size) for size in self.block_tokens)
        return None if needed >= pool.num_gpu_blocks else needed <= pool.get_num_free_blocks()

    def pin(self, request: Any, computed: int) -> bool:
        """Pin the blocks of windows before token `computed` in vLLM's cache, until `fill` or `unpin`.

        Returns:
            Whether all these blocks are in the cache; if not, none is pinned.
        """
        if not any(self.windows) or not computed:
            return True
        tables = self.manager.get_computed_blocks(request)[0].blocks
        pins = {
            (group, i): tables[group][i]
            for group, first in self._first_needed(computed)
            for i in range(first, computed // self.block_tokens[group])
        }
        if any(block.is_null for block in pins.values()):
            return False
        self.manager.block_pool.touch(list(pins.values()))
        self._pinned[request.request_id] = pins
        return True

    def unpin(self) -> None:
        """Release blocks pinned for requests that were not admitted."""
        for pins in self._pinned.values():
            self.manager.block_pool.free_blocks(pins.values())
        self._pinned.clear()

    def fill(self, request: Any, blocks: Tables, computed: int) -> Tables:
        """Return the block tables of a blended request, from token 0 on; -1: no row attends to the block.

        Blocks that are not the request's own are held until `release`. There are enough if `has_room` was
        True before vLLM allocated the request's own blocks.
        """
        pins = self._pinned.pop(request.request_id, {})
        sizes = [-(-request.num_tokens // size) for size in self.block_tokens]
        tables = tuple(
            [block or -1 for block in table] + [-1] * (size - len(table))
            for table, size in zip(blocks, sizes, strict=True)
        )
        firsts = dict(enumerate(map(len, blocks))) | dict(self._first_needed(computed))
        missing = []
        for group, table in enumerate(tables):
            for i in range(firsts[group], len(table)):
                if table[i] < 0 and (group, i) in pins:
                    table[i] = pins[group, i].block_id
                elif table[i] < 0:
                    missing.append((group, i))
        new = self.manager.block_pool.get_new_blocks(len(missing)) if missing else []
        for (group, i), block in zip(missing, new, strict=True):
            tables[group][i] = block.block_id
        self._held[request.request_id] = [*pins.values(), *new]
        return tables

    def release(self, request_id: str) -> None:
        """Release the blocks held for a request's blend, which is over."""
        self.manager.block_pool.free_blocks(self._held.pop(request_id, ()))

    def _first_needed(self, computed: int) -> Iterator[tuple[int, int]]:
        """Yield each KV cache group with a window, and the first block that tokens from `computed` need."""
        for group, (size, window) in enumerate(zip(self.block_tokens, self.windows, strict=True)):
            if window is not None:
                yield group, max(0, computed - window + 1) // size
