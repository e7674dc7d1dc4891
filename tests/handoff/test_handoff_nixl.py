"""Records handed off over NIXL arrive in the receiver's buffer, also where NIXL does not write them."""

from __future__ import annotations

import multiprocessing

import pytest
from handoff_nodes import IDENTITY, LONG_S, PATIENT, assert_holds, fill, new_sender

from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.tier import HandoffTier
from kvkit.staging import Staging, release_all
from kvkit.tiers.testing.contract import SLOT_BYTES, Completions, record_names

pytest.importorskip("nixl_cu12")
RECORDS = 40


def send(address: str) -> None:
    sender, slots = new_sender(), Staging(SLOT_BYTES, RECORDS)
    names = record_names(RECORDS)
    transfer = sender.open("t", address, names, LONG_S)
    assert transfer.admitted.result(LONG_S) == RECORDS
    leases = fill(slots, names)
    sent = Completions()
    sender.put(names, leases, sent)
    release_all(leases)
    assert [error for _, error in sent.wait(RECORDS)] == [None] * RECORDS
    assert transfer.done.result(LONG_S) == 0
    sender.close(LONG_S)
    assert slots.free == slots.slots
    slots.close()


@pytest.mark.parametrize("shared", [True, False])
def test_records_arrive(shared: bool) -> None:
    """Into memory that is not shared by TCP, which the frames use."""
    receiver = Receiver(Staging(SLOT_BYTES, RECORDS, shared=shared), PATIENT)
    tier = HandoffTier(receiver, None, shutdown_s=LONG_S)
    listen = ["nixl://127.0.0.1:0"]
    endpoint = Endpoint(receiver, (), IDENTITY, listen, timeout_s=LONG_S, pin_s=LONG_S)
    process = multiprocessing.get_context("spawn").Process(target=send, args=endpoint.addresses, daemon=True)
    process.start()
    receiver.wait("t", LONG_S)
    assert_holds(tier, record_names(RECORDS))
    receiver.release("t")
    process.join(LONG_S)
    assert process.exitcode == 0
    receiver.close(0.0)
    endpoint.close(LONG_S)
    receiver.arena.check_integrity()
    assert receiver.arena.free == RECORDS
