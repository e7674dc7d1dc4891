"""Prefetches for queued requests: in their order, while they wait, as far as there is room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.transfer.sequence import Hit
from kvkit.workers import Transfer


@dataclass(slots=True)
class _Wanted:
    """Chunks [first, last) that a request will hit; `move` is their prefetch, None until there is room."""

    request_id: str
    tokens: TokenIds
    space: Namespace
    first: int
    last: int
    move: Transfer[Hit] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks that take room: once the prefetch is done, those found; none if it failed."""
        if self.move is None or not self.move.done():
            return self.last - self.first
        return 0 if self.move.exception() is not None else self.move.result().plan.chunks


class Prefetches:
    """The prefetches of one rank. For the thread that runs steps: nothing here waits.

    All prefetches together take at most half of the memory that they fill, so that no request's prefetch
    displaces an earlier one's. Chunks of a prompt that find no room are not prefetched.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._wanted: list[_Wanted] = []

    def add(self, request_id: str, tokens: TokenIds, space: Namespace, computed: int) -> None:
        """Queue a prefetch of the whole chunks of `tokens` (int32 [T]) after the first `computed` tokens."""
        first, last = computed // space.chunk_tokens, len(tokens) // space.chunk_tokens
        if first < last:
            self._wanted.append(_Wanted(request_id, tokens, space, first, last))

    def end(self, request_id: str) -> None:
        """Stop a request's prefetches; prefetched records stay in memory."""
        self._end(lambda prefetch: prefetch.request_id == request_id)

    def end_all(self) -> None:
        """Stop the prefetches of all requests."""
        self._end(lambda _: True)

    def start_next(self) -> None:
        """Start the prefetches that have room, in the order of requests."""
        room = self._cache.prefetch_chunks
        for prefetch in self._wanted:
            if prefetch.move is None:
                if room < 1:
                    return
                prefetch.last = min(prefetch.last, prefetch.first + room)
                tokens = prefetch.tokens[: prefetch.last * prefetch.space.chunk_tokens]
                prefetch.move = self._cache.prefetch(tokens, prefetch.space, first=prefetch.first)
            room -= prefetch.chunks

    def _end(self, ends: Callable[[_Wanted], bool]) -> None:
        for prefetch in filter(ends, self._wanted):
            if prefetch.move is not None:
                prefetch.move.cancel()
        self._wanted = [prefetch for prefetch in self._wanted if not ends(prefetch)]
