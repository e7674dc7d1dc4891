"""Handoff as a tier fulfils the contract for records that a node received, and stores nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from handoff_nodes import LONG_S, Node, fill, new_sender

from kvkit.handoff.sender import HandoffError
from kvkit.handoff.tier import HandoffTier
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import OnComplete, TierError, complete
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, Completions, TierContract, put, record_names
from kvkit.tiers.testing.faulty import Wrapper


class SentTo(Wrapper):
    """The tier of a node; to put records into it is to send them there."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.node = Node(folder, slots=12)
        self.sender = new_sender()
        self.address = self.node.unix if transport == "unix" else self.node.tcp
        self.numbers = itertools.count()
        super().__init__(self.node.tier)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        for name, lease in zip(names, leases, strict=True):
            error = None
            try:
                transfer = self.sender.open(f"t{next(self.numbers)}", self.address, [name], LONG_S)
                transfer.admitted.result(LONG_S)
                self.sender.put([name], [lease], lambda name, error: None)
                transfer.done.result(LONG_S)
            except HandoffError as failure:
                error = TierError(str(failure))
            complete(on_complete, name, lease.share(), error)

    def close(self) -> None:
        self.sender.close(LONG_S)
        self.node.close()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
class TestHandoff(TierContract):
    @pytest.fixture
    def staging(self) -> Staging:
        return Staging(SLOT_BYTES, SLOTS)

    @pytest.fixture
    def tier(self, tmp_path: Path, transport: str) -> SentTo:
        return SentTo(tmp_path, transport)


@pytest.mark.parametrize("sends", [True, False])
def test_nothing_is_stored(staging: Staging, sends: bool) -> None:
    tier = HandoffTier(None, new_sender() if sends else None)
    names = record_names(3)
    assert [str(error) for error in put(tier, staging, names)] == [
        "tier 'handoff' takes only what peers send; nothing is stored there"
    ] * 3
    assert tier.match_prefix(names) == 0
    tier.close()
    assert staging.free == staging.slots
    staging.close()


def test_a_record_that_no_transfer_waits_for_is_done_at_once(staging: Staging) -> None:
    sender, names, sent = new_sender(), record_names(3), Completions()
    leases = fill(staging, names)
    sender.put(names, leases, sent)
    release_all(leases)
    assert [error for _, error in sent.wait(3)] == [None] * 3
    sender.close(LONG_S)
    assert staging.free == staging.slots
    staging.close()
