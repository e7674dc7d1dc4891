"""The router blends documents that clients mark, and passes them on to engines."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from routers import (  # noqa: F401 - fixtures, too
    CHAT,
    COMPLETIONS,
    LONG,
    Body,
    Routed,
    Start,
    ask,
    chat,
    completion,
    engine_processes,
    engines_as_new,
    fetch,
    stream,
    text_of,
    wanted,
    wanted_prompt,
)
from stub_cache import ManagedCache

from kvkit.lab.testbed.openai_engine import TOKEN, render, text_after
from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for
from kvkit.observe.http import Server
from kvkit.router.documents import Documents, PostedDocument
from kvkit.router.engines import Engine
from kvkit.router.lookups import LookupQuery
from kvkit.router.metrics import RouterMetrics
from kvkit.router.openai import ParsedRequest
from kvkit.router.spans import tokens_of
from kvkit.router.tokens import Headers, Tokenizer
from kvkit.router.warmer import MAX_WAITING, DocumentWarmer
from kvkit.tiers.testing.contract import DEADLINE_S

FIRST, SECOND = "The first document is about the sea. " * 2, "Another one tells of hills. " * 3
QUESTION = "What is in them?"
MARKS = ["[[", "]]"]
BLEND: Body = {"marks": MARKS}
DOCUMENTS = "/v1/documents"
SYSTEM = {"role": "system", "content": "be brief"}
BEFORE = render([SYSTEM, {"role": "user", "content": ""}], generate=False)[:-1]
"""Tokens of the system prompt of `parts`."""


def parts(*contents: str | Body, system: str = "be brief", **fields: Any) -> Body:
    """A chat whose user sends these parts."""
    content = [{"type": "text", "text": c} if isinstance(c, str) else c for c in contents]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    return {"model": "toy", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}


def document(text: str) -> Body:
    return {"type": "document", "text": text}


def where(body: Body, *texts: str) -> list[list[int]]:
    """Spans of texts in the toy's tokens of a chat or completion, one after the other."""
    ids = bytes(render(body["messages"])) if "messages" in body else body["prompt"].encode()
    spans, at = [], 0
    for text in texts:
        at = ids.index(text.encode(), at)
        spans.append([at, at := at + len(text.encode())])
    return spans


def blending(blend: Any) -> Body:
    return {"kv_transfer_params": {"blend": blend}}


PLAIN = parts("Read this:", FIRST, SECOND, QUESTION)
TEXT = f"Read this: {FIRST}, {SECOND} {QUESTION}"
MARKED = TEXT.replace(FIRST, f"[[{FIRST}]]").replace(SECOND, f"[[{SECOND}]]")


@pytest.mark.parametrize(
    ("sent", "plain", "texts"),
    [
        (parts("Read this:", document(FIRST), document(SECOND), QUESTION), PLAIN, [FIRST, SECOND]),
        (parts(MARKED), parts(TEXT), [FIRST, SECOND]),
        (chat(MARKED), chat(TEXT), [FIRST, SECOND]),
        (completion(MARKED), completion(TEXT), [FIRST, SECOND]),
        (parts(f"[[{FIRST}]]", document(SECOND)), parts(FIRST, SECOND), [FIRST, SECOND]),
        (parts(document(FIRST), system=f"[[{SECOND}]]"), parts(FIRST, system=SECOND), [SECOND, FIRST]),
        (parts(document(FIRST), document(FIRST)), parts(FIRST, FIRST), [FIRST, FIRST]),
        (parts(document(""), document(FIRST), document("too short")), parts("", FIRST, "too short"), [FIRST]),
        (parts(document(MARKED)), parts(MARKED), [MARKED]),
    ],
    ids=[
        "parts",
        "marks in a part",
        "marks",
        "a prompt",
        "both",
        "messages",
        "twice",
        "empty",
        "marks inside",
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_documents_are_told_and_texts_are_in_their_place(
    start: Start, sent: Body, plain: Body, texts: list[str], streams: bool
) -> None:
    engines = start(prefill=0)
    path = COMPLETIONS if "prompt" in sent else CHAT
    with Routed(**engines.settings(), blend=BLEND) as router:
        if streams:
            text = "".join(map(text_of, stream(router.url, path, sent)))
        else:
            text = text_of(ask(router.url, path, sent)[1])
    (d,) = engines["d0"].seen()
    assert d["body"].pop("kv_transfer_params") == {"blend": {"documents": where(plain, *texts), "prefix": 0}}
    d["body"].pop("return_token_ids", None)
    assert d["body"] == (plain | {"stream": True} if streams else plain)
    assert text == wanted(plain)


def told(start: Start, body: Body, **settings: Any) -> Any:
    """What D is told of a request."""
    engines = start(prefill=0)
    with Routed(**engines.settings(), blend=BLEND | settings) as router:
        status, answer = ask(router.url, COMPLETIONS if "prompt" in body else CHAT, body)
    assert (status, text_of(answer)) == (200, text_after(answered_prompt(engines["d0"].seen()[0]), 24))
    return engines["d0"].seen()[0]["body"].get("kv_transfer_params")


def answered_prompt(request: Body) -> list[int]:
    return wanted_prompt(request["body"])


@pytest.mark.parametrize(
    ("body", "blend"),
    [
        (chat("no mark", **blending({"documents": [[3, 30]], "joints": [[1]], "first_n": 2})), None),
        (completion([7] * 50, **blending({"documents": [[5, 30], [30, 50]], "prefix": 5, "ratio": 1})), None),
        (completion("no mark", **blending({"ratio": 0.5, "method": "first_n"})), None),
        (completion("no mark", **blending({})), {}),
        (completion(MARKED, **blending(False)), False),
        (chat("no mark", **blending(False)), False),
        (parts(document("too short")), "nothing"),
        (chat("no mark"), "nothing"),
    ],
    ids=[
        "spans",
        "token ids",
        "wishes",
        "as the engine wants",
        "exact",
        "exact chat",
        "too short",
        "no mark",
    ],
)
def test_what_the_client_says_itself(start: Start, body: Body, blend: Any) -> None:
    expected = body.get("kv_transfer_params") if blend is None else blending(blend)["kv_transfer_params"]
    assert told(start, body) == (None if blend == "nothing" else expected)


def test_a_document_is_behind_its_system_prompt(start: Start) -> None:
    body = parts("Read this:", document(FIRST), QUESTION, **blending({"prefix": "system"}))
    before = render([*body["messages"][:1], {"role": "user", "content": ""}], generate=False)[:-1]
    plain = parts("Read this:", FIRST, QUESTION)
    assert told(start, body) == {"blend": {"documents": where(plain, FIRST), "prefix": len(before)}}
    body = completion(MARKED, **blending({"prefix": "Read"}))
    spans = where(completion(TEXT), FIRST, SECOND)
    assert told(start, body) == {"blend": {"documents": spans, "prefix": len("Read")}}


def test_engines_tell_what_documents_of_chats_are_behind(start: Start, tmp_path: Path) -> None:
    """Until one that blends does, documents are alone; then no engine is asked again."""
    engines = start(prefill=0)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    [port] = free_ports(1)
    cache = {"cache": f"http://127.0.0.1:{port}", "token_file": str(tmp_path / "token")}
    body = parts("Read this:", document(FIRST), QUESTION)

    def prefix_tokens() -> int:
        ask(router.url, CHAT, body)
        *_, last = engines["d0"].seen()
        return int(last["body"]["kv_transfer_params"]["blend"]["prefix"])

    with Routed(**engines.settings(d0=cache), blend=BLEND, health_interval_s=0.02) as router:
        assert prefix_tokens() == 0
        with Server(ManagedCache(), token=TOKEN, port=port) as server:
            assert prefix_tokens() == 0
            server.engine["blend_context"] = "prefix"
            wait_for(lambda: prefix_tokens() == len(BEFORE))
            server.engine["blend_context"] = "alone"
            assert prefix_tokens() == len(BEFORE)
        assert prefix_tokens() == len(BEFORE)


def test_a_document_that_was_posted_alone_is_looked_for_alone(start: Start) -> None:
    engines = start(prefill=0)
    with Routed(**engines.settings(), blend=BLEND | {"context": "system"}) as router:
        for posted, expected in (({}, 0), ({"prefix": [SYSTEM]}, len(BEFORE))):
            name = ask(router.url, DOCUMENTS, {"text": FIRST, "model": "toy", **posted})[1]["id"]
            ask(router.url, CHAT, parts({"type": "document", "id": name}, QUESTION))
            *_, last = engines["d0"].seen()
            assert last["body"]["kv_transfer_params"]["blend"]["prefix"] == expected


@pytest.mark.parametrize(
    ("body", "is_behind"),
    [
        (parts("Read this:", document(FIRST), QUESTION), True),
        (parts("Read this:", document(FIRST), QUESTION, **blending({"ratio": 0.3})), True),
        (parts("Read this:", document(FIRST), QUESTION, **blending({"prefix": None})), False),
        (completion(TEXT.replace(FIRST, f"[[{FIRST}]]")), False),
    ],
    ids=["chat", "with a blend object", "a client that says otherwise", "a prompt"],
)
def test_the_settings_say_what_documents_of_chats_are_behind(
    start: Start, body: Body, is_behind: bool
) -> None:
    blend = told(start, body, context="system")["blend"]
    assert blend["prefix"] == (len(BEFORE) if is_behind else 0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (chat("[[a"), r"messages\[1\].content: '\[\[' without '\]\]'"),
        (chat("a]]"), r"messages\[1\].content: '\]\]' without '\[\['"),
        (chat("[[a [[b]] c]]"), r"messages\[1\].content: '\[\[' within a document"),
        (parts("[[a", "b]]"), r"messages\[1\].content\[0\]: '\[\[' without"),
        (parts("b]]", system="[[a"), r"messages\[0\].content: '\[\[' without"),
        (completion("[[a"), "prompt: "),
        (completion(["[[a]]", "b"]), "prompt: several texts with marks"),
        (completion(["a", "b"], **blending({})), "blend: want one prompt"),
        (parts({"type": "document"}), r"content\[0\]: want the document's text, or the id"),
        (parts({"type": "document", "text": 7}), r"content\[0\]: want the document's text"),
        (parts({"type": "document", "id": "doc-1"}), r"content\[0\].id = 'doc-1': no text was posted"),
        (parts(*[document("x")] * 257), "257 documents, want at most 256"),
        (chat("a", **blending(3)), "blend = 3: want false, or an object of documents, joints"),
        (chat("a", **blending({"ratios": 1})), "blend.ratios: unknown setting; did you mean 'ratio'"),
        (chat("a", **blending({"ratio": 0.01})), "blend.ratio = 0.01: want at least 0.05"),
        (chat("a", **blending({"ratio": True})), "blend.ratio = True: .*number"),
        (
            chat("a", **blending({"method": "k_deviation"})),
            "blend.method = 'k_deviation': want one of prophetkv",
        ),
        (
            chat("[[a]]", **blending({"documents": [[0, 1]]})),
            "blend.documents: in tokens, but documents are mark",
        ),
        (chat("[[a]]", **blending({"prefix": 3})), "blend.prefix: in tokens, but documents are marked"),
        (chat("a", **blending({"prefix": "a"})), "blend.prefix = 'a': want \"system\" in a chat"),
        (chat("a", **blending({"documents": [[0, 1]] * 257})), "want .start, stop. in order, apart"),
        (
            chat("a", **blending({"documents": [[i, i + 1] for i in range(257)]})),
            "257 documents, want at most",
        ),
        (chat("a", **blending({"documents": [[0, 2**64]]})), "blend.documents.0.1 = 18446744073709551616: "),
        (
            completion("a", **blending({"prefix": "b"})),
            "blend.prefix = 'b': want a text with which the prompt begins",
        ),
        *(
            (
                completion([1] * 9, **blending({"documents": spans})),
                "blend.documents",
            )
            for spans in (7, [1, 2], [[1]], [[1, 1]], [[2, 4], [3, 5]], [[0, 10]], [[-1, 3]], [[0, 1.5]])
        ),
        (
            completion([1] * 9, **blending({"documents": [[2, 4]], "prefix": 3})),
            "documents: .2, 4.: want .* after the prefix of 3 and within 9",
        ),
    ],
)
def test_wrong_wishes(start: Start, body: Body, words: str) -> None:
    engines = start(prefill=0)
    path = COMPLETIONS if "prompt" in body else CHAT
    with Routed(**engines.settings(), blend=BLEND | {"least_ratio": 0.05}) as router:
        status, answer = ask(router.url, path, body)
    assert (status, engines.served()) == (400, [])
    assert re.search(words, answer["error"]["message"])


@pytest.mark.parametrize("body", [chat("a", **blending({})), parts(document(FIRST))], ids=["blend", "part"])
def test_a_router_without_the_setting_refuses(start: Start, body: Body) -> None:
    engines = start(prefill=0)
    with Routed(**engines.settings()) as router:
        status, answer = ask(router.url, CHAT, body)
        assert "settings have no table [blend]" in answer["error"]["message"]
        assert fetch(router.url, "POST", DOCUMENTS, b"{}")[0] == 404
        assert ask(router.url, COMPLETIONS, completion(MARKED))[0] == 200
    assert (status, engines.order()) == (400, [("d0", completion(MARKED))])


def test_what_was_blended_is_in_the_answer(start: Start) -> None:
    engines = start(prefill=0)
    tokens = {"exact": 1, "blended": 2, "recomputed": 3, "computed": 4}
    engines["d0"].set(params={"blend": tokens | {"secret": "no"}, "remote_host": "no"})
    with Routed(**engines.settings(), blend=BLEND) as router:
        _, answer = ask(router.url, CHAT, parts(document(FIRST)))
    assert answer["kv_transfer_params"] == {"blend": tokens}


def test_what_is_blended_goes_straight_to_a_d(start: Start) -> None:
    """P would compute all of it."""
    engines = start()
    with Routed(**engines.settings(), blend=BLEND) as router:
        assert text_of(ask(router.url, CHAT, parts(document(LONG)))[1]) == wanted(parts(LONG))
        assert engines.served() == ["d0"]
        ask(router.url, CHAT, parts(document(LONG), **blending(False)))
        assert [p["body"]["kv_transfer_params"]["blend"] for p in engines["p0"].seen()] == [False]


def test_without_a_tokenizer_nothing_is_blended(start: Start) -> None:
    engines = start(prefill=0)
    engines["d0"].set(tokenizes=False)
    with Routed(**engines.settings(), blend=BLEND) as router:
        _, answer = ask(router.url, CHAT, parts(document(FIRST)))
        assert text_of(answer) == wanted(parts(FIRST))
        status, answer = ask(router.url, DOCUMENTS, {"text": FIRST})
        assert (status, "no tokenizer" in answer["error"]["message"]) == (503, True)
    assert engines.order() == [("d0", parts(FIRST))]


def test_another_engine_goes_on_with_the_same_documents(start: Start) -> None:
    engines = start(prefill=0, decode=2)
    engines.set(hold_after=10)
    body = parts(document(FIRST), QUESTION)
    with Routed(**engines.settings(), blend=BLEND) as router:
        events = stream(router.url, CHAT, body)
        found = [next(events) for _ in range(10)]
        (victim,) = engines.served()
        engines[victim].kill()
        other = engines["d1" if victim == "d0" else "d0"]
        other.set(hold_after=None)
        found += events
    assert "".join(map(text_of, found)) == wanted(parts(FIRST, QUESTION))
    (request,) = other.seen()
    assert request["body"]["kv_transfer_params"]["blend"] == {
        "documents": where(parts(FIRST), FIRST),
        "prefix": 0,
    }


def test_documents_are_sought_where_they_are_held(start: Start) -> None:
    """Each behind its prefix; what is found twice counts once."""
    engines = start(prefill=0, decode=2)
    asked: dict[str, set[bytes]] = {"d0": set(), "d1": set()}

    body = parts(document(FIRST), document(SECOND), QUESTION, **blending({"prefix": "system"}))
    prompt = bytes(render(parts(FIRST, SECOND, QUESTION)["messages"]))
    before = prompt[: prompt.index(FIRST.encode())]

    async def the_first_at_d1(engine: Engine, query: LookupQuery) -> int | None:
        asked[engine.name].add(tokens := bytes(query.tokens))
        held = {before + FIRST.encode(): len(tokens), prompt: len(before) + 5}
        return held.get(tokens, 0) if engine.name == "d1" else 0

    with Routed(the_first_at_d1, **engines.settings(), blend=BLEND) as router:
        for user in range(6):
            ask(router.url, CHAT, body | {"user": str(user)})
        new = len(prompt) - len(before) - len(FIRST)
        assert f'new_tokens_total{{computed="decode"}} {6 * new}.0' in router.metrics()
    assert engines.served() == ["d1"] * 6
    assert asked["d0"] == asked["d1"] == {prompt, before + FIRST.encode(), before + SECOND.encode()}


def test_a_document_is_computed_ahead(start: Start, tmp_path: Path) -> None:
    engines = start(prefill=0)
    engines["d0"].set(held=60)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    cache = {"cache": engines["d0"].url, "token_file": str(tmp_path / "token")}
    prefix = [{"role": "system", "content": "be brief"}]
    posted = {"text": FIRST, "prefix": prefix, "model": "toy", "cache_salt": "mine"}
    before = render([*prefix, {"role": "user", "content": ""}], generate=False)[:-1]
    with Routed(**engines.settings(d0=cache), blend=BLEND, requests={"max_keep_s": 60}) as router:
        status, answer = ask(router.url, DOCUMENTS, posted | {"seconds": 60})
        (d,) = engines["d0"].seen()
        assert d["body"] == {
            "prompt": [*before, *FIRST.encode()], "max_tokens": 1, "model": "toy", "cache_salt": "mine",
        }  # fmt: skip
        held = 60 - len(before)
        assert (status, answer.pop("pinned")) == (200, held)
        assert answer == {
            "object": "document", "id": answer["id"], "model": "toy", "tokens": len(FIRST),
            "prefix_tokens": len(before), "held": held, "engines": {"d0": held},
        }  # fmt: skip
        path = f"{DOCUMENTS}/{answer['id']}"
        assert ask(router.url, path) == (200, answer)
        engines["d0"].set(held=None)
        assert ask(router.url, path)[1]["held"] is None
        assert ask(router.url, DOCUMENTS, posted)[1]["id"] == answer["id"]

        part = {"type": "document", "id": answer["id"]}
        mine = {"cache_salt": "mine", **blending({"prefix": "system"})}
        assert text_of(ask(router.url, CHAT, parts(part, QUESTION, **mine))[1]) == wanted(
            parts(FIRST, QUESTION)
        )
        *_, last = engines["d0"].seen()
        spans = where(parts(FIRST, QUESTION), FIRST)
        assert last["body"]["kv_transfer_params"]["blend"] == {"documents": spans, "prefix": len(before)}
        for other in ({}, {"cache_salt": "theirs"}, {"cache_salt": "mine", "model": "adapter"}):
            assert ask(router.url, CHAT, parts(part) | other)[0] == 400

        assert json.loads(fetch(router.url, "DELETE", path)[1])["deleted"] is True
        for method in ("GET", "DELETE"):
            assert fetch(router.url, method, path)[0] == 404
        assert ask(router.url, CHAT, parts(part, cache_salt="mine"))[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ([], 400, r"the body is \[\], want an object"),
        ({}, 400, "want one of text and tokens"),
        ({"text": FIRST, "tokens": [1]}, 400, "want one of text and tokens"),
        ({"text": FIRST, "prefix": "a", "prefix_tokens": [1]}, 400, "want one of prefix and prefix_tokens"),
        ({"text": "short"}, 400, "5 tokens do not depend on the text before them: want at least 16"),
        ({"tokens": [1] * 15}, 400, "15 tokens"),
        ({"tokens": [-1] * 20}, 400, "tokens.0 = -1: "),
        ({"tokens": [2**31] * 20}, 400, "tokens.0 = 2147483648: "),
        ({"text": FIRST, "seconds": 60}, 400, r"seconds: this router pins nothing; .* no table \[requests\]"),
        ({"text": FIRST, "txt": 1}, 400, "txt: unknown"),
    ],
    ids=str,
)
def test_what_is_no_document(start: Start, body: Any, status: int, words: str) -> None:
    engines = start(prefill=0)
    with Routed(**engines.settings(), blend=BLEND) as router:
        found, answer = ask(router.url, DOCUMENTS, body)
    assert (found, engines.served()) == (status, [])
    assert re.search(words, answer["error"]["message"])


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "seconds = 86400: want at most requests.max_keep_s = 0"),
        ({"max_keep_s": 3600}, "seconds = 86400: want at most requests.max_keep_s = 3600"),
        ({"max_keep_s": 86400}, "seconds: no engine of this router has a cache"),
    ],
)
def test_nobody_pins_for_longer_than_requests_may_keep(start: Start, limits: Body, words: str) -> None:
    engines = start(prefill=0)
    with Routed(**engines.settings(), blend=BLEND, requests=limits) as router:
        status, answer = ask(router.url, DOCUMENTS, {"text": FIRST, "seconds": 86400})
    assert (status, engines.served()) == (400, [])
    assert words in answer["error"]["message"]


def test_documents_that_are_kept_take_no_more_than_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short they are, and however long their salts."""
    limit_bytes = 4 << 20
    monkeypatch.setattr("kvkit.router.documents.MAX_KEPT_BYTES", limit_bytes)

    async def keep(salt: str, count: int) -> None:
        documents = Documents(Tokenizer([], 1.0), [], None, None, 1.0, None)
        for number in range(count):
            tokens = tokens_of([number] * 16)
            await documents.remember(
                PostedDocument(None, f"{number}{salt}", tokens_of(()), tokens, None), None
            )

    for salt, count in (("", 20_000), ("s" * 10_000, 1000)):
        tracemalloc.start()
        try:
            asyncio.run(keep(salt, count))
            assert tracemalloc.get_traced_memory()[1] < limit_bytes + (1 << 20)
        finally:
            tracemalloc.stop()


def test_a_document_that_an_engine_refuses_is_not_kept(start: Start) -> None:
    engines = start(prefill=0)
    engines["d0"].set(status=400)
    with Routed(**engines.settings(), blend=BLEND) as router:
        status, answer = ask(router.url, DOCUMENTS, {"tokens": [1] * 20})
    assert (status, answer["error"]["message"]) == (400, "as told")


def test_kvkits_endpoint_waits_and_pins(start: Start, tmp_path: Path) -> None:
    engines = start(prefill=0)
    cache = ManagedCache()  # it has 8 tokens of anything
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with Server(cache, token=TOKEN, port=0) as server:
        settings = engines.settings(d0={"cache": server.url, "token_file": str(tmp_path / "token")})
        with Routed(**settings, blend=BLEND, requests={"max_keep_s": 60}) as router:
            body = {"tokens": [5] * 20, "prefix_tokens": [6] * 3, "seconds": 60, "model": "adapter"}
            _, answer = ask(router.url, DOCUMENTS, body)
    assert (answer["held"], answer["pinned"]) == (5, 5)
    assert cache.pinned == [(23, 60.0)]
    assert cache.waited == [0.0, 5.0], "as any prompt is looked up, then until it is stored"
    assert {space.lora for space in cache.asked_about} == {"adapter"}


def test_documents_of_answered_prompts_are_computed_until_they_are_held(start: Start, tmp_path: Path) -> None:
    """But for the first one, which its prompt has stored, and again where tiers have evicted one."""
    engines = start(prefill=0)
    d0 = engines["d0"]
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    cache = {"cache": d0.url, "token_file": str(tmp_path / "token")}
    body = parts(
        document(FIRST), document(SECOND), QUESTION, **blending({"prefix": "system"}), cache_salt="mine"
    )
    before = render([*body["messages"][:1], {"role": "user", "content": ""}], generate=False)[:-1]
    wanted = {"prompt": [*before, *SECOND.encode()], "max_tokens": 1, "model": "toy", "cache_salt": "mine"}
    with Routed(**engines.settings(d0=cache), blend=BLEND | {"first_use": 1}) as router:

        def use(held: int, outcome: str) -> list[Body]:
            d0.set(held=held)
            ask(router.url, CHAT, body, Authorization="Bearer me", **{"X-Session-ID": "mine"})
            wait_for(lambda: f'first_uses_total{{outcome="{outcome}' in router.metrics())
            return [each for each in d0.seen() if each["path"] == COMPLETIONS]

        (computed,) = use(60, 'computed"} 1.0')
        assert computed["body"] == wanted
        assert computed["headers"]["authorization"] == "Bearer me"
        assert "x-session-id" not in computed["headers"]
        assert len(use(60, 'held"} 1.0')) == 1
        assert [each["body"] for each in use(59, 'computed"} 2.0')] == [wanted, wanted]


def test_first_uses_are_few_at_a_time_and_may_fail() -> None:
    """Also as many as wait, and each document at a time once. What has no such token is left alone."""
    began: list[PostedDocument] = []
    metrics = RouterMetrics([])

    def count(outcome: str) -> float:
        return metrics.registry.get_sample_value("kvkit_router_first_uses_total", {"outcome": outcome}) or 0.0

    async def run() -> None:
        gate = asyncio.Event()

        async def compute(document: PostedDocument, headers: Headers) -> None:
            began.append(document)
            await gate.wait()
            await asyncio.sleep(0)
            if document.tokens[0] == 3:
                raise OSError("no engine")

        documents = Documents(Tokenizer([], 1.0), [], None, None, 1.0, None)
        uses = DocumentWarmer(compute, documents, metrics)
        for n in (2**31, *range(1, MAX_WAITING + 3)):
            spans = {"documents": [[10, 30], [30, 50], [50, 51]], "prefix": 5}
            asked = ParsedRequest(
                "completions", {"prompt": [7] * 10 + [n] * 20 + [1000] * 21}, params={"blend": spans}
            )
            uses.offer(asked, None, {})
        workers = [asyncio.create_task(uses.run()) for _ in range(2)]
        while len(began) < 2 or not uses._waiting.empty():
            await asyncio.sleep(0)
            if len(began) == 2 and not gate.is_set():
                for _ in range(100):
                    await asyncio.sleep(0)
                assert len(began) == 2
                gate.set()
        while count("computed") + count("failed") < MAX_WAITING:
            await asyncio.sleep(0)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert [document.tokens[0] for document in began].count(1000) == 1
    assert (count("failed"), count("computed")) == (1, MAX_WAITING - 1)
    assert count("left_out") == 3 * 3


def test_prompts_that_wait_for_first_use_have_a_limit_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvkit.router.warmer.MAX_WAITING_TOKENS", 100)
    began: list[int] = []

    async def compute(document: PostedDocument, headers: Headers) -> None:
        began.append(document.tokens[0])

    async def run() -> None:
        documents = Documents(Tokenizer([], 1.0), [], None, None, 1.0, None)
        uses = DocumentWarmer(compute, documents, RouterMetrics([]))
        task = asyncio.create_task(uses.run())
        span = {"documents": [[10, 40]], "prefix": 5}
        for first in (1, 11):
            for n in range(first, first + 4):
                uses.offer(
                    ParsedRequest("completions", {"prompt": [7] * 10 + [n] * 30}, params={"blend": span}),
                    None,
                    {},
                )
            while len(began) < (2 if first == 1 else 4):
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert began == [1, 2, 11, 12]
