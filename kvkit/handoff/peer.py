"""Another node's memory as a tier: asks what its near tiers hold, and pulls it into slots of this node."""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvkit.format.record import Damage
from kvkit.handoff.deadlines import Deadlines
from kvkit.handoff.links import Connections
from kvkit.handoff.protocol.messages import (
    MAX_NAMES,
    AnyMessage,
    Commit,
    Data,
    Found,
    Pull,
    Query,
    Release,
    TierRun,
    peer_name,
)
from kvkit.handoff.protocol.states import Unexpected
from kvkit.handoff.transport import addresses
from kvkit.handoff.transport.channel import ChannelError
from kvkit.handoff.transport.link import Identity, Link
from kvkit.staging import Lease
from kvkit.tiers.base import (
    DamagedObject,
    OnComplete,
    Ranges,
    Tier,
    TierError,
    complete,
    copy_ranges,
)


@dataclass(eq=False, slots=True)
class _Pulling:
    """A pull under way: what still comes, and by when the next of it must."""

    link: Link
    names: tuple[str, ...]
    place: Callable[[int, int], Lease | memoryview | None]
    finish: Callable[[int, int, OSError | None], None]
    deadline: float
    due: set[int] = field(default_factory=set)


class PeerTier(Tier):
    """What the node at `address` holds near. Nothing is stored there: a put fails, a delete does nothing.

    Args:
        name: as the policy names it.
        address: of the node's endpoint, see `kvkit.handoff.transport.addresses`.
        identity: what this node says of itself.
        timeout_s: how long a connection, an answer, and each record of a pull may take.
        tls: for a connection over TCP.

    Raises:
        ValueError: `address` is none, or not a unix one and there is no secret; or the name is none that can
            be said to a peer, see `kvkit.handoff.protocol.messages.peer_name`.
    """

    def __init__(
        self,
        name: str,
        address: str,
        identity: Identity,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        addresses.check_secret(address, bool(identity.secret))
        self.name = peer_name(name)
        self._address = address
        self._slot_bytes = identity.slot_bytes
        self._timeout_s = timeout_s
        self._links = Connections(self, identity, timeout_s=timeout_s, tls=tls)
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Link, Future[tuple[TierRun, ...]]]] = {}
        self._pulls: dict[str, _Pulling] = {}
        self._lock = threading.Lock()
        self._deadlines = Deadlines(f"kvkit-{name}-deadlines", self._expire)

    def count_leading(self, names: Sequence[str]) -> int:
        """As in `Tier`: the longest run of any near tier of the peer.

        Raises:
            OSError: the peer cannot be reached, is none to talk to, or does not answer in time.
        """
        if not names:
            return 0
        answer: Future[tuple[TierRun, ...]] = Future()
        with self._lock:
            link, number = self._connected(), next(self._numbers)
            self._asked[number] = link, answer
            link.say(Query(number, tuple(names[:MAX_NAMES])))
        try:
            runs = answer.result(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"tier {self.name!r}: no answer within {self._timeout_s} s") from None
        finally:
            with self._lock:
                self._asked.pop(number, None)
        return max((run.records for run in runs), default=0)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        for start in range(0, len(names), MAX_NAMES):
            self._get(names[start : start + MAX_NAMES], leases[start : start + MAX_NAMES], on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        for name, lease in zip(names, leases, strict=True):
            error = TierError(f"tier {self.name!r} is another node's memory: nothing is stored there")
            complete(on_complete, name, lease.share(), error)

    def delete(self, names: Sequence[str]) -> None:
        pass

    def size(self, name: str) -> int | None:
        """As in `Tier`; pulls the record, since nothing else tells."""
        try:
            return len(self._read(name))
        except FileNotFoundError:
            return None

    def scan(self) -> Iterator[tuple[str, int]]:
        yield from ()

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """As in `Tier`, by pulling the whole record."""
        copy_ranges(name, self._read(name), ranges, buffers)

    def close(self) -> None:
        self._links.close(self._timeout_s)
        self._deadlines.close(self._timeout_s)
        self._fail(list(self._pulls), lambda name: TierError(f"tier {self.name!r} is closed"))

    # what the link reports

    def started(self, link: Link) -> None:
        pass

    def received(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Found):
            with self._lock:
                asked = self._asked.get(message.id)
            if asked is not None and not asked[1].done():
                asked[1].set_result(message.runs)
        elif isinstance(message, Data):
            self._arrived(message)
        elif isinstance(message, Commit):
            missing = frozenset(message.missing)
            self._fail(
                [message.transfer],
                lambda name: FileNotFoundError(f"tier {self.name!r} does not hold {name}"),
                missing,
            )
            link.say(Release(message.transfer, "used"))
        else:
            raise Unexpected(f"{type(message).__name__} is nothing to say to one who pulls")

    def place(self, link: Link, data: Data) -> Lease | memoryview | None:
        with self._lock:
            pull = self._pulls.get(data.transfer)
            if pull is None:
                return None
            if data.index not in pull.due:
                raise Unexpected(f"transfer {data.transfer}: record {data.index} is not expected")
            pull.deadline = time.monotonic() + self._timeout_s
        return pull.place(data.index, data.size)

    def ended(self, link: Link, error: BaseException) -> None:
        with self._lock:
            asked = [answer for of, answer in self._asked.values() if of is link]
            pulls = [transfer for transfer, pull in self._pulls.items() if pull.link is link]
        failure = TierError(f"tier {self.name!r}: {error}")
        for answer in asked:
            if not answer.done():
                answer.set_exception(failure)
        self._fail(pulls, lambda name: failure)

    def _connected(self) -> Link:
        """The link to the peer.

        Raises:
            TierError: the tier is closed, or no thread can be started.
        """
        try:
            return self._links.to(self._address)
        except ChannelError as error:
            raise TierError(f"tier {self.name!r}: {error}") from error

    def _get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        held = [lease.share() for lease in leases]

        def place(index: int, size: int) -> Lease | None:
            lease = held[index]
            return lease.share() if size <= len(lease.buffer) else None

        def finish(index: int, size: int, error: OSError | None) -> None:
            lease = held[index]
            if error is None and size > len(lease.buffer):
                error = DamagedObject(f"{names[index]}: {size} bytes do not fit the slot", Damage.OVERSIZE)
            if error is None:
                lease.used = size
            complete(on_complete, names[index], lease, error)

        try:
            self._pull(tuple(names), place, finish)
        except TierError as error:
            for index in range(len(names)):
                finish(index, 0, error)

    def _read(self, name: str) -> memoryview:
        """A record in memory of its own.

        Raises:
            OSError: it is missing, or did not come.
        """
        done: Future[memoryview] = Future()
        target = memoryview(b"")

        def place(_: int, size: int) -> memoryview | None:
            nonlocal target
            target = memoryview(bytearray(size)) if size <= self._slot_bytes else target
            return target if size == len(target) else None

        def finish(_: int, size: int, error: OSError | None) -> None:
            if error is None and size != len(target):
                error = DamagedObject(f"{name}: {size} bytes are more than a record has", Damage.OVERSIZE)
            if error is None:
                done.set_result(target)
            else:
                done.set_exception(error)

        self._pull((name,), place, finish)
        return done.result()  # a pull ends by its deadline

    def _pull(
        self,
        names: tuple[str, ...],
        place: Callable[[int, int], Lease | memoryview | None],
        finish: Callable[[int, int, OSError | None], None],
    ) -> None:
        """Ask for records. `finish` is called once for each.

        Raises:
            TierError: the tier is closed.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            link = self._connected()
            transfer = f"{self.name}-{next(self._numbers)}"
            self._pulls[transfer] = _Pulling(link, names, place, finish, deadline, set(range(len(names))))
            link.say(Pull(transfer, names))
            self._deadlines.changed()

    def _arrived(self, data: Data) -> None:
        with self._lock:
            pull = self._pulls.get(data.transfer)
            if pull is None:
                return
            pull.due.discard(data.index)
        pull.finish(data.index, data.size, None)

    def _fail(
        self,
        transfers: Sequence[str],
        failure: Callable[[str], OSError],
        missing: frozenset[int] | None = None,
    ) -> None:
        """End pulls; what did not come failed: because it is `missing`, or for no reason that was given."""
        for transfer in transfers:
            with self._lock:
                pull = self._pulls.pop(transfer, None)
            if pull is None:
                continue
            for index in sorted(pull.due):
                name = pull.names[index]
                error = failure(name)
                if missing is not None and index not in missing:
                    error = TierError(f"tier {self.name!r}: {name} did not come")
                pull.finish(index, 0, error)

    def _expire(self, now: float) -> float | None:
        """End pulls of which nothing came for too long; the next deadline."""
        with self._lock:
            late = {name: pull.link for name, pull in self._pulls.items() if pull.deadline <= now}
        for transfer, link in late.items():
            link.say(Release(transfer, "too late"))
        self._fail(list(late), lambda name: TimeoutError(f"tier {self.name!r}: {name} is late"))
        with self._lock:
            return min((pull.deadline for pull in self._pulls.values()), default=None)
