"""What queued requests will hit is brought near: in their order, while they wait, as far as there is room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.moving.sequence import Hit
from kvkit.workers import Transfer


@dataclass(slots=True)
class _Wanted:
    """Chunks [first, last) of what a request will hit; `move` brings them near once there is room."""

    request_id: str
    tokens: TokenIds
    space: Namespace
    first: int
    last: int
    move: Transfer[Hit] | None = None

    @property
    def chunks(self) -> int:
        """How many it takes room for: in the end, those that were found; none where it failed."""
        if self.move is None or not self.move.done():
            return self.last - self.first
        return 0 if self.move.exception() is not None else self.move.result().plan.chunks


class Prefetches:
    """The prefetches of one rank. For the thread that runs steps: nothing here waits.

    What one request was brought near shall not displace what an earlier one was: together they take half of
    the memory that it goes to. The part of a prompt that has no room stays where it is.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._wanted: list[_Wanted] = []

    def add(self, request_id: str, tokens: TokenIds, space: Namespace, computed: int) -> None:
        """Bring near what whole chunks of `tokens` (int32 [T]) will hit after the first `computed`, too."""
        first, last = computed // space.chunk_tokens, len(tokens) // space.chunk_tokens
        if first < last:
            self._wanted.append(_Wanted(request_id, tokens, space, first, last))

    def end(self, request_id: str) -> None:
        """Stop; what is near already stays."""
        self._end(lambda wanted: wanted.request_id == request_id)

    def end_all(self) -> None:
        """Stop all of them."""
        self._end(lambda _: True)

    def go_on(self) -> None:
        """Start what has room, in the order of requests."""
        room = self._cache.prefetch_chunks
        for wanted in self._wanted:
            if wanted.move is None:
                if room < 1:
                    return
                wanted.last = min(wanted.last, wanted.first + room)
                part = wanted.tokens[: wanted.last * wanted.space.chunk_tokens]
                wanted.move = self._cache.prefetch(part, wanted.space, first=wanted.first)
            room -= wanted.chunks

    def _end(self, ends: Callable[[_Wanted], bool]) -> None:
        for wanted in filter(ends, self._wanted):
            if wanted.move is not None:
                wanted.move.cancel()
        self._wanted = [wanted for wanted in self._wanted if not ends(wanted)]
