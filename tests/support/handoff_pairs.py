"""A node and a sender for the tests of handoff, which prove that they lose no slot, and what they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from handoff_nodes import (
    LONG_S,
    Node,
    fill,
    new_sender,
)

from kvkit.handoff.sender import Sender
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging, release_all
from kvkit.tiers.testing.contract import SLOT_BYTES, Completions

ADDRESSES = pytest.mark.parametrize("transport", ["unix", "tcp"])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = new_sender()
    yield sender
    for transfer in sender.transfers():
        sender.cancel(transfer)
    sender.close(LONG_S)


@pytest.fixture
def slots() -> Iterator[Staging]:
    """The sender's slots."""
    slots = Staging(SLOT_BYTES, 16)
    yield slots
    slots.check_integrity()
    assert slots.free == slots.slots, "the sender keeps slots"
    slots.close()


def send(sender: Sender, slots: Staging, names: list[str]) -> None:
    """Put records and wait until each is sent, or was not wanted."""
    leases = fill(slots, names)
    sent = Completions()
    sender.put(names, leases, sent)
    release_all(leases)
    sent.wait(len(names))


def address(node: Node, transport: str) -> str:
    return node.unix if transport == "unix" else node.tcp


def ended(node: Node, transfer: str) -> str:
    """Why a transfer is over; waits until it is."""
    receiver = node.receiver

    def reason() -> str:
        status = receiver.status(transfer)
        return "" if status is None else status.reason

    wait_for(lambda: bool(reason()))
    return reason()


def wait_until_free(node: Node) -> None:
    """A sender that is cut off may hear so before the slots are back."""
    wait_for(lambda: node.receiver.arena.free == node.receiver.arena.slots)
    node.receiver.check_integrity()
