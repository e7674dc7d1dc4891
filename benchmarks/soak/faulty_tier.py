"""A folder that fails at random, as a plug-in of the kind `faulty`; who wants it calls `install` first."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.plugins import GROUP
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier, random_plan

FAULTS = {
    "get": [Fault.FAIL, Fault.FLIP, Fault.TRUNCATE],
    "put": [Fault.FAIL, Fault.DROP],
    "count": [Fault.FAIL],
}
SHARE = 0.1
"""Of the reads and writes that meet a fault."""

ASKED_SHARE = 0.02
"""Of the questions, each on its own: a cold tier is asked often for the same record before the first read
interrupts a row of failures, and would be passed over for most of a short soak."""

CALLS_OF_A_PLAN = 50
"""After so many calls another share of the objects fails, so that none fails for good."""

injected: Counter[str] = Counter()
"""What went wrong so far, as "get flip"."""


def install(folder: Path) -> None:
    """Have this process find the kind `faulty`, by an entry point written to `folder`."""
    package = folder / "kvkit_faulty-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: kvkit-faulty\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\nfaulty = {__name__}:open_tier\n")
    sys.path.append(str(folder))


def open_tier(name: str, staging: Staging, settings: Mapping[str, Any]) -> Tier:
    """A folder `settings["path"]` of at most `settings["capacity"]` bytes, with faults."""
    calls = itertools.count()

    def plan(operation: str, record: str) -> Fault | None:
        call = next(calls)
        if operation == "count":
            fault = random_plan(call, ASKED_SHARE, FAULTS)(operation, record)
        else:
            fault = random_plan(call // CALLS_OF_A_PLAN, SHARE, FAULTS)(operation, record)
        if fault is not None:
            injected[f"{operation} {fault}"] += 1
        return fault

    return FaultyTier(
        ObjectTier(TierConfig(url=settings["path"], capacity=settings["capacity"]), name=name), plan
    )
