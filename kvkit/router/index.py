"""Index of the blocks that one engine holds, from its KV events: their predecessors and locations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvkit.format.keys import as_tokens

BlockHash = int | bytes
MAX_INDEX_BYTES = 1 << 30
"""Maximum memory of one engine's index: some 64 Mi tokens in blocks of 16; later ones are left out."""
MAX_EVENT_BLOCKS = 1 << 17
MAX_EVENT_TOKENS = 1 << 21
"""Maximum number of tokens in one event; a larger event cannot be decoded."""
MAX_LOCATIONS = 16
"""Maximum number of locations (media and tiers) in vLLM's own cache, and likewise in kvkit's tiers."""
MAX_BLOCK_SIZES = 4
_MAX_BLOCK_TOKENS = 1 << 16
_STEP_BLOCKS = 1024
"""Blocks of an event in one step, of `_STEP_TOKENS` tokens at most."""
_STEP_TOKENS = 1 << 14
_SPARE_BLOCKS = 1 << 12
"""Number of removed blocks that the index remembers, because they may come back."""
_SWEEP_BLOCKS = 4 * _STEP_BLOCKS
_MAX_KEYS = 64
_INT_BYTES = 48
"""Memory of a digest, besides its table."""
_Parent = int | tuple[str | None, str]
"""Predecessor of a block: another block, or the adapter and cache salt if it begins a prompt."""
_Hashes = Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_EVENT_BLOCKS)]
_text_decoder = msgspec.msgpack.Decoder(Annotated[list[str], msgspec.Meta(max_length=_MAX_KEYS)] | None)


class StoredBlocks(msgspec.Struct, tag="BlockStored"):
    """vLLM's event of stored blocks, without unused fields.

    Attributes:
        extra_keys: extra keys of each block, not decoded: nested values could take much memory.
        resync: number of kvkit's last round that began. In each round, the engine reports again all that its
            tiers hold.
        complete: as in `ClearedBlocks`, for subscribers that have received one whole round.
    """

    block_hashes: _Hashes
    parent_block_hash: BlockHash | None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_EVENT_TOKENS)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_BLOCK_TOKENS)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENT_BLOCKS)] | None = None
    group_idx: int | None = None
    ownership: str | None = None
    resync: int | None = None
    complete: bool | None = None


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved"):
    """vLLM's event of removed blocks, without unused fields."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None
    ownership: str | None = None


class ClearedBlocks(msgspec.Struct, tag="AllBlocksCleared"):
    """vLLM's event that its own cache was cleared; with `complete`, kvkit's event about its tiers.

    Attributes:
        complete: whether the engine has reported, or will report, all that its tiers hold.
    """

    complete: bool | None = None


KVEvent = StoredBlocks | RemovedBlocks | ClearedBlocks


class _BlockLocations:
    """The blocks in vLLM's own cache, or in kvkit's tiers.

    Attributes:
        locations: locations of each block, a bit for each medium and tier.
        bits: bit of each location, by a digest of medium and tier.
    """

    def __init__(self) -> None:
        self.locations: dict[int, int] = {}
        self.bits: dict[int, int] = {}


class BlockIndex:
    """Blocks by predecessor; events may come in any order. Each block takes the same memory.

    Events of kvkit's tiers have an `ownership`, those of vLLM's own cache have none.

    Attributes:
        complete: True if the index has all that the tiers hold.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Clear the index. Mutates."""
        self.complete = False
        self._first_round: int | None = None  # number of the first round, received in whole or in part
        self._has_all = False  # a whole round was received, or all events since the tiers were empty
        self._blocks: dict[int, int] = {}  # by a digest of predecessor and tokens
        self._sweeping: dict[int, int] = {}  # blocks that the sweep has yet to check
        self._engine, self._tiers = _BlockLocations(), _BlockLocations()
        self._sizes: set[int] = set()
        self._adapters: set[int] = set()
        self._one_group = True  # one group of layers: a block in vLLM's own cache has all layers

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the index."""
        block_tables = self._blocks, self._sweeping
        tables = *block_tables, self._engine.locations, self._tiers.locations, self._adapters
        digests = sum(map(len, tables)) + sum(map(len, block_tables))
        return sum(map(sys.getsizeof, tables)) + digests * _INT_BYTES

    def apply(self, event: KVEvent) -> None:
        """Apply an event. Mutates. Raises as `steps`."""
        for _ in self.steps(event):
            pass

    def steps(self, event: KVEvent) -> Iterator[int]:
        """Apply an event in steps; yield the work of each step, in blocks. Mutates.
        Raises ValueError if the event has an invalid token id."""
        if isinstance(event, ClearedBlocks):
            self._apply_clear(event.complete)
        elif event.group_idx:
            self._one_group = False
        elif isinstance(event, StoredBlocks):
            yield from self._add(event)
        else:
            yield from self._remove(event)

    def held_tokens(self, tokens: Sequence[int], model: str | None, salt: str, *, engine_cache: bool) -> int:
        """Return how many leading tokens are held, in whole blocks.

        Args:
            model: model name of the request; without an event of that name it is the base model.
            engine_cache: whether blocks in vLLM's own cache count.
        """
        ids, longest = as_tokens(tokens), 0
        tier_blocks = self._tiers.locations
        engine_blocks = self._engine.locations if engine_cache and self._one_group else tier_blocks
        for size in self._sizes:
            parent: _Parent = (model if hash(model) in self._adapters else None, salt)
            run = 0
            for digest in _block_digests(ids, size):
                block = self._blocks.get(hash((parent, digest)))
                if block is None and self._sweeping:
                    block = self._sweeping.get(hash((parent, digest)))
                if block is None or not (block in tier_blocks or block in engine_blocks):
                    break
                parent, run = block, run + size
            longest = max(longest, run)
        return longest

    def holds_no_more(self, tokens: Sequence[int], held: int) -> bool:
        """Return whether the engine certainly holds no more than `held` of `tokens`."""
        return self.complete or len(tokens) - held < min(self._sizes, default=0)

    def _apply_clear(self, complete: bool | None) -> None:
        """Clear vLLM's cache, or the tiers if `complete` is given."""
        if complete is None:
            self._engine = _BlockLocations()
        else:
            self._tiers = _BlockLocations()
            self.complete, self._has_all = complete, True

    def _add(self, event: StoredBlocks) -> Iterator[int]:
        self._note_round(event)
        size, count = event.block_size, _count_text_blocks(event)
        if len(event.block_hashes) * size != len(event.token_ids):
            return  # the event's blocks have gaps
        parent: _Parent = (event.lora_name, _salt(event))
        if event.parent_block_hash is not None:
            parent = hash(event.parent_block_hash)
        step = max(1, min(_STEP_BLOCKS, _STEP_TOKENS // size))
        for first in range(0, count, step):
            blocks = event.block_hashes[first : min(first + step, count)]
            ids = as_tokens(event.token_ids[first * size : (first + len(blocks)) * size])
            held = self._tiers if event.ownership else self._engine
            bit = self._bit(event, held)
            if bit is None:
                self.complete = self._has_all = False
                self._first_round = None
                return
            for name, digest in zip(map(hash, blocks), _block_digests(ids, size), strict=True):
                self._blocks[hash((parent, digest))] = name
                held.locations[name] = held.locations.get(name, 0) | bit
                parent = name
            self._sweep()
            yield max(len(blocks), len(ids) * _STEP_BLOCKS // _STEP_TOKENS)

    def _note_round(self, event: StoredBlocks) -> None:
        """Note whether the index has all that the tiers hold."""
        if event.resync is None or event.complete is None:
            return
        if self._first_round is None:
            self._first_round = event.resync
        self._has_all = self._has_all or event.resync > self._first_round + 1
        self.complete = event.complete and self._has_all

    def _bit(self, event: StoredBlocks, held: _BlockLocations) -> int | None:
        """Return the bit for the location of an event's blocks; None: there is no room for them. Mutates."""
        location = hash((event.medium, event.ownership))
        fits = event.block_size in self._sizes or len(self._sizes) < MAX_BLOCK_SIZES
        if not fits or (location not in held.bits and len(held.bits) == MAX_LOCATIONS):
            return None
        if self.size_bytes > MAX_INDEX_BYTES:
            return None
        self._sizes.add(event.block_size)
        if event.lora_name is not None:
            self._adapters.add(hash(event.lora_name))
        return held.bits.setdefault(location, 1 << len(held.bits))

    def _remove(self, event: RemovedBlocks) -> Iterator[int]:
        held = self._tiers if event.ownership else self._engine
        bit = held.bits.get(hash((event.medium, event.ownership)), 0)
        for first in range(0, len(event.block_hashes), _STEP_BLOCKS):
            blocks = event.block_hashes[first : first + _STEP_BLOCKS]
            for name in map(hash, blocks):
                if remaining := held.locations.pop(name, 0) & ~bit:
                    held.locations[name] = remaining
            self._sweep()
            yield len(blocks)

    def _sweep(self) -> None:
        """Forget blocks that are held nowhere, once there are many, a few in each step."""
        engine_blocks, tier_blocks = self._engine.locations, self._tiers.locations
        if not self._sweeping:
            if len(self._blocks) <= 2 * (len(engine_blocks) + len(tier_blocks)) + _SPARE_BLOCKS:
                return
            self._sweeping, self._blocks = self._blocks, {}
        for _ in range(min(len(self._sweeping), _SWEEP_BLOCKS)):
            key, name = self._sweeping.popitem()
            if name in engine_blocks or name in tier_blocks:
                self._blocks.setdefault(key, name)
        if not self._sweeping:
            self._sweeping = {}  # a new dict, to release its memory


def _block_digests(ids: NDArray[np.int32], size: int) -> Iterator[int]:
    """Yield a digest of the tokens of each whole block."""
    for stop in range(size, len(ids) + 1, size):
        yield xxh3_64_intdigest(ids[stop - size : stop].tobytes())


def _salt(event: StoredBlocks) -> str:
    """Return the cache salt from the extra keys of a prompt's first block."""
    texts = _decode_texts(event.extra_keys[0]) if event.extra_keys else None
    adapter = event.lora_name is not None and texts is not None and texts[:1] == [event.lora_name]
    return "".join((texts or [])[adapter:])


def _count_text_blocks(event: StoredBlocks) -> int:
    """Return the number of blocks before the first with more than tokens, such as an image."""
    keys = enumerate(event.extra_keys or ())
    first = next((i for i, raw in keys if _decode_texts(raw) is None), None)
    return len(event.block_hashes) if first is None else min(first, len(event.block_hashes))


def _decode_texts(raw: msgspec.Raw) -> list[str] | None:
    """Decode the extra keys of a block; None: not all of them are texts."""
    try:
        return _text_decoder.decode(raw) or []
    except msgspec.ValidationError:
        return None
