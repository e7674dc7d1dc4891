"""Several ranks of one engine send to those of another: who sends what, and what becomes of parts."""
# ruff: noqa: F811

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from handoff_nodes import LONG_S, Node, Process, assert_holds
from handoff_sides import ADDRESSES, address, ended, new_sender, node, send, sender, slots, wait_until_free  # noqa: F401
from waiting import wait_for

from kvkit.format.layout import KVLayout, LayerGroup, Namespace, heads_of
from kvkit.handoff.protocol.states import OfRequest, Phase
from kvkit.handoff.ranks import divided, holders, shares
from kvkit.handoff.sender import HandoffError, Sender
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
    assert form.parts == min(records, heads)
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
        assert {share.parts for _, share in mine} == {len(mine)}
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
            f"{request}/0", address(node, transport), names[:2], LONG_S, of=OfRequest(request, 2)
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
    sender.open("t/0", node.unix, names[:2], LONG_S, of=OfRequest("t", 2))
    sender.cancel("t/0")
    assert ended(node, "t") == "cancelled by its sender"
    late = sender.open("t/1", node.tcp, names[2:], LONG_S, of=OfRequest("t", 2))
    with pytest.raises(HandoffError, match="t/1: cancelled by its sender"):
        late.admitted.result(LONG_S)


def test_another_s_transfer_of_the_same_name_changes_nothing(node: Node, sender: Sender) -> None:
    names = record_names(4)
    sender.open("t/0", node.unix, names[:2], LONG_S, of=OfRequest("t", 2))
    wait_for(lambda: "t/0" in node.receiver.transfers())
    another = new_sender()
    refused = another.open("t/0", node.unix, names[2:], LONG_S, of=OfRequest("x"))
    with pytest.raises(HandoffError, match="there is a transfer t/0 already"):
        refused.admitted.result(LONG_S)
    another.close(LONG_S)
    assert node.receiver.status("x") is None
    sender.cancel("t/0")
    assert ended(node, "t") == "cancelled by its sender"
