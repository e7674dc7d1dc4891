"""KV events: announce to vLLM's subscribers (routers) which chunks a tier holds on every rank.

The names of the records that the tiers of a rank hold are tracked separately from the names of a chunk's
records. Ranks with equal KV have records of the same names, but separate tiers in memory. A record
that one rank puts into a tier common to a host is available to all ranks of the host. A chunk is announced as
stored in a tier while the tier holds all its records of all ranks.

All chunks are announced again in rounds, as vLLM's publisher keeps only its last batches: a subscriber that
missed some, or comes late, knows all chunks after it has received one whole round.
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

RankRecord = tuple[int, str]
"""(rank, name of one of its records)."""

MAX_RECORDS = 1 << 16
"""Maximum number of records of chunks, and of held records: the oldest are dropped as if evicted."""
MAX_EXPECTED = 1 << 14
"""Maximum number of chunks that some workers have not named yet; the oldest are dropped."""
RESYNC_CHUNKS = 32
"""Minimum number of chunks that one step of a round announces again."""


# vLLM is not typed for mypy, which takes the keywords of msgspec's classes for errors
class TiersCleared(AllBlocksCleared, tag="AllBlocksCleared"):  # type: ignore[misc,call-arg]
    """Voids all earlier events of kvkit's tiers.

    Subscribers that do not know kvkit read vLLM's event, which voids all events.

    Attributes:
        complete: True if all chunks that the tiers hold are announced from here on.
    """

    complete: bool


class TierBlocksStored(BlockStored, tag="BlockStored", kw_only=True):  # type: ignore[misc,call-arg]
    """Announces the blocks of a chunk in a tier. Subscribers that do not know kvkit read vLLM's event.

    Attributes:
        resync: number of the last round that began. All chunks that the tiers held when round n began are
            announced again before round n + 1 begins.
        complete: False if tiers may hold chunks that are announced in no round.
    """

    resync: int
    complete: bool


@dataclass(eq=False)
class AnnouncedChunk:
    """A chunk of tokens after a prefix.

    Attributes:
        fields: fields of its `BlockStored` that do not depend on the tier, without its tokens.
        tokens: its token ids, int32.
        names: names of its records, by rank.
        tiers: tiers that were announced to hold it.
    """

    fields: dict[str, Any]
    tokens: array[int]
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tiers: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Events:
    """Events of the chunks that workers save, or find for requests.

    Args:
        tiers: tiers of the configuration, by name.
        chunk_tokens: tokens per chunk.
        hash_tokens: tokens per block hash of vLLM.
        ranks: number of workers; each has its own records of a chunk.
        per_host: number of neighbouring ranks that are known to be on one host.
        buffer_steps: number of batches of events that vLLM's publisher keeps.
        hash_block: vLLM's hash of a block without extra keys, from the hash of the block before it.
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
        self._resync, self._steps, self._per_step = 0, 0, RESYNC_CHUNKS
        self._pending: list[AnnouncedChunk] = []  # to be announced again in this round
        self._listed: dict[
            tuple[int, bytes], tuple[AnnouncedChunk, bytes]
        ] = {}  # with the hash of its last block
        self._all_listed: set[int] = set()  # ranks
        # by the hash of the chunk's last block
        self._known: WeakValueDictionary[bytes, AnnouncedChunk] = WeakValueDictionary()
        # a plain dict gets slower at finding its oldest entry, the more older ones were deleted
        self._expected: OrderedDict[tuple[str, int], AnnouncedChunk] = OrderedDict()
        self._chunks: OrderedDict[RankRecord, AnnouncedChunk] = OrderedDict()
        # by tier; records of a common tier belong to a host's first rank
        self._held: OrderedDict[tuple[str, RankRecord], None] = OrderedDict()
        self._ready: list[KVCacheEvent] = []

    def expect(self, request: Any, start: int, stop: int) -> None:
        """Note that workers will name chunks [start, stop) of vLLM's request."""
        per_chunk = self.chunk_tokens // self.hash_tokens
        for number in range(start, min(stop, len(request.block_hashes) // per_chunk)):
            last = request.block_hashes[(number + 1) * per_chunk - 1]
            chunk = self._known.get(last)
            if chunk is None:
                chunk = self._known[last] = self._requested_chunk(request, number)
            self._expected.pop((request.request_id, number), None)
            self._expected[request.request_id, number] = chunk
            if len(self._expected) > MAX_EXPECTED:
                self._expected.popitem(last=False)

    def update_from_workers(self, report: WorkerReport) -> None:
        """Note which records workers name, and which their tiers hold."""
        if report.watches is not None:
            self.begin(report.watches)
        for named in report.named:
            if named.epoch == self._epoch:
                self._add_names(named)
        for listed in report.listed:
            if listed.epoch == self._epoch:
                self._add_listed(listed)
        for rank, (tier, name, held) in report.changes:
            self._apply_change(tier, (rank, name), held)

    def begin(self, complete: bool) -> None:
        """Void all earlier announcements. `complete`: as in `TiersCleared`."""
        for chunk in self._chunks.values():
            chunk.names.clear()
            chunk.tiers.clear()
        self._chunks.clear()
        self._held.clear()
        self._listed.clear()
        self._all_listed.clear()
        self._complete, self._lost = complete, False
        self._steps, self._pending = 0, []
        self._ready = [TiersCleared(complete=complete)]

    def begin_epoch(self, epoch: str, complete: bool = True) -> None:
        """Begin an epoch: KV saved before the workers learn of it is not found any more.

        Args:
            complete: True if no other engine stores KV of that epoch.
        """
        self._epoch = epoch
        self.begin(complete)

    def take(self) -> list[KVCacheEvent]:
        """Take the events since the last call, and this step's share of a round."""
        self._steps += 1
        if not self._pending and self._steps >= max(1, self.buffer_steps // 3):  # 3 rounds are kept
            held = {id(chunk): chunk for chunk in self._chunks.values() if chunk.tiers}
            self._resync, self._steps, self._pending = self._resync + 1, 0, [*held.values()]
            self._per_step = max(RESYNC_CHUNKS, 6 * len(held) // self.buffer_steps + 1)
        batch, self._pending = self._pending[-self._per_step :], self._pending[: -self._per_step]
        self._ready += [self._stored(chunk, tier) for chunk in batch for tier in chunk.tiers]
        ready, self._ready = self._ready, []
        return ready

    def _add_listed(self, listed: Listed) -> None:
        """Name chunks that a rank's tiers held when it started, of prompts without adapter and salt."""
        for listed_chunk in listed.chunks:
            _, before = self._listed.get((listed.rank, listed_chunk.parent), (None, None))
            if before is None and listed_chunk.parent:
                continue  # announcements were voided after it was listed
            chunk, last = self._listed_chunk(before, listed_chunk.tokens.tolist())
            self._listed[listed.rank, listed_chunk.key] = chunk, last
            if chunk.names.get(listed.rank) != listed_chunk.names:
                self._rename(chunk, listed.rank, listed_chunk.names)
        self._drop_oldest()
        if listed.is_complete:
            self._all_listed.add(listed.rank)
        if len(self._all_listed) == self.ranks and not self._complete:
            self._listed.clear()
            self._complete, self._steps = not self._lost, self.buffer_steps  # the next step begins a round

    def _listed_chunk(self, before: bytes | None, tokens: list[int]) -> tuple[AnnouncedChunk, bytes]:
        """Return the chunk of tokens after block hash `before` (None: none), and its last block's hash."""
        assert self.hash_block is not None
        hashes, last = [], before
        for begin in range(0, self.chunk_tokens, self.hash_tokens):
            last = self.hash_block(last, tokens[begin : begin + self.hash_tokens])
            hashes.append(last)
        chunk = self._known.get(hashes[-1])
        if chunk is None:
            fields = self._fields(hashes, before) | {"lora_id": None, "lora_name": None, "extra_keys": None}
            chunk = self._known[hashes[-1]] = AnnouncedChunk(fields, array("i", tokens))
        return chunk, hashes[-1]

    def _fields(self, hashes: Sequence[bytes], before: bytes | None) -> dict[str, Any]:
        """Return the fields of `BlockStored` for blocks with these hashes after block `before`."""
        return {
            "block_hashes": [compat.event_hash(h) for h in hashes],
            "parent_block_hash": compat.event_hash(before) if before else None,
            "block_size": self.hash_tokens,
        }

    def _requested_chunk(self, request: Any, number: int) -> AnnouncedChunk:
        lora, size = request.lora_request, self.hash_tokens
        begin, end = number * self.chunk_tokens, (number + 1) * self.chunk_tokens
        hashes, first = request.block_hashes, begin // size
        extra = compat.extra_keys(request, range(begin, end, size))
        fields = self._fields(hashes[first : end // size], hashes[first - 1] if first else None) | {
            "lora_id": None if lora is None else lora.adapter_id,
            "lora_name": None if lora is None else lora.lora_name,
            "extra_keys": extra,
        }
        return AnnouncedChunk(fields, array("i", request.all_token_ids[begin:end]))

    def _add_names(self, named: NamedChunks) -> None:
        for number, names in enumerate(named.names, named.first):
            key = named.request_id, number
            chunk = self._expected.get(key)
            if chunk is None:
                continue
            if chunk.names.get(named.rank) != names:
                self._rename(chunk, named.rank, names)
            if len(chunk.names) == self.ranks:
                del self._expected[key]
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forget the oldest of too many chunks."""
        while len(self._chunks) > MAX_RECORDS:
            self._lost, self._complete = True, False
            self._unname(next(iter(self._chunks.values())))

    def _rename(self, chunk: AnnouncedChunk, rank: int, names: tuple[str, ...]) -> None:
        """Note the new names of a rank's records of a chunk."""
        self._unname(chunk, rank)
        for name in names:
            if (rank, name) in self._chunks:  # such as of an adapter with two names
                self._unname(self._chunks[rank, name], rank)
            self._chunks[rank, name] = chunk
        chunk.names[rank] = names
        self._announce_changes(chunk)

    def _unname(self, chunk: AnnouncedChunk, rank: int | None = None) -> None:
        """Forget the names of a chunk's records, for one rank or all."""
        for of_rank in list(chunk.names) if rank is None else [rank]:
            for name in chunk.names.pop(of_rank, ()):
                self._chunks.pop((of_rank, name), None)
        self._announce_changes(chunk)

    def _apply_change(self, tier: str, record: RankRecord, held: bool) -> None:
        key = self._holder(tier, record)
        known = key in self._held
        self._held.pop(key, None)
        if held:  # also if known, so that the oldest are the least recently requested
            self._held[key] = None
        changed = [] if known == held else [key]
        if len(self._held) > MAX_RECORDS:
            self._lost, self._complete = True, False
            changed.append(self._held.popitem(last=False)[0])
        for tier, (first, name) in changed:
            ranks = self.per_host if self.tiers[tier].shared_by_ranks else 1
            chunks = (self._chunks.get((rank, name)) for rank in range(first, first + ranks))
            for chunk in {id(chunk): chunk for chunk in chunks if chunk is not None}.values():
                self._announce_changes(chunk)

    def _holder(self, tier: str, record: RankRecord) -> tuple[str, RankRecord]:
        """Return a record's key in `_held`: by its rank, or by its host's first rank in a common tier."""
        rank, name = record
        return tier, (rank - rank % self.per_host if self.tiers[tier].shared_by_ranks else rank, name)

    def _announce_changes(self, chunk: AnnouncedChunk) -> None:
        """Announce the tiers that began or ceased to hold a chunk."""
        complete = len(chunk.names) == self.ranks
        records = [(rank, name) for rank, names in chunk.names.items() for name in names]
        for tier in self.tiers:
            held = complete and all(self._holder(tier, record) in self._held for record in records)
            if held == (tier in chunk.tiers):
                continue
            if held:
                chunk.tiers.add(tier)
                self._ready.append(self._stored(chunk, tier))
            else:
                chunk.tiers.remove(tier)
                hashes = chunk.fields["block_hashes"]
                self._ready.append(BlockRemoved(block_hashes=hashes, **self._location(tier)))

    def _stored(self, chunk: AnnouncedChunk, tier: str) -> KVCacheEvent:
        return TierBlocksStored(
            **chunk.fields,
            **self._location(tier),
            token_ids=chunk.tokens.tolist(),
            resync=self._resync,
            complete=self._complete,
        )

    def _location(self, tier: str) -> dict[str, Any]:
        config = self.tiers[tier]
        return {
            "medium": MEDIUM_CPU if config.in_memory else MEDIUM_STORAGE,
            "locality": "REMOTE" if config.scope == "shared" else "LOCAL",
            "ownership": tier,
        }
