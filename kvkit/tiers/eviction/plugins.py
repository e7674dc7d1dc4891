"""Eviction policies by name: kvkit's own, and those of other packages as "package.module:Class"."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

from kvkit.settings import imported
from kvkit.tiers.eviction.policies import MAIN, PLAIN, SMALL, Entry, EvictionPolicy
from kvkit.tiers.eviction.sessions import Sessions

POLICIES: Mapping[str, type[EvictionPolicy]] = {
    **{policy.name: policy for policy in PLAIN},
    Sessions.name: Sessions,
}
"""kvkit's eviction policies by name."""
CHOICES = f"{', '.join(POLICIES)} or package.module:Class"
log = logging.getLogger(__name__)
T = TypeVar("T")


def policy_named(name: str) -> EvictionPolicy:
    """Make the policy called `name`; one of another package is imported and wrapped in `GuardedPolicy`.

    Raises:
        ValueError: `name` does not name a policy. The message gives the reason.
    """
    if name in POLICIES:
        return POLICIES[name]()
    if ":" not in name:
        raise ValueError(f"want one of {CHOICES}")
    try:
        policy = imported(name)
    except Exception as error:  # another package's code
        raise ValueError(f"{type(error).__name__}: {error}; want one of {CHOICES}") from error
    if not isinstance(policy, type) or not issubclass(policy, EvictionPolicy):
        raise ValueError(f"is {policy!r}, want a subclass of {EvictionPolicy.__module__}.EvictionPolicy")
    if inspect.isabstract(policy):
        raise ValueError(f"lacks {', '.join(sorted(policy.__abstractmethods__))}")
    try:
        return GuardedPolicy(name, policy())
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

    The failure is logged once, and the cache keeps working; the simulator raises an error instead.
    """

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        self._name = name
        self._policy = policy
        self.queued = bool(policy.queued)
        self.promotes = bool(policy.promotes)

    def rank(self, entry: Entry) -> int:
        return self._call("rank", operator.index, entry.last, entry)

    def queue_of(self, name: str, size: int, room: int) -> int:
        return self._call("queue_of", _checked_queue, SMALL, name, size, room)

    def is_long(self, held: int, limit: int, room: int) -> bool:
        return self._call("is_long", bool, True, held, limit, room)

    def spares(self, entry: Entry) -> bool:
        return self._call("spares", bool, False, entry)

    def evicted(self, name: str, entry: Entry, room: int) -> None:
        self._call("evicted", lambda result: None, None, name, entry, room)

    def _call(self, method: str, convert: Callable[[Any], T], default: T, *arguments: object) -> T:
        """Return the converted result of a method of the policy; LRU's `default` once a method has failed."""
        if not self.failure:
            try:
                return convert(getattr(self._policy, method)(*arguments))
            except Exception as error:  # another package's code
                self.failure = f"{self._name}: {method}: {type(error).__name__}: {error}"
                log.error(
                    "eviction policy %s; from now on the least recently used record is evicted first",
                    self.failure,
                )
        return default


def _checked_queue(queue: Any) -> int:
    if queue not in (SMALL, MAIN):
        raise ValueError(f"returned {queue!r}, want SMALL or MAIN")
    return int(queue)
