"""An answer that several engines made in succession equals the answer of a single engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routers import text_of

from kvkit.lab.testbed.openai_engine import DEFAULTS, pieces_of, render, text_after, tokens_after
from kvkit.router.answers import Answer, CannotContinue
from kvkit.router.openai import Body, ParsedRequest, decode_body

COUNT = 16


def events_of(
    asked: ParsedRequest, engine: int, tokens_per_event: int, ids: bool, other: str = ""
) -> list[Body]:
    """What the toy engine sends for a request, as `openai_engine` does over HTTP."""
    body = decode_body(asked, None)
    if asked.kind == "chat":
        prompt = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or render(body["messages"])
    else:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
    count = body["max_tokens"]
    settings = DEFAULTS | {"tokens_per_event": tokens_per_event, "other": other}
    pieces, finish = pieces_of(prompt, count, body, settings)
    ids = ids and bool(body.get("return_token_ids"))
    head = {"id": f"e{engine}", "created": engine, "model": "toy"}
    found: list[Body] = []
    if asked.kind == "chat":
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        found.append({**head, "choices": [role]} | ({"prompt_token_ids": prompt} if ids else {}))
    for number, (text, tokens) in enumerate(pieces):
        choice: Body = {"index": 0, "finish_reason": finish if number == len(pieces) - 1 else None}
        choice |= {"delta": {"content": text}} if asked.kind == "chat" else {"text": text}
        if ids:
            choice |= {"token_ids": tokens}
            if number == 0 and asked.kind == "completions":
                choice["prompt_token_ids"] = prompt
        found.append({**head, "choices": [choice]})
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    return [*found, {**head, "choices": [], "usage": usage}]


BODIES = st.builds(
    lambda body, extra: body | {"max_tokens": COUNT, "stream": True} | extra,
    st.sampled_from(
        [{"prompt": "ab"}, {"prompt": [98, 97]}, {"messages": [{"role": "user", "content": "hi"}]}]
    ),
    st.sampled_from(
        [
            {},
            {"return_token_ids": True},
            {"stop": ["zz", "zzzz"]},
            {"stop": "d"},
            {"seed": 3},
            {"min_tokens": 5},
        ]
    ),
)


def asked_for(body: Body) -> ParsedRequest:
    return ParsedRequest("chat" if "messages" in body else "completions", body)


BREAKS = st.tuples(st.integers(0, 18), st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from([True, True, False]))


@settings(max_examples=400)
@given(BODIES, st.lists(BREAKS, min_size=1, max_size=4))
def test_an_answer_is_the_same_wherever_its_engines_break_off(
    body: Body, breaks: list[tuple[int, int, bool]]
) -> None:
    """`breaks`: for each engine the events that it sends, the tokens in each, whether it tells their ids."""
    asked = asked_for(body)
    whole = events_of(asked, 0, 1, True)
    answer, found, request = Answer(asked), [], asked
    for engine, (count, tokens_per_event, ids) in enumerate([*breaks, (99, 1, True)]):
        for event in events_of(request, engine, tokens_per_event, ids)[:count]:
            shown = answer.advance(event)
            if shown is not None:
                found.append(shown)
        if answer.finished:
            break
        request = answer.resume()
    owed = answer.last_event()
    found += [owed] if owed is not None else []
    assert "".join(map(text_of, found)) == "".join(map(text_of, whole))
    reasons = [choice["finish_reason"] for event in found for choice in event["choices"]]
    assert [r for r in reasons if r] == [whole[-2]["choices"][0]["finish_reason"]]
    assert len({(event["id"], event["created"]) for event in found}) <= 1
    if not body.get("return_token_ids"):
        assert not any("token_ids" in key for event in found for c in event["choices"] for key in c)
    roles = [c["delta"]["role"] for event in found for c in event["choices"] if "role" in c.get("delta", ())]
    assert roles == (["assistant"] if asked.kind == "chat" else [])


@given(BODIES, st.integers(1, 18))
def test_the_usage_is_that_of_the_clients_request(body: Body, count: int) -> None:
    asked = asked_for(body)
    answer = Answer(asked)
    for event in events_of(asked, 0, 1, True)[:count]:
        answer.advance(event)
    if answer.finished:
        return
    last = [answer.advance(event) for event in events_of(answer.resume(), 1, 1, True)][-1]
    assert last is not None
    assert last["usage"] == events_of(asked, 0, 1, True)[-1]["usage"]


def test_the_engine_that_takes_over_gets_what_makes_text() -> None:
    """Up to the last whole character; with the room that is left."""
    asked = asked_for({"prompt": "ab", "max_tokens": COUNT, "min_tokens": 9, "stream": True})
    made = tokens_after([97, 98], COUNT)
    for count in range(1, COUNT):
        answer = Answer(asked)
        for event in events_of(asked, 0, 1, True)[:count]:
            answer.advance(event)
        request = answer.resume()
        whole = len(text_after([97, 98], count).encode())
        if whole == 0:
            assert request == asked
        else:
            assert request.token_ids == (97, 98, *made[:whole])
            assert request.body["max_tokens"] == COUNT - whole
            assert request.body["min_tokens"] == max(0, 9 - whole)


def test_what_made_no_text_may_come_out_differently() -> None:
    """As an engine that samples does; the client has nothing of it."""
    asked = asked_for({"prompt": "ab", "max_tokens": COUNT, "stream": True})
    answer = Answer(asked)
    (first, *_) = events_of(asked, 0, 1, True)[1:]  # it ends "é", of two tokens
    answer.advance(events_of(asked, 0, 1, True)[0])
    answer.advance(first)
    half: Body = {"choices": [{"index": 0, "text": "", "finish_reason": None, "token_ids": [0xE6]}]}
    assert answer.advance(half) is not None
    request = answer.resume()
    assert request.token_ids == (97, 98, 0xC3, 0xA9)
    other: Body = {"choices": [{"index": 0, "text": "x", "finish_reason": None, "token_ids": [120]}]}
    shown = answer.advance(other)
    assert shown is not None
    assert text_of(shown) == "x"


def test_an_answer_that_has_all_its_tokens_is_not_asked_to_go_on() -> None:
    """Its engine failed before it could say why it ended: no engine can be asked for 0 tokens."""
    asked = asked_for({"prompt": "ab", "max_tokens": 1, "stream": True})
    made: Body = {"choices": [{"index": 0, "text": "x", "finish_reason": None, "token_ids": [120]}]}
    made["choices"][0]["prompt_token_ids"] = [97, 98]
    answer = Answer(asked)
    answer.advance(made)
    assert answer.resume() == asked
    assert answer.advance(made) is None
    last: Body = {"choices": [{"index": 0, "text": "", "finish_reason": "length", "token_ids": []}]}
    assert answer.advance(last) is not None
    assert answer.finished


def test_an_answer_cannot_shrink() -> None:
    asked = asked_for({"prompt": "ab", "max_tokens": COUNT, "stream": True, "seed": 1})
    answer = Answer(asked)
    for event in events_of(asked, 0, 1, True)[:12]:
        answer.advance(event)
    short = ParsedRequest("completions", {**asked.body, "max_tokens": 6})
    events = events_of(short, 1, 1, False)
    assert answer.resume() == asked
    assert [answer.advance(event) for event in events[:5]] == [None] * 5
    with pytest.raises(CannotContinue, match="ends the answer before"):
        answer.advance(events[5])


def test_several_choices_have_ended_when_each_has_begun() -> None:
    """An engine may make one after the other, and fail between them."""
    answer = Answer(asked_for({"prompt": ["a", "b"], "n": 1, "stream": True}))
    for index, finished in ((0, False), (1, True)):
        answer.advance({"choices": [{"index": index, "text": "x", "finish_reason": "stop"}]})
        assert answer.finished is finished


def test_usage_that_comes_with_each_token_leaves_that_of_the_end_owed() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = asked_for({"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": options})
    answer = Answer(asked)
    for event in events_of(asked, 0, 1, True)[:-1]:
        answer.advance(event | {"usage": {"prompt_tokens": 2, "completion_tokens": 1}})
    owed = answer.last_event()
    assert owed is not None
    assert owed["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_an_engine_that_fails_after_the_end_owes_the_usage() -> None:
    asked = asked_for({"prompt": "ab", "max_tokens": 3, "stream": True})
    answer = Answer(ParsedRequest("completions", {**asked.body, "stream_options": {"include_usage": True}}))
    for event in events_of(asked, 0, 1, True)[:-1]:
        answer.advance(event)
    assert answer.finished
    owed = answer.last_event()
    assert owed is not None
    assert owed["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert owed["id"] == "e0"


@pytest.mark.parametrize(
    ("body", "event"),
    [
        (
            {"messages": [], "tools": [{}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]},
        ),
        ({"prompt": "a", "n": 2}, {"choices": [{"index": 1, "text": "x", "finish_reason": None}]}),
    ],
)
def test_what_cannot_change_its_engine(body: Body, event: Body) -> None:
    answer = Answer(asked_for(body | {"stream": True}))
    assert answer.resume().body == body | {"stream": True}  # nothing was sent yet
    shown = answer.advance({"id": "e0", **event, "kv_transfer_params": {"remote_host": "h"}})
    assert shown == {"id": "e0", **event}
    with pytest.raises(CannotContinue, match="several choices or tool calls"):
        answer.resume()


@pytest.mark.parametrize("fields", [{"seed": 1}, {"return_token_ids": True}])
def test_another_answer_is_refused(fields: dict[str, Any]) -> None:
    asked = asked_for({"prompt": "ab", "max_tokens": COUNT, "stream": True, **fields})
    answer = Answer(asked)
    for event in events_of(asked, 0, 3, True)[:4]:
        answer.advance(event)
    others = events_of(answer.resume(), 1, 3, True, other="another model")
    with pytest.raises(CannotContinue, match="another answer"):
        list(map(answer.advance, others))


def test_reasoning_is_followed_by_its_text() -> None:
    def piece(**delta: str) -> Body:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "token_ids": [1]}]}

    asked = asked_for({"messages": [], "stream": True})
    answer = Answer(asked)
    for event in (piece(role="assistant", content=""), piece(reasoning="let me"), piece(content="yes")):
        answer.advance(event)
    assert answer.resume() == asked  # a parser in the middle of its work cannot be moved
    again = [piece(role="assistant", content=""), piece(reasoning="let "), piece(reasoning="me see")]
    shown = [answer.advance(event) for event in again]
    assert shown[:2] == [None, None]
    assert shown[2] is not None
    assert shown[2]["choices"][0]["delta"] == {"reasoning": " see"}
