"""`kvkit bench serve` starts real vLLM servers, plain and with kvkit, and ends them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from rich.console import Console
from small_models import save_with_tokenizer
from transformers import AutoTokenizer
from vllm_engine import ENVIRONMENT

from kvkit.adapters import smollm2
from kvkit.bench.report import Measured
from kvkit.bench.serve import Load, ServeError, run
from kvkit.bench.workloads import CONTROL, WORKLOADS

CHUNK = 256
LOAD = Load(("document-qa", CONTROL), 4, 500, 4, 1, None, 1, 0, 60.0)
OPTIONS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    f"--kv-cache-memory-bytes={256 << 20}",
)


def measured(tmp_path: Path, model: str, *systems: str) -> list[Measured]:
    return run(
        LOAD,
        systems=systems,
        urls=(),
        model=model,
        memory_gib=1,
        config=None,
        vllm_options=OPTIONS,
        interleave=True,
        json_path=tmp_path / "serve.json",
        png_path=None,
        console=Console(),
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_kvkit_hits_what_plain_vllm_computes(tmp_path: Path) -> None:
    model = str(save_with_tokenizer(tmp_path / "model"))
    qa_plain, qa_kvkit, control_plain, control_kvkit = measured(tmp_path, model, "plain", "kvkit")
    assert [(m.system, m.workload) for m in (qa_kvkit, control_plain)] == [
        ("kvkit", "document-qa"),
        ("plain", CONTROL),
    ]
    for plain, kvkit in ((qa_plain, qa_kvkit), (control_plain, control_kvkit)):
        assert [a.error for a in plain.answers + kvkit.answers] == [None] * 8
        assert [a.text for a in plain.answers] == [a.text for a in kvkit.answers]
        assert {a.output_tokens for a in plain.answers + kvkit.answers} == {4}, "the end is ignored"
        assert plain.hit_tokens == 0
    assert [a.cached_tokens for a in qa_kvkit.answers] == [0, CHUNK, CHUNK, CHUNK]
    assert control_kvkit.hit_tokens == 0


def test_a_word_is_about_a_token() -> None:
    encode = AutoTokenizer.from_pretrained(smollm2.fetch())
    for made in WORKLOADS.values():
        text = " ".join(request.text for request in made(0, 8, 200))
        assert 0.95 < len(encode(text)["input_ids"]) / len(text.split()) < 1.2, "with labels and line ends"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"plain ended with 1:(.|\n)*absent"):
        measured(tmp_path, str(tmp_path / "absent"), "plain")
