"""The quick start of docs/serve/pd.md works on real vLLM, with its files and commands as typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from page_blocks import changed, check_printed, on_page, run_shell
from page_command_server import Typed
from routers import Routed, ask, fetch, text_of
from small_models import save_with_tokenizer
from vllm_engine import BLOCK, prompt
from vllm_process import ENVIRONMENT

from kvkit.lab.testbed.servers import free_ports, together
from kvkit.lab.testbed.waiting import wait_for

COMPLETIONS = "/v1/completions"
TOKENS = 700
CHUNK = 256
"""The page's `chunk_tokens`."""
SMALL = "--dtype float32 --max-model-len 2048 --enforce-eager --kv-cache-memory-bytes 67108864"
"""So that an engine starts sooner, and takes little memory."""


@dataclass(frozen=True)
class Started:
    """What the page has started, with the ports and folders in place of the page's."""

    model: str
    places: Mapping[str, str]
    prefill: Typed
    decode: Typed
    router: Typed

    def body(self, seed: int) -> dict[str, Any]:
        """A request whose prompt nobody has seen, if the seed is new."""
        given = {"model": self.model, "prompt": prompt(TOKENS, seed), "max_tokens": 8}
        return {**given, "temperature": 0, "ignore_eos": True}

    def alone(self, body: dict[str, Any]) -> str:
        """What prefill answers by itself."""
        return text_of(ask(self.prefill.url, COMPLETIONS, body)[1])

    def handed(self) -> float:
        """Tokens of the records that came to decode by handoff."""
        return self._counted('loaded_tokens_total{.*tier="handoff".*')

    def stored(self) -> float:
        """Tokens that decode has put into its memory."""
        return self._counted('stored_tokens_total{.*tier="memory".*')

    def _counted(self, what: str) -> float:
        text = fetch(self.decode.url, "GET", "/metrics")[1].decode()
        return sum(map(float, re.findall(rf"^vllm:kvkit_{what}}} (.*)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """All of it. On a CPU, `vllm serve MODEL` is a module, as the page says.

    Besides, only the model, ports and sizes change, and the folder of the socket.
    """
    folder = tmp_path_factory.mktemp("pd")
    model = str(save_with_tokenizer(folder / "model"))
    socket = {"/run/kvkit/": f"{folder}/sockets/"}
    p, d, port, asked = free_ports(4)
    sizes = {
        "2GiB": "64MiB",
        '"1GiB': '"64MiB',
        "8192": "2000",
        "enabled = true": f"port = {asked}\nenabled = true",
    }
    (folder / "prefill.toml").write_text(on_page("docs/serve/pd.md", "# prefill.toml"))
    (folder / "decode.toml").write_text(changed(on_page("docs/serve/pd.md", "# decode.toml"), socket | sizes))
    serve = f"python -m vllm.entrypoints.openai.api_server --model {model} {SMALL}"
    lines = {
        "prefill": (p, on_page("docs/serve/pd.md", "vllm serve MODEL --port 8001"), {"8001": f"{p}"}),
        "decode": (d, on_page("docs/serve/pd.md", "vllm serve MODEL --port 8002"), {"8002": f"{d}"}),
    }
    prefill, decode = (
        Typed(folder, line, {"vllm serve MODEL": serve} | change, where, **ENVIRONMENT)
        for where, line, change in lines.values()
    )
    places = {"8000": str(port), "8001": str(p), "8002": str(d), "9477": str(asked)} | socket
    router = Typed(folder, on_page("docs/serve/pd.md", "kvkit router --port 8000"), places, port)
    for name, process in (("prefill", prefill), ("decode", decode), ("router", router)):
        process.log = folder / f"{name}.log"
    with together(prefill, decode), router:
        yield Started(model, places, prefill, decode, router)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_prefill_computed_is_handed_to_decode(started: Started) -> None:
    before, body = started.handed(), started.body(1)
    status, answer = ask(started.router.url, COMPLETIONS, body)
    metrics = fetch(started.router.url, "GET", "/metrics")[1].decode()
    assert (status, text_of(answer)) == (200, started.alone(body))
    wait_for(lambda: started.handed() - before == -(-(TOKENS - 1) // BLOCK) * BLOCK)
    assert re.search(r'requests_total{decode=".+",prefill=".+",reason="much-new"} 1.0', metrics)
    assert "kvkit_router_failures_total{" not in metrics
    assert " WARNING " not in started.router.log.read_text()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_request_of_the_page_prints_what_it_shows(started: Started, tmp_path: Path) -> None:
    before = started.handed()
    request = on_page("docs/serve/pd.md", "curl -s http://127.0.0.1:8000/v1/completions")
    run_shell(request, tmp_path, {"MODEL": started.model, "8000": started.places["8000"]})
    wait_for(lambda: started.handed() > before)
    command = on_page("docs/serve/pd.md", "curl -s http://127.0.0.1:8002/metrics")
    printed = run_shell(command, tmp_path, {"8002": started.places["8002"]}).stdout
    check_printed("docs/serve/pd.md", "curl -s http://127.0.0.1:8002/metrics", printed)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_prompt_that_comes_again_is_not_computed_by_prefill(started: Started) -> None:
    body, stored = started.body(3), started.stored()
    answers = [ask(started.router.url, COMPLETIONS, body)]
    wait_for(lambda: started.stored() - stored == TOKENS // CHUNK * CHUNK)
    answers.append(ask(started.router.url, COMPLETIONS, body))
    metrics = fetch(started.router.url, "GET", "/metrics")[1].decode()
    assert [text_of(answer) for _, answer in answers] == [started.alone(body)] * 2
    assert re.search(r'requests_total{decode=".+",prefill="",reason="little-new"} 1.0', metrics), metrics


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_without_an_address_decode_waits_for_nothing(started: Started) -> None:
    """Prefill does not know where to send, and says so; decode computes, and never asks for what will not
    come."""
    before, body = started.handed(), started.body(2)
    urls = {"prefill": {"p": {"url": started.prefill.url}}, "decode": {"d": {"url": started.decode.url}}}
    with Routed(**urls) as router:
        status, answer = ask(router.url, COMPLETIONS, body)
        assert 'failures_total{cause="kept",engine="p"} 1.0' in router.metrics()
    assert (status, text_of(answer)) == (200, started.alone(body))
    assert "kv_transfer_params.handoff: want the decode engine's address" in started.prefill.log.read_text()
    assert "nothing from the prefill engine" not in started.decode.log.read_text()
    assert started.handed() == before
