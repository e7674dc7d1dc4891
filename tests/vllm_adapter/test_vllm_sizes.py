"""Prompts are handed off between engines of different tensor-parallel sizes over real sockets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_rank import BLOCK, CHUNK, DEADLINE_S, IDS, TABLE, Ranks

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.step import SendTask
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.tier import HandoffTier
from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for

TOKENS = 2 * CHUNK + BLOCK + 3
"""Whole chunks, a block behind them, and a part of one."""
SECRET = {"secret": "of the tests of sizes", "shutdown_timeout_s": 0.1}


class Pools:
    """The workers of a prefill and of a decode engine, of so many ranks."""

    def __init__(
        self, folder: Path, prefill: int, decode: int, transport: str = "unix", records: int = 2, **more: Any
    ) -> None:
        self.address = f"unix://{folder}/sockets/{{rank}}"
        if transport == "tcp":
            self.address = f"tcp://127.0.1{{rank}}.1:{free_ports(1)[0]}"
        receives = {"role": "decode", "listen": [self.address], "buffer": "1MiB"} | SECRET
        self.decode = Ranks(folder / "d", decode, handoff=receives, records=records, **more)
        sends = {"role": "prefill"} | SECRET
        self.prefill = Ranks(folder / "p", prefill, handoff=sends, records=2, **more)
        self.prefill.compute()

    @property
    def receivers(self) -> list[Receiver]:
        tiers = [rank.worker.cache.tiers["handoff"] for rank in self.decode.each]
        return [tier.receiver for tier in tiers if isinstance(tier, HandoffTier) and tier.receiver]

    def send(self, rank: int, first: int = 0, stop: int = TOKENS) -> set[str]:
        """Have a prefill rank send tokens [first, stop) of its prompt; the requests that it is done with."""
        sequence, blocks = Sequence(IDS[:TOKENS]), TABLE[first // BLOCK : -(-stop // BLOCK)]
        last = stop == TOKENS
        task = SendTask("a", "t", self.address, sequence, first, stop, (blocks,), last)
        _, _, sent = self.prefill.each[rank].step(("a",) if last else (), sends=[task])
        return sent

    def send_all(self) -> None:
        """Have every prefill rank send all, and go on until their pages are free."""
        sent = [self.send(number) for number in range(self.prefill.size)]
        for number, already in enumerate(sent):
            self.finish(number, already)

    def finish(self, rank: int, sent: set[str]) -> None:
        """Have a prefill rank go on until its pages are free."""
        while not sent:
            _, _, sent = self.prefill.each[rank].step(idle=True)

    def found(self) -> set[int]:
        """Tokens that each decode rank has when it has waited for what is sent."""
        for rank in self.decode.each:
            lookup = LookupRequest("a", 1, Sequence(IDS[:TOKENS]), transfer="t", computed_remotely=True)
            rank.step(lookups=[lookup], idle=True)
        return {rank.heard() for rank in self.decode.each}

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextmanager
def pools(*arguments: Any, **more: Any) -> Iterator[Pools]:
    with closing(Pools(*arguments, **more)) as made:
        yield made
        for receiver in made.receivers:
            wait_for(lambda r=receiver: r.arena.free == r.arena.slots)
            receiver.check_integrity()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("prefill", "decode", "opaque"),
    [(2, 1, True), (1, 2, True), (4, 1, False), (1, 4, False), (4, 2, True), (2, 4, False), (2, 2, True)],
)
def test_every_size_takes_what_any_sends(
    tmp_path: Path, prefill: int, decode: int, transport: str, opaque: bool
) -> None:
    with pools(tmp_path, prefill, decode, transport, opaque=opaque) as made:
        made.send_all()
        records = 4 * 2 * max(1, 2 // decode)  # two chunks, two blocks; two groups; their heads
        for receiver in made.receivers:
            status = receiver.wait("t", DEADLINE_S)
            assert status is not None
            assert (status.phase, status.held, status.records) == (Phase.COMMITTED, records, records)
        assert made.found() == {TOKENS}
        made.decode.load(TOKENS)
        assert all(receiver.transfers() == {} for receiver in made.receivers)


def test_a_prompt_that_one_rank_did_not_send_is_computed(tmp_path: Path) -> None:
    """What the others send of it is not waited for, and goes."""
    with pools(tmp_path, 2, 1, opaque=True) as made:
        (receiver,) = made.receivers
        first, second = made.prefill.each
        for number in (0, 1):
            made.send(number, 0, CHUNK)
        wait_for(lambda: set(receiver.transfers().values()) == {Phase.RECEIVING})
        while not (first.stored("handoff") and second.stored("handoff")):
            first.step(idle=True)
            second.step(idle=True)
        second.worker.close()
        made.finish(0, made.send(0, CHUNK))
        assert made.found() == {0}
        assert receiver.transfers() == {}


def test_a_prompt_of_which_a_rank_is_never_heard_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkit.adapters.engine.lookups.ALLOCATION_WAIT_S", 0.1)
    with pools(tmp_path, 2, 1, opaque=True) as made:
        made.send(0)
        wait_for(lambda: set(made.receivers[0].transfers().values()) == {Phase.WAITING})
        assert made.found() == {0}
        made.decode.each[0].step(released_transfers=["t"])
        assert made.receivers[0].transfers() == {}
        for number in (0, 1):
            made.finish(number, set() if number == 0 else made.send(1))


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (1, "record_ranks: node '.*/0' has 2, '.*/0' has 1; want record_ranks = 2 for both"),
        (2, "2 ranks listen; want {rank} in the address"),
    ],
)
def test_engines_that_do_not_fit_say_what_to_set(
    tmp_path: Path, records: int, says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkit.adapters.engine.lookups.ALLOCATION_WAIT_S", 0.1)
    with pools(tmp_path, 1, records, records=records, opaque=True) as made:
        made.address = made.address.format(rank=0)
        made.finish(0, made.send(0))
        assert re.search(f"a: nothing is handed off: .*{says}", caplog.text)
        assert made.found() == {0}
