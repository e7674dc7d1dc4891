"""Conversations and workloads over documents run on a vLLM server that blends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from completions_server import Completions
from small_models import save_with_tokenizer
from transformers import AutoTokenizer
from vllm_process import ENVIRONMENT

from kvkit.lab.demo import rag
from kvkit.lab.serve import run as serve
from kvkit.lab.serve.client import blend_tokens, connect
from kvkit.lab.serve.options import Traffic
from kvkit.lab.serve.systems import Setup, started
from kvkit.lab.serve.workloads import WORKLOADS

OPTIONS = ("--enforce-eager", "--enable-prefix-caching", "--max-logprobs", str(rag.LISTED))
SIZES = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20))


@pytest.mark.nightly
def test_documents_are_blended_whatever_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's turns, as a toy leads them, as far as a small model takes them; then `kvkit bench serve`."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = save_with_tokenizer(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    *documents, one, other = rag.texts(tokenizer)
    warm = rag.turn_request(tokenizer, [one, other], [], 0)
    with Completions() as toy:
        said: list[str] = []
        target = connect("toy", toy.url("counting"))
        plain = rag.converse(target, tokenizer, documents, warm, said.append)[:1]
    with started("kvkit-blend", Setup(str(model), 1, None, (*OPTIONS, *SIZES), tmp_path)) as url:
        server = replace(connect("kvkit", url), blends=True)
        (turn,) = rag.replay(server, plain, warm, said.append)
        before = blend_tokens(server)
        lost: dict[str, str] = {}
        traffic, asked_for = Traffic(requests=8, words=600), {"rag": WORKLOADS["rag"]}
        (found,) = serve.measure([server], asked_for, traffic, lost, lambda _: None)
        grown = blend_tokens(server) - before
    kinds = ("exact", "blended", "recomputed", "computed")
    assert sum(getattr(turn, f"{kind}_tokens") for kind in kinds) == turn.prompt_tokens
    assert turn.blended_tokens > turn.recomputed_tokens > 0
    assert turn.exact_tokens >= 512, "the first document is behind its prefix"
    assert turn.ttft_s > 0
    asked = [answer for answer in found.answers if answer.again]
    assert not lost
    assert [answer.error for answer in found.answers] == [None] * 8
    assert [answer.exact is None for answer in found.answers] == [True] * 2 + [False] * 6
    assert grown["reused"] > grown["selected"] > 0
    assert grown.total() - grown["selected"] == sum(answer.prompt_tokens for answer in asked)
