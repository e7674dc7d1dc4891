"""Loading what was found of a prompt: its whole chunks, and the blocks that were handed off after them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
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


class PromptLoad:
    """The load of tokens [start, stop) of a prompt, where there is nothing to load, too. Begins at once.

        chunks    |       0       |       1       |   2
        blocks    |   |   |   |   |   |   |   |   |   |   |
        of a hit  [............ whole ............[ tail ...
        wanted              [start                    stop[
        loaded    [base         whole             [from_tail[

    Args:
        hit: None: nothing is loaded.
        start: what comes before it stays as it is.
        how: `sync`: all but the tail is loaded in this thread, before this returns.
        wake: called when something of it is over, from any thread.

    Attributes:
        base: token that its first chunk begins with.
        began: on the monotonic clock.
    """

    def __init__(
        self,
        cache: Cache,
        hit: PromptHit | None,
        start: int,
        stop: int,
        pages: PagesOf,
        how: Literal["async", "sync", "layerwise"],
        wake: Callable[[object], object],
    ) -> None:
        size = cache.namespace.chunk_tokens
        first, last = start // size, -(-stop // size)
        self.base = first * size
        self.began = time.monotonic()
        self._stop = stop
        self._whole: Transfer[Loaded] | LayerLoad | Loaded = NOTHING
        self._tail: Transfer[Loaded] | None = None
        if hit is None:
            return
        self._tail_at = at = hit.whole.tokens
        if hit.tail is not None and stop > at:
            block = hit.tail.chunks.chunk_tokens
            skipped, end = max(start - at, 0) // block, -(-(stop - at) // block)
            self._from_tail = at + skipped * block
            tail = hit.tail.part(skipped, end)
            self._tail = cache.load_async(tail, pages(self._from_tail, at + end * block))
            self._tail.add_done_callback(wake)
        part, places = hit.whole.part(min(first, hit.whole.plan.chunks), last), pages(self.base, last * size)
        if how == "layerwise":
            self._whole = cache.load_layers(part, places)
        elif how == "sync":
            # in this thread, so in the order of the engine's stream, which may be zeroing the pages
            self._whole = cache.load(part, places)
        else:
            self._whole = cache.load_async(part, places)
            self._whole.add_done_callback(wake)

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
        if self._tail is None or end < self._tail_at:
            return min(end, self._stop), whole
        tail = result_of(self._tail) or NOTHING
        end = min(self._from_tail + tail.tokens, self._stop)
        by_tier = Counter(whole.by_tier)
        by_tier.update({tier: min(tokens, end - self._from_tail) for tier, tokens in tail.by_tier.items()})
        return end, Loaded(whole.tokens + end - self._from_tail, by_tier)

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
