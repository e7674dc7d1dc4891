"""Parsers of engines' bytes in the router raise documented errors only, in bounded memory.

Each fuzzer runs in a process that has little memory, and changes what is in tests/corpus/events.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from fuzz_mutations import change
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_limits import Measured
from repository import TESTS

from kvkit.router import openai
from kvkit.router.answers import Answer, CannotContinue
from kvkit.router.openai import EventParser, ParsedRequest

CORPUS = TESTS / "corpus" / "events"
SEEDS = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
ROOM_BYTES = 128 << 20
"""Address space for a fuzzer and hypothesis; no input has over 100,000 bytes."""
bounded = settings(max_examples=600, deadline=None, database=None, suppress_health_check=list(HealthCheck))

PIECES = [
    *b'"\\[]{},',
    "\\ud800",
    "\n\n",
    "\r\n\r\n",
    "data:",
    "[DONE]",
    "null",
    "true",
    "NaN",
    "-1",
    "1e999",
]
LONG = ["1e999", "9" * 4400, "[" * 2000, '{"a":' * 200, "\ufeff"]
CHUNKS = st.binary(max_size=8) | st.sampled_from(
    [bytes([x]) if isinstance(x, int) else x.encode() for x in (*PIECES, *LONG)]
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "insert", "delete", "double", "splice"]),
        st.integers(0, 10_000),
        CHUNKS,
    ),
    max_size=4,
)


HEADERS = st.text("a0 \0\n\x7f\xe9\u6f22\U0001f600", max_size=20)
"""Of few characters: for all of Unicode hypothesis makes a table that does not fit into ROOM_BYTES."""


@st.composite
def strange(draw: st.DrawFn) -> bytes:
    """A seed with a few changes, or noise."""
    data = bytearray(draw(st.sampled_from(SEEDS) | st.binary(max_size=200)))
    for how, where, value in draw(CHANGES):
        change(data, how, where, value, SEEDS)
    return bytes(data)


ASKED = st.sampled_from(
    [
        ParsedRequest("completions", {"prompt": "ab", "max_tokens": 8, "stream": True}),
        ParsedRequest(
            "completions", {"prompt": "ab", "stream": True, "return_token_ids": True, "stop": ["a"]}
        ),
        ParsedRequest("completions", {"prompt": ["a", "b"], "stream": True, "n": 2}),
        ParsedRequest("chat", {"messages": [], "stream": True, "stream_options": {"include_usage": True}}),
        ParsedRequest("chat", {"messages": [], "stream": True, "n": 2, "tools": [{}]}),
    ]
)


def _streams(raw: bytes, asked: ParsedRequest, cuts: list[int]) -> None:
    """What the client gets of a stream are JSON objects with choices; what came before garbage can be gone on
    with."""
    parser, answer = EventParser(), Answer(asked)
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    try:
        for start, stop in pairwise(edges):
            for data in parser.feed(raw[start:stop]):
                if data == openai.DONE:
                    break
                event = openai.read_event(asked, data)
                if event.get("error") is not None:
                    break
                openai.is_aborted(event)
                shown = answer.advance(event)
                assert shown is None or isinstance(shown["choices"], list)
                if shown is not None:
                    (again,) = EventParser().feed(openai.event_bytes(shown))
                    assert strict(again) == shown
    except (ValueError, CannotContinue):
        pass
    try:
        request = answer.resume()
    except CannotContinue:
        return
    for body in (openai.decode_body(request, None), openai.prefill_body(request, {})):
        assert strict(json.dumps(body).encode()) == body
    owed = answer.last_event()
    assert owed is None or strict(json.dumps(owed).encode()) == owed


def _answers(raw: bytes, asked: ParsedRequest) -> None:
    """Whatever is no stream: an answer, tokens, what is held, an error."""
    for read in (openai.read_object, openai.read_tokens, openai.read_token_count):
        found: Any = understood(read, raw)
        assert found is None or isinstance(found, dict | tuple | int)
    answer = understood(openai.read_answer, asked, raw)
    if answer is not None:
        assert answer["choices"]
        assert not isinstance(openai.computed_tokens(answer), float)
        openai.is_aborted(answer)
        assert strict(json.dumps(answer).encode()) == answer


def _requests(raw: bytes, kind: openai.Kind, header: str | None) -> None:
    """A client's request, for once: what engines get of it holds nothing that is the router's to say."""
    asked = understood(openai.parse, kind, raw)
    if asked is None:
        return
    assert len(openai.session_of(asked, header)) == 32
    assert openai.estimated_tokens(asked) >= 0
    for body in (
        openai.decode_body(asked, None),
        openai.prefill_body(asked, {}),
        openai.tokenize_body(asked),
    ):
        assert "ec_transfer_params" not in body
        assert body.get("kv_transfer_params", {}).keys() <= {"blend", "kv_cache"}
        json.dumps(body, ensure_ascii=False).encode()


def understood(read: Callable[..., Any], *arguments: Any) -> Any:
    """What is read; None: it says that there is nothing."""
    try:
        return read(*arguments)
    except ValueError:
        return None


def strict(raw: bytes) -> Any:
    """JSON as its standard has it."""

    def never(text: str) -> None:
        raise AssertionError(text)

    return json.loads(raw, parse_constant=never)


FUZZERS: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "streams": (_streams, (strange(), ASKED, st.lists(st.integers(0, 10_000), max_size=4))),
    "answers": (_answers, (strange(), ASKED)),
    "requests": (
        _requests,
        (strange(), st.sampled_from(["completions", "chat"]), HEADERS | st.none()),
    ),
}


def fuzz(name: str) -> None:
    """Run a fuzzer."""
    fuzzer, arguments = FUZZERS[name]
    bounded(given(*arguments)(fuzzer))()


@pytest.mark.parametrize("name", FUZZERS)
def test_whatever_comes_is_understood_or_refused(name: str) -> None:
    with Measured() as process:
        process.limit(ROOM_BYTES, fuzz, name)


def test_the_corpus_is_understood_where_it_is_sound() -> None:
    """Or the fuzzers would start from nothing."""
    chat, completion = (
        ParsedRequest("chat", {"messages": [], "n": 2}),
        ParsedRequest("completions", {"prompt": "a"}),
    )
    for path in [*CORPUS.glob("chat*.sse"), *CORPUS.glob("completion*.sse")]:
        *events, done = EventParser().feed(path.read_bytes())
        assert done == openai.DONE
        assert all(openai.read_event(chat if "chat" in path.stem else completion, event) for event in events)
    assert openai.read_tokens((CORPUS / "tokens.json").read_bytes()) == (1, 2, 3)
    assert openai.read_token_count((CORPUS / "hit.json").read_bytes()) == 256
    answer = openai.read_answer(completion, (CORPUS / "answer.json").read_bytes())
    assert openai.computed_tokens(answer) == 1
