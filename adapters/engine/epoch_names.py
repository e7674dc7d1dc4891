"""Names of one engine's epochs: resets, new weights and versions of weights begin them."""

from __future__ import annotations

import hashlib
import uuid


class EpochNames:
    """The epochs of one engine, each of which finds no KV of the others.

    Attributes:
        current: name of the present epoch; empty until something has begun one.
    """

    def __init__(self) -> None:
        self.current = ""
        self._version_is_new = False  # the weights got a version since KV was last computed
        self._falls_asleep = False  # the next reset is a sleep's

    def note_computed(self) -> None:
        """Note that the engine computes KV."""
        self._version_is_new = False

    def falls_asleep(self) -> None:
        """Note that the next reset, if it comes before `wakes_up`, is that of a sleep that keeps weights."""
        self._falls_asleep = True

    def wakes_up(self) -> None:
        """Note that the next reset is no sleep's."""
        self._falls_asleep = False

    def reset(self) -> str:
        """Begin an epoch after a reset of the cache, so that KV stored before is not found; return its name.

        If the weights got a version and no KV was computed since, the version's epoch stays: its KV is valid.
        So it does if the reset is that of a sleep over which the weights stay.
        """
        if not self._version_is_new and not self._falls_asleep:
            self.current = uuid.uuid4().hex
        self._falls_asleep = False
        return self.current

    def weights_changed(self) -> str:
        """Begin an epoch for weights without a version; return its name."""
        self._version_is_new = self._falls_asleep = False  # the version is of older weights
        self.current = uuid.uuid4().hex
        return self.current

    def set_weight_version(self, version: str) -> str:
        """Begin the epoch that engines with this version of the weights share; return its name."""
        self.current = f"weights-{hashlib.blake2b(version.encode(), digest_size=16).hexdigest()}"
        self._version_is_new = True
        return self.current
