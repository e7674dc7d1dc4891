"""The contract of a tier: a named place for records, addressed by object name.

A tier knows nothing of tokens or layouts: it moves bytes between objects and leased slots. Names look like
"<namespace digest>/<group>/c.<16 bits>.<46 bits>.<layers>.<heads>.0.0" (`kvkit.format.names`). An object is
written once and never changed; equal names hold equal bytes. `kvkit.tiers.testing.contract.TierContract`
tests whether a tier keeps this contract.
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
"""Called with (name, None) or (name, error), exactly once per name, from any thread."""
Move = Callable[[Sequence[str], Sequence[Lease]], Sequence[BaseException | None]]
"""Moves records and returns an error or None for each. An exception counts for all of them."""
Scope = Literal["node", "shared"]
HeldListener = Callable[[Sequence[str], bool], None]
"""Called with (names, held) in the order of changes; held: whether the tier holds them from now on.

Often called under the tier's lock: it must neither block nor call the tier. Repeated reports are harmless."""
Ranges = Sequence[tuple[int, int]]
"""(offset, bytes) of parts of one record in its uncompressed form."""

LARGEST_BYTES = 1 << 32
"""Limit on the bytes of a record until `Tier.limit` sets the slot size."""


class TierError(OSError):
    """A record could not be read or written."""


class DamagedObject(TierError):
    """An object is at fault, not its tier: too large for the slot, not of its codec, or not a file."""

    def __init__(self, message: str, damage: Damage) -> None:
        super().__init__(message)
        self.damage = damage


class UnreadableObject(DamagedObject):
    """An object cannot be read, and either it or its tier is at fault: reads of other objects show which.

    An example is EIO: on one file it means a bad sector, on every file a dying disk.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, Damage.UNREADABLE)
        self.name = name


def too_large(name: str, size: int, room: int) -> DamagedObject:
    """Return the error for an object of `size` bytes that does not fit a slot of `room` bytes."""
    return DamagedObject(f"{name}: {size} bytes do not fit the slot's {room}", Damage.OVERSIZE)


def cut_short(name: str, count: int, offset: int, size: int) -> DamagedObject:
    """Return the error for an object that has only `count` of the `size` bytes from `offset` on."""
    return DamagedObject(f"{name} has only {count} of {size} bytes at offset {offset}", Damage.TRUNCATED)


class TierFull(TierError):
    """A record does not fit the tier's capacity, even after every permitted eviction."""


def _nobody(names: Sequence[str], held: bool) -> None:
    """Ignore the change: the listener of a tier that nobody watches."""


class Tier(ABC):
    """A named place for records. Every method is thread-safe.

    Attributes:
        name: the tier's name in the policy.
        scope: "node" (this host alone) or "shared" (with other hosts).
        codec: compression of its records, one of `kvkit.format.record.CODECS`.
        precision: precision of the quantised KV that it keeps, one of `kvkit.format.layout.Precision`; loads
            from it are approximate. None: exact KV.
        in_memory: True if its records are in this host's memory already, so that a copy in another tier
            gains nothing.
        shared_by_ranks: True if each rank of an engine on this host finds the records of all ranks.
        read_only: True if `put` refuses every record, because records arrive by other means.
        reads_at_once: number of records that it reads in parallel; further reads wait.
        reads_ranges: True if `get_ranges` moves only the requested bytes.
        slots: number of staging slots that its records may occupy.
        largest: bytes of the largest record, uncompressed; a larger one is damaged and is not read.
        reports_evictions: True if listeners of `subscribe` are called for evicted and deleted records too.
        learns: True if its eviction learns from `note_request` and `note_answer`.
        evicted: number of records evicted so far.
    """

    name: str
    scope: Scope = "node"
    codec: str = "none"
    precision: Precision | None = None
    in_memory: bool = False
    shared_by_ranks: bool = False
    read_only: bool = False
    reads_at_once: int = 32
    reads_ranges: bool = False
    slots: int = 0
    largest: int = LARGEST_BYTES
    reports_evictions: bool = False
    learns: bool = False
    evicted: int = 0
    _held_listener: HeldListener = staticmethod(_nobody)

    def limit(self, slot_bytes: int) -> None:
        """Set the size of a slot, which limits the size of a record. Called by the cache. Mutates."""
        self.largest = slot_bytes

    @abstractmethod
    def match_prefix(self, names: Sequence[str]) -> int:
        """Return the length of the leading run of `names` that is held. Reads no payload."""

    @abstractmethod
    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Start reading each object into its slot, setting `lease.used`; return at once.

        The tier keeps a share of each lease until `on_complete` was called for it, so a caller that stops
        waiting may release its own. A missing object completes with FileNotFoundError, an object larger than
        the slot with DamagedObject.
        """

    @abstractmethod
    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Start writing `lease.record` to each object; return at once, keeping a share as `get` does.

        An object becomes visible only when it is complete. An object that exists is not written again.
        `on_complete` is called once the object is visible, or the write failed.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, skipping missing ones.

        Raises:
            OSError: an object could not be removed.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the bytes of an object, None if it is missing."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every record, without reading payloads. A restart finds these records."""

    def waiting(self) -> int:
        """Return the number of reads and writes that were started and that no thread has taken yet."""
        return 0

    def subscribe(self, held_listener: HeldListener) -> bool:
        """Report the held records, then each record put, found by a lookup, evicted or deleted. Mutates.

        Returns:
            True if the reports cover all records ever held here, as no other host puts any. If False, the
            records held at the time of the call may be left out.
        """
        self._held_listener = held_listener
        return False

    def pin(self, names: Sequence[str], seconds: float) -> int:
        """Protect `names` from eviction for `seconds`; return how many of them are held.

        It must return at once: engine steps wait for it.
        """
        return 0

    def prioritise(self, names: Sequence[str], priority: int) -> None:  # noqa: B027 - optional
        """Set the eviction priority, 0 to 100, of those of `names` that are held.

        Records of lower priority are evicted first. The default is 35; of several calls the highest priority
        counts. It must return at once.
        """

    def note_request(self, names: Sequence[str]) -> None:  # noqa: B027 - optional
        """Learn that a request's prompt is `names`, a chain of records, whether they are held or not.

        Called once for each lookup, after `match_prefix`, if `learns`. It must return at once.
        """

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:  # noqa: B027 - optional
        """Learn that the request whose prompt and answer are `names`, a chain of records, was answered.

        Called if `learns`, where answers are known; `tool_call`: the answer calls a tool. It must return at
        once.
        """

    def borrow(self, name: str) -> Lease | None:
        """Return a share of the slot that holds the record; None if it is missing or not kept in a slot."""
        return None

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of one record, each to the front of its buffer; return when all are read.

        Raises:
            FileNotFoundError: the record is missing.
            DamagedObject: the record ends before a range does.
            TierError: the record could not be read, or the tier cannot read parts.
        """
        lent = self.borrow(name)
        if lent is None:
            if self.size(name) is None:
                raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
            raise TierError(f"tier {self.name!r} reads whole records only")
        with lent:
            copy_ranges(name, lent.buffer[: lent.used], ranges, buffers)

    def describe(self, array: str, metadata: bytes) -> None:  # noqa: B027 - optional
        """Store `metadata` as the zarr.json of `array`, if the tier is a store that Zarr can open."""

    @abstractmethod
    def close(self) -> None:
        """Finish all started reads and writes, then release the tier's resources. May be repeated."""


class ObjectStore(Protocol):
    """Storage for the objects of an `ObjectTier`. Blocking and thread-safe.

    Every error is an OSError; it is DamagedObject if one object is at fault.
    """

    def size(self, name: str) -> int | None:
        """Return the bytes of the object; None if it is missing or not an object.

        Raises:
            DamagedObject: the object cannot be inspected.
        """

    def read(self, name: str, buffer: memoryview) -> int:
        """Read the object into `buffer`; return its number of bytes. Mutates `buffer`.

        Raises:
            FileNotFoundError: the object is missing.
            DamagedObject: it is larger than the buffer, not an object, or cannot be read.
        """

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of the object, each to the front of its buffer. Mutates `buffers`.

        Raises:
            FileNotFoundError: the object is missing.
            DamagedObject: as for `read`, or the object ends before a range does.
        """

    def write(self, name: str, data: memoryview) -> None:
        """Create the object atomically, unless it exists. A failed write leaves nothing behind."""

    def delete(self, name: str) -> None:
        """Remove the object, or anything else under its name; a missing object is no error."""

    def scan(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every record, oldest first where the age is known."""


class ThreadedTier(Tier):
    """A tier with blocking reads and writes, which run on `threads` threads of its own."""

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"tier {name!r}: threads={threads}, want at least 1")
        self.name = name
        self.reads_at_once = threads
        self._workers = Workers(threads, f"kvkit-{name}")

    @abstractmethod
    def read(self, name: str, buffer: memoryview) -> int:
        """Read the object into `buffer`; return its number of bytes. Mutates `buffer`.

        Raises:
            FileNotFoundError: the object is missing.
            OSError: it could not be read, or is larger than the buffer.
        """

    @abstractmethod
    def write(self, name: str, record: memoryview) -> None:
        """Create the object, unless it exists; it becomes visible only when complete.

        Raises:
            OSError: the object could not be written; nothing is left of it.
        """

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        start_moves(self, self._workers, self._get_each, names, leases, on_complete, urgent=True)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        start_moves(self, self._workers, self._put_each, names, leases, on_complete, urgent=False)

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of one record, as in `Tier`, by reading the whole record: for tiers that cannot seek."""
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        if size > self.largest:
            raise too_large(name, size, self.largest)
        record = memoryview(bytearray(size))
        copy_ranges(name, record[: self.read(name, record)], ranges, buffers)

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
    """Start jobs on `workers` that move `batch` records each. Each record completes once, even on errors.

    With one record per job, an urgent get waits at most for the puts in progress.

    Raises:
        ValueError: the numbers of names and leases differ.
    """
    if len(names) != len(leases):
        raise ValueError(f"tier {tier.name!r}: {len(names)} names, {len(leases)} leases")
    shares = [lease.share() for lease in leases]
    jobs = [
        partial(_move, move, names[i : i + batch], shares[i : i + batch], on_complete)
        for i in range(0, len(names), batch)
    ]
    try:
        workers.start(*jobs, urgent=urgent)
    except Closed:
        for name, lease in zip(names, shares, strict=True):
            complete(on_complete, name, lease, TierError(f"tier {tier.name!r} is closed"))


def _move(move: Move, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
    errors: Sequence[BaseException | None]
    try:
        errors = move(names, leases)
    except BaseException as caught:  # a tier's thread must survive any error of a store
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
    """Implement `Tier.get` for a tier that keeps records in slots: copy each from its borrowed slot."""
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
    """Return the owner of a record's quota: the namespace, which includes model and cache salt."""
    return sys.intern(name.partition("/")[0])


def default_threads() -> int:
    """Return the number of threads that keep one disk busy, 4 to 8."""
    return max(4, min(8, os.cpu_count() or 4))
