"""The policy `sessions` learns when sessions return, and keeps what is due soonest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.tiers.eviction.sessions import _STARTS, _WIDTHS, ReturnTimes, Sessions, _seconds_in_bins
from kvkit.tiers.eviction.state import EvictionState, add_run, note, note_answer, note_request, touch, use_run

HOUR = 3600.0


def asked(state: EvictionState, names: list[str], now: float) -> int:
    """The hits of a request, as a cache serves it: a lookup, then a store of what was missing."""
    run = use_run(state, names, now)
    note_request(state, names, now)
    add_run(state, names[run:], 1, parent=names[run - 1] if run else None, now=now)
    return run


def prompt(session: str, length: int) -> list[str]:
    return [f"{session}.{i}" for i in range(length)]


def learnt(draw: Callable[[random.Random], float], queue: int = 3, count: int = 20_000) -> ReturnTimes:
    """What is known after so many returns, none of which is forgotten, and with nobody waiting."""
    times, chance = ReturnTimes(), random.Random(0)
    for _ in range(count):
        times.learn(queue, draw(chance))
    times.refresh(np.zeros(0, int), np.zeros(0))
    return times


def test_the_wait_of_what_has_no_memory_is_its_mean_at_any_age() -> None:
    times = learnt(lambda chance: chance.expovariate(1 / 40))
    for age_s in (0.0, 7.0, 40.0, 100.0):
        assert times.wait_s(3, age_s, 1e4) == pytest.approx(40, rel=0.15)
    assert times.wait_s(3, 0.0, 1.0) == pytest.approx(1.0, rel=0.05), "no more than the horizon"


def test_what_has_waited_long_waits_longer_where_most_return_soon() -> None:
    times = learnt(lambda chance: chance.paretovariate(1.0))
    waits = [times.wait_s(3, age_s, 1e4) for age_s in (2.0, 20.0, 200.0, 2000.0)]
    assert waits == sorted(waits)
    assert waits[0] * 20 < waits[-1]


def test_sessions_that_do_not_return_count() -> None:
    """Of ten sessions one returned after ten seconds; the others are an hour old."""
    times = ReturnTimes()
    times.learn(0, 10.0)
    times.refresh(np.zeros(9, int), np.full(9, HOUR))
    alone = ReturnTimes()
    alone.learn(0, 10.0)
    alone.refresh(np.zeros(0, int), np.zeros(0))
    assert times.wait_s(0, 0.0, HOUR) > 2 * alone.wait_s(0, 0.0, HOUR)


@given(st.lists(st.floats(0.0, 3e6)))
def test_seconds_in_bins_are_those_of_each_age(ages: list[float]) -> None:
    each = [np.clip(age_s - _STARTS, 0.0, _WIDTHS) for age_s in ages]
    assert _seconds_in_bins(np.array(ages, float)) == pytest.approx(
        sum(each, np.zeros(len(_WIDTHS))), abs=1e-3
    )


def served(policy: str, seed: int) -> tuple[int, int]:
    """Chunks of an agent that were hits, and those it asked for, amid prompts that nobody repeats.

    The agent returns every ten seconds with a chunk more; between two of its requests others fill the room
    more than once.
    """
    chance, state, hits, wanted = random.Random(seed), EvictionState(24, policy), 0, 0
    for step in range(120):
        now, names = 10.0 * step + chance.random(), prompt("agent", 6 + step % 8)
        found = asked(state, names, now)
        if step >= 40:
            hits, wanted = hits + found, wanted + len(names)
        for other in range(5):
            asked(state, prompt(f"{step}-{other}", 6), now + 1 + other)
    return hits, wanted


@pytest.mark.parametrize("seed", range(3))
def test_an_agent_is_kept_amid_prompts_that_do_not_return(seed: int) -> None:
    hits, wanted = served("sessions", seed)
    assert hits > 0.8 * wanted
    assert served("lru", seed) == (0, wanted)


@pytest.mark.parametrize("told", [True, False])
def test_who_waits_for_a_tool_is_kept_rather_than_who_waits_for_a_person(told: bool) -> None:
    """Both agents call a tool for ten seconds, then wait for a person for a thousand, in turns.

    When a third prompt needs room, the one with a tool's result to come was used longer ago than the other.
    """
    state, now = EvictionState(8, "sessions"), 0.0
    for step in range(200):
        for agent in "ab":
            asked(state, prompt(agent, 4), now)
            if told:
                note_answer(state, prompt(agent, 4), tool_call=step % 2 == 0)
            now += 1.0
        now += 8.0 if step % 2 == 0 else 998.0
    asked(state, prompt("a", 4), now)
    if told:
        note_answer(state, prompt("a", 4), tool_call=True)
    now += 5.0
    asked(state, prompt("b", 4), now)
    if told:
        note_answer(state, prompt("b", 4), tool_call=False)
    add_run(state, ["c"], 1, now=now + 1.0)
    lost = {name[0] for name in (*prompt("a", 4), *prompt("b", 4)) if name not in state.entries}
    assert (lost == {"b"}) == told


def test_documents_that_many_sessions_ask_for_are_kept() -> None:
    """Each prompt has a document, one of three or a new one, and a question of its own."""
    chance, found = random.Random(4), {"lru": 0, "sessions": 0}
    prompts = [(chance.choice("abc") if chance.random() < 0.3 else str(i), i) for i in range(2000)]
    for policy in found:
        state = EvictionState(30, policy)
        for document, i in prompts:
            names = [*prompt(document, 5), f"{document}.{i}"]
            hits = asked(state, names, 2.0 * i)
            found[policy] += hits * (document in "abc")
    of_three = 5 * sum(document in "abc" for document, _ in prompts)
    assert found["sessions"] > 0.9 * of_three > 1.5 * found["lru"]


def test_what_is_due_later_than_all_that_is_held_is_refused() -> None:
    state = EvictionState(24, "sessions")
    for step in range(100):
        for agent in "abc":
            asked(state, prompt(agent, 8), 10.0 * step)
        asked(state, prompt(f"other {step}", 4), 10.0 * step + 5)
    held = {name[0] for name in state.entries}
    assert held == set("abc"), "three agents fill the room"
    assert all(entry.followers or entry.name.endswith(".7") for entry in state.entries.values())


def steps(state: EvictionState, count: int = 80) -> Iterator[float]:
    """Times of requests of an agent, ten seconds apart, which teach the policy its pace."""
    for step in range(count):
        asked(state, prompt("agent", 4), 10.0 * step)
        yield 10.0 * step


def test_what_the_newest_prompt_has_no_more_goes_first() -> None:
    state = EvictionState(9, "sessions")
    now = max(steps(state))
    add_run(state, ["thought"], 1, parent="agent.3", now=now)  # of an answer
    asked(state, [*prompt("agent", 4), "agent.4"], now + 10)
    for _ in range(4):
        now += 10
        asked(state, [*prompt("agent", 4), "agent.4"], now)
    asked(state, prompt("old", 3), now + 1)
    assert add_run(state, ["new"], 1, now=now + 2) == (1, ["thought"])


def test_what_was_found_at_the_start_goes_before_what_was_asked_for_since() -> None:
    state = EvictionState(6, "sessions")
    note(state, "found", 1)
    now = max(steps(state))
    asked(state, ["once"], now - HOUR)
    assert add_run(state, ["new"], 1, now=now) == (1, ["found"])


def test_a_request_that_is_looked_up_again_at_once_has_not_returned() -> None:
    again, once = Sessions(), Sessions()
    for step in range(200):
        for number in range(3):
            again.requested(["a", "b"], [], 30.0 * step + 0.3 * number, 3 * step + number)
        once.requested(["a", "b"], [], 30.0 * step + 0.6, step)
    waits = [policy._times.wait_s(4, 0.0, HOUR) for policy in (again, once)]
    assert waits[0] == pytest.approx(waits[1], rel=0.25), "not a part of a second"
    assert {session.queue for p in (again, once) for session in p._sessions.values()} == {4}


def test_a_prompt_that_goes_on_is_the_same_session_whatever_was_evicted() -> None:
    policy = Sessions()
    for step in range(64):
        policy.requested(prompt("a", 5 + step), [], 20.0 * step, step)
    assert len(policy._sessions) == 1
    assert policy._sessions["a.67"].queue == 4, "it returned after 2**4 to 2**5 seconds"
    policy.requested(["a.0", "a.1", "other"], [], 2000.0, 64)
    assert len(policy._sessions) == 2, "a shared beginning makes no session"


def test_as_many_sessions_are_remembered_as_have_room() -> None:
    policy = Sessions()
    for i in range(70_000):
        policy.requested([f"{i}"], [], float(i), i)
    assert len(policy._sessions) == len(policy._starts) == 1 << 16


@pytest.mark.parametrize("seed", range(4))
def test_every_record_can_leave_whatever_queue_it_was_in(seed: int) -> None:
    """Of a model with three groups of layers, whose records follow each other in three chains."""
    chance, state, now = random.Random(seed), EvictionState(60, "sessions"), 0.0
    lengths = dict.fromkeys(range(8), 1)
    for _ in range(400):
        now += chance.choice((0.1, 2.0, 30.0, 600.0))
        session = chance.randrange(8)
        lengths[session] = chance.randint(1, 5) if chance.random() < 0.1 else min(lengths[session] + 1, 5)
        names = [f"{session}.{i}.{group}" for i in range(lengths[session]) for group in range(3)]
        run = use_run(state, names, now)
        note_request(state, names, now)
        for i in range(run, len(names)):
            add_run(state, [names[i]], 1, parent=names[i - 3] if i >= 3 else None, now=now)
        note_answer(state, [*names, "not held"], chance.random() < 0.7)
    held = set(state.entries)
    assert len(held) > 50
    added, victims = add_run(state, ["all"], 60, now=now + 1e7)
    assert (added, set(victims)) == (1, held)


def test_requests_without_evictions_cost_little_memory() -> None:
    """Two thousand sessions change their pace, and with it their queue, time and again."""
    state, now = EvictionState(10_000, "sessions"), 0.0
    for step in range(60):
        now += 3.0 if step // 10 % 2 else 3000.0
        for session in range(2000):
            asked(state, [str(session)], now)
    assert all(len(heap) <= 2 * 2000 + 1024 for heap in state._leaves.values())
    assert sum(len(heap) for heap in state._leaves.values()) > 2000


def test_without_requests_the_least_recently_used_go_first() -> None:
    """As under an engine whose adapter looks up no whole prompts."""
    learning, recency = EvictionState(6, "sessions"), EvictionState(6, "lru")
    chance = random.Random(1)
    for now in range(300):
        name = str(chance.randrange(12))
        for state in (learning, recency):
            if name in state.entries:
                touch(state, [name], float(now))
            else:
                add_run(state, [name], 1, now=float(now))
        assert set(learning.entries) == set(recency.entries)


def test_with_other_policies_a_request_is_no_use() -> None:
    state = EvictionState(3, "lru")
    add_run(state, ["a", "b"], 1)
    uses = {name: entry.uses for name, entry in state.entries.items()}
    note_request(state, ["a", "b", "c"], 1.0)
    assert {name: entry.uses for name, entry in state.entries.items()} == uses
