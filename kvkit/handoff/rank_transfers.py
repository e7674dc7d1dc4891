"""The transfers of one prompt: one to each rank of its receiver that needs records of this rank."""

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
    """The rank that sends: what the transfers of all its prompts have in common.

    Args:
        namespace: namespace of this rank.
        allocation_s: how long a receiver may take to find slots, in seconds.
        on_change: called after every change, from any thread.
    """

    sender: Sender
    layout: KVLayout
    namespace: Namespace
    allocation_s: float
    on_change: Callable[[object], object]


class RankTransfers:
    """The transfers of one prompt to the ranks of its receiver. Thread-safe.

    Args:
        transfer: transfer id at the receiver.
        address: address of the receiver's ranks, with `{rank}` if there are several.
        chunks, tail: whole chunks of the prompt, and the blocks after them.

    Attributes:
        begun: start time, on the monotonic clock.
        handles: transfers to the receiver's ranks that need records from this one; None before these are
            known. Empty if other ranks send everything.
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
        """Connect to the receiver, and ask its ranks for slots once their needs are known.

        Args:
            shared: number of leading chunks that the receiver can read from a shared tier, which are not
                sent; None for none.

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
        """Raise HandoffError or ValueError if a transfer could not be opened, or was not admitted."""
        if self._failure is not None:
            raise self._failure
        for handle in self.handles or ():
            if handle.admitted.done():
                handle.admitted.result()

    def finish(self) -> None:
        """Commit what was put: records that could not be put are missing."""
        for handle in self.handles or ():
            self._rank.sender.finish(handle.id)

    def cancel(self) -> None:
        """Cancel the transfers, also those opened later; otherwise the receiver would wait for them."""
        with self._lock:
            self._cancelled = True
            for handle in self.handles or ():
                self._rank.sender.cancel(handle.id)

    def _open(self, hello: Future[Hello], shared: Future[int] | None) -> None:
        """Open the transfers once both futures are done; cancel them if the prompt was cancelled before.

        Chunks in a shared tier are not sent, but each rank is sent at least one record.
        """
        if not hello.done() or (shared is not None and not shared.done()):
            return
        shared_known = shared is not None and not shared.cancelled() and shared.exception() is None
        skip = shared.result() if shared is not None and shared_known else 0
        rank_shares, failure = self._shares(hello)  # before the lock, which the step thread takes
        with self._lock:
            if self.handles is not None:
                return
            handles: list[Sending] = []
            try:
                handles.extend(self._ask(share, skip, alone=len(rank_shares) == 1) for share in rank_shares)
            except (HandoffError, ValueError) as error:
                failure = error
            self._failure = failure
            self.handles = handles  # all at once: none misses records that are put from now on
            if self._cancelled:
                self.cancel()
        self._rank.on_change(self)

    def _shares(self, hello: Future[Hello]) -> tuple[Sequence[RankShare], HandoffError | ValueError | None]:
        """Return what this rank sends to each rank of the receiver, and the error, if any.

        With an error it sends nothing: the receiver cannot be reached, its ranks cannot use this rank's
        records, or the address does not cover all of them.
        """
        namespace, layout = self._rank.namespace, self._rank.layout
        try:
            peer = hello.result()
        except (HandoffError, ValueError) as error:
            return (), error
        ranks = peer.ranks
        if not divided(namespace, layout):
            return (RankShare(namespace.rank, tuple(range(layout.token_groups)), 1),), None
        if not fits(layout, ranks):
            problem = f"node {peer.node!r} has {ranks} ranks, some of which would have parts of records"
            return (), HandoffError(f"{self._address}: {problem}; want record_ranks = {ranks} for both")
        if ranks > 1 and RANK not in self._address:
            return (), HandoffError(f"{self._address}: {ranks} ranks listen; want {RANK} in the address")
        return shares(layout, namespace.rank, namespace.world, ranks), None

    def _ask(self, share: RankShare, skip: int, *, alone: bool) -> Sending:
        """Ask a rank for slots for its share of all but `skip` leading chunks, and for the last snapshot."""
        chunks, rank = self._chunks, self._rank
        names = chunks.names + (self._tail.names if self._tail else [])
        names = [name for i, name in enumerate(names) if i % chunks.groups in share.groups]
        requested = names[min(skip * len(share.groups), len(names) - 1) :]
        requested += chunks.snapshot(len(chunks) - 1).names if chunks.keys and chunks.states else []
        transfer = self._transfer
        if not alone or share.parts > 1:
            transfer += f"/{rank.namespace.rank}.{share.rank}"
        return rank.sender.open(
            transfer,
            of_rank(self._address, share.rank),
            requested,
            rank.allocation_s,
            rank.on_change,
            RequestRef(self._transfer, share.parts),
        )
