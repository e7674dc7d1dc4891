"""Documents that a client marks in its prompt, and its blend options: pure functions.

A document is a content part {"type": "document", "text": ...} of a chat message, or a text between two marks.
Engines get the same request with plain text in place of either.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkit.router.openai import BadRequest, Body, ParsedRequest, shown
from kvkit.router.settings import BlendLimits

MAX_DOCUMENTS = 256
"""Maximum number of documents in one request."""
_FIELDS = ("ratio", "method", "prefix", "documents")
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class DelimitedDocuments:
    """The documents of a prompt.

    Attributes:
        texts: texts of the documents, in the order of the prompt; none is empty.
        behind: prefix that they were computed behind: the first messages of a chat, or the beginning of a
            text. None: no prefix, or one of token ids, with its length in `ParsedRequest.blend`.
    """

    texts: tuple[str, ...] = ()
    behind: list[Body] | str | None = None


def take_marks(
    asked: ParsedRequest, limits: BlendLimits | None, text_of: Callable[[str], str | None]
) -> tuple[ParsedRequest, DelimitedDocuments]:
    """Return `asked` without marks and with the client's blend options in `blend`, and its documents.

    Args:
        limits: limits on blending; None: nothing is blended.
        text_of: function that returns the text of a posted document by id; None: there is none.

    Raises:
        BadRequest: marks, content parts or blend options are wrong or not allowed.
    """
    body = {name: value for name, value in asked.body.items() if name != "blend"}
    given = asked.body.get("blend")
    texts: list[str] = []
    if asked.kind == "chat":
        body["messages"] = [
            _take_of_message(message, f"messages[{number}].content", limits, text_of, texts)
            for number, message in enumerate(body["messages"])
        ]
    elif limits is not None and limits.marks is not None:
        body["prompt"] = _take_of_prompt(body.get("prompt"), limits.marks, texts)
    if len(texts) > MAX_DOCUMENTS:
        raise BadRequest(f"{len(texts)} documents, want at most {MAX_DOCUMENTS}")
    asked = replace(asked, body=body)
    found = tuple(text for text in texts if text)
    if given is False:
        return replace(asked, blend=False), DelimitedDocuments()
    if given is None and not found:
        return asked, DelimitedDocuments()
    if limits is None:
        raise BadRequest("blend: this router blends nothing; its settings have no table [blend]")
    wish = {} if given in (None, True) else given
    if not isinstance(wish, dict):
        raise BadRequest(f"blend = {shown(given)}: want true, false, or an object of {', '.join(_FIELDS)}")
    if isinstance(body.get("prompt"), list) and asked.prompt_ids is None:
        raise BadRequest("blend: want one prompt")
    return replace(asked, blend=_told(wish, asked, limits)), DelimitedDocuments(found, _behind(wish, asked))


def _take_of_message(
    message: Mapping[str, Any],
    where: str,
    limits: BlendLimits | None,
    text_of: Callable[[str], str | None],
    texts: list[str],
) -> Mapping[str, Any]:
    """Replace the documents of a message with plain text, and append their texts to `texts`.
    Marks in an assistant's message do not count: the text is a model's."""
    content = message.get("content")
    marks = None if limits is None or message.get("role") == "assistant" else limits.marks
    if isinstance(content, str) and marks is not None:
        return {**message, "content": _take_out(content, marks, where, texts)}
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for number, part in enumerate(content):
        inside = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "document":
            if limits is None:
                raise BadRequest(f"{inside}: a document; this router's settings have no table [blend]")
            texts.append(_text_of(part, inside, text_of))
            part = {"type": "text", "text": texts[-1]}
        elif kind == "text" and marks is not None and isinstance(part.get("text"), str):
            part = {**part, "text": _take_out(part["text"], marks, inside, texts)}
        parts.append(part)
    return {**message, "content": parts}


def _text_of(part: Body, where: str, text_of: Callable[[str], str | None]) -> str:
    """Return the text of a document's content part."""
    text, name = part.get("text"), part.get("id")
    if isinstance(text, str) and name is None:
        return text
    if not isinstance(name, str) or text is not None:
        raise BadRequest(f"{where}: want the document's text, or the id of one that was posted")
    found = text_of(name)
    if found is None:
        raise BadRequest(f"{where}.id = {shown(name)}: no text was posted with this id, model and salt")
    return found


def _take_of_prompt(prompt: Any, marks: tuple[str, str], texts: list[str]) -> Any:
    """Return a completion's prompt without marks; append the marked texts to `texts`."""
    if isinstance(prompt, str):
        return _take_out(prompt, marks, "prompt", texts)
    for text in prompt if isinstance(prompt, list) else ():
        if isinstance(text, str) and any(mark in text for mark in marks):
            raise BadRequest("prompt: several texts with marks in them; want one prompt per request")
    return prompt


def _take_out(text: str, marks: tuple[str, str], where: str, texts: list[str]) -> str:
    """Return `text` without marks; append the marked texts to `texts`."""
    begin, end = marks
    pieces = re.split(f"({re.escape(begin)}|{re.escape(end)})", text)
    inside = False
    for piece, mark in itertools.zip_longest(pieces[::2], pieces[1::2]):
        if inside:
            texts.append(piece)
        if mark is None:
            break
        if (mark == begin) == inside:
            raise BadRequest(f"{where}: {mark!r} {'within a document' if inside else f'without {begin!r}'}")
        inside = not inside
    if inside:
        raise BadRequest(f"{where}: {begin!r} without {end!r}")
    return "".join(pieces[::2])


def _told(wish: Body, asked: ParsedRequest, limits: BlendLimits) -> Body:
    """Check the client's blend options; return those for the engine, without marked documents."""
    for name in wish:
        if name not in _FIELDS:
            raise BadRequest(f"blend.{name}: unknown; want some of {', '.join(_FIELDS)}")
    told = {name: wish[name] for name in ("ratio", "method", "documents") if wish.get(name) is not None}
    ratio, method, spans = (told.get(name) for name in ("ratio", "method", "documents"))
    if ratio is not None and (type(ratio) not in (int, float) or not limits.least_ratio <= ratio <= 1):
        raise BadRequest(f"blend.ratio = {shown(ratio)}: want {limits.least_ratio:g} to 1")
    if method is not None and method not in limits.methods:
        raise BadRequest(f"blend.method = {shown(method)}: want one of {', '.join(limits.methods)}")
    ids = asked.prompt_ids
    if ids is None and spans is not None:
        raise BadRequest("blend.documents: for a prompt of token ids; want marks in a text")
    if spans is not None and not _are_spans(spans, len(ids or ())):
        raise BadRequest(
            f"blend.documents = {shown(spans)}: want [start, stop] of each, in order, apart and within "
            f"{len(ids or ())} tokens"
        )
    if ids is not None and wish.get("prefix") is not None:
        most = spans[0][0] if spans else len(ids)
        if type(wish["prefix"]) is not int or not 0 <= wish["prefix"] <= most:
            raise BadRequest(f"blend.prefix = {shown(wish['prefix'])}: want a number of tokens, 0 to {most}")
        told["prefix"] = wish["prefix"]
    return told


def _are_spans(spans: Any, tokens: int) -> bool:
    """Return whether these are spans within `tokens` tokens, in order and without overlap."""
    if not isinstance(spans, list) or not 0 < len(spans) <= MAX_DOCUMENTS:
        return False
    pairs = all(isinstance(span, list) and len(span) == 2 for span in spans)
    if not pairs or any(type(edge) is not int for span in spans for edge in span):
        return False
    edges = [0, *itertools.chain(*spans), tokens]
    return all(a <= b for a, b in itertools.pairwise(edges)) and all(a < b for a, b in spans)


def _behind(wish: Body, asked: ParsedRequest) -> list[Body] | str | None:
    """Return the prefix that the documents of a text were computed behind."""
    prefix = wish.get("prefix")
    if prefix is None or asked.prompt_ids is not None:
        return None
    if asked.kind == "chat":
        if prefix != "system":
            raise BadRequest(f'blend.prefix = {shown(prefix)}: want "system" in a chat')
        return list(itertools.takewhile(lambda m: m.get("role") in _SYSTEM, asked.body["messages"]))
    if not isinstance(prefix, str) or not str(asked.body.get("prompt")).startswith(prefix):
        raise BadRequest(f"blend.prefix = {shown(prefix)}: want a text with which the prompt begins")
    return prefix
