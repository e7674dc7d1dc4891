"""Eviction policies, each of which chooses the evictable record to evict first.

A policy sees the records of one `EvictionState`, which keeps them in one or two queues. To add one, define a
class above `PLAIN`, or in another package (`kvkit.tiers.eviction.plugins`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

SMALL, MAIN = 0, 1
"""The queues: unless `EvictionPolicy.queued`, all records are in the first."""
NORMAL, HIGHEST = 35, 100
"""The default and the highest priority; the lowest is 0. TensorRT-LLM has the same priorities."""


def prevails(given: int, before: int) -> bool:
    """Return whether priority `given` replaces `before`: if `before` is `NORMAL` or lower than `given`."""
    return given != before and (before == NORMAL or given > before)


_MOST_USES = 3  # maximum that s3fifo counts
_USE = 1 << 48  # weight of a use: more than any number of events


@dataclass(slots=True)
class Session:
    """The requests of one conversation or agent, as far as a policy that learns can tell.

    Attributes:
        last_s: time of its last request.
        event: number of the event of its last request.
        queue: queue of the records that it alone uses.
        tool_call: True if its last answer called a tool, whose result comes sooner than a person's reply.
        paces: log2(1 + seconds) from one request to the next, a moving average, by whether the answer
            between them called a tool; missing: there was none.
        tip: name of the last chunk of its newest prompt.
    """

    last_s: float
    event: int
    queue: int = 0
    tool_call: bool = False
    paces: dict[bool, float] = field(default_factory=dict)
    tip: str = ""


@dataclass(slots=True)
class Entry:
    """A held record.

    Attributes:
        name: name of the record, its key in `EvictionState.entries`.
        size: bytes of the record.
        parent: name of the record that it follows; None if it begins a chain or its parent is unknown.
        owner: owner of the quota that it counts against.
        ticket: number of the event that added it.
        last: number of the event that used it last.
        uses: number of uses since it was added, or since the policy last spared it.
        queue: `SMALL` or `MAIN`; a policy that learns has more.
        priority: eviction priority; records of lower priority are evicted first, whatever the policy.
        followers: number of held records that follow it.
        session: session that used it last, for a policy that learns.
        sharings: number of times that a use was another session's than the use before.
        last_s: time when it was used last, in seconds of the store's clock.
    """

    name: str
    size: int
    parent: str | None
    owner: str
    ticket: int
    last: int
    uses: int = 0
    queue: int = SMALL
    priority: int = NORMAL
    followers: int = 0
    session: Session | None = None
    sharings: int = 0
    last_s: float = 0.0


class EvictionPolicy(ABC):
    """An eviction policy, one instance per `EvictionState`.

    Only policies with two queues need `queue_of`, `is_long`, `spares` and `evicted`; for others they are not
    called. Only those that learn need `requested`, `answered`, `enter` and `choose`.

    Attributes:
        name: name in settings, for kvkit's own policies.
        queued: True if there are two queues.
        promotes: True if a second use moves a record from `SMALL` to `MAIN`.
        learns: True if it is told of lookups, has any number of queues, and chooses among the first records
            of each at the time.
        failure: error of a policy of another package; empty if there was none.
    """

    name: ClassVar[str]
    queued: bool = False
    promotes: bool = False
    learns: bool = False
    failure: str = ""

    @abstractmethod
    def rank(self, entry: Entry) -> int:
        """Return the entry's rank; in a queue, the entry with the lowest rank is evicted first.

        The rank must depend on the entry alone, and must not fall while the record is held.
        """

    def queue_of(self, name: str, size: int, room: int) -> int:
        """Return the queue for a new record; `room` is the capacity in bytes. Mutates."""
        return SMALL

    def is_long(self, held: int, limit: int, room: int) -> bool:
        """Return whether to evict from `SMALL`, which has `held` bytes, rather than from `MAIN`.

        Args:
            held: bytes of the owner, or of all records, in `SMALL`.
            limit: quota of that owner, or the capacity, in bytes.
            room: capacity in bytes, or the quota if there is no capacity.
        """
        return True

    def spares(self, entry: Entry) -> bool:
        """Return whether to move the next victim to the end of `MAIN` instead. Mutates `entry.uses`."""
        return False

    def evicted(self, name: str, entry: Entry, room: int) -> None:  # noqa: B027 - optional
        """Note that a record was evicted. Mutates."""

    def requested(self, names: Sequence[str], held: Sequence[Entry], now: float, event: int) -> None:  # noqa: B027 - optional
        """Note a lookup of a prompt's chunks, of which the leading ones are held; set their queues. Mutates.

        Args:
            now: seconds, of any clock that does not go back.
            event: number of the event; the entries have it as `last`.
        """

    def answered(self, names: Sequence[str], held: Sequence[Entry], tool_call: bool) -> None:  # noqa: B027 - optional
        """Note that the last lookup of these chunks was answered; set the queues of those held. Mutates.

        Args:
            names: chunks of the prompt and the answer.
            tool_call: True if the answer calls a tool.
        """

    def enter(self, entry: Entry, parent: Entry | None) -> None:  # noqa: B027 - optional
        """Set session and queue of a new record that follows `parent`, before it has room. Mutates."""

    def choose(self, heads: Sequence[Entry], newcomer: Entry, now: float) -> Entry | None:
        """Return the victim among the queues' first records; None: refuse the newcomer. Mutates."""
        return heads[0]


@dataclass(slots=True)
class _Ghosts:
    """Names and bytes of records evicted from a queue, oldest first, up to the capacity in bytes."""

    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    bytes: int = 0

    def add(self, name: str, size: int, room: int) -> None:
        """Add a name, and forget the oldest ones above `room` bytes."""
        self.sizes[name] = size
        self.bytes += size
        while self.bytes > room:
            self.bytes -= self.sizes.popitem(last=False)[1]

    def remove(self, name: str) -> None:
        self.bytes -= self.sizes.pop(name)


class LRU(EvictionPolicy):
    """Evicts the least recently used record."""

    name = "lru"

    def rank(self, entry: Entry) -> int:
        return entry.last


class FIFO(EvictionPolicy):
    """Evicts the record held longest."""

    name = "fifo"

    def rank(self, entry: Entry) -> int:
        return entry.ticket


class LFU(EvictionPolicy):
    """Evicts the least often used record, and among equals the least recently used."""

    name = "lfu"

    def rank(self, entry: Entry) -> int:
        return entry.uses * _USE + entry.last


class S3FIFO(EvictionPolicy):
    """S3-FIFO, with two queues (https://doi.org/10.1145/3600006.3613147).

    New records enter a small queue, a tenth of the capacity. At its head, a record that was used more than
    once moves to the main queue; others are evicted. The names of those are remembered, and enter the main
    queue if they return. A record that was used moves from the head of the main queue to its end, and loses
    one use.
    """

    name = "s3fifo"
    queued = True

    def __init__(self) -> None:
        self._ghosts = _Ghosts()

    def rank(self, entry: Entry) -> int:
        return entry.ticket

    def queue_of(self, name: str, size: int, room: int) -> int:
        if name not in self._ghosts.sizes:
            return SMALL
        self._ghosts.remove(name)
        return MAIN

    def is_long(self, held: int, limit: int, room: int) -> bool:
        return held * 10 >= limit

    def spares(self, entry: Entry) -> bool:
        if entry.queue == MAIN and entry.uses:
            entry.uses = min(entry.uses, _MOST_USES) - 1
            return True
        if entry.uses > 1:
            entry.uses = 0
            return True
        return False

    def evicted(self, name: str, entry: Entry, room: int) -> None:
        if entry.queue == SMALL:
            self._ghosts.add(name, entry.size, room)


class ARC(EvictionPolicy):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003).

    One queue is for records used once, the other for records used again. Each evicts the least recently used
    record. Evicted names are remembered: if one returns, its queue was too short and gets more bytes.
    """

    name = "arc"
    queued = True
    promotes = True

    def __init__(self) -> None:
        self._ghosts = _Ghosts(), _Ghosts()
        self._small_bytes = 0  # target size of the first queue

    def rank(self, entry: Entry) -> int:
        return entry.last

    def queue_of(self, name: str, size: int, room: int) -> int:
        for queue, ghosts in enumerate(self._ghosts):
            if name in ghosts.sizes:
                step = max(size, size * self._ghosts[1 - queue].bytes // max(1, ghosts.bytes))
                target = self._small_bytes + (step if queue == SMALL else -step)
                self._small_bytes = max(0, min(room, target))
                ghosts.remove(name)
                return MAIN
        return SMALL

    def is_long(self, held: int, limit: int, room: int) -> bool:
        return held * room > self._small_bytes * limit

    def evicted(self, name: str, entry: Entry, room: int) -> None:
        self._ghosts[entry.queue].add(name, entry.size, room)


PLAIN: Sequence[type[EvictionPolicy]] = EvictionPolicy.__subclasses__()
"""The policies above, which learn from uses and evictions alone."""
