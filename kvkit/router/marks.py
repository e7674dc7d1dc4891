"""Documents marked in a prompt's text, and the request for engines, without marks: pure functions.

A document is a content part {"type": "document", "text": ...} of a chat message, or a text between two marks.
Engines get the same request with plain text in place of either.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkit.blend import requests
from kvkit.router.openai import BadRequest, Body, ParsedRequest, quoted
from kvkit.router.settings import BlendLimits
from kvkit.settings import ConfigError

MAX_DOCUMENTS = 256
"""Maximum number of documents in one request."""
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class MarkedDocuments:
    """The documents marked in a prompt's text.

    Attributes:
        texts: texts of the documents, in the order of the prompt; none is empty.
        prefix: what they were computed behind: the first messages of a chat, or the beginning of a text.
            None: nothing, or a number of tokens in the request's `blend` object.
    """

    texts: tuple[str, ...] = ()
    prefix: list[Body] | str | None = None


@dataclass(frozen=True, slots=True)
class MarkedText:
    """The text of a document in a prompt.

    Attributes:
        is_alone: True if it was posted without a prefix, so that its KV was computed behind nothing.
    """

    text: str
    is_alone: bool = False


def extract_documents(
    request: ParsedRequest, limits: BlendLimits | None, posted: Callable[[str], MarkedText | None]
) -> tuple[ParsedRequest, MarkedDocuments]:
    """Return `request` without marks and with a checked `blend` object, and its marked documents.

    Args:
        limits: limits on blending; None: nothing is blended.
        posted: function that returns the text of a posted document by id; None: there is none.

    Raises:
        BadRequest: marks, content parts or the `blend` object are wrong or not allowed.
    """
    body = dict(request.body)
    texts: list[MarkedText] = []
    if request.kind == "chat":
        body["messages"] = [
            _extract_from_message(message, f"messages[{number}].content", limits, posted, texts)
            for number, message in enumerate(body["messages"])
        ]
    elif limits is not None and limits.marks is not None:
        body["prompt"] = _extract_from_prompt(body.get("prompt"), limits.marks, texts)
    if len(texts) > MAX_DOCUMENTS:
        raise BadRequest(f"{len(texts)} documents, want at most {MAX_DOCUMENTS}")
    request = replace(request, body=body)
    marked_texts = tuple(marked.text for marked in texts if marked.text)
    behind_system = limits is not None and limits.context == "system" and not any(t.is_alone for t in texts)
    requested = request.params.get(requests.FIELD)
    if requested is False or (requested is None and not marked_texts):
        return request, MarkedDocuments()
    if limits is None:
        raise BadRequest("blend: this router blends nothing; its settings have no table [blend]")
    if isinstance(body.get("prompt"), list) and request.prompt_ids is None:
        raise BadRequest("blend: want one prompt")
    blend = {} if requested is None else requested
    prefix = None
    if isinstance(blend, dict) and isinstance(blend.get("prefix"), str):
        prefix = _prefix(blend["prefix"], request)
        blend = {name: value for name, value in blend.items() if name != "prefix"}
    elif marked_texts and behind_system and isinstance(blend, dict) and "prefix" not in blend:
        prefix = _prefix("system", request) if request.kind == "chat" else None
    _check_blend(blend, request, limits, marked=bool(marked_texts))
    return request.with_blend(blend), MarkedDocuments(marked_texts, prefix)


def _extract_from_message(
    message: Mapping[str, Any],
    field_path: str,
    limits: BlendLimits | None,
    posted: Callable[[str], MarkedText | None],
    texts: list[MarkedText],
) -> Mapping[str, Any]:
    """Replace the documents of a message with plain text, and append their texts to `texts`.
    Marks in an assistant's message do not count: the text is a model's."""
    content = message.get("content")
    marks = None if limits is None or message.get("role") == "assistant" else limits.marks
    if isinstance(content, str) and marks is not None:
        return {**message, "content": _remove_marks(content, marks, field_path, texts)}
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for number, part in enumerate(content):
        part_path = f"{field_path}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "document":
            if limits is None:
                raise BadRequest(f"{part_path}: a document; this router's settings have no table [blend]")
            texts.append(_text_of(part, part_path, posted))
            part = {"type": "text", "text": texts[-1].text}
        elif kind == "text" and marks is not None and isinstance(part.get("text"), str):
            part = {**part, "text": _remove_marks(part["text"], marks, part_path, texts)}
        parts.append(part)
    return {**message, "content": parts}


def _text_of(part: Body, field_path: str, posted: Callable[[str], MarkedText | None]) -> MarkedText:
    """Return the text of a document's content part."""
    text, name = part.get("text"), part.get("id")
    if isinstance(text, str) and name is None:
        return MarkedText(text)
    if not isinstance(name, str) or text is not None:
        raise BadRequest(f"{field_path}: want the document's text, or the id of one that was posted")
    posted_text = posted(name)
    if posted_text is None:
        raise BadRequest(f"{field_path}.id = {quoted(name)}: no text was posted with this id, model and salt")
    return posted_text


def _extract_from_prompt(prompt: Any, marks: tuple[str, str], texts: list[MarkedText]) -> Any:
    """Return a completion's prompt without marks; append the marked texts to `texts`."""
    if isinstance(prompt, str):
        return _remove_marks(prompt, marks, "prompt", texts)
    for text in prompt if isinstance(prompt, list) else ():
        if isinstance(text, str) and any(mark in text for mark in marks):
            raise BadRequest("prompt: several texts with marks in them; want one prompt per request")
    return prompt


def _remove_marks(text: str, marks: tuple[str, str], field_path: str, texts: list[MarkedText]) -> str:
    """Return `text` without marks; append the marked texts to `texts`."""
    begin, end = marks
    pieces = re.split(f"({re.escape(begin)}|{re.escape(end)})", text)
    in_document = False
    for piece, mark in itertools.zip_longest(pieces[::2], pieces[1::2]):
        if in_document:
            texts.append(MarkedText(piece))
        if mark is None:
            break
        if (mark == begin) == in_document:
            raise BadRequest(
                f"{field_path}: {mark!r} {'within a document' if in_document else f'without {begin!r}'}"
            )
        in_document = not in_document
    if in_document:
        raise BadRequest(f"{field_path}: {begin!r} without {end!r}")
    return "".join(pieces[::2])


def _check_blend(blend: Any, request: ParsedRequest, limits: BlendLimits, *, marked: bool) -> None:
    """Raise BadRequest if a `blend` object is wrong or not allowed.
    `marked`: the text has marked documents."""
    ids = request.prompt_ids
    try:
        fields = requests.read(blend, limits.least_ratio, limits.methods)
        requests.check_spans(fields, None if ids is None else len(ids))
    except ConfigError as error:
        raise BadRequest(str(error)) from error
    if len(fields.documents or ()) > MAX_DOCUMENTS:
        raise BadRequest(f"{len(fields.documents or ())} documents, want at most {MAX_DOCUMENTS}")
    if marked and (fields.documents is not None or fields.prefix is not None):
        field_path = f"{requests.WHERE}.{'documents' if fields.documents is not None else 'prefix'}"
        raise BadRequest(
            f"{field_path}: in tokens, but documents are marked in the text; leave out one of the two"
        )


def _prefix(prefix: str, request: ParsedRequest) -> list[Body] | str:
    """Return what a prefix stands for: the first messages of a chat, or the beginning of a text."""
    field_path = f"{requests.WHERE}.prefix = {quoted(prefix)}"
    if request.kind == "chat":
        if prefix != "system":
            raise BadRequest(f'{field_path}: want "system" in a chat, or a number of tokens')
        return list(itertools.takewhile(lambda m: m.get("role") in _SYSTEM, request.body["messages"]))
    if not str(request.body.get("prompt")).startswith(prefix) or request.prompt_ids is not None:
        raise BadRequest(f"{field_path}: want a text with which the prompt begins, or a number of tokens")
    return prefix
