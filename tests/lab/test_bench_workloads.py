"""Workloads are the same from the same seed, and share the tokens that they state."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations

import pytest
from completions_server import common
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit.lab.serve.workloads import CONTROL, QUESTION_WORDS, WORDS, WORKLOADS, CompletionRequest, arriving

SEEDS = st.integers(0, 2**32)
REQUESTS = st.integers(2, 20)
LENGTHS = st.integers(64, 300)
FEW = 8
"""Words that two random texts have in common at most: eight in a row by chance are one in 10 to the 17."""


def made(name: str, seed: int, requests: int, words: int) -> list[CompletionRequest]:
    return WORKLOADS[name](seed, requests, words)


@pytest.mark.parametrize("name", WORKLOADS)
@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_equal_arguments_give_equal_requests(name: str, seed: int, requests: int, words: int) -> None:
    found = made(name, seed, requests, words)
    assert found == made(name, seed, requests, words)
    assert len(found) == requests
    assert all(request.arrival_s == 0 for request in found)
    for one, other in zip(found, made(name, seed + 1, requests, words), strict=True):
        assert common(one.text, other.text) < FEW


@pytest.mark.parametrize("name", WORKLOADS)
@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_again_is_what_began_so_before(name: str, seed: int, requests: int, words: int) -> None:
    """Of prompts without the answers in them, which no workload knows."""
    found = made(name, seed, requests, words)
    history: dict[int, str] = defaultdict(str)
    earlier: list[str] = []
    for request in found:
        history[request.session] += request.text
        prompt = history[request.session]
        assert request.again == any(common(prompt, other) >= FEW for other in earlier)
        earlier.append(prompt)
    lengths = [len(text.split()) for text in history.values()]
    assert max(lengths) <= words + 2 * QUESTION_WORDS


@pytest.mark.parametrize(("one", "other"), [*combinations(WORKLOADS, 2)])
def test_workloads_share_nothing_with_each_other(one: str, other: str) -> None:
    texts = [[request.text for request in made(name, 0, 12, 200)] for name in (one, other)]
    assert all(common(a, b) < FEW for a in texts[0] for b in texts[1])


@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_the_control_shares_nothing(seed: int, requests: int, words: int) -> None:
    found = made(CONTROL, seed, requests, words)
    assert not any(request.again for request in found)
    assert {len(request.text.split()) for request in found} == {words}
    assert all(common(a.text, b.text) < FEW for a, b in combinations(found, 2))


@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_document_qa_asks_about_every_document_first(seed: int, requests: int, words: int) -> None:
    found = made("document-qa", seed, requests, words)
    documents = [request.text.split("\n\n")[0] for request in found]
    distinct = -(-requests // 4)
    assert len(set(documents[:distinct])) == distinct == len(set(documents))
    assert max(Counter(documents).values()) <= 4
    assert {len(document.split()) for document in documents} == {words}
    assert len({request.text for request in found}) == requests, "a question comes once"


@given(seed=SEEDS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_permutations_are_of_the_same_documents(seed: int, words: int) -> None:
    found = [request.text.split("\n\n")[:-1] for request in made("document-permutation", seed, 16, words)]
    assert {tuple(sorted(documents)) for documents in found} == {tuple(sorted(found[0]))}
    assert len({tuple(documents) for documents in found}) > 1
    assert len(set(found[0])) == 4


@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_chat_takes_turns(seed: int, requests: int, words: int) -> None:
    turns = Counter[int]()
    for request in made("chat", seed, requests, words):
        assert request.again == (turns[request.session] > 0)
        assert request.text.startswith("\n\nUser: ")
        assert request.text.endswith("\n\nAssistant:")
        turns[request.session] += 1
        assert max(turns.values()) - min(turns[s] for s in range(-(-requests // 4))) <= 1


@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_the_system_prompt_is_in_front_of_all(seed: int, requests: int, words: int) -> None:
    found = made("system-prompt", seed, requests, words)
    assert all(words <= common(a.text, b.text) < words + 1 + FEW for a, b in combinations(found, 2))


@given(seed=SEEDS, requests=REQUESTS, words=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_rag_asks_for_what_a_document_of_the_prompt_tells(seed: int, requests: int, words: int) -> None:
    found = made("rag", seed, requests, words)
    alone = [request for request in found if not request.again]
    documents = [request.text for request in alone]
    assert len(set(documents)) == len(alone) == -(-requests // 4)
    assert all(request.documents == ((0, len(request.text)),) and request.answer is None for request in alone)
    for request in found[len(alone) :]:
        parts = [request.text[start:stop] for start, stop in request.documents]
        assert len(set(parts)) == len(parts) == min(4, len(alone))
        assert set(parts) <= set(documents)
        assert request.text.startswith("".join(parts))
        line = request.text.rpartition("? ")[2]
        assert [f"{line} {request.answer}." in part for part in parts].count(True) == 1


def test_rag_asks_more_often_for_popular_documents() -> None:
    """By Zipf's law the first of 25 is twice as likely to be drawn as the second, of four without return."""
    found = made("rag", 0, 2000, 64)
    names = [request.text for request in found if not request.again]
    counts = Counter(r.text[a:b] for r in found if r.again for a, b in r.documents)
    popular, rest = names[:10], names[-10:]
    assert min(counts[text] for text in popular) > 2 * max(counts[text] for text in rest)
    assert len({tuple(r.documents) for r in found if r.again}) > 100, "their order changes"


@given(seed=SEEDS, per_second=st.floats(0.01, 1000))
@settings(max_examples=20, deadline=None)
def test_arrivals_are_in_order_and_as_many_as_said(seed: int, per_second: float) -> None:
    requests = made(CONTROL, 0, 2000, 1)
    timed = arriving(requests, per_second, seed)
    assert timed == arriving(requests, per_second, seed)
    times = [request.arrival_s for request in timed]
    assert times[0] == 0
    assert times == sorted(times)
    assert 0.85 < times[-1] * per_second / len(times) < 1.15, "over six standard deviations"
    assert [request.text for request in timed] == [request.text for request in requests]


def test_the_vocabulary_has_no_word_twice() -> None:
    assert len(set(WORDS)) == len(WORDS) > 128
