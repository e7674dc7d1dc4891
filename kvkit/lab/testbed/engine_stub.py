"""A stand-in for an engine: pages whose KV is a known function of the tokens before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvkit.cache import SequencePages
from kvkit.format.keys import chunk_keys, namespace_digest
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.api import Pages

POISON = 0xA5


def small_layout(groups: int = 1, dtype: str = "float32") -> KVLayout:
    """Groups of 2 layers, 2 heads of 8 + 4 channels, blocks of 4 tokens."""
    return KVLayout(
        tuple(
            LayerGroup(layers=(2 * g, 2 * g + 1), kv_heads=2, k_size=8, v_size=4, dtype=dtype, block_tokens=4)
            for g in range(groups)
        )
    )


def small_namespace(layout: KVLayout, chunk_tokens: int = 8, **fields: Any) -> Namespace:
    return Namespace(
        model="test", layout=layout.fingerprint(), dtype="float32", chunk_tokens=chunk_tokens, **fields
    )


class Engine:
    """Pages for `blocks` blocks per group; `kv` says what a chunk's KV must be."""

    def __init__(self, layout: KVLayout, namespace: Namespace, blocks: int = 32) -> None:
        self.layout = layout
        self.namespace = namespace
        self.blocks = blocks
        self.pools = [group.pages(blocks, fill_byte=POISON) for group in layout.groups]
        self.pages = [Pages.of(g, pool) for g, pool in zip(layout.groups, self.pools, strict=True)]

    def places(self, table: Sequence[int]) -> list[SequencePages]:
        """Where a sequence with this block table lies."""
        return [SequencePages(pages, blocks=np.asarray(table, np.int64)) for pages in self.pages]

    def table(self, tokens: int, start: int = 1) -> list[int]:
        """A block table for `tokens` tokens: odd blocks first, so that neighbours stay free."""
        count = tokens // self.layout.groups[0].block_tokens
        order = [*range(start, self.blocks, 2), *range(0, self.blocks, 2)]
        return order[:count]

    def keys(self, tokens: npt.NDArray[np.int32]) -> list[bytes]:
        space = self.namespace
        return chunk_keys(tokens, space.chunk_tokens, namespace_digest(space), space.hash)

    def kv(self, key: bytes, group: int) -> npt.NDArray[np.uint8]:
        """The payload that belongs to a key: uint8 [chunk_bytes]."""
        seed = int.from_bytes(key, "big") + group
        size = self.layout.groups[group].chunk_bytes(self.namespace.chunk_tokens)
        return np.random.default_rng(seed).integers(0, 256, size, np.uint8)

    def compute(self, tokens: npt.NDArray[np.int32], table: Sequence[int]) -> None:
        """Write the KV of the whole chunks of `tokens` to the pages of `table`."""
        keys = self.keys(tokens)
        for g, pages in enumerate(self.pages):
            if keys:
                payloads = [self.kv(key, g) for key in keys]
                reference.unpack(pages.group, pages.parts, payloads, self._slots(g, table, len(keys)))

    def read(self, tokens: npt.NDArray[np.int32], table: Sequence[int], chunks: int) -> list[list[bytes]]:
        """The first `chunks` chunks that lie in the pages of `table`: per group, per chunk."""
        found = []
        for g, pages in enumerate(self.pages):
            size = self.layout.groups[g].chunk_bytes(self.namespace.chunk_tokens)
            payloads = [np.zeros(size, np.uint8) for _ in range(chunks)]
            if chunks:
                reference.pack(pages.group, pages.parts, payloads, self._slots(g, table, chunks))
            found.append([p.tobytes() for p in payloads])
        return found

    def assert_loaded(
        self, tokens: npt.NDArray[np.int32], table: Sequence[int], chunks: int, begun: int = 0
    ) -> None:
        """The first `chunks` chunks are in place; all blocks but those and `begun` are as they were made."""
        keys = self.keys(tokens)[:chunks]
        expected = [[self.kv(key, g).tobytes() for key in keys] for g in range(len(self.layout.groups))]
        assert self.read(tokens, table, chunks) == expected
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            used = set(table[: max(chunks, begun) * self.namespace.chunk_tokens // group.block_tokens])
            rest = [b for b in range(self.blocks) if b not in used]
            for layer in pool:
                assert bool((layer[rest].contiguous().view(torch.uint8) == POISON).all()), (
                    "a neighbour was written"
                )

    def wipe(self) -> None:
        """Poison every page."""
        for pool in self.pools:
            for layer in pool:
                layer.view(torch.uint8).fill_(POISON)

    def _slots(self, group: int, table: Sequence[int], chunks: int) -> npt.NDArray[np.int64]:
        """Slots [chunks, T] of the first chunks."""
        pages = self.pages[group]
        per_chunk = self.namespace.chunk_tokens // self.layout.groups[group].block_tokens
        blocks = np.asarray(table[: chunks * per_chunk], np.int64)
        return (blocks[:, None] * pages.tokens + np.arange(pages.tokens)).reshape(chunks, -1)


STATE_BYTES = 100
"""Of one layer."""


def hybrid_layout(chunk_tokens: int = 8) -> KVLayout:
    """A group of tokens, as `small_layout` has it, and two of states, of two layers and of one."""
    states = (LayerGroup.of_states(layers, STATE_BYTES, chunk_tokens, "test") for layers in ((2, 3), (4,)))
    return KVLayout((*small_layout().groups, *states))


class HybridEngine(Engine):
    """An engine whose groups are states, but the first. The snapshot after chunk i may lie in block i."""

    def computed(self, tokens: npt.NDArray[np.int32], snapshots: Collection[int]) -> list[SequencePages]:
        """Compute whole chunks, and keep the states at the ends of some: where all of that lies."""
        table = self.table(len(tokens))
        self.write(tokens, table, snapshots)
        return self.where(table, len(self.keys(tokens)), snapshots)

    def write(self, tokens: npt.NDArray[np.int32], table: Sequence[int], snapshots: Collection[int]) -> None:
        keys = self.keys(tokens)
        group = self.pages[0]
        payloads = [self.kv(key, 0) for key in keys]
        if keys:
            reference.unpack(group.group, group.parts, payloads, self._slots(0, table, len(keys)))
        for place in snapshots:
            for g in range(1, len(self.pages)):
                state = torch.from_numpy(self.kv(keys[place], g)).view(-1, 1, 1, STATE_BYTES)
                for layer, part in zip(self.pools[g], state, strict=True):
                    layer[place] = part

    def where(self, table: Sequence[int], chunks: int, snapshots: Collection[int]) -> list[SequencePages]:
        """The pages of a sequence: of states those at the ends of some chunks."""
        places = np.array([i if i in snapshots else -1 for i in range(chunks)], np.int64)
        states = [SequencePages(pages, blocks=places) for pages in self.pages[1:]]
        return [SequencePages(self.pages[0], blocks=np.asarray(table, np.int64)), *states]

    def read_tokens(self, table: Sequence[int], chunks: int) -> list[bytes]:
        """The first chunks that lie in the pages of the group of tokens."""
        group, size = self.pages[0], self.layout.groups[0].chunk_bytes(self.namespace.chunk_tokens)
        payloads = [np.zeros(size, np.uint8) for _ in range(chunks)]
        if chunks:
            reference.pack(group.group, group.parts, payloads, self._slots(0, table, chunks))
        return [payload.tobytes() for payload in payloads]

    def snapshots(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Chunks at whose ends the right states lie. All other pages of states are as they were made."""
        found = []
        keys = self.keys(tokens)
        for place in range(self.blocks):
            held = [torch.cat([layer[place].flatten() for layer in pool]) for pool in self.pools[1:]]
            if all(bool((state == POISON).all()) for state in held):
                continue
            expected = [self.kv(keys[place], g) for g in range(1, len(self.pages))]
            assert all(np.array_equal(state, e) for state, e in zip(held, expected, strict=True)), place
            found.append(place)
        return found
