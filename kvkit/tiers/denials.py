"""Detection of stores that deny access to missing objects, as S3 does to users who may not list."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

log = logging.getLogger(__name__)


class Denials:
    """Detector of whether one store denies access to missing objects. Thread-safe.

    Args:
        shown: URL of the store, without secrets.
        look: function that inspects the object of a name. It raises FileNotFoundError if the object is
            missing, PermissionError if it is denied; any other OSError is inconclusive.
    """

    def __init__(self, shown: str, look: Callable[[str], object]) -> None:
        self._shown = shown
        self._look = look
        self._known: bool | None = None

    @property
    def known(self) -> bool:
        """True if the store is known to deny access to missing objects. Makes no request."""
        return bool(self._known)

    def learn(self) -> bool:
        """Return whether the store denies access to missing objects.

        Requests an object that cannot exist, at each call until the answer is conclusive.
        """
        if self._known is None:
            try:
                self._look(f"missing-{secrets.token_hex(16)}")
            except FileNotFoundError:
                self._known = False
            except PermissionError:
                self._known = True
                log.warning(
                    "%s: the store denies access to missing objects (HTTP 403), as S3 does without "
                    "s3:ListBucket: kvkit treats a denied record as missing",
                    self._shown,
                )
            except OSError:
                return False
        return self.known
