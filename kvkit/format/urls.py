"""URLs of stores as they may be shown: without what may be a secret, in any link of a chain.

A user name may be a token, a query a signature. What is a secret cannot always be told from the rest (a
password may have any character, also unquoted): then more is left out, never less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"
_MIN_CHARS = 3
"""A shorter part of a URL is no secret, and would be found in any text."""
_URL = re.compile(r"[^\s'\"<>()]+://[^\s'\"<>()]*")
_AFTER = re.compile("[?#].*", re.DOTALL)
_PARTS = re.compile("[:/?#&=;@]")


def shown(url: str) -> str:
    """`url` without user names, passwords, queries and fragments. A plain path is as it was."""
    protocols, user, place = _cut(url)
    if _AFTER.search(user):  # its @ may be one of the query
        return f"{protocols}{HIDDEN}"
    shown_place = _AFTER.sub(f"?{HIDDEN}", place) if protocols else place
    return f"{protocols}{HIDDEN}@{shown_place}" if user else f"{protocols}{shown_place}"


def has_password(url: str) -> bool:
    """Whether a link of `url` has a password, as far as it can be told."""
    for link in url.split("::"):
        with suppress(ValueError):
            if urlsplit(link).password is not None:
                return True
    return False


def hide(text: str, url: str, options: Mapping[str, Any] | None = None) -> str:
    """`text`, such as a library's error, without the secrets of `url` and without the values of `options`."""
    text = text.replace(url, shown(url))
    parts = {*_secrets(url), *_values(options or {})}
    secrets = {form for part in parts if len(part) >= _MIN_CHARS for form in _forms(part)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _URL.sub(lambda found: shown(found[0]), text)


def _cut(url: str) -> tuple[str, str, str]:
    """The protocols of a chain with their ://, all up to the last @ where there is a host, the rest."""
    protocols, separator, rest = url.partition("://")
    if not separator:
        return "", "", url
    has_host = not rest.startswith("/") or "://" in rest
    user, _, place = rest.rpartition("@") if has_host else ("", "", rest)
    return protocols + separator, user, place


def _secrets(url: str) -> Iterator[str]:
    """What `shown` leaves out of `url`, in one piece and in parts."""
    protocols, user, place = _cut(url)
    after = _AFTER.search(place) if protocols else None
    for piece in (user, after[0][1:] if after else ""):
        yield from (piece, *_PARTS.split(piece))


def _values(options: Mapping[str, Any]) -> Iterator[str]:
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _values(value)
        elif value is not None and not isinstance(value, bool):
            yield str(value)


def _forms(secret: str) -> set[str]:
    """How a library may write it."""
    plain = unquote(secret)
    return {secret, plain, quote(plain), quote(plain, safe=""), repr(secret)[1:-1], repr(plain)[1:-1]}
