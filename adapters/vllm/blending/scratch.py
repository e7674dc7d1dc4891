"""Scratch blocks that replace the blocks outside of a sliding window while a request is blended.

Rows may be anywhere in the prompt, and each attends to the window before it. vLLM keeps only the blocks of a
request's last window:

    computed           |
    tokens     |  0  |  1  |  2  |  3  |  4  |  5  |
    vLLM's     |  -  |  -  |  -  |  -  |  14 |  15 |
    a blend's  |  -  |  9  |  31 |  32 |  14 |  15 |     9: found in vLLM's cache and pinned; 31, 32: new
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvkit.adapters.vllm.step import Tables


@dataclass(eq=False)
class Scratch:
    """The blocks that one engine's blends hold besides their requests' blocks.

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
            for group, first in self._firsts(computed)
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

        Blocks that are not the request's own are held until `give_back`. There are enough if `has_room` was
        True before vLLM allocated the request's own blocks.
        """
        pins = self._pinned.pop(request.request_id, {})
        sizes = [-(-request.num_tokens // size) for size in self.block_tokens]
        tables = tuple(
            [block or -1 for block in table] + [-1] * (size - len(table))
            for table, size in zip(blocks, sizes, strict=True)
        )
        firsts = dict(enumerate(map(len, blocks))) | dict(self._firsts(computed))
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

    def give_back(self, request_id: str) -> None:
        """Release the blocks held for a request's blend, which is over."""
        self.manager.block_pool.free_blocks(self._held.pop(request_id, ()))

    def _firsts(self, computed: int) -> Iterator[tuple[int, int]]:
        """Yield each KV cache group with a window, and the first block that tokens from `computed` need."""
        for group, (size, window) in enumerate(zip(self.block_tokens, self.windows, strict=True)):
            if window is not None:
                yield group, max(0, computed - window + 1) // size
