"""Token sequences: their whole chunks and record names, and the engine's pages that hold their KV."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from kvkit.format.keys import as_tokens, chunk_keys
from kvkit.format.layout import KVLayout, Namespace
from kvkit.format.record import RecordFormat
from kvkit.format.rope import Rotation
from kvkit.kernels.pages.api import Pages, unpack
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.transfer.plan import RetrievePlan, cut
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

TableIds = npt.NDArray[np.int64]


class ChunkRows(TypedDict, total=False):
    """Block ids or slots of chunks, a row per chunk, as in `kvkit.kernels.pages.api`; one of the two."""

    blocks: TableIds
    slots: TableIds


class CacheError(RuntimeError):
    """The cache cannot do what was requested. The message names the argument."""


class UnknownModel(CacheError):
    """The cache does not serve this model. The message names it and the known one."""


@dataclass(frozen=True, slots=True)
class SequencePages:
    """The engine's pages that hold the KV of one sequence, for one layer group.

    Args:
        pages: the engine's pages of the group.
        blocks: block table of the sequence, int64 [>= chunks * chunk_tokens / block_tokens], or
        slots: a slot (block * N + offset) per token, int64 [>= chunks * chunk_tokens]; one of the two.

    A block or slot < 0 is absent: loads skip its tokens, stores write zeros for them. For states, `blocks`
    has one block per chunk, for the snapshot at its end. A snapshot is stored where all groups have a block,
    and a load ends at the last such chunk that the hit holds.
    """

    pages: Pages
    blocks: TableIds | None = None
    slots: TableIds | None = None

    def rows_of(self, record_format: RecordFormat, numbers: Sequence[int]) -> ChunkRows:
        """Return the block ids or slots of chunks with these numbers."""
        ids, per_chunk = self.table(record_format)
        ids = ids[: len(ids) // per_chunk * per_chunk].reshape(-1, per_chunk)[np.asarray(numbers, np.int64)]
        return {"slots": ids} if self.blocks is None else {"blocks": ids}

    def table(self, record_format: RecordFormat) -> tuple[TableIds, int]:
        """Return the block ids or slots, and their number per chunk."""
        size = record_format.namespace.chunk_tokens
        if self.blocks is not None:
            return self.blocks, size // record_format.group.block_tokens
        assert self.slots is not None
        return self.slots, size

    def copied(self) -> SequencePages:
        """Return a host copy of the blocks that are not absent. Only for pages with `blocks`."""
        assert self.blocks is not None
        present = self.blocks >= 0
        blocks = np.where(present, np.cumsum(present) - 1, -1)
        return SequencePages(self.pages.copied(self.blocks[present]), blocks)

    def fill(
        self,
        record_format: RecordFormat,
        first: int,
        payloads: Sequence[npt.NDArray[np.uint8]],
        rotate: Rotation | None,
        after: CudaEvents | None,
    ) -> None:
        """Unpack record payloads into the pages of chunk `first` and the chunks after it. Mutates the pages.

        Args:
            rotate, after: see `kvkit.kernels.pages.api.unpack`.
        """
        rows = self.rows_of(record_format, range(first, first + len(payloads)))
        unpack(self.pages, payloads, **rows, rotate=rotate, after=after)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The whole chunks of one token sequence in one namespace: the input of lookups, loads and stores.

    Attributes:
        tokens: int32 [chunks * chunk_tokens].
        keys: a key per chunk.
        names: an object name per record: chunk 0's groups, chunk 1's groups, ...
        formats: a record format per layer group, except groups of states.
        parent: key of the preceding chunk; the namespace digest for the first chunk.
        policy: request policy of the chunks.
        first: number of chunks of the sequence before these.
        states: a record format per layer group of states.
    """

    tokens: npt.NDArray[np.int32]
    keys: list[bytes]
    names: list[str]
    formats: tuple[RecordFormat, ...]
    parent: bytes
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    first: int = 0
    states: tuple[RecordFormat, ...] = ()

    @staticmethod
    def of(
        tokens: Any, layout: KVLayout, namespace: Namespace, policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    ) -> Chunks:
        """Return the whole chunks of `tokens` (int32 [T]; numpy, torch or list)."""
        all_formats, token_groups = formats_of(layout, namespace), layout.token_groups
        formats, states = all_formats[:token_groups], all_formats[token_groups:]
        ids, size, seed = as_tokens(tokens), namespace.chunk_tokens, formats[0].digest
        keys = chunk_keys(ids, size, seed, namespace.hash)
        names = [record_format.name(key) for key in keys for record_format in formats]
        # a copy: engines write the next tokens into the same array, and a move may take long
        tokens = ids[: len(keys) * size].copy()
        return Chunks(tokens, keys, names, formats, seed, policy, states=states)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def groups(self) -> int:
        """Records per chunk."""
        return len(self.formats)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.formats[0].namespace.chunk_tokens

    def identity(self, chunk: int) -> tuple[bytes, bytes, npt.NDArray[np.int32]]:
        """Return parent key, key and token ids of a chunk."""
        size = self.chunk_tokens
        parent = self.keys[chunk - 1] if chunk else self.parent
        return parent, self.keys[chunk], self.tokens[chunk * size : (chunk + 1) * size]

    def records(self, start: int, stop: int) -> list[str]:
        """Return the record names of chunks [start, stop)."""
        return self.names[start * self.groups : stop * self.groups]

    def policy_at(self, chunk: int) -> RequestPolicy:
        """Return the policy of a chunk's records, for the tiers' eviction."""
        return self.policy.at((self.first + chunk) * self.chunk_tokens)

    def retained(self, stop: int) -> Iterator[tuple[Chunks, RequestPolicy]]:
        """Yield the parts of chunks [0, stop) whose records have the same policy; none if it retains none."""
        for policy, run in itertools.groupby(range(stop if self.policy.retains else 0), self.policy_at):
            chunks = list(run)
            yield self.part(chunks[0], chunks[-1] + 1), policy

    def part(self, start: int, stop: int | None = None) -> Chunks:
        """Return chunks [start, stop) (None: to the last) alone, where `start` becomes chunk 0.

        Raises:
            CacheError: there are no such chunks.
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise CacheError(f"start={start}, stop={stop}: there are {len(self)} whole chunks")
        size = self.chunk_tokens
        return Chunks(
            self.tokens[start * size : stop * size],
            self.keys[start:stop],
            self.records(start, stop),
            self.formats,
            self.keys[start - 1] if start else self.parent,
            self.policy,
            self.first + start,
            self.states,
        )

    @property
    def snapshots(self) -> list[str]:
        """Names of the records of all possible snapshots, one per chunk and group of states."""
        return [record_format.name(key) for key in self.keys for record_format in self.states]

    @property
    def of_states(self) -> bool:
        """True if the records are those of a snapshot."""
        return self.formats[0].group.state is not None

    def snapshot(self, chunk: int) -> Chunks:
        """Return a chunk with the records of the states at its end in place of its own.

        These records depend on no others, so they have no parent and are evicted separately.

        Raises:
            CacheError: there is no such chunk.
        """
        one_chunk, seed = self.part(chunk, chunk + 1), self.formats[0].digest
        return replace(one_chunk, names=one_chunk.snapshots, formats=self.states, parent=seed, states=())


@dataclass(frozen=True, slots=True)
class Hit:
    """The available leading run: `tokens` tokens, in whole chunks, `by_tier` of them in each tier.

    The first `exact` tokens come from tiers with full precision. A load never takes them from quantised
    tiers: if no other tier has them at that time, the load ends before them.
    """

    chunks: Chunks
    plan: RetrievePlan

    @property
    def tokens(self) -> int:
        return self.plan.chunks * self.chunks.chunk_tokens

    @property
    def exact(self) -> int:
        return self.plan.exact * self.chunks.chunk_tokens

    @property
    def by_tier(self) -> dict[str, int]:
        return {tier: n * self.chunks.chunk_tokens for tier, n in self.plan.by_tier().items()}

    @property
    def approximate(self) -> dict[str, int]:
        """Tokens stored in fewer bits, by tier; all tokens if records have a precision."""
        by_tier, approximate = self.by_tier, self.plan.approximate
        if any(record_format.group.precision for record_format in self.chunks.formats):
            return by_tier
        return {tier: n for tier, n in by_tier.items() if tier in approximate}

    def part(self, start: int, stop: int) -> Hit:
        """Return chunks [start, stop) as a separate hit, for an engine that has the chunks before.

        Its pages begin at chunk `start`. It ends where this hit ends, if that is before `stop`.

        Raises:
            CacheError: `start` is after the end of the hit, or `stop` before `start`.
        """
        stop = min(stop, self.plan.chunks)
        return Hit(self.chunks.part(start, stop), cut(self.plan, start, stop))


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load: the first `tokens` tokens, `by_tier` of them from each tier.

    Attributes:
        approximate: number of tokens from tiers with fewer bits.
        approximate_from: first approximate token; KV that the engine computes after it is approximate too,
            and must not be stored. None: there is none.
    """

    tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    approximate: int = 0
    approximate_from: int | None = None

    @staticmethod
    def of(plan: RetrievePlan, chunk_tokens: int) -> Loaded:
        """Return the result for a plan that was carried out completely."""
        by_tier = {tier: n * chunk_tokens for tier, n in plan.by_tier().items()}
        approximate = sum(n for tier, n in by_tier.items() if tier in plan.approximate)
        first = plan.exact * chunk_tokens if approximate else None
        return Loaded(plan.chunks * chunk_tokens, by_tier, approximate, first)


AllPages = SequencePages | Sequence[SequencePages]
"""Pages of every layer group; a single one for a layout of one group."""


def check_pages(pages: AllPages, chunks: Chunks, count: int, layout: KVLayout) -> Sequence[SequencePages]:
    """Return the pages per layer group, after checking that they hold the first `count` of `chunks`.

    Raises:
        CacheError: they hold fewer chunks, or do not fit the layout.
    """
    groups = [pages] if isinstance(pages, SequencePages) else list(pages)
    if len(groups) != len(layout.groups):
        raise CacheError(f"pages: {len(groups)} given, the layout has {len(layout.groups)} groups")
    for g, (entry, record_format) in enumerate(zip(groups, chunks.formats + chunks.states, strict=True)):
        if (entry.blocks is None) == (entry.slots is None):
            raise CacheError(f"pages[{g}]: give blocks or slots, one of the two")
        if record_format.group.state and entry.blocks is None:
            raise CacheError(f"pages[{g}].slots: states have none; give blocks, one per chunk")
        kind, (ids, per_chunk) = "slots" if entry.blocks is None else "blocks", entry.table(record_format)
        if len(ids) < count * per_chunk:
            raise CacheError(
                f"pages[{g}].{kind}: {len(ids)} entries, {count} chunks take {count * per_chunk}"
            )
    return groups


@functools.lru_cache(maxsize=1024)
def formats_of(layout: KVLayout, namespace: Namespace) -> tuple[RecordFormat, ...]:
    """Return a record format per layer group; cached, since requests share few namespaces."""
    return tuple(RecordFormat.of(layout, group, namespace) for group in range(len(layout.groups)))


def largest_record_bytes(layout: KVLayout, namespace: Namespace) -> int:
    """Return the bytes of the largest record of any layer group: the minimum slot size."""
    return max(record_format.record_bytes for record_format in formats_of(layout, namespace))


def snapshot_chunks(states: Sequence[SequencePages], stop: int) -> list[int]:
    """Return those of the first `stop` chunks with pages for all groups of states at their ends."""
    tables = [pages.blocks[:stop] for pages in states if pages.blocks is not None]
    if not tables:
        return []
    chunks: list[int] = np.flatnonzero(np.min(tables, axis=0) >= 0).tolist()
    return chunks


def pages_at(states: Sequence[SequencePages], chunk: int) -> list[SequencePages]:
    """Return the pages of the snapshot at the end of a chunk."""
    return [SequencePages(p.pages, p.blocks[chunk : chunk + 1]) for p in states if p.blocks is not None]


def clear_gaps(rows: ChunkRows, pieces: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Zero the pieces of chunks with absent blocks or slots. Mutates the pieces.

    A staging slot still holds its previous record, which may be another tenant's.
    """
    ids = rows["blocks"] if "blocks" in rows else rows["slots"]
    for piece, row in zip(pieces, ids, strict=True):
        if row.min() < 0:
            piece[:] = 0
