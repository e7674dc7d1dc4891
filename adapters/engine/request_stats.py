"""What each request hit and had stored: a line in the log when it is over, and its last put."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tallied:
    """What is known of one.

    Attributes:
        hit, stored: tokens by tier; hit: None before its first load is over.
        under_way: loads and saves that are not over.
        prompt_tokens: None until the request is over.
    """

    hit: Mapping[str, int] | None = None
    stored: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    prompt_tokens: int | None = None


class RequestStats:
    """The requests of one engine, as its first rank sees them. Thread-safe: puts end in threads of tiers.

    Args:
        tells: whether there are lines in the log; one rank's will do.
    """

    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self._requests: defaultdict[str, _Tallied] = defaultdict(_Tallied)
        self._lock = threading.Lock()

    def begin(self, request_id: str) -> None:
        """Note that a load or a save of a request is under way, until `done`."""
        with self._lock:
            self._requests[request_id].under_way += 1

    def hit(self, request_id: str, tokens: Mapping[str, int]) -> None:
        """Note what a request's first load brought, by tier; what is loaded after a preemption was there."""
        with self._lock:
            found = self._requests[request_id]
            found.hit = tokens if found.hit is None else found.hit

    def stored(self, request_id: str, tier: str, tokens: int) -> None:
        """Count what a tier has completely."""
        with self._lock:
            if request_id in self._requests:  # or the line is out: its save failed, and had begun some puts
                self._requests[request_id].stored[tier] += tokens

    def done(self, request_id: str) -> None:
        """Note that a load or a save is over: nothing more is counted for it."""
        with self._lock:
            self._requests[request_id].under_way -= 1
        self._tell(request_id)

    def over(self, request_id: str, prompt_tokens: int) -> None:
        """Note that a request is over: nothing more is begun for it."""
        with self._lock:
            self._requests[request_id].prompt_tokens = prompt_tokens
        self._tell(request_id)

    def _tell(self, request_id: str) -> None:
        """Write a request's line, and forget it, if everything is over."""
        with self._lock:
            found = self._requests.get(request_id)
            if found is None or found.under_way or found.prompt_tokens is None:
                return
            del self._requests[request_id]
        if self._tells:
            hit, stored = _shown(found.hit or {}), _shown(found.stored)
            log.info(
                "%s: of %d prompt tokens hit %s; stored %s", request_id, found.prompt_tokens, hit, stored
            )


def _shown(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({tier})" for tier, count in tokens.items() if count) or "none"
