"""The router before real vLLM servers: what it answers is what a server answers that is asked directly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from routers import Routed, ask, stream, text_of
from vllm_server import Served

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
    """One is P and a D, the other a D; whichever decodes is killed in the middle of its stream."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with Served(folders[0], None) as one, Served(folders[1], None) as two:
        servers = {"one": one, "two": two}
        direct = {path: ask(one.url, path, body(160))[1] for path, body in BODIES.items()}
        for path, body in BODIES.items():
            with Routed(
                prefill={"p": {"url": one.url}},
                decode={name: {"url": server.url} for name, server in servers.items()},
            ) as router:
                status, whole = ask(router.url, path, body(32))
                streamed = list(stream(router.url, path, body(32), timeout_s=120))
                assert status == 200
                assert text_of(direct[path]).startswith(text_of(whole))
                assert "".join(map(text_of, streamed)) == text_of(whole)

                events = stream(router.url, path, body(160), timeout_s=120)
                found = [next(events) for _ in range(7)]
                (victim,) = re.findall(r'engine_requests{engine="(.*)",role="decode"} 1.0', router.metrics())
                servers[victim].kill()
                found += events
                assert "".join(map(text_of, found)) == text_of(direct[path])
                metrics = router.metrics()
                assert 'reason="much-new"' in metrics
                assert 'kvkit_router_takeovers_total{outcome="continued"} 1.0' in metrics
                servers[victim].start()


BODIES = {COMPLETIONS: completion, CHAT: chat}
