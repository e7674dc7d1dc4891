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
from kvkit.router.engines import Engine, EngineFailed, Refused
from kvkit.router.marks import MarkedDocuments
from kvkit.router.openai import Body, ParsedRequest
from kvkit.router.spans import BEFORE, TokenArray, common_end, common_start, find_spans, tokens_of

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 64 << 20
"""Maximum memory for the token ids of documents, prefixes and joints."""
ENTRY_BYTES = 512
"""Memory per cached value, besides the value: its name and its table entry."""
_MAX_IN_FLIGHT = 16
_PER_REQUEST = len(BEFORE)
"""Joints that one request asks for at once, so that other requests are served in between."""
_BEGINNING = ("model", "tools", "add_special_tokens", "chat_template", "chat_template_kwargs")

V = TypeVar("V")
Prefix = str | Sequence[Mapping[str, Any]]
Headers = Mapping[str, str]


class Recent(Generic[V]):
    """The values used last, by name, as many as fit in memory.

    Args:
        most_bytes: maximum memory, names and table included.
        size: function that returns the size of a value in bytes.
    """

    def __init__(self, most_bytes: int, size: Callable[[V], int]) -> None:
        self._most_bytes = most_bytes
        self._size = size
        self._values: OrderedDict[str, V] = OrderedDict()
        self._held = 0

    def get(self, name: str) -> V | None:
        if name in self._values:
            self._values.move_to_end(name)
        return self._values.get(name)

    def put(self, name: str, value: V) -> None:
        self.pop(name)
        self._values[name] = value
        self._held += self._size(value) + ENTRY_BYTES
        while self._held > self._most_bytes:
            self.pop(next(iter(self._values)))

    def pop(self, name: str) -> V | None:
        value = self._values.pop(name, None)
        if value is not None:
            self._held -= self._size(value) + ENTRY_BYTES
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
        self._known = Recent[TokenArray](MAX_KEPT_BYTES, sys.getsizeof)
        self._requests = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def ids(self, body: Body, headers: Headers, timeout_s: float | None = None) -> tuple[int, ...]:
        """Return the token ids that `/tokenize` answers.

        Args:
            timeout_s: timeout of a free slot and the answer; None: the tokenizer's.

        Raises:
            NoTokens: no engine is up, or its answer is late or unusable.
            Refused: the engine rejected the request as wrong.
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

    async def document(self, model: str | None, text: str, headers: Headers) -> TokenArray:
        """Return the tokens of a document that do not depend on the text before it. Raises as `ids`."""
        model_field = {} if model is None else {"model": model}
        bodies = [{**model_field, "prompt": before + text, "add_special_tokens": False} for before in BEFORE]
        return await self._shared(["document", bodies[0]], common_end, bodies, headers)

    async def prefix(self, asked: Mapping[str, Any], prefix: Prefix, headers: Headers) -> TokenArray:
        """Return the first tokens of every prompt that begins with this text or these messages.

        Args:
            asked: fields of a request; only those that shape the prompt's beginning are used.
            prefix: the text or messages.

        Raises:
            NoTokens, Refused: as `ids`.
        """
        bodies = [_beginning(asked, prefix, after) for after in BEFORE[1:]]
        return await self._shared(["prefix", bodies[0]], common_start, bodies, headers)

    async def joint(
        self, asked: Mapping[str, Any], prefix: Prefix, text: str, headers: Headers
    ) -> TokenArray:
        """Return the tokens between a prefix and a document directly after it. Args, raises as `prefix`."""
        before = await self.prefix(asked, prefix, headers)
        document = await self.document(asked.get("model"), text, headers)

        def between(prompts: Sequence[Sequence[int]]) -> TokenArray:
            prompt, first = prompts[0], len(before)
            (span,) = find_spans(prompt, [document], first)
            return tokens_of(prompt[first : span[0]] if span and tokens_of(prompt[:first]) == before else ())

        body = _beginning(asked, prefix, text)
        return await self._shared(["joint", body, text], between, [body], headers)

    async def locate_documents(
        self, asked: ParsedRequest, marked: MarkedDocuments, headers: Headers
    ) -> tuple[ParsedRequest, tuple[int, ...] | None]:
        """Return `asked` with the spans of marked documents, and the prompt's ids; None: no engine was asked.
        The request is not blended if tokens are missing or none of its documents is found."""
        if not asked.blends or not (marked.texts or marked.prefix is not None):
            return asked, None
        try:
            async with asyncio.timeout(self._timeout_s):
                ids, documents, prefix_tokens, joints = await self._tokens_of(asked, marked, headers)
        except (NoTokens, Refused) as error:
            log.warning("not blended: /tokenize: %s", error)
            return asked.with_blend(None), None
        except TimeoutError:
            log.warning("not blended: /tokenize: not all answers within %g s", self._timeout_s)
            return asked.with_blend(None), None
        has_prefix = ids[: len(prefix_tokens)] == tuple(prefix_tokens)
        first = len(prefix_tokens) if has_prefix else 0
        located = zip(find_spans(ids, documents, first), joints, strict=True)
        spans = {span: joint.tolist() for span, joint in located if span}
        log.info("%d of %d documents found in %d tokens", len(spans), len(documents), len(ids))
        if documents and not spans:
            return asked.with_blend(None), ids
        blend: Body = {**asked.params[BLEND], "prefix": first}
        if spans:
            blend["documents"] = list(map(list, spans))
        if has_prefix and any(spans.values()):
            blend["joints"] = list(spans.values())
        return asked.with_blend(blend), ids

    async def _tokens_of(
        self, request: ParsedRequest, marked: MarkedDocuments, headers: Headers
    ) -> tuple[tuple[int, ...], list[TokenArray], TokenArray, list[TokenArray]]:
        """Return the tokens of a prompt, of its documents, of their prefix, and of their joints with it."""
        model, texts, prefix = request.model, marked.texts, marked.prefix
        prefix_tokens, joints = tokens_of(()), [tokens_of(())] * len(texts)
        ids = await self.ids(openai.tokenize_body(request), headers)
        documents = [await self.document(model, text, headers) for text in texts]
        if prefix is not None:
            prefix_tokens, joints = await self.prefix(request.body, prefix, headers), []
            for first in range(0, len(texts), _PER_REQUEST):
                batch = (
                    self.joint(request.body, prefix, t, headers) for t in texts[first : first + _PER_REQUEST]
                )
                joints += await asyncio.gather(*batch)
        return ids, documents, prefix_tokens, joints

    async def _shared(
        self,
        key: Sequence[Any],
        combine: Callable[[Sequence[Sequence[int]]], TokenArray],
        bodies: Sequence[Body],
        headers: Headers,
    ) -> TokenArray:
        """Tokenize `bodies`, combine the results with `combine`, and cache that under `key`."""
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        tokens = self._known.get(digest)
        if tokens is None:
            tokens = combine(await asyncio.gather(*(self.ids(body, headers) for body in bodies)))
            self._known.put(digest, tokens)
        return tokens


def _beginning(request: Mapping[str, Any], prefix: Prefix, text: str) -> Body:
    """Return the `/tokenize` body for a text directly after a prompt's beginning."""
    fields = {name: request[name] for name in _BEGINNING if request.get(name) is not None}
    if isinstance(prefix, str):
        return {**fields, "prompt": prefix + text}
    return {**fields, "messages": [*prefix, {"role": "user", "content": text}]}
