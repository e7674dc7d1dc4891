"""Transfers of one prompt: one to each rank of the receiving engine that needs records of this rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.protocol.messages import Hello
from kvkit.handoff.protocol.states import RequestRef
from kvkit.handoff.ranks import RankShare, divided, fits, shares
from kvkit.handoff.sender import HandoffError, Sender, Sending
from kvkit.handoff.transport.addresses import RANK, of_rank
from kvkit.transfer.sequence import Chunks


@dataclass(frozen=True, slots=True)
class SendingRank:
    """Arguments that the transfers of all prompts of a sending rank share.

    Args:
        namespace: namespace of this rank.
        allocation_s: longest wait for a receiver to find slots, in seconds.
        on_change: called after every change, from any thread.
    """

    sender: Sender
    layout: KVLayout
    namespace: Namespace
    allocation_s: float
    on_change: Callable[[object], object]


class RankTransfers:
    """Transfers of one prompt to the ranks of the receiving engine. Thread-safe.

    Args:
        transfer: transfer id at the receiver.
        address: address of the receiver's ranks, with `{rank}` if there are several.
        chunks, tail: whole chunks of the prompt, and the blocks after them.

    Attributes:
        begun: monotonic time of the start.
        handles: one for each rank that needs records of this one; None before these ranks are known. Empty if
            other ranks send everything.
    """

    def __init__(
        self, rank: SendingRank, transfer: str, address: str, chunks: Chunks, tail: Chunks | None
    ) -> None:
        self._rank = rank
        self._transfer = transfer
        self._address = address
        self._chunks = chunks
        self._tail = tail
        self.begun = time.monotonic()
        self.handles: list[Sending] | None = None
        self._failure: Exception | None = None
        self._cancelled = False
        self._lock = threading.RLock()

    @property
    def admitted(self) -> bool:
        """True if every rank of the receiver has admitted or refused its transfer."""
        return self.handles is not None and all(handle.admitted.done() for handle in self.handles)

    @property
    def done(self) -> bool:
        """True if every transfer has arrived or failed."""
        return self.handles is not None and all(handle.done.done() for handle in self.handles)

    @property
    def queued(self) -> bool:
        """True if records were put and are not sent yet."""
        return any(handle.queued for handle in self.handles or ())

    def open(self, shared: Future[int] | None) -> None:
        """Connect to the receiver, and ask its ranks for slots once their number and `shared` are known.

        Args:
            shared: number of leading chunks that are not sent, since the receiver can read them from a shared
                tier; None for none.

        Raises:
            HandoffError, ValueError: as for `Sender.connect`.
        """
        is_divided = divided(self._rank.namespace, self._rank.layout)
        hello = self._rank.sender.connect(
            of_rank(self._address, 0 if is_divided else self._rank.namespace.rank)
        )
        hello.add_done_callback(lambda _: self._open(hello, shared))
        if shared is not None:
            shared.add_done_callback(lambda _: self._open(hello, shared))

    def check(self) -> None:
        """Raise HandoffError or ValueError if a transfer could not be opened or was not admitted."""
        if self._failure is not None:
            raise self._failure
        for handle in self.handles or ():
            if handle.admitted.done():
                handle.admitted.result()

    def finish(self) -> None:
        """Commit the transfers with the records that were put."""
        for handle in self.handles or ():
            self._rank.sender.finish(handle.id)

    def cancel(self) -> None:
        """Cancel the transfers, also those that are opened later: the receiver must not wait for them."""
        with self._lock:
            self._cancelled = True
            for handle in self.handles or ():
                self._rank.sender.cancel(handle.id)

    def _open(self, hello: Future[Hello], shared: Future[int] | None) -> None:
        """Open the transfers once both futures are done; cancel them if the prompt was cancelled before."""
        if not hello.done() or (shared is not None and not shared.done()):
            return
        shared_known = shared is not None and not shared.cancelled() and shared.exception() is None
        skip = shared.result() if shared is not None and shared_known else 0
        failure: Exception | None
        rank_shares, failure = self._shares(hello)  # without the lock, which the engine's thread takes
        with self._lock:
            if self.handles is not None:
                return
            handles: list[Sending] = []
            try:
                handles.extend(
                    self._open_transfer(share, skip, alone=len(rank_shares) == 1) for share in rank_shares
                )
            except (HandoffError, ValueError) as error:
                failure = error
            self._failure = failure
            self.handles = handles  # after all are opened: records that are put from now on go to each
            if self._cancelled:
                self.cancel()
        self._rank.on_change(self)

    def _shares(self, hello: Future[Hello]) -> tuple[Sequence[RankShare], HandoffError | None]:
        """Return what this rank sends to each rank of the receiver, or nothing and an error.

        Errors: no connection, ranks that cannot use this rank's records, or an address of only one of them.
        """
        namespace, layout = self._rank.namespace, self._rank.layout
        if error := hello.exception():
            return (), HandoffError(f"no receiver: {error}")
        peer, ranks = hello.result(), hello.result().ranks
        if not divided(namespace, layout):
            return (RankShare(namespace.rank, tuple(range(layout.token_groups)), 1),), None
        if not fits(layout, ranks):
            problem = f"node {peer.node!r} has {ranks} ranks, some of which would have parts of records"
            return (), HandoffError(f"{self._address}: {problem}; want record_ranks = {ranks} for both")
        if ranks > 1 and RANK not in self._address:
            return (), HandoffError(f"{self._address}: {ranks} ranks listen; want {RANK} in the address")
        return shares(layout, namespace.rank, namespace.world, ranks), None

    def _open_transfer(self, share: RankShare, skip: int, *, alone: bool) -> Sending:
        """Ask a rank for slots for its share of all but `skip` leading chunks, and for the last snapshot.

        At least one record is requested.
        """
        chunks, rank = self._chunks, self._rank
        names = chunks.names + (self._tail.names if self._tail else [])
        names = [name for i, name in enumerate(names) if i % chunks.groups in share.groups]
        requested = names[min(skip * len(share.groups), len(names) - 1) :]
        requested += chunks.snapshot(len(chunks) - 1).names if chunks.keys and chunks.states else []
        transfer = self._transfer
        if not alone or share.senders > 1:
            transfer += f"/{rank.namespace.rank}.{share.rank}"
        return rank.sender.open(
            transfer,
            of_rank(self._address, share.rank),
            requested,
            rank.allocation_s,
            rank.on_change,
            RequestRef(self._transfer, share.senders),
        )
