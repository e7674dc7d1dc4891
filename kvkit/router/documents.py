"""/v1/documents: have a document's KV computed before any prompt carries it, and ask whether it is held.

    POST   /v1/documents       {"text" | "tokens", "prefix", "model", ...}: an engine computes it; answers as
    GET    /v1/documents/{id}  {"id", "model", "tokens", "prefix_tokens", "held", "engines"}
    DELETE /v1/documents/{id}  forgets the id and the text; what tiers hold of it they evict as anything else

An id is made of all that the KV depends on: the same document has the same id after a restart, too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkit.moving.requests import RequestLimits
from kvkit.router.engines import CacheLookup, Engine, Lookup, LookupQuery, ask_each
from kvkit.router.openai import BadRequest, Body, ParsedRequest, read_body, shown
from kvkit.router.spans import LEAST_TOKENS, TokenArray, tokens_of
from kvkit.router.tokens import Headers, Recent, Tokenizer
from kvkit.settings import explain

MAX_KEPT_BYTES = 256 << 20
"""So much memory documents take that are kept: 64 Mi tokens of long ones."""
STORED_S = 5.0
"""So long engines have to store what was just computed."""
_PostedToken = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class _DocumentBody(BaseModel):
    """What a client posts."""

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
    """A document as it was posted.

    Attributes:
        prefix: tokens that it stands behind, its joint among them.
        tokens: its own.
        text: None where it was posted as tokens.
    """

    model: str | None
    salt: str
    prefix: TokenArray
    tokens: TokenArray
    text: str | None

    @property
    def id(self) -> str:
        """A name that nobody guesses who does not have the document."""
        named = json.dumps([self.model, self.salt, list(self.prefix), list(self.tokens), self.text])
        return "doc-" + hashlib.blake2b(named.encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Memory that is taken to keep it."""
        parts = self.model, self.salt, self.prefix, self.tokens, self.text
        return sys.getsizeof(self) + sum(map(sys.getsizeof, parts))

    def query(self, wait_s: float = 0.0) -> LookupQuery:
        """What engines are asked about."""
        return LookupQuery((*self.prefix, *self.tokens), self.model, self.salt, wait_s)

    @property
    def asked(self) -> ParsedRequest:
        """The request that has an engine compute it."""
        named = {"model": self.model, "cache_salt": self.salt}
        body = {"prompt": [*self.prefix, *self.tokens], "max_tokens": 1}
        return ParsedRequest("completions", body | {name: value for name, value in named.items() if value})


class Documents:
    """Those that were posted, as many as there is room for. Lives in one event loop.

    Args:
        lookup: asks an engine what it holds; None: it is not known.
        pins: has an engine's tiers hold on to them; None: no engine has kvkit's endpoint.
        timeout_s: for the engines to answer either.
        limits: of what requests may want of the engines' caches; None: nothing.
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
        self._known = Recent[PostedDocument](MAX_KEPT_BYTES, lambda document: document.size_bytes)

    async def read(self, raw: bytes, headers: Headers) -> tuple[PostedDocument, float | None]:
        """The document that a client posts, and for how many seconds it is to be pinned.

        Raises:
            BadRequest: a field is wrong, or the document too short.
            NoTokens, Refused: as `Tokenizer.ids`.
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
            tokens = await self._tokenizer.document(body.model, body.text, headers)
        else:
            tokens = tokens_of(body.tokens or ())
        if len(tokens) < LEAST_TOKENS:
            raise BadRequest(
                f"{len(tokens)} tokens that do not depend on what stands before them: want {LEAST_TOKENS}"
            )
        before = tokens_of(body.prefix_tokens)
        if body.prefix is not None:
            fields = body.model_dump()
            before = await self._tokenizer.prefix(fields, body.prefix, headers)
            if body.text is not None:
                before = before + await self._tokenizer.joint(fields, body.prefix, body.text, headers)
        return PostedDocument(body.model, body.cache_salt, before, tokens, body.text), body.seconds

    def _check_pin(self, seconds: float) -> None:
        """Refuse to pin for so long, if that is not allowed, or cannot be done."""
        if self._limits is None:
            raise BadRequest("seconds: this router pins nothing; its settings have no table [requests]")
        if seconds > self._limits.max_keep_s:
            most = self._limits.max_keep_s
            raise BadRequest(f"seconds = {seconds:g}: want at most requests.max_keep_s = {most:g}")
        if self._pins is None:
            raise BadRequest("seconds: no engine of this router has a cache that could be asked to hold on")

    def text_of(self, name: str, asked: ParsedRequest) -> str | None:
        """The text of a document for a request of the same model and salt; None: there is none."""
        found = self._known.get(name)
        same = found is not None and (found.model, found.salt) == (asked.model, asked.salt)
        return found.text if found is not None and same else None

    def get(self, name: str) -> PostedDocument:
        """Raises BadRequest with HTTP status 404: there is none."""
        found = self._known.get(name)
        if found is None:
            raise BadRequest(
                f"no document {shown(name)}: never posted to this router, or forgotten since", 404
            )
        return found

    def forget(self, name: str) -> Body:
        """Mutates. Raises as `get`."""
        self.get(name)
        self._known.pop(name)
        return {"object": "document.deleted", "id": name, "deleted": True}

    async def keep(self, document: PostedDocument, seconds: float | None) -> Body:
        """Remember a document that was computed; what there is to tell of it. Mutates.

        Args:
            seconds: for so long tiers are to evict none of it; None: they are not asked to.
        """
        self._known.put(document.id, document)
        told = await self.tell(document, STORED_S)
        if seconds is not None and (pins := self._pins) is not None:
            pinned = await self._ask(document, lambda e: pins.pin(e, document.query(), seconds))
            told["pinned"] = _most(pinned)
        return told

    async def tell(self, document: PostedDocument, wait_s: float = 0.0) -> Body:
        """What there is to tell of a document; engines wait for so long for what they are storing of it."""
        held = await self._held(document, wait_s)
        return {
            "object": "document",
            "id": document.id,
            "model": document.model,
            "tokens": len(document.tokens),
            "prefix_tokens": len(document.prefix),
            "held": _most(held),
            "engines": held,
        }

    async def held(self, document: PostedDocument, wait_s: float = 0.0) -> int | None:
        """The most tokens of a document that an engine holds; None: it is not known. Args as `tell`."""
        return _most(await self._held(document, wait_s))

    async def _held(self, document: PostedDocument, wait_s: float) -> dict[str, int | None]:
        if (lookup := self._lookup) is None:
            return {}
        return await self._ask(document, lambda e: lookup(e, document.query(wait_s)), wait_s)

    async def _ask(
        self, document: PostedDocument, ask: Callable[[Engine], Awaitable[int | None]], wait_s: float = 0.0
    ) -> dict[str, int | None]:
        """By engine, how many of a document's tokens it answers."""
        found = await ask_each(self._engines, ask, self._timeout_s + wait_s)
        before = len(document.prefix)
        return {name: None if tokens is None else max(0, tokens - before) for name, tokens in found.items()}


def _most(tokens: Mapping[str, int | None]) -> int | None:
    """The most that one of these has; None: it is not known of any."""
    return max((n for n in tokens.values() if n is not None), default=None)
