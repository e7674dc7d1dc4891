"""Whether a process stays as large as it was: what it takes when it rests, and the rule that this is held to.

A process rests where nothing is asked of it. `Flat.rest` notes then how much memory is resident, without
pages of files, which come and go as the machine has room, and how many descriptors and threads there are.
`judge` says what of that rises:

- resident memory, where the last third of the rests spans `JUDGED_S`: its least-squares slope there is at
  most `GROWTH` MiB a minute, or what the soak says. Before, allocators come to hold what threads need at
  most;
- descriptors, and threads: in the second half of the rests there are never over `SPARE` more than in the
  first.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GROWTH = 0.5
"""MiB a minute."""
JUDGED_S = 300.0
"""In less time memory that is taken once looks like growth."""
SPARE = 2
"""What is opened once, late: a pool starts a thread when all others of it are busy for the first time."""
LOOKS, PAUSE_S = 5, 0.1
"""What is being closed takes a moment: the least of so many looks, and the time between two."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a process took at a time, in seconds since its first rest."""

    at_s: float
    resident_mib: float
    descriptors: int
    threads: int


def size_of(pid: int) -> tuple[float, int, int]:
    """MiB of resident memory that is no file's, descriptors and threads of a process of this user."""
    process = Path("/proc") / str(pid)
    lines = re.findall(
        r"^(RssAnon|RssShmem|Threads):\s+(\d+)", (process / "status").read_text(), re.MULTILINE
    )
    status = {name: int(number) for name, number in lines}
    kib = status["RssAnon"] + status["RssShmem"]
    return kib / 1024, len(os.listdir(process / "fd")), status["Threads"]


def judge(sizes: Sequence[Size], growth: float = GROWTH) -> list[str]:
    """What rises, in words; nothing where there are too few rests to tell."""
    half = len(sizes) // 2
    early, late = sizes[:half], sizes[half:]
    if not early:
        return []
    found = []
    slope = growth_of(sizes)
    if slope is not None and slope > growth:
        found.append(f"resident memory grows by {slope:.2f} MiB a minute, want at most {growth:g}")
    for what in ("descriptors", "threads"):
        before, after = (max(getattr(size, what) for size in part) for part in (early, late))
        if after > before + SPARE:
            found.append(f"{what}: {after} in the second half, {before} in the first")
    return found


def growth_of(sizes: Sequence[Size]) -> float | None:
    """MiB a minute in the last third; None where that is too short to tell."""
    late = sizes[-(-2 * len(sizes) // 3) :]
    if len(late) < 3 or late[-1].at_s - late[0].at_s < JUDGED_S:
        return None
    minutes = np.array([size.at_s / 60 for size in late])
    return float(np.polyfit(minutes, [size.resident_mib for size in late], 1)[0])


@dataclass(slots=True)
class Flat:
    """The rests of one process."""

    pid: int
    growth: float = GROWTH
    sizes: list[Size] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def rest(self) -> None:
        """Note what the process takes, which rests now. Mutates."""
        looks = []
        for look in range(LOOKS):
            time.sleep(PAUSE_S if look else 0)
            looks.append(size_of(self.pid))
        mib, descriptors, threads = map(min, zip(*looks, strict=True))
        now = time.monotonic()
        if not self.sizes:
            self._began = now
        self.sizes.append(Size(round(now - self._began, 1), round(mib, 2), descriptors, threads))

    def result(self) -> dict[str, Any]:
        """What there was, and what is wrong with it."""
        slope = growth_of(self.sizes)
        return {
            "mib_per_minute": None if slope is None else round(slope, 3),
            "most_mib_per_minute": self.growth,
            "not_flat": judge(self.sizes, self.growth),
            "rests": [[size.at_s, size.resident_mib, size.descriptors, size.threads] for size in self.sizes],
        }
