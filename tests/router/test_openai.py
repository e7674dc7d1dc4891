"""OpenAI requests are split for P and D, and streams of events are parsed in pieces."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.router import openai
from kvkit.router.openai import EventParser, ParsedRequest, parse

TEXTS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(["data: ", "data:", ": ", "event: "]))),
    st.sampled_from(["\n", "\r\n"]),
    st.data(),
)
def test_events_come_out_whole_however_they_are_cut(
    lines: list[tuple[str, str]], end: str, data: st.DataObject
) -> None:
    raw = "".join(f"{kind}{text}{end}{end}" for text, kind in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    parser = EventParser()
    found = [e for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) for e in parser.feed(raw[a:b])]
    expected = [
        text.removeprefix(" ") if kind == "data:" else text for text, kind in lines if kind.startswith("data")
    ]
    assert [event.decode() for event in found] == expected


def test_an_event_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    assert list(parser.feed(b"data: " + b"x" * 94)) == []
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        list(parser.feed(b"x"))


@given(st.dictionaries(TEXTS, st.recursive(TEXTS | st.integers() | st.none(), st.lists, max_leaves=5)))
def test_an_event_that_is_sent_can_be_read(event: dict[str, Any]) -> None:
    (raw,) = EventParser().feed(openai.event_bytes(event))
    assert json.loads(raw) == event


def asked(**body: Any) -> ParsedRequest:
    kind: openai.Kind = "chat" if "messages" in body else "completions"
    return parse(kind, json.dumps(body).encode())


@given(
    st.binary(max_size=50) | st.recursive(TEXTS | st.none(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_whatever_comes_is_a_request_or_refused(raw: bytes) -> None:
    for kind in openai.PATHS:
        try:
            found = parse(kind, raw)
        except openai.BadRequest:
            continue
        assert isinstance(found.body, dict)
        openai.estimated_tokens(found)
        openai.session_of(found, None)


@pytest.mark.parametrize(
    ("body", "single", "can_disaggregate"),
    [
        ({"prompt": "a"}, True, True),
        ({"prompt": [1, 2]}, True, True),
        ({"prompt": ["a"]}, False, False),
        ({"prompt": [[1], [2]]}, False, False),
        ({"prompt": "a", "n": 2}, False, False),
        ({"prompt": "a", "best_of": 2}, False, False),
        ({"prompt": "a", "echo": True}, True, False),
        ({"prompt": "a", "echo": False, "n": 1}, True, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True, False),
        ({"messages": [], "n": 3}, False, False),
        ({"messages": []}, True, True),
    ],
)
def test_what_can_be_split(body: dict[str, Any], single: bool, can_disaggregate: bool) -> None:
    assert (asked(**body).single, asked(**body).can_disaggregate) == (single, can_disaggregate)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a"}, 16),
        ({"prompt": "a", "max_tokens": 3}, 3),
        ({"messages": []}, None),
        ({"messages": [], "max_tokens": 3}, 3),
        ({"messages": [], "max_tokens": 3, "max_completion_tokens": 4}, 4),
    ],
)
def test_the_longest_answer(body: dict[str, Any], expected: int | None) -> None:
    assert asked(**body).max_tokens == expected


def test_what_vllm_hands_to_its_connectors_is_refused() -> None:
    """All of it: fields of vLLM's requests, and what it takes out of a request's extra arguments."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vllm is missing")
    source = Path(found.origin).parent
    requests = source / "entrypoints/openai"
    fields = re.findall(
        r"^    (\w+): ",
        (requests / "completion/protocol.py").read_text()
        + (requests / "chat_completion/protocol.py").read_text(),
        re.MULTILINE,
    )
    taken = re.findall(r'extra_args\.get\(\s*"(\w+)"', (source / "v1/request.py").read_text())
    assert "kv_transfer_params" in {*fields} & {*taken}
    for name in {name for name in (*fields, *taken) if "transfer" in name}:
        for body in ({name: {"x": 1}}, {"vllm_xargs": {name: "x"}}):
            with pytest.raises(openai.BadRequest, match=rf"{name}(\.x)?: not for clients"):
                asked(prompt="a", **body)


def test_a_conversation_is_told_by_how_it_begins() -> None:
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    later = [*first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "how?"}]
    session = openai.session_of(asked(messages=first, model="m"), None)
    assert session == openai.session_of(asked(messages=later, model="m"), None)
    assert session != openai.session_of(asked(messages=later[1:], model="m"), None)
    assert session != openai.session_of(asked(messages=first, model="n"), None)
    long = "x" * 1024
    assert openai.session_of(asked(prompt=long + "a"), None) == openai.session_of(asked(prompt=long), None)
    assert openai.session_of(asked(prompt="a"), None) != openai.session_of(asked(prompt=[97]), None)


def test_who_names_a_conversation_is_believed() -> None:
    def session(header: str | None = None, **names: Any) -> str:
        return openai.session_of(asked(prompt="a", **names), header)

    assert session("header", user="u", session_id="s") == session("header")
    assert session(user="u", session_id="s") == session("s")
    assert session("", user="u") == session("u")
    assert len({session("header"), session("s"), session("u"), session()}) == 4
    assert openai.session_of(asked(prompt="a", user=3), None) == openai.session_of(asked(prompt="a"), None)


@pytest.mark.parametrize("name", ["u", "u" * (8 << 20), "\udcff"], ids=["short", "8 MiB", "half a character"])
def test_a_conversations_name_takes_32_characters(name: str) -> None:
    assert len(openai.session_of(asked(prompt="a", user=name[:0]), name)) == 32


def test_the_bodies_for_p_and_d_leave_the_clients_alone() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "min_tokens": 5,
        "logprobs": True,
        "tools": [{"type": "function"}],
    }
    request = asked(**body)
    p, d = openai.prefill_body(request, {"x": 1}), openai.decode_body(request, {"y": 2})
    assert p == {
        "messages": body["messages"],
        "tools": body["tools"],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "kv_transfer_params": {"x": 1},
    }
    assert d == body | {"return_token_ids": True, "kv_transfer_params": {"y": 2}}
    assert request.body == body


def test_token_ids_take_the_place_of_the_prompt() -> None:
    ids = (1, 2, 3)
    completion = ParsedRequest("completions", {"prompt": "a"}, ids)
    assert openai.decode_body(completion, None) == {"prompt": [1, 2, 3]}
    chat = ParsedRequest("chat", {"messages": []}, ids)
    assert openai.decode_body(chat, {"z": 0})["kv_transfer_params"] == {
        "z": 0,
        "prompt_token_ids": [1, 2, 3],
    }
    assert openai.prefill_body(chat, {})["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 400}, 100),
        ({"prompt": [5] * 7}, 7),
        ({"prompt": ["x" * 40, "x" * 40]}, 20),
        ({"prompt": [[5] * 7, [5]]}, 8),
        ({"messages": [{"content": "x" * 40}, {"content": [{"text": "x" * 40}, {"image": 1}]}, {}]}, 20),
    ],
)
def test_about_how_long_a_prompt_is(body: dict[str, Any], tokens: int) -> None:
    assert openai.estimated_tokens(asked(**body)) == tokens


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (None, None),
        ({"prompt_tokens": 10}, None),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}, 6),
        ({"prompt_tokens": 10, "prompt_tokens_details": None}, None),
    ],
)
def test_what_p_computed(usage: dict[str, Any] | None, tokens: int | None) -> None:
    assert openai.computed_tokens({"usage": usage}) == tokens


def test_documents_are_spans_within_the_prompt() -> None:
    """Behind the prefix and their joints; a client may send any span with a text."""
    blend = {"documents": [[4, 6], [6, 8], [7, 9]], "prefix": 2, "joints": [[], [70], []]}
    asked = ParsedRequest("chat", {"messages": []}, params={"blend": blend})
    assert list(openai.documents_of(asked, range(10, 18))) == [((10, 11), 4, 6), ((10, 11, 70), 6, 8)]
    for other in ({}, {"blend": False}, {"blend": {"prefix": None, "documents": None}}):
        assert not list(openai.documents_of(ParsedRequest("chat", {}, params=other), range(8)))
