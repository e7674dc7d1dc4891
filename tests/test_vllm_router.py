"""The router before real vLLM servers: what it answers is what a server answers that is asked directly."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from routers import Routed, ask, stream, text_of
from vllm_server import Served
from waiting import wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "The quick brown fox jumps over the lazy dog, and then it counts to ten. " * 40
"""Far over 256 tokens: it goes over P."""


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
    """One is P and a D, the other a D. Whichever decodes is stopped in the middle of one stream, and killed
    in the middle of another."""
    with ExitStack() as stack:
        servers = {}
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            servers[name] = stack.enter_context(Served(tmp_path / name, None))
        router = stack.enter_context(
            Routed(
                prefill={"p": {"url": servers["one"].url}},
                decode={name: {"url": server.url} for name, server in servers.items()},
                idle_timeout_s=15,
                prefill_timeout_s=15,  # P may be what is stopped
            )
        )
        for path, body, end in ((COMPLETIONS, completion, Served.stop), (CHAT, chat, Served.kill)):
            direct = text_of(ask(servers["one"].url, path, body(160))[1])
            whole = text_of(ask(router.url, path, body(32))[1])
            assert direct.startswith(whole)
            assert "".join(map(text_of, stream(router.url, path, body(32)))) == whole
            events = stream(router.url, path, body(160), timeout_s=200)
            found = [next(events) for _ in range(7)]
            (victim,) = re.findall(r'engine_requests{engine="(.*)",role="decode"} 1.0', router.metrics())
            end(servers[victim])
            found += events
            assert "".join(map(text_of, found)) == direct
            if end is Served.stop:
                servers[victim].resume()
                wait_for(lambda: all(router.health().values()))
        metrics = router.metrics()
        assert 'kvkit_router_takeovers_total{outcome="continued"} 2.0' in metrics
        assert re.search('prefill="p",reason="much-new"} [1-9]', metrics)
