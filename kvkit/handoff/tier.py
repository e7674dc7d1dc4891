"""Handoff as a tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import Sender
from kvkit.staging import Lease
from kvkit.tiers.base import OnComplete, Tier, complete, get_by_copy


class HandoffTier(Tier):
    """Both sides of handoff as one tier.

    Reads come from the receiver's buffer, and `borrow` shares its slots. `put` sends records to the open
    transfers that wait for them; it keeps nothing, and does nothing if no transfer waits.

    Args:
        receiver, sender: the sides that this node takes part in.
        endpoint: endpoint where peers connect, or None.
        shutdown_s: how long `close` waits for each of them, in seconds.
    """

    near = True
    transient = True

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

    def count_unneeded(self, names: Sequence[str]) -> int:
        return len(names) if self.sender is None else self.sender.count_unneeded(names)

    def borrow(self, name: str) -> Lease | None:
        return None if self.receiver is None else self.receiver.borrow(name)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        get_by_copy(self, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        if self.sender is not None:
            self.sender.put(names, leases, on_complete)
            return
        for name, lease in zip(names, leases, strict=True):
            complete(on_complete, name, lease.share(), None)

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
