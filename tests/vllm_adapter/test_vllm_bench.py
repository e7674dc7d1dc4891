"""`kvkit bench serve` starts real vLLM servers, plain and with kvkit, and ends them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from page_blocks import check_printed, on_page, run_shell
from small_models import save_with_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner
from vllm_process import ENVIRONMENT

from kvkit.adapters.huggingface import smollm2
from kvkit.cli import app
from kvkit.lab.serve.workloads import CONTROL, WORKLOADS

CHUNK = 256
FEW = "--requests 4 --words 500 --png serve.png --vllm=--enforce-eager"


@pytest.mark.nightly
def test_kvkit_hits_what_plain_vllm_computes(tmp_path: Path) -> None:
    """As docs/research/measure.md has it typed, with a small model and few requests."""
    model = save_with_tokenizer(tmp_path / "model")
    command = on_page("docs/research/measure.md", "kvkit bench serve --workloads")
    changes = {"--rounds 6": "", "--words 1540 --requests 8": f"--model {model} {FEW}"}
    done = run_shell(command, tmp_path, changes, **ENVIRONMENT)
    check_printed("docs/research/measure.md", "kvkit bench serve --workloads", done.stdout)
    assert re.search(
        r"vLLM's blocks: \d+\.\d GiB for each of 2; .* are available, 1\.2 GiB of them for tiers", done.stdout
    )
    assert "lmcache: left out, LMCache is neither installed" in done.stdout
    written = json.loads((tmp_path / "serve.json").read_text())
    cached: dict[tuple[str, str], list[int]] = defaultdict(list)
    for request in written["requests"]:
        assert request["error"] is None
        assert request["output_tokens"] == 4, "the end is ignored"
        cached[request["system"], request["workload"]].append(request["cached_tokens"] or 0)
    assert cached == {
        ("plain", "document-qa"): [0] * 4,
        ("plain", CONTROL): [0] * 4,
        ("kvkit", "document-qa"): [0, CHUNK, CHUNK, CHUNK],
        ("kvkit", CONTROL): [0] * 4,
    }
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_a_word_is_about_a_token() -> None:
    encode = AutoTokenizer.from_pretrained(smollm2.fetch())
    for made in WORKLOADS.values():
        text = " ".join(request.text for request in made(0, 8, 200))
        assert 0.95 < len(encode(text)["input_ids"]) / len(text.split()) < 1.2, "with labels and line ends"


@pytest.mark.nightly
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    absent, figures = str(tmp_path / "absent"), str(tmp_path / "serve.json")
    result = CliRunner().invoke(
        app, ["bench", "serve", "--systems", "plain", "--model", absent, "--json", figures], env=ENVIRONMENT
    )
    assert result.exit_code == 1
    assert re.search(r"error: plain ended with 1:(.|\n)*absent", result.stderr)
