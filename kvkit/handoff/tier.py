"""Tier "handoff": the records that peers have sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import Sender
from kvkit.staging import Lease
from kvkit.tiers.base import OnComplete, Tier, TierError, complete, get_by_copy


class HandoffTier(Tier):
    """Records in the receiver's buffer, read-only. `borrow` shares the buffer's slots.

    The tier also owns the sender and the endpoint. `kvkit.handoff.chunk_sender.ChunkSender` sends records.

    Args:
        receiver, sender: None if this node does not receive, or does not send.
        endpoint: endpoint where peers connect; None if this node does not listen.
        shutdown_s: longest wait of `close` for each of them, in seconds.
    """

    in_memory = True
    read_only = True

    def __init__(
        self,
        receiver: Receiver | None,
        sender: Sender | None,
        endpoint: Endpoint | None = None,
        *,
        shutdown_s: float = 10.0,
    ) -> None:
        self.name = HANDOFF
        self.receiver = receiver
        self.sender = sender
        self.endpoint = endpoint
        self._shutdown_s = shutdown_s

    def match_prefix(self, names: Sequence[str]) -> int:
        return 0 if self.receiver is None else self.receiver.match_prefix(names)

    def borrow(self, name: str) -> Lease | None:
        return None if self.receiver is None else self.receiver.borrow(name)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        get_by_copy(self, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        for name, lease in zip(names, leases, strict=True):
            error = TierError(f"tier {self.name!r} takes only what peers send; nothing is stored there")
            complete(on_complete, name, lease.share(), error)

    def delete(self, names: Sequence[str]) -> None:
        if self.receiver is not None:
            self.receiver.delete(names)

    def size(self, name: str) -> int | None:
        return dict(self.scan()).get(name)

    def scan(self) -> Iterator[tuple[str, int]]:
        yield from () if self.receiver is None else self.receiver.records()

    def close(self) -> None:
        for side in (self.sender, self.receiver, self.endpoint):
            if side is not None:
                side.close(self._shutdown_s)
