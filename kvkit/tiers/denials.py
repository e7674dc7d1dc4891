"""Finds out whether a store denies objects that are missing, as S3 does to users who may not list."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

log = logging.getLogger(__name__)


class Denials:
    """Knows whether one store denies what is missing. Thread-safe.

    Args:
        shown: the store's URL, without secrets.
        look: looks at the object of a name. FileNotFoundError: it is missing; PermissionError: denied; any
            other OSError says nothing.
    """

    def __init__(self, shown: str, look: Callable[[str], object]) -> None:
        self._shown = shown
        self._look = look
        self._known: bool | None = None

    @property
    def known(self) -> bool:
        """Say, without a request, whether the store is known to."""
        return bool(self._known)

    def learn(self) -> bool:
        """Say whether the store does. Requests an object that nobody has, until there is an answer."""
        if self._known is None:
            try:
                self._look(f"missing-{secrets.token_hex(16)}")
            except FileNotFoundError:
                self._known = False
            except PermissionError:
                self._known = True
                log.warning(
                    "%s: what is missing is denied (HTTP 403), as without s3:ListBucket: a record that is "
                    "denied is taken for a missing one",
                    self._shown,
                )
            except OSError:
                return False
        return self.known
