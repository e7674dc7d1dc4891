"""Tokenization by engines: of prompts, of documents, and of the prefixes of documents."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvkit.blend.requests import FIELD as BLEND
from kvkit.router import openai
from kvkit.router.engines import Engine, EngineFailed, RequestRefused
from kvkit.router.marks import MarkedDocuments
from kvkit.router.openai import Body, ParsedRequest
from kvkit.router.spans import CONTEXTS, TokenArray, common_end, common_start, find_spans, tokens_of

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 64 << 20
"""Maximum memory for the token ids of documents, prefixes and joints."""
ENTRY_BYTES = 512
"""Memory per cached value, besides the value: its name and its table entry."""
_MAX_IN_FLIGHT = 16
_JOINTS = len(CONTEXTS)
"""Joints that one request asks for at once, so that other requests are served in between."""
_BEGINNING_FIELDS = ("model", "tools", "add_special_tokens", "chat_template", "chat_template_kwargs")

V = TypeVar("V")
Prefix = str | Sequence[Mapping[str, Any]]
Headers = Mapping[str, str]


class LRUCache(Generic[V]):
    """A cache of values by name, bounded in memory, that evicts the least recently used.

    Args:
        max_bytes: maximum memory, names and table included.
        size: function that returns the size of a value in bytes.
    """

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size = size
        self._values: OrderedDict[str, V] = OrderedDict()
        self._size_bytes = 0

    def get(self, name: str) -> V | None:
        if name in self._values:
            self._values.move_to_end(name)
        return self._values.get(name)

    def put(self, name: str, value: V) -> None:
        self.pop(name)
        self._values[name] = value
        self._size_bytes += self._size(value) + ENTRY_BYTES
        while self._size_bytes > self._max_bytes:
            self.pop(next(iter(self._values)))

    def pop(self, name: str) -> V | None:
        value = self._values.pop(name, None)
        if value is not None:
            self._size_bytes -= self._size(value) + ENTRY_BYTES
        return value


class NoTokens(RuntimeError):
    """No engine returned the tokens of a text."""


class Tokenizer:
    """Tokenizer that asks the engine with the fewest requests. Lives in one event loop.

    Args:
        engines: engines to ask.
        timeout_s: timeout of each answer, and of all answers that one `locate_documents` needs.
    """

    def __init__(self, engines: Sequence[Engine], timeout_s: float) -> None:
        self._engines = engines
        self._timeout_s = timeout_s
        self._cache = LRUCache[TokenArray](MAX_KEPT_BYTES, sys.getsizeof)
        self._requests = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def tokenize(self, body: Body, headers: Headers, timeout_s: float | None = None) -> tuple[int, ...]:
        """Return the token ids that `/tokenize` answers.

        Args:
            timeout_s: timeout of a free slot and the answer; None: the tokenizer's.

        Raises:
            NoTokens: no engine is up, or its answer is late or unusable.
            RequestRefused: the engine rejected the request as wrong.
        """
        up = [engine for engine in self._engines if engine.up]
        if not up:
            raise NoTokens("no decode engine is up")
        engine = min(up, key=lambda e: e.requests)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s), self._requests:
                return await engine.ask("POST", "/tokenize", body, headers, limit_s, openai.read_tokens)
        except EngineFailed as error:
            raise NoTokens(str(error)) from error
        except TimeoutError as error:
            raise NoTokens(f"no answer within {limit_s:g} s") from error

    async def document_tokens(self, model: str | None, text: str, headers: Headers) -> TokenArray:
        """Return the tokens of a document that do not depend on the text before it. Raises as `tokenize`."""
        model_field = {} if model is None else {"model": model}
        bodies = [{**model_field, "prompt": c + text, "add_special_tokens": False} for c in CONTEXTS]
        return await self._cached(["document", bodies[0]], common_end, bodies, headers)

    async def prefix_tokens(self, fields: Mapping[str, Any], prefix: Prefix, headers: Headers) -> TokenArray:
        """Return the first tokens of every prompt that begins with this text or these messages.

        Args:
            fields: fields of a request; only those that shape the prompt's beginning are used.
            prefix: the text or messages.

        Raises:
            NoTokens, RequestRefused: as `tokenize`.
        """
        bodies = [_beginning(fields, prefix, after) for after in CONTEXTS[1:]]
        return await self._cached(["prefix", bodies[0]], common_start, bodies, headers)

    async def joint_tokens(
        self, fields: Mapping[str, Any], prefix: Prefix, text: str, headers: Headers
    ) -> TokenArray:
        """Return the tokens between a prefix and a document behind it. Args, raises as `prefix_tokens`."""
        before = await self.prefix_tokens(fields, prefix, headers)
        document = await self.document_tokens(fields.get("model"), text, headers)

        def between(prompts: Sequence[Sequence[int]]) -> TokenArray:
            prompt, first = prompts[0], len(before)
            (span,) = find_spans(prompt, [document], first)
            return tokens_of(prompt[first : span[0]] if span and tokens_of(prompt[:first]) == before else ())

        body = _beginning(fields, prefix, text)
        return await self._cached(["joint", body, text], between, [body], headers)

    async def locate_documents(
        self, request: ParsedRequest, marked: MarkedDocuments, headers: Headers
    ) -> tuple[ParsedRequest, tuple[int, ...] | None]:
        """Return `request` with the spans of marked documents, and the prompt's ids (None: not tokenized).
        The request is not blended if tokens are missing or none of its documents is found."""
        if not request.blends or not (marked.texts or marked.prefix is not None):
            return request, None
        try:
            async with asyncio.timeout(self._timeout_s):
                ids, documents, prefix_tokens, joints = await self._tokens_of(request, marked, headers)
        except (NoTokens, RequestRefused) as error:
            log.warning("not blended: /tokenize: %s", error)
            return request.with_blend(None), None
        except TimeoutError:
            log.warning("not blended: /tokenize: not all answers within %g s", self._timeout_s)
            return request.with_blend(None), None
        has_prefix = ids[: len(prefix_tokens)] == tuple(prefix_tokens)
        first = len(prefix_tokens) if has_prefix else 0
        located = zip(find_spans(ids, documents, first), joints, strict=True)
        spans = {span: joint.tolist() for span, joint in located if span}
        log.info("%d of %d documents found in %d tokens", len(spans), len(documents), len(ids))
        if documents and not spans:
            return request.with_blend(None), ids
        blend: Body = {**request.params[BLEND], "prefix": first}
        if spans:
            blend["documents"] = list(map(list, spans))
        if has_prefix and any(spans.values()):
            blend["joints"] = list(spans.values())
        return request.with_blend(blend), ids

    async def _tokens_of(
        self, request: ParsedRequest, marked: MarkedDocuments, headers: Headers
    ) -> tuple[tuple[int, ...], list[TokenArray], TokenArray, list[TokenArray]]:
        """Return the tokens of a prompt, of its documents, of their prefix, and of their joints with it."""
        model, texts, prefix = request.model, marked.texts, marked.prefix
        prefix_tokens, joints = tokens_of(()), [tokens_of(())] * len(texts)
        ids = await self.tokenize(openai.tokenize_body(request), headers)
        documents = [await self.document_tokens(model, text, headers) for text in texts]
        if prefix is not None:
            prefix_tokens, joints = await self.prefix_tokens(request.body, prefix, headers), []
            for first in range(0, len(texts), _JOINTS):
                batch = texts[first : first + _JOINTS]
                computing = (self.joint_tokens(request.body, prefix, text, headers) for text in batch)
                joints += await asyncio.gather(*computing)
        return ids, documents, prefix_tokens, joints

    async def _cached(
        self,
        key: Sequence[Any],
        combine: Callable[[Sequence[Sequence[int]]], TokenArray],
        bodies: Sequence[Body],
        headers: Headers,
    ) -> TokenArray:
        """Tokenize `bodies`, combine the results with `combine`, and cache that under `key`."""
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        tokens = self._cache.get(digest)
        if tokens is None:
            tokens = combine(await asyncio.gather(*(self.tokenize(body, headers) for body in bodies)))
            self._cache.put(digest, tokens)
        return tokens


def _beginning(fields: Mapping[str, Any], prefix: Prefix, text: str) -> Body:
    """Return the `/tokenize` body for a text directly after a prompt's beginning."""
    used = {name: fields[name] for name in _BEGINNING_FIELDS if fields.get(name) is not None}
    if isinstance(prefix, str):
        return {**used, "prompt": prefix + text}
    return {**used, "messages": [*prefix, {"role": "user", "content": text}]}
