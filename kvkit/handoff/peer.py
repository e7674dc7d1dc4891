"""Another node's memory as a tier: queries its host-memory tiers, and pulls records from them."""

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
from kvkit.handoff.transport.handshake import Identity
from kvkit.handoff.transport.link import Handler, Link
from kvkit.staging import Lease
from kvkit.tiers.base import DamagedObject, OnComplete, Ranges, Tier, TierError, complete, copy_ranges


@dataclass(eq=False, slots=True)
class _Pull:
    """A pull in flight.

    Attributes:
        targets: memory for each record.
        finish: called once for each record, with its index, its size and an error or None.
        deadline: monotonic time by which the next record must arrive.
        due: indices of the records that have not arrived.
    """

    link: Link
    names: Sequence[str]
    targets: Sequence[Lease | memoryview]
    finish: Callable[[int, int, OSError | None], None]
    deadline: float
    due: set[int]

    def capacity(self, index: int) -> int:
        """Return the bytes that fit the target of a record."""
        target = self.targets[index]
        return len(target.buffer if isinstance(target, Lease) else target)


class PeerTier(Tier, Handler):
    """Host memory of the node at `address`. It is only read: `put` fails, `delete` does nothing.

    Args:
        name: name of the tier in the policy.
        address: address of the node's endpoint, see `kvkit.handoff.transport.addresses`.
        timeout_s: limit for connecting, for an answer, and for each record of a pull, in seconds.
        tls: TLS context for a connection over TCP.

    Raises:
        ValueError: `address` is invalid or needs a secret and has none, or `name` is no valid peer name.
    """

    read_only = True

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
        self._queries: dict[int, tuple[Link, Future[tuple[TierRun, ...]]]] = {}
        self._pulls: dict[str, _Pull] = {}
        self._lock = threading.Lock()
        self._deadlines = Deadlines(f"kvkit-{name}-deadlines", self._expire)

    def match_prefix(self, names: Sequence[str]) -> int:
        """As in `Tier`: the longest leading run in any host-memory tier of the peer.

        Raises:
            OSError: the peer cannot be connected to, is refused, or does not answer in time.
        """
        if not names:
            return 0
        answer: Future[tuple[TierRun, ...]] = Future()
        with self._lock:
            link, number = self._link(), next(self._numbers)
            self._queries[number] = link, answer
            link.queue_message(messages.Query(number, tuple(names[:MAX_NAMES])))
        try:
            runs = answer.result(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"tier {self.name!r}: no answer within {self._timeout_s} s") from None
        finally:
            with self._lock:
                self._queries.pop(number, None)
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
        """As in `Tier`, by pulling the record: the protocol has no message for its size."""
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

    # callbacks of the link

    def handle_connected(self, link: Link) -> None:
        """Check a connected peer. Raises ChannelError if its engine has another number of ranks."""
        peer, identity = link.peer, self._identity
        if peer is not None and identity.record_ranks > 1 and peer.ranks != identity.ranks:
            raise ChannelError(
                f"ranks: node {peer.node!r} has {peer.ranks}, {identity.node!r} has {identity.ranks}; want a "
                "peer of as many ranks: each rank reads only from the peer's rank of the same number"
            )

    def handle_message(self, link: Link, message: AnyMessage) -> None:
        match message:
            case messages.Found(number, runs):
                with self._lock:
                    _, answer = self._queries.get(number, (link, None))
                if answer is not None and not answer.done():
                    answer.set_result(runs)
            case messages.Data(index=index, size=size):
                pull = self._pull_of(message, arrived=True)
                if pull is None:
                    return
                error = None
                if size > pull.capacity(index):
                    detail = f"{pull.names[index]}: {size} bytes do not fit the slot"
                    error = DamagedObject(detail, Damage.OVERSIZE)
                pull.finish(index, size, error)
            case messages.Commit(transfer, missing):

                def failure(index: int, name: str) -> OSError:
                    if index in missing:
                        return FileNotFoundError(f"tier {self.name!r} does not hold {name}")
                    return TierError(f"tier {self.name!r}: {name} did not come")

                self._fail([transfer], failure)
                link.queue_message(messages.Release(transfer, "used"))
            case _:
                raise Unexpected(f"{type(message).__name__}: a node that pulls takes no such message")

    def payload_target(self, link: Link, data: Data) -> Lease | memoryview | None:
        pull = self._pull_of(data, arrived=False)
        if pull is None or data.size > pull.capacity(data.index):
            return None
        target = pull.targets[data.index]
        return target.share() if isinstance(target, Lease) else target[: data.size]

    def handle_ended(self, link: Link, error: BaseException) -> None:
        failure = TierError(f"tier {self.name!r}: {error}")
        with self._lock:
            answers = [answer for query_link, answer in self._queries.values() if query_link is link]
            pulls = [transfer for transfer, pull in self._pulls.items() if pull.link is link]
        for answer in answers:
            if not answer.done():
                answer.set_exception(failure)
        self._fail(pulls, lambda *_: failure)

    def _link(self) -> Link:
        """Return the link to the peer. Raises TierError if the tier is closed or no thread can start."""
        try:
            return self._links.link_to(self._address)
        except ChannelError as error:
            raise TierError(f"tier {self.name!r}: {error}") from error

    def _pull_of(self, data: Data, *, arrived: bool) -> _Pull | None:
        """Return the pull that waits for a record; None if it is over. `arrived`: the record has arrived."""
        with self._lock:
            pull = self._pulls.get(data.transfer)
            if pull is not None:
                if data.index not in pull.due:
                    raise Unexpected(f"transfer {data.transfer}: record {data.index} is not expected")
                pull.deadline = time.monotonic() + self._timeout_s
                if arrived:
                    pull.due.discard(data.index)
            return pull

    def _get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        shares = [lease.share() for lease in leases]

        def finish(index: int, size: int, error: OSError | None) -> None:
            if error is None:
                shares[index].used = size
            complete(on_complete, names[index], shares[index], error)

        try:
            self._pull(names, shares, finish)
        except TierError as error:
            for index in range(len(names)):
                finish(index, 0, error)

    def _read(self, name: str) -> memoryview:
        """Return a record in memory of its own."""
        done: Future[memoryview] = Future()
        target = memoryview(bytearray(self._identity.slot_bytes))

        def finish(_: int, size: int, error: OSError | None) -> None:
            if error is None:
                done.set_result(target[:size])
            else:
                done.set_exception(error)

        self._pull([name], [target], finish)
        return done.result()  # returns by the pull's deadline

    def _pull(
        self,
        names: Sequence[str],
        targets: Sequence[Lease | memoryview],
        finish: Callable[[int, int, OSError | None], None],
    ) -> None:
        """Request records from the peer. Raises TierError if the tier is closed."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            link = self._link()
            transfer = f"{self.name}-{next(self._numbers)}"
            due = set(range(len(names)))
            self._pulls[transfer] = _Pull(link, names, targets, finish, deadline, due)
            link.queue_message(messages.Pull(transfer, tuple(names)))
            self._deadlines.changed()

    def _fail(self, transfers: Sequence[str], failure: Callable[[int, str], OSError]) -> None:
        """End pulls; `failure` returns the error of each record that did not arrive."""
        for transfer in transfers:
            with self._lock:
                pull = self._pulls.pop(transfer, None)
            if pull is not None:
                for index in sorted(pull.due):
                    pull.finish(index, 0, failure(index, pull.names[index]))

    def _expire(self, now: float) -> float | None:
        """End pulls past their deadline, and return the next deadline."""
        with self._lock:
            late = {name: pull.link for name, pull in self._pulls.items() if pull.deadline <= now}
        for transfer, link in late.items():
            link.queue_message(messages.Release(transfer, "too late"))
        self._fail(
            list(late), lambda _, name: TimeoutError(f"tier {self.name!r}: {name} did not arrive in time")
        )
        with self._lock:
            return min((pull.deadline for pull in self._pulls.values()), default=None)
