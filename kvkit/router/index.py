"""What one engine holds, as its KV events say: which blocks follow which, and in which places they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvkit.format.keys import as_tokens

BlockHash = int | bytes
MAX_BLOCKS = 1 << 22
"""Blocks that are remembered of one engine: 64 Mi tokens in blocks of 16. Of later ones it is asked."""
_SPARE = 1 << 12
"""Blocks that are gone, before they are forgotten: they may come back."""
_Before = BlockHash | tuple[str | None, str]
"""What a block follows: another, or the adapter and cache salt of a prompt that begins with it."""


class StoredBlocks(msgspec.Struct, tag="BlockStored"):
    """vLLM's event, as far as it is used."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    ownership: str | None = None


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved"):
    """vLLM's event, as far as it is used; with one of the last two fields, kvkit's, which removes nothing.

    Attributes:
        again: whether the engine tells from here on all that its tiers hold, once more.
        complete: as in `ClearedBlocks`, for who has heard all of that.
    """

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    ownership: str | None = None
    again: bool = False
    complete: bool | None = None


class ClearedBlocks(msgspec.Struct, tag="AllBlocksCleared"):
    """vLLM's event, of its own cache; with `complete`, kvkit's, of its tiers.

    Attributes:
        complete: whether the engine has told, or will, all that its tiers hold.
    """

    complete: bool | None = None


KVEvent = StoredBlocks | RemovedBlocks | ClearedBlocks


class BlockIndex:
    """Blocks by what they follow, in whatever order they are told.

    A tier of kvkit is told from vLLM's own cache by `ownership`.

    Attributes:
        complete: whether nothing is in the tiers but what is here.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know of nothing. Mutates."""
        self.complete = False
        self._hears_all = False  # since all that is held was begun to be told
        self._blocks: dict[int, BlockHash] = {}  # by a digest of what they follow and of their tokens
        self._places: dict[BlockHash, int] = {}  # of each block, a bit for each
        self._bits: dict[tuple[str | None, str | None], int] = {}  # by medium and tier
        self._sizes: set[int] = set()
        self._adapters: set[str] = set()
        self._whole = True  # one group of layers: a block of vLLM's own is one of all layers

    def take(self, event: KVEvent) -> None:
        """Note what an event says. Mutates.

        Raises:
            ValueError: its tokens are none.
        """
        if isinstance(event, ClearedBlocks):
            self._clear(event.complete)
        elif event.group_idx:
            self._whole = False
        elif isinstance(event, StoredBlocks):
            self._add(event)
        else:
            self._remove(event)

    def tokens(self, tokens: Sequence[int], model: str | None, salt: str, *, engine_cache: bool) -> int:
        """How many of `tokens`, from the first on, are held, in whole blocks.

        Args:
            model: as requests name it; one that no event has named is the base model.
            engine_cache: whether what vLLM's own cache holds counts.
        """
        places = sum(b for (_, tier), b in self._bits.items() if tier or (engine_cache and self._whole))
        ids, most = as_tokens(tokens), 0
        for size in self._sizes:
            before: _Before = (model if model in self._adapters else None, salt)
            run = 0
            for piece in _pieces(ids, size):
                block = self._blocks.get(hash((before, piece)))
                if block is None or not self._places.get(block, 0) & places:
                    break
                before, run = block, run + size
            most = max(most, run)
        return most

    def says_all(self, tokens: Sequence[int], held: int) -> bool:
        """Whether no more than `held` of `tokens` can be held."""
        return self.complete or len(tokens) - held < min(self._sizes, default=0)

    def _clear(self, complete: bool | None) -> None:
        """Forget what is in vLLM's cache, or (`complete` is given) in the tiers."""
        going = sum(b for (_, tier), b in self._bits.items() if bool(tier) == (complete is not None))
        self._places = {block: left for block, places in self._places.items() if (left := places & ~going)}
        if complete is not None:
            self.complete, self._hears_all = complete, True

    def _add(self, event: StoredBlocks) -> None:
        size, ids = event.block_size, as_tokens(event.token_ids)
        blocks = event.block_hashes[: _text_blocks(event)]
        if not blocks or len(event.block_hashes) * size != len(ids):
            return  # with gaps
        if len(self._blocks) + len(blocks) > MAX_BLOCKS:
            self.complete = self._hears_all = False
            return
        if event.lora_name is not None:
            self._adapters.add(event.lora_name)
        self._sizes.add(size)
        bit = self._bits.setdefault((event.medium, event.ownership), 1 << len(self._bits))
        before: _Before | None = event.parent_block_hash
        if before is None:
            extra = event.extra_keys and event.extra_keys[0]
            before = event.lora_name, _salt(extra, event.lora_name)
        for block, piece in zip(blocks, _pieces(ids, size), strict=False):
            self._blocks[hash((before, piece))] = block
            self._places[block] = self._places.get(block, 0) | bit
            before = block

    def _remove(self, event: RemovedBlocks) -> None:
        self._hears_all = self._hears_all or event.again
        if event.complete is not None:
            self.complete = event.complete and (self.complete or self._hears_all)
        bit = self._bits.get((event.medium, event.ownership), 0)
        for block in event.block_hashes:
            if left := self._places.pop(block, 0) & ~bit:
                self._places[block] = left
        if len(self._blocks) > 2 * len(self._places) + _SPARE:
            self._blocks = {key: block for key, block in self._blocks.items() if block in self._places}


def _pieces(ids: NDArray[np.int32], size: int) -> Iterator[int]:
    """A digest of the tokens of each whole block."""
    for stop in range(size, len(ids) + 1, size):
        yield xxh3_64_intdigest(ids[stop - size : stop].tobytes())


def _salt(extra: list[Any] | None, adapter: str | None) -> str:
    """The cache salt among the extra keys of a prompt's first block."""
    texts = [key for key in extra or () if isinstance(key, str)]
    return "".join(texts[1:] if adapter is not None and texts[:1] == [adapter] else texts)


def _text_blocks(event: StoredBlocks) -> int:
    """How many blocks come before the first that has more than tokens in it, such as an image."""
    for i, extra in enumerate(event.extra_keys or ()):
        if any(not isinstance(key, str) for key in extra or ()):
            return i
    return len(event.block_hashes)
