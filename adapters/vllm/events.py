"""KV events: tells whoever listens to vLLM (a router) which chunks a tier has on every rank, and lets go of.

Two things are known apart from each other: what the tiers of a rank hold, by the names of records, and which
records a chunk of a request has. Records of ranks whose KV is equal share a name, not the tiers in memory;
what one rank puts into a tier that is common to those of a host is there for all. A chunk is told as stored
in a tier while all its records of all ranks are held there.

All that is held is told again in rounds, as vLLM's publisher keeps its last batches alone: who has missed
some, or comes late, knows all after a round that it has heard from its beginning.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.step import Listed, NamedChunks, WorkerReport
from kvkit.tiers.settings import TierConfig

OfRank = tuple[int, str]
"""A rank, and a record of its."""

KEPT = 1 << 16
"""Records of chunks, and records that are held, so many of each: the oldest give way, as if removed."""
EXPECTED = 1 << 14
"""Chunks that not all workers have named yet; the oldest give way."""
AGAIN = 32
"""Chunks that a step tells again in a round, at least."""


# vLLM is not typed for mypy: it takes the keywords of msgspec's classes for errors
class TiersCleared(AllBlocksCleared, tag="AllBlocksCleared"):  # type: ignore[misc,call-arg]
    """What was told of kvkit's tiers before this is void. For others it is vLLM's event: all of it is.

    Attributes:
        complete: whether all that they hold is told, from this on.
    """

    complete: bool


class TierSync(BlockRemoved, tag="BlockRemoved", kw_only=True):  # type: ignore[misc,call-arg]
    """What is known of the tiers from this on. It removes no block.

    Attributes:
        again: whether a round begins: all that they hold is told from here on, once more.
        complete: whether that was all, for those who have heard it from the round's beginning, or from
            `TiersCleared`; false: tiers may hold what is not told, or no longer.
    """

    again: bool = False
    complete: bool | None = None


@dataclass(eq=False)
class AnnouncedChunk:
    """A chunk of tokens behind a prefix.

    Attributes:
        said: what `BlockStored` says of it besides where it is, and its tokens.
        tokens: its token ids, int32.
        names: of its records, by rank.
        tiers: that were told to hold it.
    """

    said: dict[str, Any]
    tokens: array[int]
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tiers: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Events:
    """Events of the chunks that workers save, or find for requests.

    Args:
        tiers: of the configuration, by name.
        hash_tokens: tokens that one of vLLM's block hashes stands for.
        ranks: workers, each of which has its records of a chunk.
        per_host: neighbouring ranks that are on one host for sure.
        buffer_steps: batches of events that vLLM's publisher keeps.
        hash_block: vLLM's hash of a block without extra keys, from that of the block before it.
    """

    tiers: Mapping[str, TierConfig]
    chunk_tokens: int
    hash_tokens: int
    ranks: int
    per_host: int = 1
    buffer_steps: int = 10_000
    hash_block: Callable[[bytes | None, list[int]], bytes] | None = None

    def __post_init__(self) -> None:
        self._epoch, self._complete, self._lost = "", False, False
        self._steps, self._at_once = 0, AGAIN
        self._round: list[AnnouncedChunk] | None = None
        self._listed: dict[tuple[int, bytes], tuple[AnnouncedChunk, bytes]] = {}  # and its last block's hash
        self._all_listed: set[int] = set()  # ranks
        self._known: WeakValueDictionary[bytes, AnnouncedChunk] = (
            WeakValueDictionary()
        )  # by its last block's hash
        # a plain dict takes the longer to find its oldest, the more have gone before that
        self._expected: OrderedDict[tuple[str, int], AnnouncedChunk] = OrderedDict()
        self._chunks: OrderedDict[OfRank, AnnouncedChunk] = OrderedDict()
        # by tier; where it is common, of a host's first rank
        self._held: OrderedDict[tuple[str, OfRank], None] = OrderedDict()
        self._ready: list[KVCacheEvent] = []

    def expect(self, request: Any, start: int, stop: int) -> None:
        """Note that workers will name chunks [start, stop) of vLLM's request."""
        per_chunk = self.chunk_tokens // self.hash_tokens
        for number in range(start, min(stop, len(request.block_hashes) // per_chunk)):
            last = request.block_hashes[(number + 1) * per_chunk - 1]
            chunk = self._known.get(last)
            if chunk is None:
                chunk = self._known[last] = self._chunk(request, number)
            self._expected.pop((request.request_id, number), None)
            self._expected[request.request_id, number] = chunk
            if len(self._expected) > EXPECTED:
                self._expected.popitem(last=False)

    def hear(self, report: WorkerReport) -> None:
        """Note what workers name, and what their tiers hold."""
        if report.watches is not None:
            self.begin(report.watches)
        for named in report.named:
            if named.epoch == self._epoch:
                self._name(named)
        for listed in report.listed:
            if listed.epoch == self._epoch:
                self._list(listed)
        for rank, (tier, name, held) in report.changes:
            self._change(tier, (rank, name), held)

    def begin(self, complete: bool) -> None:
        """Have all that was told forgotten. `complete`: as in `TiersCleared`."""
        for chunk in self._chunks.values():
            chunk.names.clear()
            chunk.tiers.clear()
        self._chunks.clear()
        self._held.clear()
        self._listed.clear()
        self._all_listed.clear()
        self._complete, self._lost = complete, False
        self._steps, self._round = 0, None
        self._ready = [TiersCleared(complete=complete)]

    def forget(self, epoch: str, complete: bool = True) -> None:
        """Note that nothing is found from now on that was saved before the workers hear of `epoch`.

        Args:
            complete: whether nobody else stores KV of that epoch.
        """
        self._epoch = epoch
        self.begin(complete)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, of a step, and its part of a round."""
        self._steps += 1
        if self._steps >= max(1, self.buffer_steps // 3):  # so that a whole one is among those that are kept
            told = {id(chunk): chunk for chunk in self._chunks.values() if chunk.tiers}
            self._steps, self._round = 0, [*told.values()]
            self._at_once = max(AGAIN, 6 * len(told) // self.buffer_steps + 1)
            self._ready.append(TierSync(block_hashes=[], medium=None, again=True))
        if self._round is not None:
            part, self._round = self._round[-self._at_once :], self._round[: -self._at_once]
            self._ready += [self._stored(chunk, tier) for chunk in part for tier in chunk.tiers]
            if not self._round:
                self._round = None
                if self._complete:
                    self._ready.append(TierSync(block_hashes=[], medium=None, complete=True))
        ready, self._ready = self._ready, []
        return ready

    def _list(self, listed: Listed) -> None:
        """Name chunks that a rank's tiers held when it was started, of prompts without adapter and salt."""
        for one in listed.chunks:
            _, before = self._listed.get((listed.rank, one.parent), (None, None))
            if before is None and one.parent:
                continue  # all was lost since it was listed
            chunk, last = self._listed_chunk(before, one.tokens.tolist())
            self._listed[listed.rank, one.key] = chunk, last
            if chunk.names.get(listed.rank) != one.names:
                self._rename(chunk, listed.rank, one.names)
        self._bound()
        if listed.is_all:
            self._all_listed.add(listed.rank)
        if len(self._all_listed) == self.ranks and not self._complete:
            self._listed.clear()
            self._complete, self._steps = not self._lost, self.buffer_steps  # a round tells so

    def _listed_chunk(self, before: bytes | None, tokens: list[int]) -> tuple[AnnouncedChunk, bytes]:
        """The chunk of these tokens behind a block of that hash (None: there is none), and its last hash."""
        assert self.hash_block is not None
        hashes, last = [], before
        for begin in range(0, self.chunk_tokens, self.hash_tokens):
            last = self.hash_block(last, tokens[begin : begin + self.hash_tokens])
            hashes.append(last)
        chunk = self._known.get(hashes[-1])
        if chunk is None:
            said = self._said(hashes, before) | {"lora_id": None, "lora_name": None, "extra_keys": None}
            chunk = self._known[hashes[-1]] = AnnouncedChunk(said, array("i", tokens))
        return chunk, hashes[-1]

    def _said(self, hashes: Sequence[bytes], before: bytes | None) -> dict[str, Any]:
        """What is said of blocks with these hashes behind another."""
        return {
            "block_hashes": [compat.event_hash(h) for h in hashes],
            "parent_block_hash": compat.event_hash(before) if before else None,
            "block_size": self.hash_tokens,
        }

    def _chunk(self, request: Any, number: int) -> AnnouncedChunk:
        lora, size = request.lora_request, self.hash_tokens
        begin, end = number * self.chunk_tokens, (number + 1) * self.chunk_tokens
        hashes, first = request.block_hashes, begin // size
        extra = compat.extra_keys(request, range(begin, end, size))
        said = self._said(hashes[first : end // size], hashes[first - 1] if first else None) | {
            "lora_id": None if lora is None else lora.adapter_id,
            "lora_name": None if lora is None else lora.lora_name,
            "extra_keys": extra,
        }
        return AnnouncedChunk(said, array("i", request.all_token_ids[begin:end]))

    def _name(self, named: NamedChunks) -> None:
        for number, names in enumerate(named.names, named.first):
            key = named.request_id, number
            chunk = self._expected.get(key)
            if chunk is None:
                continue
            if chunk.names.get(named.rank) != names:
                self._rename(chunk, named.rank, names)
            if len(chunk.names) == self.ranks:
                del self._expected[key]
        self._bound()

    def _bound(self) -> None:
        """Forget the oldest of too many chunks."""
        while len(self._chunks) > KEPT:
            self._forget_some()
            self._unname(next(iter(self._chunks.values())))

    def _rename(self, chunk: AnnouncedChunk, rank: int, names: tuple[str, ...]) -> None:
        """Note what a rank's records of a chunk are called from now on."""
        self._unname(chunk, rank)
        for name in names:
            if (rank, name) in self._chunks:  # of an adapter that has two names, say
                self._unname(self._chunks[rank, name], rank)
            self._chunks[rank, name] = chunk
        chunk.names[rank] = names
        self._update(chunk)

    def _unname(self, chunk: AnnouncedChunk, rank: int | None = None) -> None:
        """Forget what the records of a chunk are, of a rank, or of all."""
        for of_rank in list(chunk.names) if rank is None else [rank]:
            for name in chunk.names.pop(of_rank, ()):
                self._chunks.pop((of_rank, name), None)
        self._update(chunk)

    def _change(self, tier: str, record: OfRank, held: bool) -> None:
        key = self._holder(tier, record)
        known = key in self._held
        self._held.pop(key, None)
        if held:  # also where it is known: the oldest are those that nobody has asked for
            self._held[key] = None
        changed = [] if known == held else [key]
        if len(self._held) > KEPT:
            self._forget_some()
            changed.append(self._held.popitem(last=False)[0])
        for tier, (first, name) in changed:
            ranks = self.per_host if self.tiers[tier].common else 1
            chunks = (self._chunks.get((rank, name)) for rank in range(first, first + ranks))
            for chunk in {id(chunk): chunk for chunk in chunks if chunk is not None}.values():
                self._update(chunk)

    def _holder(self, tier: str, record: OfRank) -> tuple[str, OfRank]:
        """Whose a record is in a tier: a rank's, or, where it is common, its host's."""
        rank, name = record
        return tier, (rank - rank % self.per_host if self.tiers[tier].common else rank, name)

    def _forget_some(self) -> None:
        """Tell, once, that not all is told."""
        self._lost = True
        if self._complete:
            self._complete = False
            self._ready.append(TierSync(block_hashes=[], medium=None, complete=False))

    def _update(self, chunk: AnnouncedChunk) -> None:
        """Tell where a chunk is held now, if that is new."""
        whole = len(chunk.names) == self.ranks
        records = [(rank, name) for rank, names in chunk.names.items() for name in names]
        for tier in self.tiers:
            held = whole and all(self._holder(tier, record) in self._held for record in records)
            if held == (tier in chunk.tiers):
                continue
            if held:
                chunk.tiers.add(tier)
                self._ready.append(self._stored(chunk, tier))
            else:
                chunk.tiers.remove(tier)
                self._ready.append(BlockRemoved(block_hashes=chunk.said["block_hashes"], **self._where(tier)))

    def _stored(self, chunk: AnnouncedChunk, tier: str) -> KVCacheEvent:
        return BlockStored(**chunk.said, token_ids=chunk.tokens.tolist(), **self._where(tier))

    def _where(self, tier: str) -> dict[str, Any]:
        config = self.tiers[tier]
        return {
            "medium": MEDIUM_CPU if config.in_memory else MEDIUM_STORAGE,
            "locality": "REMOTE" if config.scope == "shared" else "LOCAL",
            "ownership": tier,
        }
