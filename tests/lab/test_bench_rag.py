"""The benchmark over documents in changing order runs on a toy server."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from completions_server import Completions
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvkit.adapters.huggingface import smollm2
from kvkit.cli import app
from kvkit.lab.demo import rag
from kvkit.lab.demo.rag import BlendTurn, divergence
from kvkit.lab.files import BenchError
from kvkit.lab.serve.client import connect
from kvkit.lab.serve.systems import BLEND_CHUNK_TOKENS


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(smollm2.fetch())


def test_the_documents_are_those_of_the_first_turn_in_another_order(tokenizer: Any) -> None:
    *documents, one, other = rag.texts(tokenizer)
    warm = rag.turn_request(tokenizer, [one, other], [], 0)
    said: list[str] = []
    with Completions() as server:
        plain = rag.converse(
            connect("plain", server.url("counting")), tokenizer, documents, warm, said.append
        )
        blends = replace(connect("kvkit", server.url("counting")), blends=True)
        turns = rag.replay(blends, plain, warm, said.append)
        asked = [body for body in server.bodies if "kv_transfer_params" in body]
    assert said[:2] == ["plain: warming up", f"plain: turn 1 of {len(rag.ORDERS)}"]
    assert said[-1] == f"kvkit: turn {len(rag.ORDERS)} of {len(rag.ORDERS)}"
    prompts = [request.text for request, _ in plain]
    assert [body["prompt"] for body in asked] == [warm.text, *prompts], "both are asked the same"
    seen = []
    for number, (request, answer) in enumerate(plain):
        parts = [request.text[start:stop] for start, stop in request.documents]
        assert parts == [documents[d] for d in rag.ORDERS[number]]
        assert f": {request.answer}." in documents[rag.ASKED[number]]
        assert all(said in request.text for said in seen), "what was said before"
        seen.append(answer.text)
    for turn, body in zip(turns, asked[1:], strict=True):
        spans = body["kv_transfer_params"]["blend"]["documents"]
        reused = sum(stop - start for start, stop in spans)
        assert turn.exact_tokens == body["kv_transfer_params"]["blend"]["prefix"] == spans[0][0]
        assert (turn.recomputed_tokens, turn.blended_tokens) == (reused // 4, reused - reused // 4)
        assert (turn.computed_tokens, turn.kl, turn.identical) == (3, 0.0, True)


def test_documents_fill_whole_chunks_behind_what_stands_before_them(tokenizer: Any) -> None:
    request = rag.turn_request(tokenizer, rag.texts(tokenizer)[:4], [], 0)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    before = count(request.text[: request.documents[0][0]])
    for start, stop in request.documents:
        assert 0 <= (before + count(request.text[start:stop])) % BLEND_CHUNK_TOKENS < 16


def test_a_turn_that_is_not_blended_is_an_error(tokenizer: Any) -> None:
    request = rag.turn_request(tokenizer, rag.texts(tokenizer)[:2], [], 0)
    with Completions() as server:
        target = connect("s", server.url("counting"))
        plain = [(request, rag._answer(target, request))]
        with pytest.raises(BenchError, match="turn 1 was not blended"):
            rag.replay(target, plain, request, print)
        with pytest.raises(BenchError, match=r"s: .*out of memory"):
            rag.replay(connect("s", server.url("failing")), plain, request, print)


DISTRIBUTIONS = st.lists(st.floats(-8, 8), min_size=3, max_size=12)


@given(DISTRIBUTIONS, DISTRIBUTIONS, st.integers(1, 12))
@settings(deadline=None)
def test_the_divergence_is_that_of_the_listed_tokens_and_never_more(
    one: list[float], other: list[float], listed: int
) -> None:
    size = min(len(one), len(other))
    p, q = (torch.tensor(logits[:size], dtype=torch.float64).log_softmax(0) for logits in (one, other))
    true = float((p.exp() * (p - q)).sum())
    lists = [{str(int(i)): float(x[i]) for i in x.topk(min(listed, size)).indices} for x in (p, q)]
    found = divergence(*lists)
    assert -1e-6 <= found <= true + 1e-6
    if listed >= size:
        assert math.isclose(found, true, rel_tol=1e-6, abs_tol=1e-6)


def turn(**fields: Any) -> BlendTurn:
    known = {"prompt_tokens": 2097, "exact_tokens": 512, "blended_tokens": 1224, "recomputed_tokens": 216}
    known |= {"computed_tokens": 145, "ttft_s": 2.0, "ttft_cold_s": 9.0, "kl": 0.0125}
    return BlendTurn(
        **known | {"answer": "1", "answer_cold": "2", "exact": True, "exact_cold": False} | fields
    )


def test_the_table() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(rag.table([turn()]))
    (row,) = (line for line in captured.get().splitlines() if "2097" in line)
    cells = ["1", "2097", "512", "1224", "216", "145", "9.00 s", "2.00 s", "4.5×", "0.013", "no/yes"]
    assert row.split() == " ".join(cells).split()


def test_no_legend_hides_a_bar() -> None:
    figure = rag.picture([turn(), turn(ttft_s=0.1)])
    figure.savefig(io.BytesIO(), dpi=110)
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert not legend.get_window_extent().overlaps(axes.bbox)


def test_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["demo", "--pd", "--blend"])
    assert done.exit_code == 2
    assert "want one of --pd and --blend" in done.output
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = CliRunner().invoke(app, ["demo", "--blend"])
    assert done.exit_code == 1
    assert "demo --blend: vLLM is not installed" in done.output
