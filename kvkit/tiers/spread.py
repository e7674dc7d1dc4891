"""Several disks as one tier, with records spread over them by key.

A disk is called a path. If one fails, its records are misses; the other paths stay in use, and the failed one
is tried again later.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import TypeVar

from kvkit.staging import Lease
from kvkit.tiers.base import (
    DamagedObject,
    HeldListener,
    OnComplete,
    Ranges,
    Tier,
    TierError,
    UnreadableObject,
)
from kvkit.tiers.health import Health

log = logging.getLogger(__name__)
T = TypeVar("T")


class SpreadTier(Tier):
    """Records spread over `paths` by name: a record is on the same path in every process.

    Args:
        paths: independent tiers, with their own capacities. Closing this tier closes them.
    """

    def __init__(self, name: str, paths: Sequence[Tier]) -> None:
        if not paths:
            raise ValueError(f"tier {name!r}: paths=[]: want at least one")
        self.name = name
        self.scope = paths[0].scope
        self.codec, self.precision = paths[0].codec, paths[0].precision
        self.reads_ranges = all(path.reads_ranges for path in paths)
        self._paths = tuple(paths)
        self._health = tuple(Health() for _ in paths)

    @property
    def evicted(self) -> int:  # type: ignore[override]
        """Number of records evicted so far by all paths."""
        return sum(path.evicted for path in self._paths)

    @property
    def reports_evictions(self) -> bool:  # type: ignore[override]
        """True if every path reports evicted and deleted records."""
        return all(path.reports_evictions for path in self._paths)

    def subscribe(self, held_listener: HeldListener) -> bool:
        return all([path.subscribe(held_listener) for path in self._paths])  # noqa: C419 - each is watched

    def limit(self, slot_bytes: int) -> None:
        super().limit(slot_bytes)
        for path in self._paths:
            path.limit(slot_bytes)

    def match_prefix(self, names: Sequence[str]) -> int:
        run = len(names)
        for path, indices in self._indices_by_path(names).items():
            count = self._try(path, methodcaller("match_prefix", [names[i] for i in indices]), 0)
            if count < len(indices):
                run = min(run, indices[count])
        return run

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._move(names, leases, on_complete, reading=True)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._move(names, leases, on_complete, reading=False)

    def delete(self, names: Sequence[str]) -> None:
        with ExitStack() as deletions:  # an error does not stop the other deletions
            for path, indices in self._indices_by_path(names).items():
                deletions.callback(self._paths[path].delete, [names[i] for i in indices])

    def size(self, name: str) -> int | None:
        return self._try(path_of(name, len(self._paths)), lambda tier: tier.size(name), None)

    def scan(self) -> Iterator[tuple[str, int]]:
        return chain.from_iterable(path.scan() for path in self._paths)

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        path = path_of(name, len(self._paths))
        if not self._health[path].usable(time.monotonic()):
            raise self._error_of_skipped(name, path, reading=True)
        try:
            self._paths[path].get_ranges(name, ranges, buffers)
        except OSError as error:
            reported = self._reported_error(name, path, error)
            if reported is error:
                raise
            raise reported from error
        self._record_result(path, None)

    def pin(self, names: Sequence[str], seconds: float) -> int:
        held = 0
        for path, indices in self._indices_by_path(names).items():
            held += self._paths[path].pin([names[i] for i in indices], seconds)
        return held

    def prioritise(self, names: Sequence[str], priority: int) -> None:
        for path, indices in self._indices_by_path(names).items():
            self._paths[path].prioritise([names[i] for i in indices], priority)

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """True if the eviction of the paths learns from requests."""
        return any(path.learns for path in self._paths)

    def note_request(self, names: Sequence[str]) -> None:
        for path, indices in self._indices_by_path(names).items():
            self._paths[path].note_request([names[i] for i in indices])

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:
        for path, indices in self._indices_by_path(names).items():
            self._paths[path].note_answer([names[i] for i in indices], tool_call)

    def waiting(self) -> int:
        return sum(path.waiting() for path in self._paths)

    def describe(self, array: str, metadata: bytes) -> None:
        for path in range(len(self._paths)):
            self._try(path, lambda tier: tier.describe(array, metadata), None)

    def close(self) -> None:
        with ExitStack() as closings:  # as in `delete`
            for path in self._paths:
                closings.callback(path.close)

    def _indices_by_path(self, names: Sequence[str]) -> dict[int, list[int]]:
        """Return, for each path, the indices of those of `names` that are on it."""
        indices_by_path: dict[int, list[int]] = {}
        for i, name in enumerate(names):
            indices_by_path.setdefault(path_of(name, len(self._paths)), []).append(i)
        return indices_by_path

    def _move(
        self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete, reading: bool
    ) -> None:
        """Start reading or writing each record on its path."""
        if len(names) != len(leases):
            raise ValueError(f"tier {self.name!r}: {len(names)} names, {len(leases)} leases")
        for path, indices in self._indices_by_path(names).items():
            tier, health = self._paths[path], self._health[path]
            if not health.usable(time.monotonic()):
                for name in (names[i] for i in indices):
                    on_complete(name, self._error_of_skipped(name, path, reading))
                continue
            move = tier.get if reading else tier.put
            report = partial(self._report, path, on_complete, reading)
            move([names[i] for i in indices], [leases[i] for i in indices], report)

    def _report(
        self, path: int, on_complete: OnComplete, reading: bool, name: str, error: BaseException | None
    ) -> None:
        """Report a path's result; a failed read is reported as a miss, so that other paths stay usable."""
        if not reading:
            self._health[path].answered(time.monotonic())
        elif error is None:
            self._record_result(path, None)
        else:
            error = self._reported_error(name, path, error)
        on_complete(name, error)

    def _reported_error(self, name: str, path: int, error: BaseException) -> BaseException:
        """Return the error to report for a failed read: the failure of a path is a miss of the record."""
        was_open = self._health[path].state(time.monotonic()) == "open"
        self._record_result(path, error)
        if isinstance(error, UnreadableObject):
            # its evidence against the path is recorded already
            return self._miss(name, path, error) if was_open else DamagedObject(str(error), error.damage)
        if isinstance(error, FileNotFoundError | DamagedObject):
            return error
        return self._miss(name, path, error)

    def _record_result(self, path: int, error: BaseException | None) -> None:
        """Record the result of a read, or the error of another call, in the health of its path."""
        now = time.monotonic()
        if error is None:
            self._health[path].worked(now)
        elif isinstance(error, UnreadableObject):
            self._health[path].failed(now, unreadable=error.name)
        elif isinstance(error, FileNotFoundError | DamagedObject):
            self._health[path].answered(now)
        else:
            self._health[path].failed(now, isinstance(error, TimeoutError))

    def _error_of_skipped(self, name: str, path: int, reading: bool) -> OSError:
        """Return the error of a record whose path is not used, because its circuit is open."""
        reason = "it failed a moment ago"
        if reading:
            return self._miss(name, path, reason)
        return TierError(f"tier {self.name!r}: path {path} does not take {name}: {reason}")

    def _miss(self, name: str, path: int, reason: object) -> FileNotFoundError:
        """Return, and log, the error of a record that its path does not deliver."""
        log.warning("tier %r: path %d does not deliver %s: %s", self.name, path, name, reason)
        return FileNotFoundError(f"tier {self.name!r}: path {path} does not deliver {name}: {reason}")

    def _try(self, path: int, call: Callable[[Tier], T], default: T) -> T:
        """Return the result of `call` for a path; `default` if it fails or the path's circuit is open."""
        health = self._health[path]
        if not health.usable(time.monotonic()):
            return default
        try:
            result = call(self._paths[path])
        except OSError as error:
            log.warning("tier %r: path %d: %s", self.name, path, error)
            self._record_result(path, error)
            return default
        health.answered(time.monotonic())
        return result


def path_of(name: str, paths: int) -> int:
    """Return the path of an object: the BLAKE2b-64 of its name, as a big-endian number, modulo `paths`."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % paths
