"""Loading what was found of a prompt: its whole chunks, and the blocks that were handed off after them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kvkit.cache import Cache, Loaded
from kvkit.moving.layerwise import LayerLoad
from kvkit.moving.sequence import Hit, SequencePages
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

PagesOf = Callable[[int, int], Sequence[SequencePages]]
"""Where tokens [start, stop) of a prompt lie; both are multiples of a block."""
NOTHING = Loaded(0)


@dataclass(frozen=True, slots=True)
class PromptHit:
    """What was found of a prompt: whole chunks, and the blocks of an unfilled one after them."""

    whole: Hit
    tail: Hit | None = None

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """(tier, tokens) in their order. The last block counts in full."""
        return tuple(
            (segment.tier, (segment.stop - segment.start) * hit.chunks.chunk_tokens)
            for hit in (self.whole, self.tail)
            if hit is not None
            for segment in hit.plan.segments
        )


@dataclass(slots=True)
class PromptLoad:
    """The load of tokens [start, stop) of a prompt, where there is nothing to load, too.

        chunks    |       0       |       1       |   2
        blocks    |   |   |   |   |   |   |   |   |   |   |
        of a hit  [............ whole ............[ tail ...
        wanted              [start                    stop[
        loaded    [base         whole             [from_tail[

    Attributes:
        base: token that its first chunk begins with.
        tail_at: token that the tail begins with.
        from_tail: the first of the tail's tokens that is loaded.
        began: on the monotonic clock.
    """

    start: int
    stop: int
    base: int
    tail_at: int = 0
    from_tail: int = 0
    began: float = field(default_factory=time.monotonic)
    _whole: Transfer[Loaded] | LayerLoad | Loaded = NOTHING
    _tail: Transfer[Loaded] | None = None

    @staticmethod
    def begin(
        cache: Cache,
        hit: PromptHit | None,
        start: int,
        stop: int,
        pages: PagesOf,
        how: Literal["async", "sync", "layerwise"],
        wake: Callable[[object], object],
    ) -> PromptLoad:
        """Start it; `sync`: carry it out, but for the tail, in this thread.

        Args:
            hit: None: nothing is loaded.
            start: what comes before it stays as it is.
            wake: called when something of it is over, from any thread.
        """
        size = cache.namespace.chunk_tokens
        first, last = start // size, -(-stop // size)
        load = PromptLoad(start, stop, first * size)
        if hit is None:
            return load
        part = hit.whole.part(min(first, hit.whole.plan.chunks), last)
        if hit.tail is not None and stop > hit.whole.tokens:
            load._begin_tail(cache, hit.whole.tokens, hit.tail, pages, wake)
        places = pages(load.base, last * size)
        if how == "layerwise":
            load._whole = cache.load_layers(part, places)
        elif how == "sync":
            # in this thread, so in the order of the engine's stream, which may be zeroing the pages
            load._whole = cache.load(part, places)
        else:
            load._whole = cache.load_async(part, places)
            load._whole.add_done_callback(wake)
        return load

    def _begin_tail(
        self, cache: Cache, at: int, tail: Hit, pages: PagesOf, wake: Callable[[object], object]
    ) -> None:
        size = tail.chunks.chunk_tokens
        first, last = max(self.start - at, 0) // size, -(-(self.stop - at) // size)
        self.tail_at, self.from_tail = at, at + first * size
        self._tail = cache.load_async(tail.part(first, last), pages(self.from_tail, at + last * size))
        self._tail.add_done_callback(wake)

    @property
    def layers(self) -> LayerLoad | None:
        """The load of its whole chunks where that goes by layers."""
        return self._whole if isinstance(self._whole, LayerLoad) else None

    @property
    def done(self) -> bool:
        """Whether `finish` returns at once."""
        return self.layers is None and all(move.done() for move in self._moves)

    def cancel(self) -> None:
        """Have it end soon. The pages are in use until it is done."""
        for move in self._moves:
            move.cancel()

    def finish(self) -> tuple[int, Loaded]:
        """One past the last token that is there, and what was loaded. Waits for it."""
        whole = self._whole
        if isinstance(whole, LayerLoad):
            for _ in whole:
                pass
            whole = whole.loaded
        elif isinstance(whole, Transfer):
            whole = result_of(whole) or NOTHING
        end = self.base + whole.tokens
        if self._tail is None or end < self.tail_at:
            return min(end, self.stop), whole
        tail = result_of(self._tail) or NOTHING
        end = min(self.from_tail + tail.tokens, self.stop)
        by_tier = Counter(whole.by_tier)
        by_tier.update({tier: min(tokens, end - self.from_tail) for tier, tokens in tail.by_tier.items()})
        return end, Loaded(whole.tokens + end - self.from_tail, by_tier)

    @property
    def _moves(self) -> list[Transfer[Loaded]]:
        return [move for move in (self._whole, self._tail) if isinstance(move, Transfer)]


T = TypeVar("T")


def result_of(transfer: Future[T]) -> T | None:
    """What a transfer that is done, or will be soon, came to; None if it failed."""
    try:
        return transfer.result()
    except CancelledError:
        return None
    except Exception as error:
        log.warning("a lookup, a load or a save failed: %s", error or type(error).__name__)
        return None
