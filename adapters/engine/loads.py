"""Load of a prompt's hit: its whole chunks, and the blocks that were handed off after them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from kvkit.cache import Cache, Loaded
from kvkit.transfer.layer_load import LayerLoad
from kvkit.transfer.sequence import Hit, SequencePages
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

PagesOf = Callable[[int, int], Sequence[SequencePages]]
"""Function that returns the pages of tokens [start, stop) of a prompt; both are multiples of a block."""
LoadMode = Literal["async", "sync", "layerwise"]
NOTHING = Loaded(0)


@dataclass(frozen=True, slots=True)
class PromptHit:
    """The hit of a prompt: whole chunks, blocks of an unfilled chunk after them, and its documents' hits."""

    whole: Hit
    tail: Hit | None = None
    documents: tuple[Hit, ...] = ()

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """(tier, number of tokens) pairs in the order of the tokens. The last block counts in full."""
        return tuple(
            (segment.tier, (segment.stop - segment.start) * hit.chunks.chunk_tokens)
            for hit in (self.whole, self.tail)
            if hit is not None
            for segment in hit.plan.segments
        )


class PromptLoad:
    """The load of tokens [start, stop) of a prompt; it may be empty. Begins at once.

        chunks    |       0       |       1       |   2
        blocks    |   |   |   |   |   |   |   |   |   |   |
        of a hit  [............ whole ............[ tail ...
        wanted              [start                    stop[
        loaded    [base         whole             [tail_from[

    Args:
        hit: None: nothing is loaded.
        start: tokens before it stay as they are.
        pages_of: returns the pages to load into.
        mode: with "sync", this thread loads all but the tail before the constructor returns.
        wake: called from any thread when a transfer of the load is over.

    Attributes:
        base: first token of the first chunk.
        began: start time on the monotonic clock.
    """

    def __init__(
        self,
        cache: Cache,
        hit: PromptHit | None,
        start: int,
        stop: int,
        pages_of: PagesOf,
        mode: LoadMode,
        wake: Callable[[object], object],
    ) -> None:
        size = cache.namespace.chunk_tokens
        first, last = start // size, -(-stop // size)
        self.base = first * size
        self.began = time.monotonic()
        self._stop = stop
        self._whole: list[tuple[int, Transfer[Loaded]]] | LayerLoad | Loaded = NOTHING
        self._tail: Transfer[Loaded] | None = None
        if hit is None:
            return
        self._whole_tokens = whole_tokens = hit.whole.tokens
        if hit.tail is not None and stop > whole_tokens:
            block = hit.tail.chunks.chunk_tokens
            skipped, end = max(start - whole_tokens, 0) // block, -(-(stop - whole_tokens) // block)
            self._tail_from = whole_tokens + skipped * block
            tail = hit.tail.part(skipped, end)
            self._tail = cache.load_async(tail, pages_of(self._tail_from, whole_tokens + end * block))
            self._tail.add_done_callback(wake)
        if mode == "async":
            self._whole = _start_whole(cache, hit.whole, first, min(last, hit.whole.plan.chunks), pages_of)
            for _, transfer in self._whole:
                transfer.add_done_callback(wake)
            return
        whole = hit.whole.part(min(first, hit.whole.plan.chunks), last)
        pages = pages_of(self.base, last * size)
        if mode == "layerwise":
            self._whole = cache.load_layers(whole, pages)
        else:
            # in this thread, hence in order after the engine's stream, which may be zeroing the pages
            self._whole = cache.load(whole, pages)

    @property
    def layers(self) -> LayerLoad | None:
        """The layerwise load of the whole chunks; None if they are not loaded layerwise."""
        return self._whole if isinstance(self._whole, LayerLoad) else None

    @property
    def done(self) -> bool:
        """True if `finish` returns at once."""
        return self.layers is None and all(transfer.done() for transfer in self._transfers)

    def cancel(self) -> None:
        """Ask the load to end soon. The pages are in use until it is done."""
        for transfer in self._transfers:
            transfer.cancel()

    def finish(self) -> tuple[int, Loaded]:
        """Wait for the load; return one past the last loaded token, and what was loaded."""
        loaded = self._whole
        if isinstance(loaded, LayerLoad):
            for _ in loaded:
                pass
            loaded = loaded.loaded
        elif isinstance(loaded, list):
            loaded = _leading([(tokens, result_of(transfer) or NOTHING) for tokens, transfer in loaded])
        end = self.base + loaded.tokens
        if self._tail is None or end < self._whole_tokens:
            return min(end, self._stop), loaded
        tail = result_of(self._tail) or NOTHING
        end = min(self._tail_from + tail.tokens, self._stop)
        by_tier = Counter(loaded.by_tier)
        by_tier.update({tier: min(tokens, end - self._tail_from) for tier, tokens in tail.by_tier.items()})
        return end, replace(loaded, tokens=loaded.tokens + end - self._tail_from, by_tier=by_tier)

    @property
    def _transfers(self) -> list[Transfer[Loaded]]:
        transfers = [transfer for _, transfer in self._whole] if isinstance(self._whole, list) else []
        return [*transfers, self._tail] if self._tail is not None else transfers


def _start_whole(
    cache: Cache, hit: Hit, first: int, last: int, pages_of: PagesOf
) -> list[tuple[int, Transfer[Loaded]]]:
    """Start the load of chunks [first, last) of a hit; return (number of tokens, transfer) pairs.

    A hit in memory is loaded in two transfers, since each only verifies and unpacks. A hit with states is
    loaded in one, as only the states after its last token are loaded.
    """
    size = hit.chunks.chunk_tokens
    in_memory = all(cache.tiers[segment.tier].in_memory for segment in hit.plan.segments)
    middle = (first + last) // 2 if in_memory and not hit.chunks.states else first
    ranges = [(start, stop) for start, stop in ((first, middle), (middle, last)) if start < stop]
    return [
        ((stop - start) * size, cache.load_async(hit.part(start, stop), pages_of(start * size, stop * size)))
        for start, stop in ranges
    ]


def _leading(loads: Sequence[tuple[int, Loaded]]) -> Loaded:
    """Return the sum of loads up to the first gap, from (expected tokens, load) pairs."""
    tokens, by_tier, approximate, first_approximate = 0, Counter[str](), 0, None
    for expected, loaded in loads:
        if first_approximate is None and loaded.approximate_from is not None:
            first_approximate = tokens + loaded.approximate_from
        tokens += loaded.tokens
        by_tier.update(loaded.by_tier)
        approximate += loaded.approximate
        if loaded.tokens < expected:
            break
    return Loaded(tokens, dict(by_tier), approximate, first_approximate)


T = TypeVar("T")


def result_of(transfer: Future[T]) -> T | None:
    """Wait for a transfer and return its result; None if it failed or was cancelled."""
    try:
        return transfer.result()
    except CancelledError:
        return None
    except Exception as error:
        log.warning("a lookup, a load or a save failed: %s", str(error) or type(error).__name__)
        return None
