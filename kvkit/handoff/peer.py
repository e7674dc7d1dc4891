"""Another node's memory as a tier: asks what its near tiers hold, and pulls it into slots of this node."""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvkit.format.record import Damage
from kvkit.handoff.deadlines import Deadlines
from kvkit.handoff.links import Connections
from kvkit.handoff.protocol import messages
from kvkit.handoff.protocol.messages import MAX_NAMES, MAX_PEER_NAME, AnyMessage, Data, TierRun, check_id
from kvkit.handoff.protocol.states import Unexpected
from kvkit.handoff.transport import addresses
from kvkit.handoff.transport.channel import ChannelError
from kvkit.handoff.transport.link import Handler, Identity, Link
from kvkit.staging import Lease
from kvkit.tiers.base import DamagedObject, OnComplete, Ranges, Tier, TierError, complete, copy_ranges


@dataclass(eq=False, slots=True)
class _Pulling:
    """A pull under way: what still comes, and by when the next of it must. `finish` is called for each."""

    link: Link
    names: Sequence[str]
    targets: Sequence[Lease | memoryview]
    finish: Callable[[int, int, OSError | None], None]
    deadline: float
    due: set[int]

    def room(self, index: int) -> int:
        target = self.targets[index]
        return len(target.buffer if isinstance(target, Lease) else target)


class PeerTier(Tier, Handler):
    """What the node at `address` holds near. Nothing is stored there: a put fails, a delete does nothing.

    Args:
        name: as the policy names it.
        address: of the node's endpoint, see `kvkit.handoff.transport.addresses`.
        timeout_s: how long a connection, an answer, and each record of a pull may take.
        tls: for a connection over TCP.

    Raises:
        ValueError: `address` is none, or not a unix one and there is no secret; or the name is none that can
            be said to a peer.
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
        self.name = check_id("peer", name, MAX_PEER_NAME)
        self._address = address
        self._identity = identity
        self._timeout_s = timeout_s
        self._links = Connections(self, identity, timeout_s=timeout_s, tls=tls)
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Link, Future[tuple[TierRun, ...]]]] = {}
        self._pulls: dict[str, _Pulling] = {}
        self._lock = threading.Lock()
        self._deadlines = Deadlines(f"kvkit-{name}-deadlines", self._expire)

    def match_prefix(self, names: Sequence[str]) -> int:
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
            link.say(messages.Query(number, tuple(names[:MAX_NAMES])))
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
        self._fail(list(self._pulls), lambda *_: TierError(f"tier {self.name!r} is closed"))

    # what the link reports

    def started(self, link: Link) -> None:
        """A peer is there. Raises ChannelError where its rank of this number may have other heads."""
        theirs, mine = link.peer, self._identity
        if theirs is not None and mine.record_ranks > 1 and theirs.ranks != mine.ranks:
            raise ChannelError(
                f"ranks: node {theirs.node!r} has {theirs.ranks}, {mine.node!r} has {mine.ranks}; want a "
                "peer of as many ranks, as each is asked by the rank of its number alone"
            )

    def received(self, link: Link, message: AnyMessage) -> None:
        match message:
            case messages.Found(number, runs):
                with self._lock:
                    _, answer = self._asked.get(number, (link, None))
                if answer is not None and not answer.done():
                    answer.set_result(runs)
            case messages.Data(index=index, size=size):
                pull = self._waiting_for(message, came=True)
                if pull is None:
                    return
                error = None
                if size > pull.room(index):
                    what = f"{pull.names[index]}: {size} bytes do not fit the slot"
                    error = DamagedObject(what, Damage.OVERSIZE)
                pull.finish(index, size, error)
            case messages.Commit(transfer, missing):

                def failure(index: int, name: str) -> OSError:
                    if index in missing:
                        return FileNotFoundError(f"tier {self.name!r} does not hold {name}")
                    return TierError(f"tier {self.name!r}: {name} did not come")

                self._fail([transfer], failure)
                link.say(messages.Release(transfer, "used"))
            case _:
                raise Unexpected(f"{type(message).__name__} is nothing to say to one who pulls")

    def place(self, link: Link, data: Data) -> Lease | memoryview | None:
        pull = self._waiting_for(data, came=False)
        if pull is None or data.size > pull.room(data.index):
            return None
        target = pull.targets[data.index]
        return target.share() if isinstance(target, Lease) else target[: data.size]

    def ended(self, link: Link, error: BaseException) -> None:
        failure = TierError(f"tier {self.name!r}: {error}")
        with self._lock:
            asked = [answer for of, answer in self._asked.values() if of is link]
            pulls = [transfer for transfer, pull in self._pulls.items() if pull.link is link]
        for answer in asked:
            if not answer.done():
                answer.set_exception(failure)
        self._fail(pulls, lambda *_: failure)

    def _connected(self) -> Link:
        """The link to the peer. Raises TierError where the tier is closed, or no thread can be started."""
        try:
            return self._links.to(self._address)
        except ChannelError as error:
            raise TierError(f"tier {self.name!r}: {error}") from error

    def _waiting_for(self, data: Data, *, came: bool) -> _Pulling | None:
        """The pull that waits for a record, until it `came`; None if it is over."""
        with self._lock:
            pull = self._pulls.get(data.transfer)
            if pull is not None:
                if data.index not in pull.due:
                    raise Unexpected(f"transfer {data.transfer}: record {data.index} is not expected")
                pull.deadline = time.monotonic() + self._timeout_s
                if came:
                    pull.due.discard(data.index)
            return pull

    def _get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        held = [lease.share() for lease in leases]

        def finish(index: int, size: int, error: OSError | None) -> None:
            if error is None:
                held[index].used = size
            complete(on_complete, names[index], held[index], error)

        try:
            self._pull(names, held, finish)
        except TierError as error:
            for index in range(len(names)):
                finish(index, 0, error)

    def _read(self, name: str) -> memoryview:
        """A record in memory of its own."""
        done: Future[memoryview] = Future()
        target = memoryview(bytearray(self._identity.slot_bytes))

        def finish(_: int, size: int, error: OSError | None) -> None:
            if error is None:
                done.set_result(target[:size])
            else:
                done.set_exception(error)

        self._pull([name], [target], finish)
        return done.result()  # a pull ends by its deadline

    def _pull(
        self,
        names: Sequence[str],
        targets: Sequence[Lease | memoryview],
        finish: Callable[[int, int, OSError | None], None],
    ) -> None:
        """Ask for records. Raises TierError where the tier is closed."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            link = self._connected()
            transfer = f"{self.name}-{next(self._numbers)}"
            due = set(range(len(names)))
            self._pulls[transfer] = _Pulling(link, names, targets, finish, deadline, due)
            link.say(messages.Pull(transfer, tuple(names)))
            self._deadlines.changed()

    def _fail(self, transfers: Sequence[str], failure: Callable[[int, str], OSError]) -> None:
        """End pulls; `failure` says what went wrong with each record that did not come."""
        for transfer in transfers:
            with self._lock:
                pull = self._pulls.pop(transfer, None)
            if pull is not None:
                for index in sorted(pull.due):
                    pull.finish(index, 0, failure(index, pull.names[index]))

    def _expire(self, now: float) -> float | None:
        """End pulls of which nothing came for too long; the next deadline."""
        with self._lock:
            late = {name: pull.link for name, pull in self._pulls.items() if pull.deadline <= now}
        for transfer, link in late.items():
            link.say(messages.Release(transfer, "too late"))
        self._fail(list(late), lambda _, name: TimeoutError(f"tier {self.name!r}: {name} is late"))
        with self._lock:
            return min((pull.deadline for pull in self._pulls.values()), default=None)
