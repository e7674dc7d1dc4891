"""The router before real vLLM servers: what it answers is what a server answers that is asked directly."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from routers import Routed, ask, stream, text_of
from servers import together
from vllm_engine import BLOCK, connector
from vllm_server import Served
from waiting import wait_for

from kvkit.testing import DEADLINE_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "The quick brown fox jumps over the lazy dog, and then it counts to ten. " * 40
"""Far over 256 tokens: it goes over P."""


def loaded(server: Served) -> float:
    """Tokens that came from a prefill engine."""
    found = re.search(
        r'^vllm:kvkit_loaded_tokens_total{.*tier="handoff".*} (.*)$', server.ask("/metrics"), re.M
    )
    return float(found[1]) if found else 0.0


def completion(count: int) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": LONG, "max_tokens": count, "temperature": 0, "ignore_eos": True}


def chat(count: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{LONG}\nWrite a poem about 日本 and the sea, with emojis."}]
    return {
        "model": "smollm2",
        "messages": messages,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
    }


@pytest.mark.timeout(900)
def test_texts_are_those_of_a_server_asked_directly(tmp_path: Path) -> None:
    """One P and two D. A D is stopped in the middle of a stream, one is killed in the middle of another, and
    then P while it computes a prompt."""
    servers, addresses = {}, {}
    for name in ("p", "one", "two"):
        (tmp_path / name).mkdir()
        addresses[name] = f"unix://{tmp_path}/{name}/handoff/socket"
        handoff = {"listen": [addresses[name]], "buffer": "64MiB"}
        transfer = connector({"chunk_tokens": 2 * BLOCK, "handoff": handoff}, handoff_timeout_s=5.0)
        servers[name] = Served(tmp_path / name, transfer)
    decode = {name: servers[name] for name in ("one", "two")}
    router = Routed(
        prefill={"p": {"url": servers["p"].url}},
        decode={name: {"url": d.url, "handoff": addresses[name]} for name, d in decode.items()},
        idle_timeout_s=15,
        prefill_timeout_s=60,
    )
    with together(*servers.values()), router:
        for path, body, end in ((COMPLETIONS, completion, Served.stop), (CHAT, chat, Served.kill)):
            before = sum(map(loaded, decode.values()))
            direct = text_of(ask(servers["p"].url, path, body(80))[1])
            whole = text_of(ask(router.url, path, body(16))[1])
            assert direct.startswith(whole)
            assert "".join(map(text_of, stream(router.url, path, body(16)))) == whole
            assert sum(map(loaded, decode.values())) > before, "P's KV came"
            events = stream(router.url, path, body(80), timeout_s=200)
            found = [next(events) for _ in range(7)]
            (victim,) = re.findall(r'engine_requests{engine="(.*)",role="decode"} 1.0', router.metrics())
            end(decode[victim])
            found += events
            assert "".join(map(text_of, found)) == direct
            if end is Served.stop:
                decode[victim].resume()
                wait_for(lambda: all(router.health().values()))
        del decode[victim]
        servers["p"].stop()
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(ask, router.url, COMPLETIONS, completion(16))
            wait_for(lambda: 'engine_requests{engine="p",role="prefill"} 1.0' in router.metrics())
            servers["p"].kill()
            found_text = text_of(answer.result(DEADLINE_S)[1])
        (left,) = decode.values()
        assert found_text == text_of(ask(left.url, COMPLETIONS, completion(16))[1])
        metrics = router.metrics()
        assert 'kvkit_router_takeovers_total{outcome="continued"} 2.0' in metrics
        assert re.search('prefill="p",reason="much-new"} [1-9]', metrics)
        assert re.search('failures_total{cause=".*",engine="p"} [1-9]', metrics)
