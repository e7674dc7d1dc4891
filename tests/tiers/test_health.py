"""The circuit breaker pauses failing tiers as documented, over random histories and threads."""

from __future__ import annotations

import threading
from copy import copy

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkit.tiers.health import (
    CURRENT_S,
    FAILURES_TO_PAUSE,
    PAUSES_S,
    RECENT,
    REMEMBERED,
    SLOW_FACTOR,
    TRIAL_S,
    Health,
)
from kvkit.tiers.testing.contract import DEADLINE_S

LONGEST_S = max(PAUSES_S)


def twin_of(health: Health) -> Health:
    """One of the same history, to ask what would be."""
    twin = Health()
    vars(twin).update({name: copy(value) for name, value in vars(health).items() if name != "_lock"})
    return twin


class Breaker(RuleBasedStateMachine):
    """Any order of questions and reports; whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health()
        self.now = 1000.0
        self.row = 0
        self.unreadable: set[str] = set()  # in that row
        self.pauses: list[float] = []  # when each began, since it was last closed
        self.trial: float | None = None  # when the one under way began

    def paused(self) -> bool:
        """By the text: the n-th pause in a row lasts PAUSES_S[n], the later ones as long as the last."""
        if not self.pauses:
            return False
        length = PAUSES_S[min(len(self.pauses), len(PAUSES_S)) - 1]
        return self.now < self.pauses[-1] + length

    def pause(self) -> None:
        self.pauses.append(self.now)
        self.unreadable = set()
        self.trial = None

    @rule(seconds=st.integers(0, 9) | st.integers(0, 300))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        allowed = self.health.usable(self.now)
        if not self.pauses:
            assert allowed
        elif self.paused():
            assert not allowed
        else:
            assert allowed == (self.trial is None or self.now >= self.trial + TRIAL_S), "one trial at a time"
            if allowed:
                self.trial = self.now

    @rule(timed_out=st.booleans())
    def fail(self, timed_out: bool) -> None:
        self.health.failed(self.now, timed_out)
        if not self.pauses:
            self.row += 1
            if timed_out or self.row == FAILURES_TO_PAUSE:
                self.pause()
        elif not self.paused():
            self.pause()

    @rule(record=st.sampled_from("abcd"))
    def fail_to_read(self, record: str) -> None:
        self.health.failed(self.now, unreadable=record)
        if not self.pauses and record not in self.unreadable:
            self.row += 1
            self.unreadable.add(record)
            if self.row == FAILURES_TO_PAUSE:
                self.pause()
        elif self.pauses and not self.paused():
            self.pause()

    @rule(seconds=st.none() | st.floats(0, 10))
    def work(self, seconds: float | None) -> None:
        self.health.worked(self.now, seconds)
        if not self.paused():
            self.row, self.unreadable, self.pauses, self.trial = 0, set(), [], None

    @rule()
    def answer(self) -> None:
        self.health.answered(self.now)
        self.trial = None

    @invariant()
    def state_is_what_the_history_says(self) -> None:
        state = self.health.state(self.now)
        if not self.pauses:
            assert state in ("ok", "slow")
        else:
            assert state == ("open" if self.paused() else "half-open")

    @invariant()
    def nobody_is_shut_out_for_ever(self) -> None:
        twin, later = twin_of(self.health), self.now + max(LONGEST_S, TRIAL_S)
        assert twin.usable(later)
        twin.worked(later)
        assert twin.state(later) in ("ok", "slow")


TestBreaker = Breaker.TestCase
TestBreaker.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def pause_s(breaker: Health, now: float) -> float:
    """The shortest wait from `now` on, in seconds, after which `breaker` is tried again."""
    return next(pause for pause in PAUSES_S if twin_of(breaker).usable(now + pause))


def test_pauses_grow_and_are_bounded() -> None:
    breaker, now, lengths = Health(), 0.0, []
    for _ in range(500):
        breaker.failed(now, timed_out=True)
        assert not twin_of(breaker).usable(now)
        lengths.append(pause_s(breaker, now))
        now += lengths[-1]
        assert breaker.usable(now)
    assert lengths[: len(PAUSES_S)] == list(PAUSES_S)
    assert list(PAUSES_S) == sorted(set(PAUSES_S))
    assert max(lengths) == LONGEST_S
    breaker.worked(now)
    breaker.failed(now, timed_out=True)
    assert pause_s(breaker, now) == PAUSES_S[0], "success forgets the past"


def test_what_began_before_the_pause_decides_nothing() -> None:
    breaker = Health()
    breaker.failed(0.0, timed_out=True)
    breaker.failed(1.0)
    assert pause_s(breaker, 0.0) == PAUSES_S[0]
    breaker.worked(1.0, 0.5)
    assert breaker.state(1.0) == "open"
    assert breaker.record_s(1.0) is None


def test_a_success_ends_a_row_of_failures() -> None:
    breaker = Health()
    for _ in range(10):
        for _ in range(FAILURES_TO_PAUSE - 1):
            breaker.failed(0.0)
        breaker.worked(0.0)
    assert breaker.usable(0.0)


def test_one_record_that_cannot_be_read_is_one_failure_and_several_are_the_tiers() -> None:
    breaker = Health()
    for _ in range(10 * FAILURES_TO_PAUSE):
        breaker.failed(0.0, unreadable="a")
    assert breaker.usable(0.0)
    for number in range(FAILURES_TO_PAUSE - 1):
        assert breaker.usable(0.0)
        breaker.failed(0.0, unreadable=f"b{number}")
    assert not breaker.usable(0.0)


def test_an_answer_does_not() -> None:
    breaker = Health()
    for _ in range(FAILURES_TO_PAUSE):
        breaker.answered(0.0)
        breaker.failed(0.0)
    assert not breaker.usable(0.0)


def test_one_of_many_threads_gets_the_trial() -> None:
    breaker = Health()
    breaker.failed(0.0, timed_out=True)
    barrier = threading.Barrier(16)
    allowed = []

    def caller() -> None:
        barrier.wait(DEADLINE_S)
        if breaker.usable(PAUSES_S[0]):
            allowed.append(threading.get_ident())

    threads = [threading.Thread(target=caller) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert len(allowed) == 1


def after(*seconds: float) -> str:
    breaker = Health()
    for each in seconds:
        breaker.worked(0.0, each)
    return breaker.state(0.0)


@given(st.floats(1e-6, 10))
def test_slow_is_against_what_the_tier_did_before(usual: float) -> None:
    before, worse = [usual] * (2 * RECENT), SLOW_FACTOR * usual * 1.01
    assert after(*before) == "ok"
    assert after(*before, *[worse] * RECENT) == "slow"
    assert after(*before, *[usual * 2] * RECENT) == "ok"
    assert after(*before, *[worse] * (RECENT // 2 - 1), *[usual] * RECENT) == "ok", "a few do not count"
    assert after(*before, *[worse] * RECENT, *[usual] * RECENT) == "ok", "it recovers"
    assert after(*before, *[worse] * REMEMBERED) == "ok", "in the end it is usual"
    assert after(*[usual] * (RECENT - 1), *[worse] * RECENT) == "ok", "too few to know what is usual"


def test_latencies_are_kept_through_a_pause_and_bounded() -> None:
    breaker, now = Health(), PAUSES_S[0]
    for _ in range(3 * REMEMBERED):
        breaker.worked(0.0, 1.0)
    breaker.failed(0.0, timed_out=True)
    breaker.worked(now)
    states = []
    for _ in range(REMEMBERED):
        breaker.worked(now, 1.01 * SLOW_FACTOR)
        states.append(breaker.state(now))
    assert states[RECENT - 1] == "slow", "against what was before the pause"
    assert states[-1] == "ok", "nothing is known of before"


def test_a_records_time_is_the_median_of_late_and_forgotten_after_a_while() -> None:
    breaker = Health()
    assert breaker.record_s(0.0) is None
    for seconds in [9.0] * RECENT + [0.5] * (RECENT // 2) + [0.25] * (RECENT // 2 + 1):
        breaker.worked(7.0, seconds)
    assert breaker.record_s(7.0) == 0.25
    assert breaker.record_s(7.0 + CURRENT_S) == 0.25
    assert breaker.record_s(7.1 + CURRENT_S) is None, "old figures say nothing"
    breaker.failed(8.0, timed_out=True)
    breaker.worked(8.0 + PAUSES_S[0])
    assert breaker.record_s(9.0) == 0.25
