"""First use of documents: compute those that no engine held, once their prompt is answered.

If a document does not directly follow its prefix, its KV in the prompt depends on the text between them, and
no other prompt can reuse it. An engine therefore computes the document behind its prefix alone, like a posted
one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from kvkit.router import openai
from kvkit.router.documents import STORED_S, Documents, PostedDocument
from kvkit.router.metrics import RouterMetrics
from kvkit.router.openai import ParsedRequest
from kvkit.router.spans import MIN_TOKENS, tokens_of
from kvkit.router.tokens import Headers, LRUCache

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Maximum number of answered prompts that wait; documents of others are left out until used again."""
MAX_WAITING_TOKENS = 16 << 20
"""Maximum number of tokens of all prompts that wait."""
_MAX_KNOWN_BYTES = 32 << 20


class DocumentWarmer:
    """Worker that computes the documents of answered prompts. Lives in one event loop.

    Args:
        compute: function that makes an engine compute a document; may raise anything.
        documents: lookup of a document in engines.
    """

    def __init__(
        self,
        compute: Callable[[PostedDocument, Headers], Awaitable[object]],
        documents: Documents,
        metrics: RouterMetrics,
    ) -> None:
        self._compute = compute
        self._documents = documents
        self._outcomes = metrics.first_uses
        self._waiting = asyncio.Queue[tuple[ParsedRequest, Sequence[int], Headers]](MAX_WAITING)
        self._waiting_tokens = 0
        self._in_flight = set[str]()
        self._held_after = LRUCache[int](_MAX_KNOWN_BYTES, sys.getsizeof)  # tokens held after computing it

    def offer(self, request: ParsedRequest, ids: Sequence[int] | None, headers: Headers) -> None:
        """Queue an answered prompt, without waiting. `ids`: its token ids; None: the request has them."""
        ids = request.prompt_ids if ids is None else ids
        if not request.blends or ids is None:
            return
        if self._waiting.full() or self._waiting_tokens + len(ids) > MAX_WAITING_TOKENS:
            self._outcomes.labels("left_out").inc(len(list(openai.documents_of(request, ids))))
            return
        fields = {name: request.body[name] for name in ("model", "cache_salt") if name in request.body}
        self._waiting_tokens += len(ids)
        self._waiting.put_nowait((replace(request, body=fields), ids, headers))

    async def run(self) -> None:
        """Compute one document after another, forever."""
        while True:
            request, ids, headers = await self._waiting.get()
            self._waiting_tokens -= len(ids)
            try:
                for document in _documents_to_warm(request, ids):
                    await self._warm(document, headers)
            except Exception:
                log.exception("internal error in the router")

    async def _warm(self, document: PostedDocument, headers: Headers) -> None:
        """Make an engine compute a document, unless it is held or being computed."""
        name = document.id
        if name in self._in_flight:
            return
        self._in_flight.add(name)
        outcome = "failed"
        try:
            if await self._is_held(name, document):
                outcome = "held"
            else:
                await self._compute(document, headers)
                self._held_after.put(name, await self._documents.held_tokens(document, STORED_S) or 0)
                outcome = "computed"
        except Exception as error:
            log.warning("cannot compute a document of %d tokens: %s", len(document.tokens), error)
        finally:
            self._in_flight.remove(name)
            self._outcomes.labels(outcome).inc()

    async def _is_held(self, name: str, document: PostedDocument) -> bool:
        """Return whether an engine holds as much of a document as after this router computed it.
        False: it did not compute it. True: what the engines hold is not known."""
        known = self._held_after.get(name)
        if known is None:
            return False
        held = await self._documents.held_tokens(document)
        return held is None or held >= known


def _documents_to_warm(request: ParsedRequest, ids: Sequence[int]) -> Iterator[PostedDocument]:
    """Yield the prompt's documents that do not directly follow their prefix, without short ones."""
    for before, start, stop in openai.documents_of(request, ids):
        if stop - start >= MIN_TOKENS and tuple(ids[:start]) != tuple(before):
            tokens = tokens_of(before), tokens_of(ids[start:stop])
            yield PostedDocument(request.model, request.salt, *tokens, None)
