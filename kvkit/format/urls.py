"""URLs of stores as they are shown: without possible secrets. Chained URLs are treated link by link.

A user name may be a token, and a query may be a signature. Secrets cannot always be recognised (a password
may have any character, also unquoted), so text that may be a secret is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"
_MIN_CHARS = 3
"""Length of the shortest text that is treated as a secret; shorter ones would match in any text."""
_URL = re.compile(r"[^\s'\"<>()]+://[^\s'\"<>()]*")
_AFTER = re.compile("[?#].*", re.DOTALL)
_SEPARATORS = re.compile("[:/?#&=;@]")


def shown(url: str) -> str:
    """Return `url` without user names, passwords, queries and fragments; plain paths are unchanged."""
    protocols, user, location = _cut(url)
    if _AFTER.search(user):  # the @ may belong to the query
        return f"{protocols}{HIDDEN}"
    shown_location = _AFTER.sub(f"?{HIDDEN}", location) if protocols else location
    return f"{protocols}{HIDDEN}@{shown_location}" if user else f"{protocols}{shown_location}"


def has_password(url: str) -> bool:
    """Return whether a link of `url` has a password that can be recognised."""
    for link in url.split("::"):
        with suppress(ValueError):
            if urlsplit(link).password is not None:
                return True
    return False


def hide(text: str, url: str, options: Mapping[str, Any] | None = None) -> str:
    """Remove the secrets of `url` and the values of `options` from `text`, such as a library's error."""
    text = text.replace(url, shown(url))
    candidates = {*_secrets(url), *_values(options or {})}
    secrets = {
        spelling
        for candidate in candidates
        if len(candidate) >= _MIN_CHARS
        for spelling in _spellings(candidate)
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _URL.sub(lambda found: shown(found[0]), text)


def _cut(url: str) -> tuple[str, str, str]:
    """Split a URL into its protocols with their ://, the user before a host's last @, and the location."""
    protocols, separator, rest = url.partition("://")
    if not separator:
        return "", "", url
    has_host = not rest.startswith("/") or "://" in rest
    user, _, location = rest.rpartition("@") if has_host else ("", "", rest)
    return protocols + separator, user, location


def _secrets(url: str) -> Iterator[str]:
    """Yield the texts that `shown` leaves out of `url`, whole and split at separators."""
    protocols, user, location = _cut(url)
    after = _AFTER.search(location) if protocols else None
    for text in (user, after[0][1:] if after else ""):
        yield from (text, *_SEPARATORS.split(text))


def _values(options: Mapping[str, Any]) -> Iterator[str]:
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _values(value)
        elif value is not None and not isinstance(value, bool):
            yield str(value)


def _spellings(secret: str) -> set[str]:
    """Return all spellings in which a library may write a secret: quoted, unquoted, with escapes."""
    plain = unquote(secret)
    return {secret, plain, quote(plain), quote(plain, safe=""), repr(secret)[1:-1], repr(plain)[1:-1]}
