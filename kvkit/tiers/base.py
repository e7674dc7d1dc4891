"""The contract of a tier: a named place for records, addressed by object name.

A tier knows nothing of tokens or layouts: it moves bytes between objects and leased slots. Names look like
"<namespace digest>/<group>/c.<16 bits>.<46 bits>.0.0.0.0" (`kvkit.record`). An object is written once, never
changed; equal names hold equal bytes. `kvkit.testing.TierContract` checks an implementation.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from kvkit.record import Damage
from kvkit.staging import Lease
from kvkit.threads import Closed, Workers

log = logging.getLogger(__name__)

OnComplete = Callable[[str, BaseException | None], None]
"""Called with (name, None) or (name, what went wrong), exactly once per name, from any thread."""
Scope = Literal["node", "shared"]


class TierError(OSError):
    """A record could not be read or written."""


class DamagedObject(TierError):
    """An object is no record of this cache: too large for its slot, or not what its codec makes."""

    def __init__(self, message: str, damage: Damage) -> None:
        super().__init__(message)
        self.damage = damage


class TierFull(TierError):
    """A record does not fit the tier's capacity, whatever is let go."""


class Tier(ABC):
    """A named place for records. Every method is thread-safe.

    Attributes:
        name: as the policy names it.
        scope: "node", this host alone, or "shared" with other hosts.
        codec: how its records are compressed, one of `kvkit.record.CODECS`.
        near: whether its records are in this host's memory already, so that nothing is gained by
            copying them into another tier.
    """

    name: str
    scope: Scope = "node"
    codec: str = "none"
    near: bool = False

    @abstractmethod
    def run(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, are held without a gap. Reads no payload."""

    @abstractmethod
    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Start reading each object into its slot and set `lease.used`; returns at once.

        The tier keeps a share of each lease until `on_complete` was called for it: a caller that stops
        waiting may release its own. A missing object completes with FileNotFoundError, one larger than the
        slot with DamagedObject.
        """

    @abstractmethod
    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Start writing `lease.record` to each object; returns at once, keeping a share as `get` does.

        An object becomes visible when it is complete, or never. One that exists completes without being
        written again. `on_complete` comes after that, or after the failure.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is missing is passed over.

        Raises:
            OSError: one could not be removed.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of an object, None if it is missing."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every record, without reading payloads. What a restart finds."""

    def borrow(self, name: str) -> Lease | None:
        """A share of the slot that holds the record, where the tier keeps records in slots; else None."""
        return None

    def describe(self, array: str, metadata: bytes) -> None:  # noqa: B027 - optional
        """Keep `metadata` as the zarr.json of `array`, where the tier is a store that Zarr can open."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was started, then release what the tier holds. Only another close may follow."""


class ThreadedTier(Tier):
    """A tier of blocking reads and writes, made asynchronous by `threads` threads of its own."""

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"tier {name!r}: threads={threads}, want at least 1")
        self.name = name
        self._workers = Workers(threads, f"kvkit-{name}")
        self._threads = threads

    @abstractmethod
    def read(self, name: str, buffer: memoryview) -> int:
        """Read the object into `buffer`; returns its bytes.

        Raises:
            FileNotFoundError: it is missing.
            OSError: it could not be read, or is larger than the buffer.
        """

    @abstractmethod
    def write(self, name: str, record: memoryview) -> None:
        """Make the object, visible only when complete; done already if it exists.

        Raises:
            OSError: it could not be written. Nothing is left behind.
        """

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._start(self._get_one, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._start(self._put_one, names, leases, on_complete)

    def close(self) -> None:
        self._workers.close()

    def _get_one(self, name: str, lease: Lease) -> None:
        lease.used = self.read(name, lease.buffer)

    def _put_one(self, name: str, lease: Lease) -> None:
        self.write(name, lease.buffer[: lease.used])

    def _start(
        self,
        move: Callable[[str, Lease], None],
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        """Share out the batch: thread i takes records i, i + threads, ..., so the first complete first."""
        if len(names) != len(leases):
            raise ValueError(f"tier {self.name!r}: {len(names)} names, {len(leases)} leases")
        held = [lease.share() for lease in leases]
        stride = min(self._threads, len(names))
        for first in range(stride):
            part = range(first, len(names), stride)
            try:
                self._workers.start(partial(self._move_all, move, names, held, part, on_complete))
            except Closed:
                for i in part:
                    complete(on_complete, names[i], held[i], TierError(f"tier {self.name!r} is closed"))

    def _move_all(
        self,
        move: Callable[[str, Lease], None],
        names: Sequence[str],
        leases: Sequence[Lease],
        part: range,
        on_complete: OnComplete,
    ) -> None:
        for i in part:
            error: BaseException | None = None
            try:
                move(names[i], leases[i])
            except BaseException as caught:  # a tier's thread must outlive whatever a store throws
                error = caught
            complete(on_complete, names[i], leases[i], error)


def complete(on_complete: OnComplete, name: str, lease: Lease, error: BaseException | None) -> None:
    """Release the tier's share of a slot and report its record; an error in the callback is only logged."""
    lease.release()
    try:
        on_complete(name, error)
    except Exception:
        log.exception("the completion callback of %s failed", name)


def default_threads() -> int:
    """Threads that keep one disk busy: 4 to 8."""
    return max(4, min(8, os.cpu_count() or 4))
