"""The sender's state of a transfer answers every message of its receiver as the protocol says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvkit.handoff.protocol import outgoing
from kvkit.handoff.protocol.messages import Cancel, Commit
from kvkit.handoff.protocol.outgoing import Outgoing, Stage
from kvkit.handoff.protocol.states import Unexpected


def open_transfer(word: str = "abc", slots: Sequence[int] = (0, -1, 2)) -> Outgoing:
    out = Outgoing.opened("T", list(word), deadline_s=5.0, transfer_s=10.0, now=0.0)
    out, steps = outgoing.admitted(out, slots, 1.0)
    assert steps == ()
    return out


def test_a_sender_sends_what_is_wanted_then_commits() -> None:
    out = open_transfer()
    assert (out.unsent, out.deadline) == ({"a", "c"}, 11.0)
    out, steps = outgoing.put(out, "b", 2.0)
    assert steps == ()
    out, steps = outgoing.put(out, "c", 2.0)
    assert (out.unsent, out.deadline) == ({"a"}, 12.0)
    assert steps == (outgoing.Send(2, 2),)
    assert outgoing.put(out, "c", 2.0) == (out, ())
    out, steps = outgoing.put(out, "a", 3.0)
    assert steps == (outgoing.Send(0, 0), Commit("T", ()))
    assert (out.stage, out.unsent, out.deadline) == (Stage.COMMITTED, frozenset(), 13.0)
    out, steps = outgoing.done(out)
    assert (out.stage, out.error, out.missing) == (Stage.ENDED, None, 0)


def test_a_sender_that_has_nothing_to_send_commits() -> None:
    out = Outgoing.opened("T", ["a", "b"], 5.0, 10.0, 0.0)
    out, steps = outgoing.admitted(out, [-1, -1], 1.0)
    assert (out.stage, steps) == (Stage.COMMITTED, (Commit("T", ()),))


def test_a_sender_wants_nothing_before_it_is_admitted() -> None:
    out = Outgoing.opened("T", ["a", "b"], 5.0, 10.0, 0.0)
    assert outgoing.put(out, "a", 1.0) == (out, ())
    assert not out.unsent


def test_a_sender_that_finishes_early_says_what_is_missing() -> None:
    out, _ = outgoing.put(open_transfer(), "a", 2.0)
    out, steps = outgoing.finish(out, 3.0)
    assert steps == (Commit("T", (2,)),)
    assert (out.unsent, out.deadline) == (frozenset(), 13.0)
    out, _ = outgoing.done(out)
    assert (out.error, out.missing) == (None, 1)


def test_a_sender_that_is_not_admitted_yet_cancels_when_it_finishes_or_is_told_to() -> None:
    asked = Outgoing.opened("T", ["a", "b"], 5.0, 10.0, 0.0)
    for (out, steps), reason in [
        (outgoing.finish(asked, 2.0), "it was finished before it was admitted"),
        (outgoing.cancelled(asked, "told to"), "told to"),
        (outgoing.cancelled(open_transfer(), "told to"), "told to"),
    ]:
        assert steps == (Cancel("T"),)
        assert (out.stage, out.unsent, out.error) == (Stage.ENDED, frozenset(), reason)
        assert outgoing.cancelled(out, "again") == (out, ())


@pytest.mark.parametrize("stage", list(Stage))
def test_a_release_is_always_answered(stage: Stage) -> None:
    """The receiver lends its slots to nobody before that."""
    out = replace(open_transfer(), stage=stage, error="before" if stage is Stage.ENDED else None)
    out, steps = outgoing.released(out, "expired")
    assert steps == (Cancel("T"),)
    assert (out.stage, out.error) == (Stage.ENDED, "before" if stage is Stage.ENDED else "expired")
    assert outgoing.put(out, "a", 2.0) == (out, ())
    assert outgoing.finish(out, 2.0) == (out, ())
    assert outgoing.admitted(out, [1, 2, 3], 2.0) == (out, ())
    assert outgoing.done(out) == (out, ())


def test_a_sender_that_waits_too_long_cancels() -> None:
    asked = Outgoing.opened("T", ["a", "b"], 5.0, 10.0, 0.0)
    assert outgoing.overdue(asked, 4.9) == (asked, ())
    for out, at, reason in [
        (asked, 5.0, "the receiver did not answer in time"),
        (open_transfer(), 11.0, "no record was put for too long"),
        (outgoing.finish(open_transfer(), 2.0)[0], 12.0, "the receiver did not confirm in time"),
    ]:
        ended, steps = outgoing.overdue(out, at)
        assert (ended.stage, ended.error, steps) == (Stage.ENDED, reason, (Cancel("T"),))
        assert outgoing.overdue(ended, at + 100) == (ended, ())


def test_answers_that_nobody_asked_for() -> None:
    out = open_transfer()
    told = "transfer T is sending: this answer is not expected"
    with pytest.raises(Unexpected, match=told):
        outgoing.admitted(out, [1, 2, 3], 2.0)
    with pytest.raises(Unexpected, match=told):
        outgoing.done(out)
    asked = Outgoing.opened("T", ["a", "b"], 5.0, 10.0, 0.0)
    with pytest.raises(Unexpected, match="3 slots for 2 records"):
        outgoing.admitted(asked, [1, 2, 3], 2.0)
