"""The contract of a tier: a named place for records, addressed by object name.

A tier knows nothing of tokens or layouts: it moves bytes between objects and leased slots. Names look like
"<namespace digest>/<group>/c.<16 bits>.<46 bits>.<layers>.<heads>.0.0" (`kvkit.format.names`). An object is
written once, never changed; equal names hold equal bytes. `kvkit.tiers.testing.contract.TierContract` checks
a tier.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, Protocol

from kvkit.format.layout import Precision
from kvkit.format.record import Damage
from kvkit.staging import Lease
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

OnComplete = Callable[[str, BaseException | None], None]
"""Called with (name, None) or (name, what went wrong), exactly once per name, from any thread."""
Move = Callable[[Sequence[str], Sequence[Lease]], Sequence[BaseException | None]]
"""Moves records; what went wrong with each. What it raises went wrong with all."""
Scope = Literal["node", "shared"]
HeldListener = Callable[[Sequence[str], bool], None]
"""Called with (names, whether a tier holds them from now on), in the order in which that changes. Often under
the tier's lock: it neither waits nor asks the tier. What is told twice counts once."""
Ranges = Sequence[tuple[int, int]]
"""(offset, bytes) of parts of one record, as it is without compression."""

LARGEST_BYTES = 1 << 32
"""No record is larger, where a tier was not told how large the slots are."""


class TierError(OSError):
    """A record could not be read or written."""


class DamagedObject(TierError):
    """An object is to blame, not its tier: too large for its slot, not what its codec makes, or no file."""

    def __init__(self, message: str, damage: Damage) -> None:
        super().__init__(message)
        self.damage = damage


class UnreadableObject(DamagedObject):
    """An object cannot be read, and it or its tier is to blame: that shows in whether others can be.

    Such as EIO: of one file it is a bad sector, of every file a disk that dies.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, Damage.UNREADABLE)
        self.name = name


def too_large(name: str, size: int, room: int) -> DamagedObject:
    """The error of an object of `size` bytes that does not fit a slot's `room`."""
    return DamagedObject(f"{name}: {size} bytes do not fit the slot's {room}", Damage.OVERSIZE)


def cut_short(name: str, count: int, offset: int, size: int) -> DamagedObject:
    """The error of an object that has only `count` of the `size` bytes from `offset` on."""
    return DamagedObject(f"{name}: {count} of the {size} bytes from {offset} on are there", Damage.TRUNCATED)


class TierFull(TierError):
    """A record does not fit the tier's capacity, whatever is evicted."""


def _nobody(names: Sequence[str], held: bool) -> None:
    """Who watches a tier that nobody watches."""


class Tier(ABC):
    """A named place for records. Every method is thread-safe.

    Attributes:
        name: as the policy names it.
        scope: "node", this host alone, or "shared" with other hosts.
        codec: how its records are compressed, one of `kvkit.format.record.CODECS`.
        precision: how few bits it keeps KV with, one of `kvkit.format.layout.Precision`; None: all of them.
            What comes from it is approximate.
        near: whether its records are in this host's memory already, so that nothing is gained by
            copying them into another tier.
        common: whether all ranks of an engine on this host find there what one of them puts.
        transient: whether its records are only on their way, so that `staging_only` does not concern it.
        reads_at_once: records that it reads at the same time; what else it is asked for waits.
        reads_parts: whether `get_ranges` moves no more than what it is asked for.
        slots: of staging that its records may keep.
        largest: bytes of the largest record, without compression; what is larger is damaged, and not read.
        tells: whether `watch` hears of what it lets go of.
        evicted: records that were evicted so far.
    """

    name: str
    scope: Scope = "node"
    codec: str = "none"
    precision: Precision | None = None
    near: bool = False
    common: bool = False
    transient: bool = False
    reads_at_once: int = 32
    reads_parts: bool = False
    slots: int = 0
    largest: int = LARGEST_BYTES
    tells: bool = False
    evicted: int = 0
    _held_listener: HeldListener = staticmethod(_nobody)

    def limit(self, slot_bytes: int) -> None:
        """Be told how large a slot is, which no record outgrows, by the cache that uses it. Mutates."""
        self.largest = slot_bytes

    @abstractmethod
    def match_prefix(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, are held without a gap. Reads no payload."""

    def count_unneeded(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, need not be put: as many as it holds, by default."""
        return self.match_prefix(names)

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

    def waiting(self) -> int:
        """Reads and writes that were started and that no thread has taken up."""
        return 0

    def watch(self, held_listener: HeldListener) -> bool:
        """Have what is put, found by a lookup, or let go of told from now on, and what is there. Mutates.

        Whether that is all that is ever held here: no other host puts anything. If not, what is there may be
        left out.
        """
        self._held_listener = held_listener
        return False

    def pin(self, names: Sequence[str], seconds: float) -> int:
        """Evict none of `names` within so many seconds, whatever else needs room; how many are held.

        Returns at once: engines' steps wait for it.
        """
        return 0

    def prioritise(self, names: Sequence[str], priority: int) -> None:  # noqa: B027 - optional
        """Evict none of `names` that are held while others of a lower priority, 0 to 100, can go.

        A record has 35 until it is given one; of several, the highest counts. Returns at once.
        """

    def borrow(self, name: str) -> Lease | None:
        """A share of the slot that holds the record, where the tier keeps records in slots; else None."""
        return None

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of one record, each to the front of its buffer. Returns when they are there.

        Raises:
            FileNotFoundError: the record is missing.
            DamagedObject: it ends before a range does.
            TierError: it could not be read, or the tier has no way to read a part.
        """
        lent = self.borrow(name)
        if lent is None:
            if self.size(name) is None:
                raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
            raise TierError(f"tier {self.name!r} reads whole records only")
        with lent:
            copy_ranges(name, lent.buffer[: lent.used], ranges, buffers)

    def describe(self, array: str, metadata: bytes) -> None:  # noqa: B027 - optional
        """Keep `metadata` as the zarr.json of `array`, where the tier is a store that Zarr can open."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was started, then release what the tier holds. Only another close may follow."""


class ObjectStore(Protocol):
    """Where the objects of an `ObjectTier` lie. Blocking, and thread-safe.

    Whatever goes wrong is an OSError; DamagedObject where one object is to blame.
    """

    def size(self, name: str) -> int | None:
        """Bytes of the object; None if it is missing, or is no object.

        Raises:
            DamagedObject: it cannot be looked at.
        """

    def read(self, name: str, buffer: memoryview) -> int:
        """Read the object into `buffer`; returns its bytes. Mutates `buffer`.

        Raises:
            FileNotFoundError: it is missing.
            DamagedObject: it is larger than the buffer, no object, or cannot be read.
        """

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of the object, each to the front of its buffer. Mutates `buffers`.

        Raises:
            FileNotFoundError, DamagedObject: as `read` does, or it ends before a range does.
        """

    def write(self, name: str, data: memoryview) -> None:
        """Make the object, complete at once; done already if it exists. Nothing is left of one that fails."""

    def delete(self, name: str) -> None:
        """Remove the object, or what lies in its place; missing is fine."""

    def scan(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every record, oldest first where that is known."""


class ThreadedTier(Tier):
    """A tier of blocking reads and writes, made asynchronous by `threads` threads of its own."""

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"tier {name!r}: threads={threads}, want at least 1")
        self.name = name
        self.reads_at_once = threads
        self._workers = Workers(threads, f"kvkit-{name}")

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
            OSError: it could not be written. Nothing is left of it.
        """

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        start_moves(self, self._workers, self._get_each, names, leases, on_complete, urgent=True)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        start_moves(self, self._workers, self._put_each, names, leases, on_complete, urgent=False)

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """As in `Tier`, by reading the whole record. For tiers that can do no better."""
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        if size > self.largest:
            raise too_large(name, size, self.largest)
        whole = memoryview(bytearray(size))
        copy_ranges(name, whole[: self.read(name, whole)], ranges, buffers)

    def waiting(self) -> int:
        return self._workers.waiting

    def close(self) -> None:
        self._workers.close()

    def _get_each(self, names: Sequence[str], leases: Sequence[Lease]) -> list[None]:
        return list(map(self._get_one, names, leases))

    def _put_each(self, names: Sequence[str], leases: Sequence[Lease]) -> list[None]:
        return list(map(self._put_one, names, leases))

    def _get_one(self, name: str, lease: Lease) -> None:
        lease.used = self.read(name, lease.buffer)

    def _put_one(self, name: str, lease: Lease) -> None:
        self.write(name, lease.buffer[: lease.used])


def start_moves(
    tier: Tier,
    workers: Workers,
    move: Move,
    names: Sequence[str],
    leases: Sequence[Lease],
    on_complete: OnComplete,
    *,
    urgent: bool,
    batch: int = 1,
) -> None:
    """Have `workers` move records, `batch` of them in a job. Each completes once, whatever goes wrong.

    With one record in a job a get waits for no more than the puts that are being written.

    Raises:
        ValueError: names and leases are not as many.
    """
    if len(names) != len(leases):
        raise ValueError(f"tier {tier.name!r}: {len(names)} names, {len(leases)} leases")
    held = [lease.share() for lease in leases]
    jobs = [
        partial(_move, move, names[i : i + batch], held[i : i + batch], on_complete)
        for i in range(0, len(names), batch)
    ]
    try:
        workers.start(*jobs, urgent=urgent)
    except Closed:
        for name, lease in zip(names, held, strict=True):
            complete(on_complete, name, lease, TierError(f"tier {tier.name!r} is closed"))


def _move(move: Move, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
    errors: Sequence[BaseException | None]
    try:
        errors = move(names, leases)
    except BaseException as caught:  # a tier's thread must outlive whatever a store throws
        errors = [caught] * len(names)
    for name, lease, error in zip(names, leases, errors, strict=True):
        complete(on_complete, name, lease, error)


def copy_ranges(name: str, record: memoryview, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
    """Copy parts of a record, each to the front of its buffer.

    Raises:
        DamagedObject: the record ends before a range does.
    """
    for (offset, size), buffer in zip(ranges, buffers, strict=True):
        if offset + size > len(record):
            raise cut_short(name, max(0, len(record) - offset), offset, size)
        buffer[:size] = record[offset : offset + size]


def get_by_copy(tier: Tier, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
    """`Tier.get` for one that keeps records in slots: copy what it lends."""
    for name, lease in zip(names, leases, strict=True):
        target = lease.share()
        error: OSError | None = None
        source = tier.borrow(name)
        if source is None:
            error = FileNotFoundError(f"tier {tier.name!r} does not hold {name}")
        else:
            with source:
                if source.used > len(target.buffer):
                    error = too_large(name, source.used, len(target.buffer))
                else:
                    target.array[: source.used] = source.record
                    target.used = source.used
        complete(on_complete, name, target, error)


def complete(on_complete: OnComplete, name: str, lease: Lease, error: BaseException | None) -> None:
    """Release the tier's share of a slot and report its record; an error in the callback is only logged."""
    lease.release()
    try:
        on_complete(name, error)
    except Exception:
        log.exception("the completion callback of %s failed", name)


def owner_of(name: str) -> str:
    """Whose quota a record counts against: its namespace, and so its model and its cache salt."""
    return sys.intern(name.partition("/")[0])


def default_threads() -> int:
    """Threads that keep one disk busy: 4 to 8."""
    return max(4, min(8, os.cpu_count() or 4))
