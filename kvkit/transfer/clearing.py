"""Clearing a tier: delete every record, under one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from kvkit.tiers.base import Tier
from kvkit.transfer.tier_set import TierSet

T = TypeVar("T")

CLEARED_AT_ONCE = 256
"""Records deleted at a time; after the deadline, no more are deleted."""


def delete(tiers: TierSet, tier: str, names: Sequence[str], timeout_s: float) -> None:
    """Delete records of a tier; those that it does not hold are passed over.

    Raises:
        TimeoutError: it takes more than `timeout_s` seconds.
        OSError: some could not be deleted.
    """
    tiers.bounded(tier, lambda target: target.delete(names), timeout_s)
    tiers.notify(tier, names, False)


def clear(tiers: TierSet, tier: str, timeout_s: float, prefix: str = "") -> int:
    """Delete every record of a tier that can be deleted, and end their quarantine; return how many.

    Args:
        prefix: only records whose names begin with it.

    Raises:
        TimeoutError: some are left after `timeout_s` seconds.
        OSError: some could not be deleted; all others are.
    """
    until = time.monotonic() + timeout_s
    removed, failures = 0, dict[str, OSError]()

    def step(call: Callable[[Tier], T]) -> T:
        return tiers.bounded(tier, call, until - time.monotonic())

    def remove(names: Sequence[str]) -> int:
        try:
            delete(tiers, tier, names, until - time.monotonic())
        except TimeoutError:
            raise
        except OSError as error:
            if len(names) > 1:
                return sum(remove([name]) for name in names)
            failures[names[0]] = error
            return 0
        return len(names)

    try:
        records = (found for found in step(lambda target: target.scan()) if found[0].startswith(prefix))
        while names := step(lambda _: [name for name, _ in islice(records, CLEARED_AT_ONCE)]):
            removed += remove(names)
    except TimeoutError as error:
        raise TimeoutError(
            f"tier {tier!r}: not empty after {timeout_s} s; {removed} records are deleted"
        ) from error
    tiers.quarantine.forget(tier, failures)
    if failures:
        name, cause = next(iter(failures.items()))
        raise OSError(
            f"tier {tier!r}: {removed} records are deleted, {len(failures)} cannot be: {name}: {cause}"
        ) from cause
    return removed
