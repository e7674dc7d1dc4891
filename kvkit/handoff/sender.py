"""Send records to peers as `protocol.outgoing` decides, over one link to each peer."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvkit.handoff.deadlines import Deadlines
from kvkit.handoff.links import Connections
from kvkit.handoff.protocol import messages, outgoing
from kvkit.handoff.protocol.messages import MAX_DEADLINE_S, MAX_NAMES, Hello, check_id
from kvkit.handoff.protocol.outgoing import Outgoing, Send, Stage, Transition
from kvkit.handoff.protocol.states import Outcome, RequestRef, Unexpected
from kvkit.handoff.transport import addresses
from kvkit.handoff.transport.channel import ChannelError
from kvkit.handoff.transport.handshake import Identity
from kvkit.handoff.transport.link import Handler, Link
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import OnComplete, TierError, complete

log = logging.getLogger(__name__)


class HandoffError(RuntimeError):
    """A transfer failed: refused, released by its receiver, cancelled or late. The message says why."""


def _uncancellable() -> Future[Any]:
    """Return a future that nobody can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False, slots=True)
class Sending:
    """A transfer in flight. Threads of the sender complete its futures.

    Attributes:
        state: state of the transfer, as the sender knows it.
        link: link to the receiver.
        on_change: called with each of its futures that is done, and with this object when nothing is queued.
        admitted: done when the receiver has leased slots; returns the number of records that it lacks. Until
            then, `Sender.put` sends no records and `Sender.borrow_slots` returns no slots.
        done: done when the receiver has everything; returns the number of records that were never put.
        queued: number of records that were put and are not sent yet.
        borrowed: by name, slots of the receiver that are borrowed: neither put nor returned.
        held_messages: messages that allow the receiver to reuse its slots; held back while any is borrowed.
    """

    state: Outgoing
    link: Link
    on_change: Callable[[Any], object]
    admitted: Future[int] = field(default_factory=_uncancellable)
    done: Future[int] = field(default_factory=_uncancellable)
    queued: int = 0
    borrowed: dict[str, Lease] = field(default_factory=dict)
    held_messages: list[messages.Commit | messages.Cancel] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.state.id

    def queue_or_hold(self, message: messages.Commit | messages.Cancel) -> None:
        """Queue a message after which the receiver may reuse its slots, once none is borrowed. Mutates."""
        if self.borrowed:
            self.held_messages.append(message)
        else:
            self.link.queue_message(message)

    def return_slot(self, name: str) -> None:
        """End the borrowing of a record's slot, if it is borrowed. Mutates."""
        self.borrowed.pop(name, None)
        if not self.borrowed:
            for message in self.held_messages:
                self.link.queue_message(message)
            self.held_messages.clear()

    def completions(self, before: Stage) -> list[Callable[[], None]]:
        """Return calls that complete the futures, if the change from stage `before` decides them."""
        state, was_asked = self.state, before is Stage.ASKED
        if state.stage is not Stage.ENDED:
            return [partial(self.admitted.set_result, len(state.sends))] if was_asked else []
        if state.error is None:
            return [partial(self.done.set_result, state.missing)]
        error = HandoffError(f"transfer {state.id}: {state.error}")
        futures = (self.admitted, self.done) if was_asked else (self.done,)
        return [partial(future.set_exception, error) for future in futures]


@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """Slots borrowed from receivers, each for a record that is put; an unused slot is released."""

    leases: Sequence[Lease]
    sendings: Collection[Sending]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow writing into the slots within the context. Keep it short: a link that ends waits for it.

        Raises:
            HandoffError: a transfer is over.
            ChannelError: a link ended.
        """
        with ExitStack() as stack:
            for link in {sending.link for sending in self.sendings}:
                stack.enter_context(link.writing())
            for sending in self.sendings:
                if sending.state.stage is Stage.ENDED:
                    raise HandoffError(f"transfer {sending.id}: {sending.state.error or 'it is over'}")
            yield


@dataclass(eq=False, slots=True)
class _Put:
    """A record that is being sent to several transfers.

    `remaining`: number of transfers that it is not sent to yet, and 1 until it is queued for all of them.
    """

    name: str
    lease: Lease
    on_complete: OnComplete
    remaining: int = 1
    error: TierError | None = None


class Sender(Handler):
    """Sends records to peers. Thread-safe; no call but `close` waits for a peer.

    Args:
        timeout_s: limit for connecting and for one frame, in seconds.
        transfer_s: longest wait of a transfer for a record or for the receiver's confirmation, in seconds.
        tls: TLS context for connections over TCP.
        max_ranks: most ranks of a peer's engine; a peer that reports more is refused.

    Attributes:
        outcomes: counts of transfers that were done, not admitted, or failed after admission.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        timeout_s: float,
        transfer_s: float,
        tls: ssl.SSLContext | None = None,
        max_ranks: int = messages.MAX_RANKS,
    ) -> None:
        self._max_ranks = max_ranks
        self._has_secret = bool(identity.secret)
        self._transfer_s = transfer_s
        self.outcomes: Counter[Outcome] = Counter()
        self._links = Connections(self, identity, timeout_s=timeout_s, tls=tls)
        self._open_transfers: dict[str, Sending] = {}
        self._lenders: set[Sending] = set()
        self._completions: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._deadlines = Deadlines("kvkit-handoff-overdue", self._expire)

    def open(
        self,
        transfer: str,
        address: str,
        names: Sequence[str],
        deadline_s: float,
        on_change: Callable[[Any], object] = lambda _: None,
        request: RequestRef | None = None,
    ) -> Sending:
        """Ask the receiver at `address` for slots for all of `names`, within `deadline_s` seconds.

        Args:
            on_change: as in `Sending`; called from any thread.
            request: request that the transfer belongs to; None if the transfer is the whole request.

        Raises:
            HandoffError: the transfer id is in use, the sender is closed, no thread can be started, or
                there are no names or more than `MAX_NAMES`.
            ValueError: `address` or `transfer` is invalid, the address needs a secret and has none, or
                `deadline_s` is not above 0 and at most `MAX_DEADLINE_S`.
        """
        check_id("transfer", transfer)
        if not 0 < deadline_s <= MAX_DEADLINE_S:
            raise ValueError(f"deadline_s={deadline_s}: want more than 0 and at most {MAX_DEADLINE_S}")
        if not 1 <= len(names) <= MAX_NAMES:
            raise HandoffError(f"transfer {transfer}: {len(names)} records; want 1 to {MAX_NAMES}")
        with self._changed:
            if transfer in self._open_transfers or any(sending.id == transfer for sending in self._lenders):
                raise HandoffError(f"transfer {transfer}: this id is in use")
            link = self._link(address, f"transfer {transfer}")
            state = Outgoing.opened(transfer, names, deadline_s, self._transfer_s, time.monotonic())
            sending = Sending(state, link, on_change)
            for future in (sending.admitted, sending.done):
                future.add_done_callback(on_change)
            self._open_transfers[transfer] = sending
            of = request or RequestRef(transfer)
            link.queue_message(messages.Reserve(transfer, tuple(names), deadline_s, of.id, of.parts))
            self._deadlines.changed()
            return sending

    def connect(self, address: str) -> Future[Hello]:
        """Connect to the node at `address`; the future returns its hello, or raises ChannelError.

        Raises:
            HandoffError: the sender is closed, or no thread can be started.
            ValueError: `address` is invalid, or needs a secret and has none.
        """
        with self._changed:
            return self._link(address, address).hello

    def unsent(self, names: Sequence[str]) -> set[str]:
        """Return those of `names` that a transfer waits for."""
        with self._changed:
            states = [sending.state for sending in self._open_transfers.values()]
            return {name for name in names if any(name in state.unsent for state in states)}

    def borrow_slots(self, sendings: Collection[Sending], names: Sequence[str]) -> RemoteSlots | None:
        """Borrow a receiver's slot for each of `names`, from the first transfer that lacks the record.

        Returns None if no transfer lacks one of the records any more, or if this process cannot access a
        slot. A record that is written there is put like any other, and is copied to other transfers. Until
        the slot is put or released, its transfer takes the record from no other slot. If the receiver
        releases the transfer meanwhile, the sender answers only after that.
        """
        leases: list[Lease] = []
        lenders: set[Sending] = set()
        with self._changed:
            for name in names:
                lacking = (s for s in sendings if name in s.state.unsent and name not in s.borrowed)
                sending = next(lacking, None)
                lease = None if sending is None else self._borrow_slot(sending, name)
                if sending is None or lease is None:
                    release_all(leases)
                    return None
                leases.append(lease)
                lenders.add(sending)
        return RemoteSlots(leases, lenders)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        """Send records to every transfer that waits for them; as `Tier.put`.

        A record completes when it is sent to all of them, or is in their shared memory; a record that no
        transfer waits for completes at once. `Sending.done` reports the arrival of a whole transfer.
        """
        for name, lease in zip(names, leases, strict=True):
            record = _Put(name, lease.share(), on_complete)
            with self._changed:
                for sending in list(self._open_transfers.values()):
                    borrowed = sending.borrowed.get(name)
                    if borrowed is None or borrowed.same_slot(lease):
                        self._return_slot(sending, name)
                        self._adopt(sending, outgoing.put(sending.state, name, time.monotonic()), record)
            self._record_sent(None, record, None)
        self._complete()

    def finish(self, transfer: str) -> None:
        """Finish a transfer with the records that were put; report the rest to its receiver as missing."""
        self._apply(transfer, partial(outgoing.finish, now=time.monotonic()))

    def cancel(self, transfer: str, reason: str = "cancelled") -> None:
        """Cancel a transfer. Does nothing if it is over."""
        self._apply(transfer, partial(outgoing.cancelled, reason=reason))

    def transfers(self) -> dict[str, Stage]:
        """Return the stage of every transfer that is not over."""
        with self._changed:
            return {name: sending.state.stage for name, sending in self._open_transfers.items()}

    def close(self, timeout_s: float) -> None:
        """Cancel transfers that are not confirmed within `timeout_s` seconds, then end every link."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._open_transfers, timeout_s)
            open_transfers = list(self._open_transfers)
        for transfer in open_transfers:
            self.cancel(transfer, "the sender is closing")
        self._links.close(timeout_s)
        self._deadlines.close(timeout_s)

    # callbacks of links

    def handle_connected(self, link: Link) -> None:
        """Check a connected peer. Raises ChannelError if its engine has too many ranks."""
        peer = link.peer
        if peer is not None and peer.ranks > self._max_ranks:
            raise ChannelError(
                f"ranks: node {peer.node!r} has {peer.ranks}; want at most handoff.max_ranks = "
                f"{self._max_ranks}"
            )
        log.info("handoff: connected to %s", link)

    def handle_message(self, link: Link, message: messages.AnyMessage) -> None:
        match message:
            case messages.Admit(transfer, slots):
                self._apply(transfer, partial(outgoing.admitted, slots=slots, now=time.monotonic()), link)
            case messages.Done(transfer):
                self._apply(transfer, outgoing.done, link)
            case messages.Refuse(transfer, reason):
                self._apply(transfer, partial(outgoing.refused, reason=reason), link)
            case messages.Release(transfer, reason):
                known = self._apply(transfer, partial(outgoing.released, reason=reason), link)
                with self._changed:  # a transfer with borrowed slots answers once they are returned
                    known = known or any(s.id == transfer and s.link is link for s in self._lenders)
                if not known:  # it is over: records queued before this answer are written, none after it
                    link.queue_message(messages.Cancel(transfer))
            case _:
                raise Unexpected(f"{type(message).__name__}: a sender takes no such message")

    def handle_ended(self, link: Link, error: BaseException) -> None:
        with self._changed:
            for sending in [s for s in self._open_transfers.values() if s.link is link]:
                self._adopt(sending, outgoing.refused(sending.state, f"the receiver is gone: {error}"))
        self._complete()

    def _link(self, address: str, subject: str) -> Link:
        """Return the link to `address`, with the errors of `connect`, about `subject`. The lock is held."""
        addresses.check_secret(address, self._has_secret)
        if self._closed:
            raise HandoffError(f"{subject}: the sender is closed")
        try:
            return self._links.link_to(address)
        except ChannelError as error:
            raise HandoffError(f"{subject}: {error}") from error

    def _apply(
        self, transfer: str, event: Callable[[Outgoing], Transition], link: Link | None = None
    ) -> bool:
        """Apply an event to a transfer; return False if there is no transfer of this id on the link."""
        with self._changed:
            sending = self._open_transfers.get(transfer)
            if sending is None or link not in (None, sending.link):
                return False
            self._adopt(sending, event(sending.state))
        self._complete()
        return True

    def _adopt(self, sending: Sending, outcome: Transition, record: _Put | None = None) -> None:
        """Adopt a new state and carry out its instructions. The lock is held."""
        before = sending.state.stage
        sending.state, instructions = outcome
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(sending, instruction, record)
            else:
                sending.queue_or_hold(instruction)
        state = sending.state
        if state.stage is before:
            return
        if state.stage is Stage.ENDED:
            del self._open_transfers[state.id]
            failed: Outcome = "refused" if before is Stage.ASKED else "failed"
            self.outcomes["done" if state.error is None else failed] += 1
        self._completions.extend(sending.completions(before))
        self._changed.notify_all()
        self._deadlines.changed()

    def _complete(self) -> None:
        """Complete futures, without the lock: their callbacks may call the sender."""
        with suppress(IndexError):  # there are no more
            while True:
                self._completions.popleft()()

    def _send(self, sending: Sending, send: Send, record: _Put | None) -> None:
        """Queue a record for its transfer. The lock is held."""
        assert record is not None
        record.remaining += 1
        sending.queued += 1
        sending.link.queue_record(
            messages.Data(sending.id, send.index, record.lease.used),
            record.lease,
            send.slot,
            lambda: sending.state.stage is not Stage.ENDED,
            partial(self._record_sent, sending, record),
        )

    def _borrow_slot(self, sending: Sending, name: str) -> Lease | None:
        """Borrow a receiver's slot. The lock is held."""

        def returned() -> None:
            with self._changed:
                if sending.borrowed.get(name) is lease:
                    self._return_slot(sending, name)

        lease = sending.link.borrow_slot(sending.state.sends[name].slot, returned)
        if lease is not None:
            sending.borrowed[name] = lease
            self._lenders.add(sending)
        return lease

    def _return_slot(self, sending: Sending, name: str) -> None:
        """Return the borrowed slot of a record, if any. The lock is held."""
        sending.return_slot(name)
        if not sending.borrowed:
            self._lenders.discard(sending)

    def _record_sent(self, sending: Sending | None, record: _Put, error: BaseException | None) -> None:
        """Count a record as sent to a transfer, with its link's error if it failed.

        `sending`: None once the record was queued for all transfers.
        """
        with self._changed:
            record.remaining -= 1
            complete_now = not record.remaining
            if error is not None and record.error is None:
                record.error = TierError(f"{record.name} was not sent: {error}")
            if sending is not None:
                sending.queued -= 1
            idle = sending is not None and not sending.queued and error is None
        if complete_now:
            complete(record.on_complete, record.name, record.lease, record.error)
        if sending is not None and idle:
            sending.on_change(sending)

    def _expire(self, now: float) -> float | None:
        """End transfers past their deadline, and return the next deadline."""
        with self._changed:
            for sending in list(self._open_transfers.values()):
                self._adopt(sending, outgoing.overdue(sending.state, now))
        self._complete()
        with self._changed:
            return min((sending.state.deadline for sending in self._open_transfers.values()), default=None)
