"""Tables of pools in shared memory."""

from collections.abc import Callable, Mapping
from typing import Any


def tables(figures: Mapping[str, dict[str, Any]]) -> dict[str, Callable[[], list[list[str]]]]:
    """Give the function that makes each table, by the table's name, from the results' entries."""
    return {
        "shm": lambda: _shm(figures),
        "trusted": lambda: _trusted(figures["shm::copy_before_verifying"]),
    }


def _shm(figures: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """Hits of one process, and of eight at the same time, over those from memory of their own."""
    one, eight = figures["shm::hits[1]"], figures.get("shm::hits[8]", {})
    words = {"memory": "memory of its own", "shm": "a pool (`shm://`)", "folder": "a folder in /dev/shm"}
    words |= {"redis": "Redis on a unix socket, its client alone", "lmcache": "LMCache's server"}
    head = ["over memory, of minima", "of medians"]
    rows = [["16 records of 5.9 MB from", "one process", *head, *(["eight", *head] if eight else [])]]
    for name, what in words.items():
        cells = [what]
        for times in (one.get(name), eight.get(name)) if eight else (one.get(name),):
            ratios = [f"{times[kind]:.2f}" for kind in ("min", "median")] if times else []
            cells += [f"{times['us'] / 1e3:.1f} ms", *ratios] if times else [""] * 3
        rows.append(cells)
    return rows


def _trusted(found: dict[str, Any]) -> list[list[str]]:
    """Hits of a pool, by what sees to it that nobody changes what was verified."""
    rows = [["16 records of 5.9 MB of a pool", "GB/s", "times as long, of minima", "of medians"]]
    for way, took in ((way, took) for way, took in found.items() if isinstance(took, dict)):
        ratios = [f"{took[kind]:.2f}" for kind in ("min", "median")]
        rows.append([way, f"{found['bytes'] / took['us'] / 1e3:.1f}", *ratios])
    return rows
