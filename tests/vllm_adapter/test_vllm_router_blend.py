"""OpenAI's client gets blended answers through the router from a real vLLM server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from openai import BadRequestError, OpenAI
from routers import Routed, ask, fetch
from small_models import save_with_tokenizer
from vllm_engine import BLOCK, connector
from vllm_server import Served

from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for

SECRET = "known-to-the-engine-and-the-router"
SYSTEM = {"role": "system", "content": "Answer from the documents, and from nothing else."}
KEY = " ".join(f"The key number {n} is under the mat by the door of house {7 * n}." for n in range(18))
SEA = " ".join(f"Wave {n} comes in at {n} past {n % 12}, and is {3 * n} feet high." for n in range(18))
QUESTION = "Where is key number 7?"
DOCUMENTS = "/v1/documents"
Body = dict[str, Any]


@dataclass(frozen=True)
class Front:
    """The router, a client of it, and its settings."""

    url: str
    client: OpenAI
    settings: Body

    def chat(self, *content: Body, blend: Any, **fields: Any) -> Any:
        """An answer; `content` are parts of what the user says."""
        messages: Any = [SYSTEM, {"role": "user", "content": list(content)}]
        return self.client.chat.completions.create(
            model="smollm2",
            messages=messages,
            temperature=0,
            max_tokens=24,
            extra_body={"kv_transfer_params": {"blend": blend}},
            **fields,
        )

    def post(self, text: str) -> Body:
        """Have a document computed."""
        body = {"model": "smollm2", "text": text, "prefix": [SYSTEM], "seconds": 60}
        status, told = ask(self.url, DOCUMENTS, body)
        assert status == 200, told
        return dict(told)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("blend")
    (port,) = free_ports(1)
    endpoint = {"enabled": True, "port": port, "token": SECRET}
    settings = {"tiers": {"memory": {"capacity": "64MiB"}}, "server": endpoint}
    transfer = connector(settings, blend={"unchecked": True})
    token = folder / "token"
    token.write_text(SECRET)
    token.chmod(0o600)
    (folder / "engine").mkdir()
    with Served(folder / "engine", transfer, save_with_tokenizer(folder / "model")) as engine:
        decode = {"url": engine.url, "cache": f"http://127.0.0.1:{port}", "token_file": str(token)}
        blend = {"marks": ["[[", "]]"]}
        settings = {"decode": {"d": decode}, "blend": blend, "requests": {"max_keep_s": 60}}
        with Routed(**settings) as router:
            yield Front(router.url, client_of(router), settings)


def client_of(router: Routed) -> OpenAI:
    return OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


def text(words: str) -> Body:
    return {"type": "text", "text": words}


def document(words: str) -> Body:
    return {"type": "document", "text": words}


def said(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def reused(answer: Any) -> int:
    return tokens(answer)["blended"] + tokens(answer)["recomputed"]


def tokens(answer: Any) -> Counter[str]:
    """What became of its prompt."""
    return Counter(answer.kv_transfer_params["blend"])


@pytest.mark.timeout(600)
def test_documents_that_were_computed_ahead_are_blended(front: Front) -> None:
    """All of them recomputed it is the answer without blending, which finds nothing of what was blended.
    The first one stands where it was computed: it is exact."""
    posted = [front.post(words) for words in (KEY, SEA)]
    for told in posted:
        behind = told["prefix_tokens"]
        assert told["held"] == (behind + told["tokens"]) // BLOCK * BLOCK - behind == told["pinned"]
        assert ask(front.url, f"{DOCUMENTS}/{told['id']}")[1]["held"] == told["held"]
    held, exact_there = posted[0]["held"], posted[1]["prefix_tokens"] + posted[1]["held"]
    content = document(SEA), document(KEY), text(QUESTION)
    full = front.chat(*content, blend={"ratio": 1, "prefix": "system"})
    part = front.chat(*content, blend={"prefix": "system"})
    *_, last = front.chat(
        *content, blend={"prefix": "system"}, stream=True, stream_options={"include_usage": True}
    )
    exact = front.chat(*content, blend=False)
    assert said(full) == said(exact)
    rest = exact.usage.prompt_tokens - held - exact_there
    assert tokens(full) == {"exact": exact_there, "blended": 0, "recomputed": held, "computed": rest}
    found = tokens(part)
    assert found["blended"] + found["recomputed"] == held
    assert 0 < found["recomputed"] < held / 4
    assert (found["exact"], found["computed"]) == (exact_there, rest)
    assert last.usage.prompt_tokens_details.cached_tokens == found["blended"] + exact_there
    assert exact.usage.prompt_tokens_details.cached_tokens == exact_there


@pytest.mark.timeout(600)
def test_however_documents_are_marked_the_same_is_blended(front: Front) -> None:
    ids = [front.post(words)["id"] for words in (KEY, SEA)]
    marked = f"[[{KEY}]]\n[[{SEA}]]\n{QUESTION}"
    ways: list[Sequence[Body]] = [
        (document(KEY), document(SEA), text(QUESTION)),
        (*({"type": "document", "id": name} for name in ids), text(QUESTION)),
        (text(marked),),
    ]
    answers = [front.chat(*way, blend={"prefix": "system"}) for way in ways]
    answers.append(front.chat(*ways[0], blend={}))  # the engine's choice
    assert len({said(answer) for answer in answers}) == 1
    assert len({tuple(sorted(tokens(answer).items())) for answer in answers}) == 1
    assert tokens(answers[0])["blended"] > 0
    plain = front.chat(text(marked.replace("[[", "").replace("]]", "")), blend=False)
    assert plain.usage.prompt_tokens == answers[0].usage.prompt_tokens


@pytest.mark.timeout(600)
def test_a_document_right_behind_the_system_prompt_is_stored_on_first_use(front: Front) -> None:
    """By a request that is not blended; found wherever it stands then."""
    hill, road = (f"{words} Here it begins. {KEY}" for words in ("Hills are high.", "Roads are long."))
    front.chat(text(hill), text(QUESTION), blend=None)
    later = front.chat(document(road), document(hill), text(QUESTION), blend={"prefix": "system"})
    assert reused(later) == front.post(hill)["held"] > BLOCK


@pytest.mark.timeout(600)
def test_what_a_prompt_carried_is_computed_once_it_is_answered(front: Front) -> None:
    lake, moor, wood = (f"{words} Here it begins. {SEA}" for words in ("Lakes.", "The moor.", "In the wood."))
    settings = front.settings | {"blend": front.settings["blend"] | {"first_use": 1}}
    with Routed(**settings) as router:
        first_use = Front(router.url, client_of(router), settings)
        asked = {"blend": {"prefix": "system"}}
        first_use.chat(document(lake), document(moor), text(QUESTION), **asked)
        wait_for(lambda: 'first_uses_total{outcome="computed"} 1.0' in router.metrics())
    later = front.chat(document(wood), document(moor), document(lake), text(QUESTION), **asked)
    assert reused(later) == sum(front.post(words)["held"] for words in (moor, lake))


@pytest.mark.timeout(600)
def test_what_is_wrong_is_openais_error(front: Front) -> None:
    with pytest.raises(BadRequestError, match=r"blend\.ratio = 2: .*less than or equal to 1"):
        front.chat(document(KEY), blend={"ratio": 2})
    path = f"{DOCUMENTS}/{front.post(KEY)['id']}"
    assert fetch(front.url, "DELETE", path)[0] == 200
    assert ask(front.url, path)[0] == 404
