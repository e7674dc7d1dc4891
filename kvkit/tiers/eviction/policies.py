"""Eviction policies: which of the records that may go, goes first. A new one is a class above `POLICIES`, or
of another package (`kvkit.tiers.eviction.plugins`).

A policy sees the records of one `EvictionState`, which keeps them in one queue, or in two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

SMALL, MAIN = 0, 1
"""The queues: without `EvictionPolicy.queued` all is in the first."""
NORMAL, HIGHEST = 35, 100
"""Priorities: of what nobody has given one, and the most; 0 is the least. TensorRT-LLM has the same ones."""


def prevails(given: int, before: int) -> bool:
    """Tell whether a priority replaces that of a record: the highest counts, but for `NORMAL`."""
    return given != before and (before == NORMAL or given > before)


_MOST_USES = 3  # what s3fifo counts up to
_USE = 1 << 48  # a use weighs more than any number of events


@dataclass(slots=True)
class Entry:
    """A held record.

    Attributes:
        name: as `EvictionState.entries` has it.
        size: its bytes.
        parent: the record that it follows; None if it begins a chain, or nobody has said.
        owner: whose quota it counts against.
        ticket: the event that brought it.
        last: the event that used it last.
        uses: how often it was used since it came, or since its queue let it pass.
        queue: `SMALL` or `MAIN`.
        priority: what has a lower one goes first, whatever the policy.
        followers: held records whose parent it is.
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


class EvictionPolicy(ABC):
    """One for each state. What is not abstract is for policies with two queues, and is called for them alone.

    Attributes:
        name: as settings call one of kvkit's own.
        queued: whether there are two queues.
        promotes: whether a second use moves a record from `SMALL` to `MAIN`.
        failure: what went wrong in a policy of another package; empty: nothing.
    """

    name: ClassVar[str]
    queued: bool = False
    promotes: bool = False
    failure: str = ""

    @abstractmethod
    def rank(self, entry: Entry) -> int:
        """Within a queue the lowest goes first. It depends on the entry alone, and never falls while held."""

    def queue_of(self, name: str, size: int, room: int) -> int:
        """The queue of a newcomer; `room` is the bytes that may be held. Mutates."""
        return SMALL

    def is_long(self, held: int, limit: int, room: int) -> bool:
        """Tell whether `SMALL`, with `held` bytes of what may have `limit`, is the one to shrink."""
        return True

    def spares(self, entry: Entry) -> bool:
        """Tell whether a record whose turn it is goes to the end of `MAIN` instead. Mutates `entry.uses`."""
        return False

    def evicted(self, name: str, entry: Entry, room: int) -> None:  # noqa: B027 - optional
        """Note that a record went. Mutates."""


@dataclass(slots=True)
class _Ghosts:
    """Names that left a queue, the oldest first, with their bytes: as many as may be held."""

    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    bytes: int = 0

    def add(self, name: str, size: int, room: int) -> None:
        self.sizes[name] = size
        self.bytes += size
        while self.bytes > room:
            self.bytes -= self.sizes.popitem(last=False)[1]

    def remove(self, name: str) -> None:
        self.bytes -= self.sizes.pop(name)


class LRU(EvictionPolicy):
    """The least recently used."""

    name = "lru"

    def rank(self, entry: Entry) -> int:
        return entry.last


class FIFO(EvictionPolicy):
    """The one held longest."""

    name = "fifo"

    def rank(self, entry: Entry) -> int:
        return entry.ticket


class LFU(EvictionPolicy):
    """The least often used, of these the least recently used."""

    name = "lfu"

    def rank(self, entry: Entry) -> int:
        return entry.uses * _USE + entry.last


class S3FIFO(EvictionPolicy):
    """Two queues (https://doi.org/10.1145/3600006.3613147).

    Newcomers pass through a small one, a tenth of the capacity, and leave unless they were used again
    meanwhile; names that left so are remembered, and enter the main queue at once when they return. What is
    used there passes again, and is worth less each time.
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
    """Two queues (Megiddo and Modha, FAST 2003), of records that were used again and of those that were not.

    The least recently used of either goes first. Names that left are remembered, and when one returns, its
    queue had been too short: it gets more of the room.
    """

    name = "arc"
    queued = True
    promotes = True

    def __init__(self) -> None:
        self._ghosts = _Ghosts(), _Ghosts()
        self._small_bytes = 0  # the room of the first queue

    def rank(self, entry: Entry) -> int:
        return entry.last

    def queue_of(self, name: str, size: int, room: int) -> int:
        for queue, ghosts in enumerate(self._ghosts):
            if name in ghosts.sizes:
                step = max(size, size * self._ghosts[1 - queue].bytes // max(1, ghosts.bytes))
                wanted = self._small_bytes + (step if queue == SMALL else -step)
                self._small_bytes = max(0, min(room, wanted))
                ghosts.remove(name)
                return MAIN
        return SMALL

    def is_long(self, held: int, limit: int, room: int) -> bool:
        return held * room > self._small_bytes * limit

    def evicted(self, name: str, entry: Entry, room: int) -> None:
        self._ghosts[entry.queue].add(name, entry.size, room)


POLICIES: Mapping[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in EvictionPolicy.__subclasses__()
}
"""By name."""
