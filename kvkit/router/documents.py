"""/v1/documents: compute a document's KV before any prompt carries it, and look it up.

    POST   /v1/documents       {"text" | "tokens", "prefix", "model", ...}: computes it; answers as GET does
    GET    /v1/documents/{id}  {"id", "model", "tokens", "prefix_tokens", "held", "engines"}
    DELETE /v1/documents/{id}  forgets the id and the text; tiers keep its KV until they evict it

An id is a digest of all that the KV depends on, so a document has the same id after a restart.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.router.engines import Engine
from kvkit.router.lookups import CacheLookup, Lookup, LookupQuery, ask_each
from kvkit.router.marks import MarkedText
from kvkit.router.openai import BadRequest, Body, ParsedRequest, quoted, read_body
from kvkit.router.spans import MIN_TOKENS, TokenArray, tokens_of
from kvkit.router.tokens import Headers, LRUCache, Tokenizer
from kvkit.settings import explain
from kvkit.transfer.requests import RequestLimits

MAX_KEPT_BYTES = 256 << 20
"""Maximum memory for posted documents: room for 64 Mi tokens of long documents."""
STORED_S = 5.0
"""Time that engines have to store what was just computed, in seconds."""
_PostedToken = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class _DocumentBody(BaseModel):
    """Body of a client's POST."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str | None = None
    tokens: list[_PostedToken] | None = Field(default=None, min_length=1)
    prefix: str | list[dict[str, Any]] | None = None
    prefix_tokens: list[_PostedToken] = []
    model: str | None = None
    cache_salt: str = ""
    seconds: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PostedDocument:
    """A posted document.

    Attributes:
        prefix: tokens before the document, its joint included.
        tokens: tokens of the document.
        text: text of the document; None: it was posted as tokens.
    """

    model: str | None
    salt: str
    prefix: TokenArray
    tokens: TokenArray
    text: str | None

    @property
    def id(self) -> str:
        """Digest of the document, which cannot be guessed without it."""
        identity = json.dumps([self.model, self.salt, list(self.prefix), list(self.tokens), self.text])
        return "doc-" + hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Memory that the document takes."""
        fields = self.model, self.salt, self.prefix, self.tokens, self.text
        return sys.getsizeof(self) + sum(map(sys.getsizeof, fields))

    def query(self, wait_s: float = 0.0) -> LookupQuery:
        """Return the lookup for the document and its prefix."""
        return LookupQuery((*self.prefix, *self.tokens), self.model, self.salt, wait_s)

    @property
    def request(self) -> ParsedRequest:
        """Request that makes an engine compute the document."""
        optional_fields = {"model": self.model, "cache_salt": self.salt}
        body = {"prompt": [*self.prefix, *self.tokens], "max_tokens": 1}
        return ParsedRequest(
            "completions", body | {name: value for name, value in optional_fields.items() if value}
        )


class Documents:
    """Posted documents, bounded in memory; the least recently used are forgotten. Lives in one event loop.

    Args:
        lookup: lookup in an engine; None: there are no lookups.
        pins: kvkit's endpoints, to pin documents in engines' tiers; None: no engine has one.
        timeout_s: timeout of a lookup or pin.
        limits: limits on request policies; None: nothing may be pinned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engines: Sequence[Engine],
        lookup: Lookup | None,
        pins: CacheLookup | None,
        timeout_s: float,
        limits: RequestLimits | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._engines = engines
        self._lookup = lookup
        self._pins = pins
        self._timeout_s = timeout_s
        self._posted = LRUCache[PostedDocument](MAX_KEPT_BYTES, lambda document: document.size_bytes)

    async def parse(self, raw: bytes, headers: Headers) -> tuple[PostedDocument, float | None]:
        """Parse a posted document; return it, and the seconds to pin it (None: no pin).

        Raises:
            BadRequest: a field is invalid, or the document is too short.
            NoTokens, RequestRefused: as `Tokenizer.tokenize`.
        """
        try:
            body = _DocumentBody(**read_body(raw))
        except ValidationError as error:
            raise BadRequest(explain(error, _DocumentBody)) from error
        if (body.text is None) == (body.tokens is None):
            raise BadRequest("want one of text and tokens")
        if body.prefix is not None and body.prefix_tokens:
            raise BadRequest("want one of prefix and prefix_tokens")
        if body.seconds is not None:
            self._check_pin(body.seconds)
        if body.text is not None:
            tokens = await self._tokenizer.document_tokens(body.model, body.text, headers)
        else:
            tokens = tokens_of(body.tokens or ())
        if len(tokens) < MIN_TOKENS:
            raise BadRequest(
                f"{len(tokens)} tokens do not depend on the text before them: want at least {MIN_TOKENS}"
            )
        prefix = tokens_of(body.prefix_tokens)
        if body.prefix is not None:
            fields = body.model_dump()
            prefix = await self._tokenizer.prefix_tokens(fields, body.prefix, headers)
            if body.text is not None:
                prefix = prefix + await self._tokenizer.joint_tokens(fields, body.prefix, body.text, headers)
        return PostedDocument(body.model, body.cache_salt, prefix, tokens, body.text), body.seconds

    def _check_pin(self, seconds: float) -> None:
        """Raise BadRequest if a pin of this duration is not allowed or not possible."""
        if self._limits is None:
            raise BadRequest("seconds: this router pins nothing; its settings have no table [requests]")
        if seconds > self._limits.max_keep_s:
            limit = self._limits.max_keep_s
            raise BadRequest(f"seconds = {seconds:g}: want at most requests.max_keep_s = {limit:g}")
        if self._pins is None:
            raise BadRequest("seconds: no engine of this router has a cache endpoint to pin documents in")

    def posted(self, name: str, request: ParsedRequest) -> MarkedText | None:
        """Return the text of a document posted for the request's model and salt; None: there is none."""
        document = self._posted.get(name)
        if document is None or (document.model, document.salt) != (request.model, request.salt):
            return None
        return None if document.text is None else MarkedText(document.text, is_alone=not document.prefix)

    def get(self, name: str) -> PostedDocument:
        """Return a document by id. Raises BadRequest with HTTP status 404 if there is none."""
        document = self._posted.get(name)
        if document is None:
            raise BadRequest(
                f"no document {quoted(name)}: never posted to this router, or forgotten since", 404
            )
        return document

    def forget(self, name: str) -> Body:
        """Forget a document; return the answer to DELETE. Mutates. Raises as `get`."""
        self.get(name)
        self._posted.pop(name)
        return {"object": "document.deleted", "id": name, "deleted": True}

    async def remember(self, document: PostedDocument, seconds: float | None) -> Body:
        """Remember a computed document; return the answer to POST. Mutates.

        Args:
            seconds: time to pin the document in tiers; None: no pin.
        """
        self._posted.put(document.id, document)
        described = await self.describe(document, STORED_S)
        if seconds is not None and (pins := self._pins) is not None:
            pinned = await self._ask_engines(document, lambda e: pins.pin(e, document.query(), seconds))
            described["pinned"] = _max_known(pinned)
        return described

    async def describe(self, document: PostedDocument, wait_s: float = 0.0) -> Body:
        """Return the answer to GET; engines wait up to `wait_s` for pending stores of the document."""
        held = await self._held_by_engine(document, wait_s)
        return {
            "object": "document",
            "id": document.id,
            "model": document.model,
            "tokens": len(document.tokens),
            "prefix_tokens": len(document.prefix),
            "held": _max_known(held),
            "engines": held,
        }

    async def held_tokens(self, document: PostedDocument, wait_s: float = 0.0) -> int | None:
        """Return the most tokens of a document that one engine holds; None: not known. Args as `describe`."""
        return _max_known(await self._held_by_engine(document, wait_s))

    async def _held_by_engine(self, document: PostedDocument, wait_s: float) -> dict[str, int | None]:
        if (lookup := self._lookup) is None:
            return {}
        return await self._ask_engines(document, lambda e: lookup(e, document.query(wait_s)), wait_s)

    async def _ask_engines(
        self, document: PostedDocument, ask: Callable[[Engine], Awaitable[int | None]], wait_s: float = 0.0
    ) -> dict[str, int | None]:
        """Call `ask` for each engine; return its number of tokens without the prefix, by engine."""
        tokens_by_engine = await ask_each(self._engines, ask, self._timeout_s + wait_s)
        prefix_tokens = len(document.prefix)
        return {
            name: None if tokens is None else max(0, tokens - prefix_tokens)
            for name, tokens in tokens_by_engine.items()
        }


def _max_known(tokens: Mapping[str, int | None]) -> int | None:
    """Return the largest number of tokens; None: none is known."""
    return max((n for n in tokens.values() if n is not None), default=None)
