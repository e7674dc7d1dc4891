"""A token sequence as the cache sees it: its whole chunks and their names, and where its KV lies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from kvkit.format.keys import as_tokens, chunk_keys
from kvkit.format.layout import KVLayout, Namespace
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import Pages
from kvkit.moving.plan import RetrievePlan, cut

TableIds = npt.NDArray[np.int64]


class ChunkRows(TypedDict, total=False):
    """Where some chunks lie, as `kvkit.kernels.pages.api` takes it: one of the two, a row per chunk."""

    blocks: TableIds
    slots: TableIds


class CacheError(RuntimeError):
    """The cache cannot do what was asked. The message names the argument."""


class UnknownModel(CacheError):
    """A cache keeps nothing under that name. The message names it, and those that are known."""


@dataclass(frozen=True, slots=True)
class SequencePages:
    """Where the KV of one sequence lies in an engine, for one layer group.

    Args:
        pages: the engine's pages of the group.
        blocks: int64 [>= chunks * chunk_tokens / block_tokens], the sequence's block table, or
        slots: int64 [>= chunks * chunk_tokens], a slot (block * N + offset) per token; one of the two.

    A block or slot < 0 is not there: a load leaves its tokens out, a store has zeros in their place.
    """

    pages: Pages
    blocks: TableIds | None = None
    slots: TableIds | None = None

    def rows(self, form: RecordFormat, first: int, count: int) -> ChunkRows:
        """The block ids or the slots of chunks [first, first + count)."""
        ids, per_chunk = self.table(form)
        ids = ids[first * per_chunk : (first + count) * per_chunk].reshape(count, per_chunk)
        return {"slots": ids} if self.blocks is None else {"blocks": ids}

    def table(self, form: RecordFormat) -> tuple[TableIds, int]:
        """The block ids or the slots, and how many of them a chunk has."""
        size = form.namespace.chunk_tokens
        if self.blocks is not None:
            return self.blocks, size // form.group.block_tokens
        assert self.slots is not None
        return self.slots, size


@dataclass(frozen=True, slots=True)
class Chunks:
    """The whole chunks of one token sequence in one namespace: what every step works on.

    Attributes:
        tokens: int32 [chunks * chunk_tokens].
        keys: a key per chunk.
        names: an object name per record: chunk 0's groups, chunk 1's groups, ...
        formats: a record format per layer group.
        parent: key of the chunk before these; the namespace digest where there is none.
    """

    tokens: npt.NDArray[np.int32]
    keys: list[bytes]
    names: list[str]
    formats: tuple[RecordFormat, ...]
    parent: bytes

    @staticmethod
    def of(tokens: Any, layout: KVLayout, namespace: Namespace) -> Chunks:
        """The whole chunks of `tokens` (int32 [T]; numpy, torch or list)."""
        formats = formats_of(layout, namespace)
        ids, size, seed = as_tokens(tokens), namespace.chunk_tokens, formats[0].digest
        keys = chunk_keys(ids, size, seed, namespace.hash)
        names = [form.name(key) for key in keys for form in formats]
        # a copy: engines write the next tokens into the same array, and a move may be under way for long
        return Chunks(ids[: len(keys) * size].copy(), keys, names, formats, seed)

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
        """Parent key, key and token ids of a chunk."""
        size = self.chunk_tokens
        parent = self.keys[chunk - 1] if chunk else self.parent
        return parent, self.keys[chunk], self.tokens[chunk * size : (chunk + 1) * size]

    def records(self, start: int, stop: int) -> list[str]:
        """The names of chunks [start, stop)."""
        return self.names[start * self.groups : stop * self.groups]

    def part(self, start: int, stop: int) -> Chunks:
        """Chunks [start, stop) alone; `start` becomes chunk 0.

        Raises:
            CacheError: there are no such chunks.
        """
        if not 0 <= start <= stop <= len(self):
            raise CacheError(f"start={start}, stop={stop}: there are {len(self)} whole chunks")
        size = self.chunk_tokens
        return Chunks(
            self.tokens[start * size : stop * size],
            self.keys[start:stop],
            self.records(start, stop),
            self.formats,
            self.keys[start - 1] if start else self.parent,
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """The leading run that is available: `tokens` tokens, whole chunks, `by_tier` of them at each tier."""

    chunks: Chunks
    plan: RetrievePlan

    @property
    def tokens(self) -> int:
        return self.plan.chunks * self.chunks.chunk_tokens

    @property
    def by_tier(self) -> dict[str, int]:
        return {tier: n * self.chunks.chunk_tokens for tier, n in self.plan.by_tier().items()}

    def part(self, start: int, stop: int) -> Hit:
        """Chunks [start, stop) of the hit as a hit of its own: for an engine that has those before.

        Its pages begin at chunk `start`. Where the hit ends before `stop`, so does the part.

        Raises:
            CacheError: `start` lies after the hit, or `stop` before it.
        """
        stop = min(stop, self.plan.chunks)
        return Hit(self.chunks.part(start, stop), cut(self.plan, start, stop))


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load put into the engine: the first `tokens` tokens, `by_tier` of them from each tier."""

    tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)


AllPages = SequencePages | Sequence[SequencePages]
"""Pages of every layer group; one alone for a layout of one group."""


def check_pages(pages: AllPages, chunks: Chunks, count: int, layout: KVLayout) -> Sequence[SequencePages]:
    """Pages per layer group, enough for the first `count` of `chunks`.

    Raises:
        CacheError: they are not.
    """
    groups = [pages] if isinstance(pages, SequencePages) else list(pages)
    if len(groups) != len(layout.groups):
        raise CacheError(f"pages: {len(groups)} given, the layout has {len(layout.groups)} groups")
    for g, (p, form) in enumerate(zip(groups, chunks.formats, strict=True)):
        if (p.blocks is None) == (p.slots is None):
            raise CacheError(f"pages[{g}]: give blocks or slots, one of the two")
        kind, (ids, per_chunk) = "slots" if p.blocks is None else "blocks", p.table(form)
        if len(ids) < count * per_chunk:
            raise CacheError(
                f"pages[{g}].{kind}: {len(ids)} entries, {count} chunks take {count * per_chunk}"
            )
    return groups


@functools.lru_cache(maxsize=1024)
def formats_of(layout: KVLayout, namespace: Namespace) -> tuple[RecordFormat, ...]:
    """A record format per layer group; remembered, since requests share few namespaces."""
    return tuple(RecordFormat.of(layout, group, namespace) for group in range(len(layout.groups)))


def largest_record_bytes(layout: KVLayout, namespace: Namespace) -> int:
    """Bytes of the largest record of any layer group: the smallest slot that takes them all."""
    return max(form.record_bytes for form in formats_of(layout, namespace))


def clear_gaps(rows: ChunkRows, pieces: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Zero the pieces whose chunk has blocks or slots that are not there. Mutates them.

    A slot of the staging memory holds what was last in it, which may be another tenant's.
    """
    ids = rows["blocks"] if "blocks" in rows else rows["slots"]
    for piece, row in zip(pieces, ids, strict=True):
        if row.min() < 0:
            piece[:] = 0
