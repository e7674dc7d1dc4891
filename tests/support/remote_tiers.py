"""Records, and a server that dies amid a load, for the tests of tiers on servers."""

from __future__ import annotations

import threading

import numpy as np

from kvkit.lab.testbed.servers import Process
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import Tier, TierError
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    RECORDS,
    Completions,
    TierContract,
    put,
    record_bytes,
    record_names,
)


def finish(tier: Tier, staging: Staging) -> None:
    TierContract().finish(tier, staging)


def same(found: object, name: str) -> bool:
    """Whether a get found the record of this name."""
    return isinstance(found, np.ndarray) and np.array_equal(found, record_bytes(name))


def kill_amid_a_load(server: Process, tier: Tier, staging: Staging) -> list[str]:
    """Kill `server` when 3 of the records that `tier` put there are loaded; returns the names of all.

    Raises:
        AssertionError: a record is neither right nor an error, or none was under way.
    """
    names = record_names(RECORDS)
    assert put(tier, staging, names) == [None] * RECORDS
    leases = staging.acquire(RECORDS, DEADLINE_S, at_least=RECORDS)
    lock = threading.Lock()
    errors: dict[str, BaseException | None] = {}
    done = Completions()

    def on_complete(name: str, error: BaseException | None) -> None:
        with lock:
            errors[name] = error
            if len(errors) == 3:
                server.kill()
        done(name, error)

    tier.get(names, leases, on_complete)
    done.wait(RECORDS)
    for name, lease in zip(names, leases, strict=True):
        assert isinstance(errors[name], TierError) or np.array_equal(lease.record, record_bytes(name))
    assert any(isinstance(error, TierError) for error in errors.values()), "nothing was under way"
    release_all(leases)
    return names
