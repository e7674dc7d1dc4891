"""Prefetches for queued requests, in the order of the requests, as far as there is room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.transfer.sequence import Hit
from kvkit.workers import Transfer


@dataclass(slots=True)
class _Prefetch:
    """The prefetch of chunks [first, last) of a request's tokens. `transfer` is None until there is room."""

    request_id: str
    tokens: TokenIds
    namespace: Namespace
    first: int
    last: int
    transfer: Transfer[Hit] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks that take room. A prefetch that is done takes room for the chunks it found."""
        if self.transfer is None or not self.transfer.done():
            return self.last - self.first
        return 0 if self.transfer.exception() is not None else self.transfer.result().plan.chunks


class Prefetches:
    """The prefetches of one rank. For the thread that runs steps: nothing here waits.

    All prefetches together take at most half of the memory that they fill, so that no request's prefetch
    displaces an earlier one's. Chunks of a prompt without room are not prefetched.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._prefetches: list[_Prefetch] = []

    def add(self, request_id: str, tokens: TokenIds, namespace: Namespace, computed: int) -> None:
        """Queue a prefetch of the whole chunks of `tokens` (int32 [T]) after the first `computed` tokens."""
        first, last = computed // namespace.chunk_tokens, len(tokens) // namespace.chunk_tokens
        if first < last:
            self._prefetches.append(_Prefetch(request_id, tokens, namespace, first, last))

    def end_request(self, request_id: str) -> None:
        """Stop a request's prefetches; prefetched records stay in memory."""
        self._end(lambda prefetch: prefetch.request_id == request_id)

    def end_all(self) -> None:
        """Stop the prefetches of all requests."""
        self._end(lambda _: True)

    def start_next(self) -> None:
        """Start the prefetches that have room, in the order of requests."""
        room = self._cache.prefetch_chunks
        for prefetch in self._prefetches:
            if prefetch.transfer is None:
                if room < 1:
                    return
                prefetch.last = min(prefetch.last, prefetch.first + room)
                tokens = prefetch.tokens[: prefetch.last * prefetch.namespace.chunk_tokens]
                prefetch.transfer = self._cache.prefetch(tokens, prefetch.namespace, first=prefetch.first)
            room -= prefetch.chunks

    def _end(self, ends: Callable[[_Prefetch], bool]) -> None:
        for prefetch in filter(ends, self._prefetches):
            if prefetch.transfer is not None:
                prefetch.transfer.cancel()
        self._prefetches = [prefetch for prefetch in self._prefetches if not ends(prefetch)]
