"""A check that a pool in shared memory still has all of its slots, whichever process died."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import count

from kvkit.tiers.shm.pool import Pool


def check_room(pool: Pool, slots: int, write: Callable[[Pool, str], object]) -> None:
    """Every slot without a record can be had, and then every slot. Evicts all that there was.

    Args:
        pool: opened by nobody but this caller's thread, who has evicted nothing yet; others may have it open.
        write: writes a record of that name.

    Raises:
        AssertionError: room is lost.
    """
    held = len(pool.listed())
    others = (f"{uuid.uuid4().hex}/0/c.0.{i}.0.0.0.0" for i in count())
    for _ in range(slots - held):
        write(pool, next(others))
    assert (len(pool.listed()), pool.evicted) == (slots, 0), "room is lost"
    for _ in range(slots):
        write(pool, next(others))
    assert (len(pool.listed()), pool.evicted) == (slots, slots), "a slot cannot be had"
