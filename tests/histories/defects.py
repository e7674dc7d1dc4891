"""Defects that are planted in the processes of a run, which has to find them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvkit.cache import Cache
from kvkit.format import record as records
from kvkit.format.keys import namespace_digest
from kvkit.format.layout import Namespace
from kvkit.handoff.receiver import Receiver
from kvkit.lab.testbed import engine_stub
from kvkit.staging import Lease
from kvkit.tiers.folder import Folder
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.redis import RedisTier
from kvkit.tiers.shm.tier import ShmTier

LATER_S = 0.02
"""How much later than it should something is done: others look meanwhile."""

LOST = 10
"""Of so many writes one is lost."""


@dataclass(frozen=True, slots=True)
class Defect:
    """A change of the product.

    Attributes:
        setup: that finds it.
        plant: makes the change, in the process that calls it.
    """

    setup: str
    plant: Callable[[], object]


def _in_place() -> None:
    """A file has its name before it has all its bytes."""

    def write(self: Folder, path: str, data: memoryview) -> None:
        self._make_folder(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            time.sleep(LATER_S)
            file.write(data[len(data) // 2 :])

    Folder._write = write  # type: ignore[method-assign]


def _shown_first() -> None:
    """A pool holds a record whose bytes are still to come."""

    def write(self: ShmTier, name: str, slot: Lease, source: Lease) -> None:
        pool = self._pool
        assert pool is not None
        with pool._locked():
            pool._index.set_held(slot.slot, 1)
        time.sleep(LATER_S)
        slot.record[:] = source.record
        pool._unpublished.pop(name, None)
        slot.release()
        self._complete(name, None)

    ShmTier._write = write  # type: ignore[method-assign]


def _over_gaps() -> None:
    """A lookup counts what lies after a gap."""

    def match_prefix(self: ObjectTier, names: Sequence[str]) -> int:
        return max((i + 1 for i, name in enumerate(names) if self.size(name) is not None), default=0)

    ObjectTier.match_prefix = match_prefix  # type: ignore[method-assign]


def _forgets_memory() -> None:
    """What lies in memory survives a clear."""
    clear = Cache.clear

    def but_memory(self: Cache, tier: str, timeout_s: float | None = None) -> int:
        return 0 if tier == "memory" else clear(self, tier, timeout_s)

    Cache.clear = but_memory  # type: ignore[method-assign]


def _clears_later() -> None:
    """A clear returns before it has deleted anything."""
    clear = Cache.clear

    def later(self: Cache, tier: str, timeout_s: float | None = None) -> int:
        timer = threading.Timer(LATER_S, partial(clear, self, tier, timeout_s))
        timer.daemon = True
        timer.start()
        return 0

    Cache.clear = later  # type: ignore[method-assign]


def _knows_forever() -> None:
    """What others deleted stays known after a clear."""
    ObjectTier.scan = lambda self: self._store.scan()  # type: ignore[method-assign]


def _same_after_reset() -> None:
    """The keys of what is stored after a reset are those of what was stored before."""

    def digest(namespace: Namespace) -> bytes:
        return namespace_digest(replace(namespace, revision=""))

    for module in (records, engine_stub):
        module.namespace_digest = digest  # type: ignore[attr-defined]


def _remembers() -> None:
    """A lookup on a server answers what it has answered before."""
    match_prefix = RedisTier.match_prefix
    held: set[str] = set()

    def remembering(self: RedisTier, names: Sequence[str]) -> int:
        known = next((i for i, name in enumerate(names) if name not in held), len(names))
        count = known + match_prefix(self, names[known:])
        held.update(names[:count])
        return count

    RedisTier.match_prefix = remembering  # type: ignore[method-assign]


def _loses() -> None:
    """One write in so many is not made, and counts as done."""
    write, numbers = RedisTier.write, itertools.count(1)

    def losing(self: RedisTier, name: str, record: memoryview) -> None:
        if next(numbers) % LOST:
            write(self, name, record)

    RedisTier.write = losing  # type: ignore[method-assign]


def _shows_parts() -> None:
    """A receiver shows records of a transfer that is not complete."""
    borrow = Receiver.borrow

    def arriving(self: Receiver) -> dict[str, Lease]:
        found = {}
        for transfer in self._buffer.transfers.values():
            for index in transfer.arrived & self._filling.get(transfer.id, {}).keys():
                found[transfer.names[index]] = self._filling[transfer.id][index]
        return found

    def count(self: Receiver, names: Sequence[str]) -> int:
        with self._changed:
            there = self._records.keys() | arriving(self).keys()
            return next((i for i, name in enumerate(names) if name not in there), len(names))

    def lend(self: Receiver, name: str) -> Lease | None:
        with self._changed:
            early = arriving(self).get(name)
            return borrow(self, name) if early is None else early.share()

    Receiver.match_prefix = count  # type: ignore[method-assign]
    Receiver.borrow = lend  # type: ignore[method-assign]


def _keeps_released() -> None:
    """What nobody needs any more stays in the receiver."""
    Receiver.release = lambda self, request_id, reason="used": None  # type: ignore[method-assign]


DEFECTS: Mapping[str, Defect] = {
    "a file has its name before its bytes": Defect("folder", _in_place),
    "a lookup counts what lies after a gap": Defect("folder", _over_gaps),
    "a clear forgets memory": Defect("folder", _forgets_memory),
    "a clear leaves what others deleted": Defect("folder", _knows_forever),
    "keys after a reset are those before": Defect("folder", _same_after_reset),
    "a pool shows a record before its bytes": Defect("pool", _shown_first),
    "a clear returns before it has deleted": Defect("pool", _clears_later),
    "a lookup on a server remembers": Defect("server", _remembers),
    "a write is lost": Defect("server", _loses),
    "a receiver shows parts of a transfer": Defect("pd", _shows_parts),
    "what was released stays": Defect("pd", _keeps_released),
}
