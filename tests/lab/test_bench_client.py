"""The benchmark's client reports answers, failures and hangs of a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from completions_server import Completions

from kvkit.lab.files import BenchError
from kvkit.lab.serve.client import Completion, Target, ask, connect, counted_hits, drive, tokenize
from kvkit.lab.serve.workloads import CompletionRequest, chat
from kvkit.lab.testbed.servers import free_ports
from kvkit.tiers.testing.contract import DEADLINE_S

SHORT_S = 0.3
"""Less than a server that hangs takes."""


@pytest.fixture
def server() -> Iterator[Completions]:
    with Completions() as served:
        yield served


def answers(server: Target, *requests: CompletionRequest, concurrency: int = 1) -> list[Completion]:
    return drive(server, requests, concurrency, DEADLINE_S)[0]


def test_an_answer_is_timed_and_counted(server: Completions) -> None:
    found = connect("s", server.url("good"))
    assert found == Target("s", server.url("good"), "first", vllm=False)
    requests = CompletionRequest(0, "one two three", False, 5), CompletionRequest(1, "one two four", True, 1)
    first, second = answers(found, *requests)
    assert (first.text, first.error, first.again) == (" w0 w1 w2 w3 w4", None, False)
    assert (first.prompt_tokens, first.output_tokens, first.cached_tokens) == (3, 5, 0)
    assert (second.text, second.cached_tokens, second.again) == (" w0", 2, True)
    assert len(first.gaps_s) == 4
    assert second.gaps_s == ()
    assert 0 < first.ttft_s < first.ttft_s + sum(first.gaps_s) < first.total_s
    assert server.bodies[0] == {
        "model": "first",
        "prompt": "one two three",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_vllm_is_told_to_give_all_tokens(server: Completions) -> None:
    (answer,) = answers(
        connect("s", server.url("counting") + "/v1/", "first"), CompletionRequest(0, "a", False)
    )
    assert answer.error is None
    assert server.bodies[0]["ignore_eos"] is True


DOCUMENTS = CompletionRequest(
    0, "Read this. one two three\n\nfour five? Why?", True, 2, documents=((10, 24), (24, 36))
)


def test_a_document_has_the_same_tokens_wherever_it_stands(server: Completions) -> None:
    found = connect("s", server.url("counting"))
    ids, spans = tokenize(found, DOCUMENTS.text, DOCUMENTS.documents, DEADLINE_S)
    assert spans == [[2, 5], [5, 7]]
    one, other = (DOCUMENTS.text[start:stop] for start, stop in DOCUMENTS.documents)
    turned, (second, first) = tokenize(
        found, other + one, ((0, len(other)), (len(other), len(other + one))), 9
    )
    for (start, stop), (a, b) in zip(spans, (first, second), strict=True):
        assert ids[start:stop] == turned[a:b]


def test_a_server_that_blends_is_told_where_documents_stand(server: Completions) -> None:
    plain = connect("s", server.url("counting"))
    blends = replace(plain, blends=True)
    known = replace(DOCUMENTS, answer="w0 w1")
    for target, request in ((plain, known), (blends, replace(known, again=False)), (blends, known)):
        (answer,) = answers(target, request)
        assert (answer.error, answer.exact, answer.top) == (None, True, None)
    assert server.prompts == [DOCUMENTS.text] * 3
    told = [body.get("kv_transfer_params") for body in server.bodies]
    assert told == [None, None, {"blend": {"documents": [[2, 5], [5, 7]], "prefix": 2}}]
    (text,) = answers(connect("s", server.url("good")), replace(DOCUMENTS, answer="w1"))
    assert text.exact is False
    assert server.prompts[-1] == DOCUMENTS.text, "another server gets it as text"


def test_probabilities_of_the_first_token(server: Completions) -> None:
    found = ask(connect("s", server.url("counting")), DOCUMENTS, DOCUMENTS.text, DEADLINE_S, logprobs=2)
    assert found.top == {"token_id:1": -0.5, "token_id:2": -1.5}
    assert server.bodies[0]["logprobs"] == 2


def test_hits_are_read_from_metrics(server: Completions) -> None:
    found = connect("s", server.url("counting"))
    assert counted_hits(found) == 0
    told = answers(found, CompletionRequest(0, "one two", False), CompletionRequest(1, "one two", True))
    assert [answer.cached_tokens for answer in told] == [None, None]
    assert counted_hits(found) == 2
    assert counted_hits(connect("s", server.url("mute"))) is None


def test_a_turn_follows_the_last_ones_answer(server: Completions) -> None:
    requests = chat(0, 12, 64)
    found = answers(connect("s", server.url("good")), *requests, concurrency=3)
    assert [answer.error for answer in found] == [None] * 12
    for session in range(3):
        said = ""
        for request, answer in zip(requests, found, strict=True):
            if request.session == session:
                said += request.text
                assert said in server.prompts
                said += answer.text
    assert server.most <= 3


def test_requests_are_under_way_together_as_many_as_allowed(server: Completions) -> None:
    requests = [CompletionRequest(i, f"{i}", False) for i in range(6)]
    found = answers(connect("s", server.url("pairs")), *requests, concurrency=2)
    assert [answer.error for answer in found] == [None] * 6
    assert [answer.prompt_tokens for answer in found] == [1] * 6
    assert server.most == 2


def test_requests_are_sent_as_they_arrive(server: Completions) -> None:
    requests = [CompletionRequest(i, f"{i}", False, arrival_s=(4 - i) * 0.02) for i in range(5)]
    found = answers(connect("s", server.url("good")), *requests)
    assert server.prompts == ["4", "3", "2", "1", "0"]
    assert [answer.error for answer in found] == [None] * 5


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("refusing", "HTTP 400: .*too long"),
        ("failing", "out of memory"),
        ("cut", "the stream ended early"),
        ("garbled", "JSONDecodeError"),
    ],
)
def test_a_failure_is_an_answer_and_ends_its_session(server: Completions, way: str, words: str) -> None:
    requests = (
        CompletionRequest(0, "a", False),
        CompletionRequest(0, "b", True),
        CompletionRequest(1, "c", False),
    )
    first, following, other = answers(connect("s", server.url(way)), *requests)
    for answer in (first, other):
        assert answer.error is not None
        assert re.search(words, answer.error)
        assert (answer.ttft_s, answer.text, answer.output_tokens) == (0.0, "", 0)
    assert following.error == "an earlier turn failed"
    assert server.prompts == ["a", "c"]


@pytest.mark.parametrize("way", ["hanging", "trickling"])
def test_no_request_is_waited_for_longer_than_said(server: Completions, way: str) -> None:
    requests = [CompletionRequest(i, "a", False) for i in range(3)]
    found, _ = drive(connect("s", server.url(way)), requests, 2, SHORT_S)
    assert [answer.error for answer in found] == [f"not answered within {SHORT_S} s"] * 3


def test_a_server_that_is_gone(server: Completions) -> None:
    found = connect("s", server.url("good"))
    (port,) = free_ports(1)
    gone = Target("s", f"http://127.0.0.1:{port}", "first", False)
    (answer,) = answers(gone, CompletionRequest(0, "a", False))
    assert "Connection refused" in (answer.error or "")
    assert counted_hits(gone) is None
    assert answers(found, CompletionRequest(0, "a", False))[0].error is None


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "", "http://me:hush@host", "http://host/?key=hush"]
)
def test_a_url_that_is_none(url: str) -> None:
    """Figures and errors name the URL: one with a secret is refused, too."""
    with pytest.raises(BenchError, match="want http://HOST:PORT") as caught:
        connect("s", url)
    assert "hush" not in str(caught.value)


def test_no_server_and_no_such_model(server: Completions) -> None:
    with pytest.raises(BenchError, match=r"no OpenAI-compatible server .HTTPException: HTTP 404"):
        connect("s", server.url("good") + "/elsewhere")
    with pytest.raises(BenchError, match=r"model = 'third': http.* has first, second"):
        connect("s", server.url("good"), "third")
