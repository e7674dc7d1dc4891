"""Each rank of an engine gets the records that it needs, once, from the ranks of another engine."""
# ruff: noqa: F811

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from caches import make_engine, new_cache, new_staging, sequence
from handoff_nodes import LONG_S, Node, Process, assert_holds
from handoff_pairs import ADDRESSES, address, ended, new_sender, node, send, sender, slots, wait_until_free  # noqa: F401

from kvkit.format.layout import KVLayout, LayerGroup, Namespace, heads_of
from kvkit.handoff import ranks as ranks_module
from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.prompt import Prompts
from kvkit.handoff.protocol.messages import MAX_RANKS
from kvkit.handoff.protocol.states import Phase, RequestRef
from kvkit.handoff.ranks import RankShare, divided, fits, holders, shares
from kvkit.handoff.sender import HandoffError, Sender
from kvkit.handoff.settings import identify
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.handshake import Identity
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging
from kvkit.tiers.testing.contract import record_names

SIZES = (1, 2, 4, 8)


def layout_of(rank: int, ranks: int, records: int, heads: int) -> KVLayout:
    """Of a rank of a model with latents in two layers, each a record, and so many heads in another."""
    each = max(1, heads // records)
    latents = [LayerGroup((i,), 1, 24, 0, "float32", model_heads=1, model_layers=(0, 2)) for i in (0, 2)]
    parts = heads_of(heads, rank, ranks)[::each]
    form = LayerGroup((1,), each, 8, 8, "float32", model_heads=heads)
    split = [LayerGroup((1,), each, 8, 8, "float32", first_head=first, model_heads=heads) for first in parts]
    assert form.head_shards == min(records, heads)
    return KVLayout((*latents, *split))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("senders", SIZES)
@pytest.mark.parametrize("receivers", SIZES)
def test_every_rank_gets_all_that_it_needs_once(senders: int, receivers: int, heads: int) -> None:
    records = max(senders, receivers)
    layouts = [layout_of(rank, senders, records, heads) for rank in range(senders)]
    sent = [shares(layout, rank, senders, receivers) for rank, layout in enumerate(layouts)]
    for receiver in range(receivers):
        mine = [(rank, s) for rank in range(senders) for s in sent[rank] if s.rank == receiver]
        came = Counter(layouts[rank].groups[index] for rank, share in mine for index in share.groups)
        assert came == Counter(layout_of(receiver, receivers, records, heads).groups)
        assert {share.senders for _, share in mine} == {len(mine)}
    if senders == receivers:
        assert [[share.rank for share in each] for each in sent] == [[rank] for rank in range(senders)]


def test_ranks_with_the_same_heads_share_the_sending() -> None:
    layout = layout_of(0, 4, 1, 1)
    assert holders(layout.groups[0], 4) == [0, 1, 2, 3]
    assert [[share.rank for share in shares(layout, rank, 4, 8)] for rank in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert [bool(shares(layout, rank, 4, 1)) for rank in range(4)] == [True, False, False, False]


def test_a_pipeline_sends_from_rank_to_rank() -> None:
    whole = layout_of(0, 1, 1, 1)
    space = Namespace("m", whole.fingerprint(), "float32", world=2, ranks_share=True)
    assert divided(space, whole)
    assert not divided(replace(space, ranks_share=False), whole)
    assert divided(replace(space, ranks_share=False, world=1), whole)
    assert not divided(space, KVLayout(whole.groups[1:])), "the first layer is in another stage"


@ADDRESSES
def test_one_of_two_ranks_is_killed(
    node: Node, sender: Sender, slots: Staging, tmp_path: Path, transport: str
) -> None:
    """What it had begun to bring goes, with the other part; what it had brought stays."""
    process = Process("sender", tmp_path)
    names = record_names(8)
    for request in ("whole", "half"):
        ours = sender.open(
            f"{request}/0", address(node, transport), names[:2], LONG_S, request=RequestRef(request, 2)
        )
        assert not ours.admitted.done()
        assert process.call("open", f"{request}/1", address(node, transport), names[2:4], request, 2) == 2
        assert ours.admitted.result(LONG_S) == 2
        send(sender, slots, names[: 2 if request == "whole" else 1])
        process.call("put", names[2 : 4 if request == "whole" else 3])
        if request == "whole":
            assert ours.done.result(LONG_S) == 0
            assert process.call("done", "whole/1") == 0
            status = node.receiver.wait("whole", LONG_S)
            assert status is not None
            assert (status.phase, status.held, status.records) == (Phase.COMMITTED, 4, 4)
            names = names[4:] + names[:4]
    waiting = sender.open("waiting", address(node, transport), record_names(4, "a" * 16), LONG_S)
    assert not waiting.admitted.done()
    process.kill()
    assert ended(node, "half") == "another part of it: its sender is gone"
    with pytest.raises(HandoffError, match="half/0: another part of it: its sender is gone"):
        ours.done.result(LONG_S)
    assert_holds(node.tier, names[4:])
    assert waiting.admitted.result(LONG_S) == 4
    sender.cancel("waiting")
    ended(node, "waiting")
    node.receiver.release("whole")
    wait_until_free(node)


def test_what_comes_after_another_part_failed_is_refused_at_once(node: Node, sender: Sender) -> None:
    names = record_names(4)
    sender.open("t/0", node.unix, names[:2], LONG_S, request=RequestRef("t", 2))
    sender.cancel("t/0")
    assert ended(node, "t") == "cancelled by its sender"
    late = sender.open("t/1", node.tcp, names[2:], LONG_S, request=RequestRef("t", 2))
    with pytest.raises(HandoffError, match="t/1: cancelled by its sender"):
        late.admitted.result(LONG_S)


def test_another_s_transfer_of_the_same_name_changes_nothing(node: Node, sender: Sender) -> None:
    names = record_names(4)
    sender.open("t/0", node.unix, names[:2], LONG_S, request=RequestRef("t", 2))
    wait_for(lambda: "t/0" in node.receiver.transfers())
    another = new_sender()
    refused = another.open("t/0", node.unix, names[2:], LONG_S, request=RequestRef("x"))
    with pytest.raises(HandoffError, match="there is a transfer t/0 already"):
        refused.admitted.result(LONG_S)
    another.close(LONG_S)
    assert node.receiver.status("x") is None
    sender.cancel("t/0")
    assert ended(node, "t") == "cancelled by its sender"


def heads_asked(monkeypatch: pytest.MonkeyPatch, layout: KVLayout, ranks: int, receivers: int) -> int:
    """How often `shares` asks for a rank's heads."""
    asked = 0

    def counted(heads: int, rank: int, of: int) -> range:
        nonlocal asked
        asked += 1
        return heads_of(heads, rank, of)

    monkeypatch.setattr(ranks_module, "heads_of", counted)
    shares.cache_clear()
    shares(layout, 0, ranks, receivers)
    return asked


def test_reckoning_costs_as_much_as_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not their square: the largest number that a peer may say takes milliseconds."""
    layout, parts = layout_of(0, 1, 8, 8), 2 + 8
    for receivers in (8, MAX_RANKS):
        assert heads_asked(monkeypatch, layout, 1, receivers) <= parts * (1 + receivers)


@pytest.mark.parametrize(
    ("records", "heads", "ranks", "fitting"),
    [
        (4, 8, 4, True),
        (4, 8, 2, True),
        (4, 8, 8, False),  # a rank would have half of a record
        (4, 8, 3, False),
        (8, 8, 64, True),  # neighbours have the same heads
        (8, 8, 12, False),
        (1, 1, 5, True),
    ],
)
def test_a_number_of_ranks_that_cannot_use_the_records_is_known(
    records: int, heads: int, ranks: int, fitting: bool
) -> None:
    assert fits(layout_of(0, 1, records, heads), ranks) is fitting


@dataclass
class Prefill:
    """The sending side of one engine, over a real cache, and what it says of itself."""

    prompts: Prompts
    sender: Sender
    identity: Identity
    engine: Engine

    def begin(self, address: str, request_id: str = "r") -> None:
        space = self.engine.namespace
        self.prompts.begin_prompt(request_id, f"t-{request_id}", address, sequence(2), space)


@pytest.fixture
def prefill(caplog: pytest.LogCaptureFixture) -> Iterator[Prefill]:
    engine = make_engine()
    identity = identify(engine.layout, engine.namespace, b"of the tests")
    sender = Sender(identity, timeout_s=LONG_S, transfer_s=LONG_S, max_ranks=16)
    with new_cache(engine, new_staging(engine, 8), [HandoffTier(None, sender)]) as cache:
        prompts = Prompts(
            ChunkSender(sender, cache.layout, cache.writes),
            cache.namespace,
            count_shared=None,
            block_tokens=4,
            allocation_s=LONG_S,
            wake=lambda _: None,
        )
        yield Prefill(prompts, sender, identity, engine)
        prompts.close(LONG_S)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (MAX_RANKS, "ranks: node '.*' has 1024; want at most handoff.max_ranks = 16"),
        (3, "node '.*' has 3 ranks, some of which would have parts of records"),
    ],
)
def test_a_peer_that_says_too_many_ranks_is_refused_by_name(
    ranks: int, told: str, prefill: Prefill, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    liar = Node(tmp_path, identity=replace(prefill.identity, ranks=ranks))
    address = liar.unix + "{rank}"
    for rank in (0, 1):
        Path(address.format(rank=rank).removeprefix("unix://")).symlink_to(liar.unix.removeprefix("unix://"))
    prefill.begin(address)
    wait_for(lambda: not prefill.prompts.advance() and not prefill.prompts.in_flight)
    assert re.search(f"r: nothing is handed off: .*{told}", caplog.text), caplog.text
    assert not prefill.sender.transfers()
    assert liar.endpoint.peers <= 1, "more of its ranks were connected to"
    liar.close()


def test_a_step_does_not_wait_for_what_a_peer_s_ranks_cost(
    prefill: Prefill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is cancelled while it is reckoned who needs what of it."""
    reckoning, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Sequence[RankShare]:
        reckoning.set()
        assert go_on.wait(LONG_S)
        return shares(*given)

    monkeypatch.setattr("kvkit.handoff.rank_transfers.shares", slow)
    node = Node(tmp_path, identity=prefill.identity)
    prefill.begin(node.unix)
    assert reckoning.wait(LONG_S)
    cancelled = threading.Thread(target=prefill.prompts.cancel_prompt, args=("r", True), daemon=True)
    cancelled.start()
    cancelled.join(LONG_S)
    go_on.set()
    assert not cancelled.is_alive()
    wait_for(lambda: not prefill.sender.transfers())
    node.close()
