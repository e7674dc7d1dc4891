"""The benchmark of blending in vLLM computes its figures from measured times (without vLLM)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.spec import MACHINE
from benchmarks.report.tables import render
from benchmarks.serving.engines import BLOCK
from benchmarks.serving.vllm_blend import transfer
from kvkit.adapters.vllm.settings import read_settings

TOKENS = {"exact": 640, "blended": 1346, "recomputed": 190, "computed": 21}
RESULT: dict[str, Any] = {
    "documents": 4,
    "prompt_tokens": 2197,
    "ttft_s": {
        "plain": [9.0, 8.0, 10.0],
        "blended": [2.0, 1.0, 3.0],
        "question_attention": [1.0, 1.0, 1.0],
        "naive": [0.5, 0.5, 0.5],
        "hit, on": [0.25, 0.5, 1.0],
    },
    "ratio": {"hit": {"min": 1.01, "median": 1.0}, "computed": {"min": 0.99, "median": 1.02}},
    "tokens": {"blended": TOKENS, "question_attention": TOKENS, "naive": TOKENS},
    "stage_s": {
        "blended": {"load": 0.01, "place": 0.02, "choose": 0.25, "rows": 1.5},
        "question_attention": {"load": 0.01, "place": 0.02, "choose": 0.125, "rows": 0.75},
        "naive": {"load": 0.01, "place": 0.02, "rows": 0.25},
    },
}


@pytest.mark.parametrize("blend", [False, True])
def test_its_engines_can_be_opened(blend: bool) -> None:
    settings, config = read_settings(transfer(blend)["kv_connector_extra_config"])
    assert (settings.blend is not None, config.chunk_tokens) == (blend, BLOCK)


def rendered(name: str, folder: Path) -> list[str]:
    return render(f"<!-- table: {name} -->\n<!-- end -->", folder).splitlines()[1:-1]


def test_the_tables(tmp_path: Path) -> None:
    assert rendered("vllm_blend", tmp_path) == ["*Not measured yet.*"]
    (tmp_path / f"vllm-blend-{MACHINE}.json").write_text(json.dumps({"results": [RESULT]}))
    assert rendered("vllm_blend", tmp_path)[2:] == [
        "| 2,197 tokens, 4 documents | plain vLLM | 8.000 s | 9.000 s |  |  |",
        "|  | blended, 15 % recomputed | 1.000 s | 2.000 s | 8.0× | 4.5× |",
        "|  | the same by question_attention | 1.000 s | 1.000 s | 8.0× | 9.0× |",
        "|  | blended, nothing recomputed | 0.500 s | 0.500 s | 16.0× | 18.0× |",
        "|  | exact hit | 0.250 s | 0.500 s | 32.0× | 18.0× |",
    ]
    start, counts = "| 2,197 tokens", "640 | 1,346 | 190 | 21"
    assert rendered("vllm_blend_stages", tmp_path)[2:] == [
        f"{start} | blended, 15 % recomputed | {counts} | 10 ms | 20 ms | 250 ms | 1500 ms | 2000 ms |",
        f"{start} | the same by question_attention | {counts} | 10 ms | 20 ms | 125 ms | 750 ms | 1000 ms |",
        f"{start} | blended, nothing recomputed | {counts} | 10 ms | 20 ms | 0 ms | 250 ms | 500 ms |",
    ]
    assert rendered("vllm_blend_exact", tmp_path)[2:] == [
        "| 2,197 tokens, hit | 1.010 | 1.000 |",
        "| 640 tokens, computed | 0.990 | 1.020 |",
    ]
