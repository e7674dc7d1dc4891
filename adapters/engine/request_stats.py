"""Hits and stores of each request, logged in one line once the request and its last put are over."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RequestCounts:
    """Counts of one request.

    Attributes:
        hit: tokens by tier; None before the first load is over.
        stored: tokens by tier.
        in_flight: number of loads and saves in flight.
        prompt_tokens: tokens of its prompt; None until the request ended.
    """

    hit: Mapping[str, int] | None = None
    stored: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    prompt_tokens: int | None = None


class RequestStats:
    """Counts of the requests of one rank. Thread-safe: puts end in threads of tiers.

    Args:
        logs: True if lines are logged. Only one rank of an engine does that.
    """

    def __init__(self, logs: bool) -> None:
        self._logs = logs
        self._requests: defaultdict[str, _RequestCounts] = defaultdict(_RequestCounts)
        self._lock = threading.Lock()

    def begin_transfer(self, request_id: str) -> None:
        """Note that a load or a save of a request is in flight, until `end_transfer`."""
        with self._lock:
            self._requests[request_id].in_flight += 1

    def hit(self, request_id: str, tokens: Mapping[str, int]) -> None:
        """Note the tokens of a request's first load, by tier; loads after a preemption do not count."""
        with self._lock:
            counts = self._requests[request_id]
            counts.hit = tokens if counts.hit is None else counts.hit

    def stored(self, request_id: str, tier: str, tokens: int) -> None:
        """Count tokens that a tier has stored completely."""
        with self._lock:
            if request_id in self._requests:  # else its line was logged: its save failed after some puts
                self._requests[request_id].stored[tier] += tokens

    def end_transfer(self, request_id: str) -> None:
        """Note that a load or a save of a request is over."""
        with self._lock:
            self._requests[request_id].in_flight -= 1
        self._log_if_complete(request_id)

    def end_request(self, request_id: str, prompt_tokens: int) -> None:
        """Note that a request ended: no load or save begins for it any more."""
        with self._lock:
            self._requests[request_id].prompt_tokens = prompt_tokens
        self._log_if_complete(request_id)

    def _log_if_complete(self, request_id: str) -> None:
        """Log a request's line and forget the request, once it and its transfers are over."""
        with self._lock:
            counts = self._requests.get(request_id)
            if counts is None or counts.in_flight or counts.prompt_tokens is None:
                return
            del self._requests[request_id]
        if self._logs:
            hit, stored = by_tier(counts.hit or {}), by_tier(counts.stored)
            log.info(
                "%s: of %d prompt tokens hit %s; stored %s", request_id, counts.prompt_tokens, hit, stored
            )


def by_tier(tokens: Mapping[str, int]) -> str:
    """Return tokens by tier as text, such as `512 (memory), 128 (disk)`."""
    return ", ".join(f"{count} ({tier})" for tier, count in tokens.items() if count) or "none"
