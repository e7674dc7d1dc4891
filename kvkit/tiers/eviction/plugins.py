"""Eviction policies by name: kvkit's own, and those of other packages as "package.module:Class"."""

from __future__ import annotations

import inspect
import logging
import operator
from typing import Annotated

from pydantic import AfterValidator

from kvkit.settings import imported
from kvkit.tiers.eviction.policies import MAIN, POLICIES, SMALL, Entry, EvictionPolicy

CHOICES = f"{', '.join(POLICIES)} or package.module:Class"
log = logging.getLogger(__name__)


def policy_named(name: str) -> EvictionPolicy:
    """Make the policy called `name`; one of another package is imported and wrapped in `GuardedPolicy`.

    Raises:
        ValueError: there is no such policy, or the name is that of something else. The message gives the
            reason.
    """
    if name in POLICIES:
        return POLICIES[name]()
    if ":" not in name:
        raise ValueError(f"want one of {CHOICES}")
    try:
        found = imported(name)
    except Exception as error:  # another package's code
        raise ValueError(f"{type(error).__name__}: {error}; want one of {CHOICES}") from error
    if not isinstance(found, type) or not issubclass(found, EvictionPolicy):
        raise ValueError(f"is {found!r}, want a subclass of {EvictionPolicy.__module__}.EvictionPolicy")
    if inspect.isabstract(found):
        raise ValueError(f"lacks {', '.join(sorted(found.__abstractmethods__))}")
    try:
        return GuardedPolicy(name, found())
    except Exception as error:
        raise ValueError(f"cannot be made without arguments: {type(error).__name__}: {error}") from error


def check_policy(name: str) -> str:
    """Return `name` if it names a policy.

    Raises:
        ValueError: as for `policy_named`.
    """
    policy_named(name)
    return name


PolicyName = Annotated[str, AfterValidator(check_policy)]
"""Type of a setting that names a policy."""


class GuardedPolicy(EvictionPolicy):
    """A policy of another package, replaced by LRU once one of its methods fails.

    A cache keeps working with LRU. The failure is logged once; the simulator raises it.
    """

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        self._name = name
        self._policy = policy
        self.queued = bool(policy.queued)
        self.promotes = bool(policy.promotes)

    def rank(self, entry: Entry) -> int:
        if not self.failure:
            try:
                return operator.index(self._policy.rank(entry))
            except Exception as error:
                self._fail("rank", error)
        return entry.last

    def queue_of(self, name: str, size: int, room: int) -> int:
        if not self.failure:
            try:
                queue = self._policy.queue_of(name, size, room)
                if queue not in (SMALL, MAIN):
                    raise ValueError(f"returned {queue!r}, want SMALL or MAIN")
                return queue
            except Exception as error:
                self._fail("queue_of", error)
        return SMALL

    def is_long(self, held: int, limit: int, room: int) -> bool:
        if not self.failure:
            try:
                return bool(self._policy.is_long(held, limit, room))
            except Exception as error:
                self._fail("is_long", error)
        return True

    def spares(self, entry: Entry) -> bool:
        if not self.failure:
            try:
                return bool(self._policy.spares(entry))
            except Exception as error:
                self._fail("spares", error)
        return False

    def evicted(self, name: str, entry: Entry, room: int) -> None:
        if not self.failure:
            try:
                self._policy.evicted(name, entry, room)
            except Exception as error:
                self._fail("evicted", error)

    def _fail(self, method: str, error: Exception) -> None:
        self.failure = f"{self._name}: {method}: {type(error).__name__}: {error}"
        log.error("eviction policy %s; the least recently used record goes first from now on", self.failure)
