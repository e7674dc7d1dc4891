"""The benchmark of handoff beside vLLM's own runs the right commands and computes the right ratios."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.report.spec import MACHINE
from benchmarks.report.tables import render
from benchmarks.serving.engines import BLOCK, TOKEN_BYTES, awake
from benchmarks.serving.pd_peers import PROMPT_TOKENS, Handed, summary, systems
from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.vllm.settings import read_settings
from kvkit.lab.testbed.waiting import wait_for


def state_of(pid: int) -> str:
    """One letter: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_kvkits_engines_can_be_opened_and_hear_each_other(tmp_path: Path) -> None:
    kvkit = systems(tmp_path)[0]["kvkit"]
    read = [read_settings(side["kv_connector_extra_config"])[1] for side in (kvkit.prefill, kvkit.decode)]
    sends, receives = (config.handoff for config in read)
    assert sends is not None
    assert receives is not None
    assert (sends.role, receives.role) == ("prefill", "decode")
    assert [told["handoff"] for told in kvkit.ways.values()] == list(receives.listen)
    assert receives.buffer >= 2 * max(PROMPT_TOKENS) * TOKEN_BYTES
    assert {config.chunk_tokens % BLOCK for config in read} == {0}


def test_nixl_is_left_out_and_named_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKIT_PEERS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nixl", None)
    found, missing = systems(tmp_path)
    assert list(found) == ["kvkit"]
    assert missing == ["NIXL is neither installed nor in $KVKIT_PEERS/nixl"]
    (tmp_path / "nixl").mkdir()
    found, missing = systems(tmp_path)
    assert found["nixl"].package == tmp_path / "nixl"
    assert missing == []


def test_the_bytes_of_a_token_are_the_models() -> None:
    config = AutoConfig.from_pretrained(smollm2.fetch())
    size = config.hidden_size // config.num_attention_heads
    assert config.num_hidden_layers * 2 * config.num_key_value_heads * size * 4 == TOKEN_BYTES


def test_processes_run_while_they_are_awake_and_no_longer() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with awake([process.pid]):
            wait_for(lambda: state_of(process.pid) in "RS")
        wait_for(lambda: state_of(process.pid) == "T")
        process.kill()


def test_of_all_rounds_the_least_and_the_middle_count() -> None:
    each = [Handed(2.0, 0.25, 0.125, 3.0, 1536, True), Handed(1.0, 1.0, 0.5, 4.0, 1400, False)]
    found = summary("way", 1600, each)
    assert found["first_s"] == {"min": 0.25, "median": 0.625}
    assert found["prefill_s"] == {"min": 1.0, "median": 1.5}
    assert (found["hit_tokens"], found["same_tokens"]) == (1400, False)


def test_the_table(tmp_path: Path) -> None:
    each = [Handed(2.0, 0.25, 0.125, 3.0, 1536, True), Handed(1.0, 1.0, 0.5, 4.0, 1536, True)]
    (tmp_path / f"pd-{MACHINE}.json").write_text(json.dumps({"results": [summary("way", 1600, each)]}))
    *_, row, _ = render("<!-- table: pd -->\n<!-- end -->", tmp_path).splitlines()
    times = "1000 / 1500 ms | 250 / 625 ms | 125 / 312 ms | 3000 / 3500 ms"
    assert row == f"| 1,600 | way | 1,536 | {times} |"
