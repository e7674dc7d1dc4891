"""The quality judge in vLLM finds what the transformers judge finds, and measures served methods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from small_models import save_with_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, CohereConfig
from vllm_process import ENVIRONMENT, Fork

from kvkit.blend import gate
from kvkit.blend.plan import BlendError, Selection
from kvkit.lab.quality import comparison as quality
from kvkit.lab.quality.in_vllm import CHUNK_TOKENS, is_served
from kvkit.lab.quality.judge import Judge
from kvkit.lab.quality.methods import method_named
from kvkit.lab.quality.tasks.registry import SETS
from kvkit.lab.quality.verdicts import served_names

DOCTOR = """
from kvkit import cli
from kvkit.lab.quality import comparison as quality
quality.GATE_SAMPLES = 1
cli.main()
"""


def measured_in_vllm(folder: Path, *arguments: object) -> Any:
    """Return the measurements of `quality_vllm_program`."""
    printed, errors = folder / "printed", folder / "errors"
    with open(os.devnull) as nothing, open(printed, "w") as out, open(errors, "w") as bad:
        streams = nothing.fileno(), out.fileno(), bad.fileno()
        process = Fork("quality_vllm_program", [str(one) for one in arguments], streams, {})
        process.wait(280.0)
    text = printed.read_text()
    assert text, errors.read_text()[-2000:]
    return json.loads(text.splitlines()[-1])


@pytest.mark.nightly
def test_vllm_and_transformers_find_the_same(tmp_path: Path) -> None:
    """In both contexts, of two tasks: divergence, answers and rows, by methods that a request can name."""
    model = save_with_tokenizer(tmp_path / "model")
    names = (
        "naive",
        "default .15",
        "question_attention .15",
        "random .15",
        "default .15, alone",
        "question_attention 1",
    )
    lead, sizes = CHUNK_TOKENS, {"count": 1, "tokens": 512, "sets": ("retrieval", "needle")}
    found = measured_in_vllm(tmp_path, model, tmp_path / "kept.jsonl", lead, json.dumps(sizes), *names)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    judge = Judge(AutoModelForCausalLM.from_pretrained(model).eval())
    judge.lead, judge.system = np.split(np.arange(2 * lead, dtype=np.int32), 2)
    methods = {name: method_named(name) for name in names}
    expected: Any = quality.run(
        judge, encode, tmp_path / "other.jsonl", methods=methods, count=1, tokens=512, sets=sizes["sets"]
    )
    for ours, theirs in zip(found, expected, strict=True):
        for name in names[:-1]:
            figures = ours["measured"][name]
            assert figures["kl"] > 0.01
            for figure in ("kl", "f1", "rows", "nll"):
                wanted = pytest.approx(theirs["measured"][name][figure], rel=0.01)
                assert figures[figure] == wanted, (ours["set"], name, figure)
            assert figures["seconds"] > 0
        full = ours["measured"]["full"]
        assert abs(ours["measured"][names[-1]]["kl"]) < 1e-4
        assert full["kl"] == 0
        assert full["nll"] == pytest.approx(theirs["measured"]["full"]["nll"], rel=1e-4)
        assert full["f1"] == theirs["measured"]["full"]["f1"]


@pytest.mark.parametrize(
    ("name", "can"),
    [
        ("first_n .15", True),
        ("default .30", True),
        ("cacheblend .15", False),
        ("default .15, covering .5", False),
        ("k_deviation .15, block mask", False),
    ],
)
def test_vllm_measures_what_a_request_can_ask_for(name: str, can: bool) -> None:
    assert is_served(method_named(name)) is can


@pytest.mark.nightly
def test_doctor_measures_in_vllm_what_is_not_like_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_with_tokenizer(tmp_path / "model", CohereConfig)
    settings = ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "80"}
    settings["VLLM_CACHE_ROOT"] = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm"))
    command = [sys.executable, "-c", DOCTOR, "doctor", "--blend", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | settings)
    said = " ".join(done.stdout.split())
    assert "not Llama-like: measured in vLLM" in said, done.stderr[-2000:]
    assert "blending 15 % changes the distribution of the next token by" in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (name,) = served_names(str(model), None)
    measured = json.loads(gate.path_of(name).read_text())["measured"]
    assert measured["samples"] == len(SETS)
    assert 0 < measured["kl"] < measured["naive_kl"]
    assert done.returncode == 1, "its weights are random"
    with pytest.raises(BlendError, match="too much"):
        gate.check(name, Selection(), "unchecked")
