"""The router before real vLLM servers gives one server's texts, and moves no KV twice.

One prefill engine P; of the decode engines, `one` is on its host and `two` behind a slow link. All are set
up for every flow: P keeps nothing, and seeks in a shared folder, the pool, and in the memories of both D's;
these store to their memory and to the pool.
"""

from __future__ import annotations

import json
import re
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from metric_names import documented, moved, samples
from network_namespaces import Host, Link, far_host
from routers import Routed, ask, stream, text_of
from run_sizes import nightly
from small_models import save_with_tokenizer
from vllm_engine import BLOCK, Settings, connector, prompt
from vllm_server import Served

from kvkit.lab.testbed.servers import free_ports, together
from kvkit.lab.testbed.waiting import wait_for
from kvkit.router import metrics as router_metrics
from kvkit.tiers.testing.contract import DEADLINE_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHUNK = 2 * BLOCK
SECRET = "known-to-all-of-the-engines"
LONG = "The quick brown fox jumps over the lazy dog, and then it counts to ten. " * 40
"""Far over 256 tokens: it goes over P."""
GREEDY = {"model": "smollm2", "temperature": 0, "ignore_eos": True}

Tokens = list[int]
ByTier = dict[str, int]


class Engine(Served):
    """A server whose kvkit has an HTTP endpoint, too."""

    def __init__(self, folder: Path, model: Path, settings: Settings, address: str, network: str) -> None:
        folder.mkdir()
        (port,) = free_ports(1)
        endpoint = {"enabled": True, "host": address, "port": port, "token": SECRET}
        transfer = connector({"chunk_tokens": CHUNK, "server": endpoint} | settings, handoff_timeout_s=5.0)
        super().__init__(folder, transfer, model, address, network)
        self.endpoint = f"http://{address}:{port}"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"VLLM_SERVER_DEV_MODE": "1"}  # or it has no /reset_prefix_cache

    def kvkit(self, path: str, body: Settings | None = None) -> str:
        """What the endpoint answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.endpoint + path, data, {"Authorization": f"Bearer {SECRET}"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            text: str = reply.read().decode()
            return text

    def counts(self) -> dict[str, Counter[str]]:
        """What was moved so far, by metric and tier."""
        found: dict[str, Counter[str]] = {}
        shown = re.findall(r'^kvkit_(\w+)_total{tier="(\w+)"} (.*)$', self.kvkit("/metrics"), re.M)
        for metric, tier, value in shown:
            found.setdefault(metric, Counter())[tier] = int(float(value))
        return found

    def counted(self, metric: str) -> int:
        """The value of a counter without labels."""
        (value,) = re.findall(rf"^kvkit_{metric}_total (.*)$", self.kvkit("/metrics"), re.M)
        return int(float(value))

    def settle(self) -> None:
        """Return when nothing is on its way from an earlier request."""
        self.ask(COMPLETIONS, GREEDY | {"prompt": prompt(20), "max_tokens": 3})  # takes its last steps
        busy = r"^(?:kvkit_puts_under_way|kvkit_handoff_transfers{.*}) [^0]"
        wait_for(lambda: not re.search(busy, self.kvkit("/metrics"), re.M))


@dataclass(frozen=True)
class Turn:
    """A request over the router: its answer, and what the engines moved for it, by engine and tier.

    Attributes:
        loaded: prompt tokens that were not computed.
        loaded_bytes, stored, stored_bytes: of records, and how many.
    """

    tokens: Tokens
    loaded: dict[str, ByTier]
    loaded_bytes: dict[str, ByTier]
    stored: dict[str, ByTier]
    stored_bytes: dict[str, ByTier]


@dataclass(frozen=True)
class Engines:
    """All of them, by name."""

    all: dict[str, Engine]
    handoff: dict[str, str]
    link: Link | None
    token_file: Path

    def router(self, *decode: str, asks: bool = False, **settings: Any) -> Routed:
        """One before P and these D's; `asks`: P is asked what it holds."""
        p = self.all["p"]
        cache = {"cache": p.endpoint, "token_file": str(self.token_file)} if asks else {}
        return Routed(
            prefill={"p": {"url": p.url} | cache},
            decode={name: {"url": self.all[name].url, "handoff": self.handoff[name]} for name in decode},
            **settings,
        )

    def alone(self, path: str, body: Settings) -> Settings:
        """What P answers by itself, with nothing from elsewhere: nobody else has this salt."""
        return ask(self.all["p"].url, path, body | {"cache_salt": "alone"})[1]

    def turn(self, router: Routed, given: Tokens, tokens: int) -> Turn:
        """A request for `tokens` tokens, whose answer must be P's own."""
        for engine in self.all.values():
            engine.settle()
        before = {name: engine.counts() for name, engine in self.all.items()}
        body = GREEDY | {"prompt": given, "max_tokens": tokens, "return_token_ids": True}
        (choice,) = ask(router.url, COMPLETIONS, body)[1]["choices"]
        for engine in self.all.values():
            engine.settle()
        (own,) = self.alone(COMPLETIONS, body)["choices"]
        assert (choice["text"], choice["token_ids"]) == (own["text"], own["token_ids"])
        after = {name: engine.counts() for name, engine in self.all.items()}

        def grown(metric: str) -> dict[str, ByTier]:
            new = {name: dict(after[name][metric] - before[name][metric]) for name in self.all}
            return {name: by_tier for name, by_tier in new.items() if by_tier}

        moved = ("loaded_tokens", "loaded_bytes", "stored_records", "stored_bytes")
        return Turn(choice["token_ids"], *map(grown, moved))


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Host, Link] | None]:
    """The host of `two`; None where none can be made: it takes root and iproute2."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(far_host())
        except OSError as error:
            warnings.warn(f"decode engine two is on loopback, behind no slow link: {error}", stacklevel=1)
            found = None
        yield found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, far: tuple[Host, Link] | None) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("router")
    model = save_with_tokenizer(folder / "model")
    near = "127.0.0.1"
    address, network, link = (near, "", None) if far is None else (far[0].address, far[0].network, far[1])
    (port,) = free_ports(1)
    handoff = {"one": f"unix://{folder}/one/handoff/socket", "two": f"tcp://{address}:{port}"}
    pool = {"url": f"file://{folder}/pool", "scope": "shared"}
    settings: dict[str, Settings] = {
        "p": {
            "tiers": {"pool": pool},
            "handoff": {"role": "prefill", "secret": SECRET, "peers": handoff},
            "policy": {
                "retrieve_from": ["pool", *handoff],
                "store_to": ["handoff"],
                "write_back_to": [],
            },
        }
    }
    for name, where in handoff.items():
        settings[name] = {
            "tiers": {"memory": {"capacity": "64MiB"}, "pool": pool},
            "handoff": {"role": "decode", "secret": SECRET, "listen": [where], "buffer": "32MiB"},
            "policy": {
                "retrieve_from": ["handoff", "memory", "pool"],
                "store_to": ["memory", "pool"],
                "write_back_to": [],
            },
        }
    hosts = {"p": (near, ""), "one": (near, ""), "two": (address, network)}
    token = folder / "token"
    token.write_text(SECRET)
    token.chmod(0o600)
    all_ = {name: Engine(folder / name, model, settings[name], *hosts[name]) for name in settings}
    with together(*all_.values()):
        yield Engines(all_, handoff, link, token)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["one", *nightly("two")])
def test_a_conversation_moves_nothing_twice(engines: Engines, name: str) -> None:
    """P finds in the pool what D stored of the last turn, and when that is gone, in D's memory.

    What is left of each prompt is sent in two blocks.
    """
    seed = {"one": 100, "two": 200}[name]
    with engines.router(name) as router:
        given = prompt(700, seed)
        first = engines.turn(router, given, 150)
        assert first.loaded == {name: {"handoff": 6 * BLOCK}}
        assert first.stored == {"p": {"handoff": 4}, name: {"memory": 3, "pool": 3}}, "of 849 tokens"
        chunk = first.stored_bytes[name]["pool"] // 3
        blocks = first.stored_bytes["p"]["handoff"] - 2 * chunk
        assert first.loaded_bytes == {name: {"handoff": 2 * chunk + blocks}}

        given += first.tokens + prompt(60, seed + 1)
        second = engines.turn(router, given, 150)
        assert second.loaded == {"p": {"pool": 3 * CHUNK}, name: {"memory": 3 * CHUNK, "handoff": CHUNK}}
        assert second.loaded_bytes["p"] == {"pool": 3 * chunk}
        assert second.stored_bytes == {"p": {"handoff": blocks}, name: {"memory": chunk, "pool": chunk}}

        engines.all[name].kvkit("/clear", {"tier": "pool"})
        given += second.tokens + prompt(100, seed + 2)
        third = engines.turn(router, given, 8)
        assert third.loaded == {"p": {name: 4 * CHUNK}, name: {"memory": 4 * CHUNK, "handoff": CHUNK}}
        assert third.loaded_bytes["p"] == {name: 4 * chunk}
        assert third.stored_bytes == {"p": {"handoff": blocks}, name: {"pool": 4 * chunk}}
    if name == "two" and engines.link is not None:
        assert engines.link.lost > 0, "it was a bad link"


def test_a_conversation_that_moves_finds_its_beginning_in_the_pool(engines: Engines) -> None:
    given = prompt(700, 300)
    with engines.router("one") as router:
        first = engines.turn(router, given, 150)
    given += first.tokens + prompt(60, 301)
    with engines.router("two") as router:
        moved = engines.turn(router, given, 150)
    assert moved.loaded == {"p": {"pool": 3 * CHUNK}, "two": {"pool": 3 * CHUNK, "handoff": CHUNK}}
    assert moved.stored == {"p": {"handoff": 2}, "two": {"memory": 4, "pool": 1}}
    assert moved.stored_bytes["p"]["handoff"] == moved.loaded_bytes["two"]["handoff"]


def completion(count: int) -> Settings:
    return GREEDY | {"prompt": LONG, "max_tokens": count}


def chat(count: int) -> Settings:
    messages = [{"role": "user", "content": f"{LONG}\nWrite a poem about 日本 and the sea, with emojis."}]
    return GREEDY | {"messages": messages, "max_tokens": count}


def session_at(router: Routed, name: str) -> Settings:
    """What makes a request one of a conversation that this D has."""
    here = rf'requests_total{{decode="{name}",.*}} [1-9]'
    for number in count():
        session = {"user": f"{name}-{number}"}
        ask(router.url, COMPLETIONS, GREEDY | {"prompt": "Hello.", "max_tokens": 1} | session)
        if re.search(here, router.metrics()):
            return session
    raise AssertionError


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("path", "body", "name", "end"),
    [
        pytest.param(COMPLETIONS, completion, "one", Served.stop, marks=pytest.mark.nightly, id="stopped"),
        pytest.param(CHAT, chat, "two", Served.kill, id="killed"),
    ],
)
def test_another_decode_engine_goes_on_in_the_middle_of_a_stream(
    engines: Engines,
    path: str,
    body: Callable[[int], Settings],
    name: str,
    end: Callable[[Served], None],
) -> None:
    victim = engines.all[name]
    with engines.router("one", "two", asks=True, idle_timeout_s=8, prefill_timeout_s=60) as router:
        shown = [samples(router.metrics())]
        session = session_at(router, name)
        before = victim.counts()["loaded_tokens"]["handoff"]
        direct = text_of(engines.alone(path, body(400)))
        whole = text_of(ask(router.url, path, body(16) | session)[1])
        assert direct.startswith(whole)
        assert "".join(map(text_of, stream(router.url, path, body(16) | session))) == whole
        assert victim.counts()["loaded_tokens"]["handoff"] > before, "P's KV came"
        events = stream(router.url, path, body(400) | session, timeout_s=200)
        found = [next(events) for _ in range(7)]
        shown.append(samples(router.metrics()))
        end(victim)
        found += events
        shown.append(samples(router.metrics()))
        assert "".join(map(text_of, found)) == direct
        assert 'kvkit_router_takeovers_total{outcome="continued"} 1.0' in router.metrics()
        if end is Served.stop:
            victim.resume()
            wait_for(lambda: all(router.health().values()))
        else:
            still = documented(router_metrics.__doc__) - moved(*shown)
            assert still == {"kvkit_router_first_uses_total"}  # of documents: test_vllm_router_blend.py


@pytest.mark.timeout(900)
def test_decode_computes_what_a_killed_prefill_engine_does_not(engines: Engines) -> None:
    direct = text_of(engines.alone(COMPLETIONS, completion(16)))
    prefill = engines.all["p"]
    with engines.router("one", prefill_timeout_s=60) as router:
        prefill.stop()
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(ask, router.url, COMPLETIONS, completion(16))
            wait_for(lambda: 'engine_requests{engine="p",role="prefill"} 1.0' in router.metrics())
            prefill.kill()
            assert text_of(answer.result(DEADLINE_S)[1]) == direct
        metrics = router.metrics()
        assert re.search('prefill="p",reason="much-new"} 1.0', metrics)
        assert re.search('failures_total{cause=".*",engine="p"} 1.0', metrics)


@pytest.mark.timeout(900)
def test_an_engine_is_asked_what_it_holds_until_it_forgets(engines: Engines) -> None:
    """Of each salt by itself; after a reset at once, before any request; and no question is a lookup."""
    one = engines.all["one"]
    given = prompt(700, 400)

    def ways(router: Routed) -> Counter[str]:
        found = re.findall(r'requests_total{.*reason="(.*)"} (.*)', router.metrics())
        return Counter({reason: int(float(count)) for reason, count in found})

    def way(router: Routed, **more: str) -> tuple[list[str], int]:
        """Why a request goes where it does, and the tokens of its prompt that are not computed."""
        before = ways(router)
        answer = ask(router.url, COMPLETIONS, GREEDY | {"prompt": given, "max_tokens": 4} | more)[1]
        one.settle()
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return list((ways(router) - before).elements()), details["cached_tokens"]

    decode = {"one": {"url": one.url, "cache": one.endpoint, "token_file": str(engines.token_file)}}
    with Routed(decode=decode) as router:
        lookups, queries = one.counted("lookups"), one.counted("queries")
        for more in ({}, {"cache_salt": "tenant"}):
            assert way(router, **more) == (["no-prefill"], 0)
            assert way(router, **more) == (["little-new"], 2 * CHUNK)
        assert (one.counted("lookups") - lookups, one.counted("queries") - queries) == (4, 4)
        one.ask("/reset_prefix_cache?reset_external=true", {})
        wait_for(lambda: json.loads(one.kvkit("/lookup", {"tokens": given}))["hit_tokens"] == 0)
        for more in ({}, {"cache_salt": "tenant"}):
            assert way(router, **more) == (["no-prefill"], 0)
            assert way(router, **more) == (["little-new"], 2 * CHUNK)
