"""The soak of the vLLM connector passes within seconds, with a small model."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from repository import ROOT
from small_models import QWEN, save
from vllm_process import ENVIRONMENT

from benchmarks.soak.vllm import fill, pools
from kvkit.workers import Workers


@pytest.mark.nightly
def test_some_seconds_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    options = ["--quick", "--model", str(save(QWEN, tmp_path / "model")), "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.soak.vllm", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert path.exists(), done.stderr[-4000:]
    found = json.loads(path.read_text())
    assert done.returncode == 0, found
    assert found["wrong_tokens"] == found["wrong_tokens_at_ratio_1"] == found["unfinished"] == 0
    assert found["all_slots_free"]
    assert found["all_blocks_free"]
    assert found["blended"]["requests"] > 5
    assert found["blended"]["blended tokens"] > 0
    assert found["requests"] > 20
    assert 0 < found["hit_tokens"] < found["prompt_tokens"]
    assert set(found["loaded_tokens_by_tier"]) == {"memory", "faulty", "disk"}
    assert found["preemptions"] > 0
    assert sum(found["faults_injected"].values()) > 0
    assert {"machine", "versions", "command", "vllm"} <= set(found)
    assert found["wrong"] == found["flat"]["the engine"]["not_flat"] == []


def test_every_thread_is_there_before_the_first_rest() -> None:
    """Those that a pool would start only when all others are busy for the first time."""
    mine = [Workers(count, f"kvkit-soak-test-{count}") for count in (1, 3, 8)]
    mine[1].submit(int).result()
    gc.freeze()  # as vLLM does
    found = pools()
    gc.unfreeze()
    assert {id(pool) for pool in mine} <= {id(pool) for pool in found}
    fill(mine)
    names = Counter(thread.name.rpartition("-")[0] for thread in threading.enumerate())
    assert [names[f"kvkit-soak-test-{pool.count}"] for pool in mine] == [1, 3, 8]
    assert all(pool.close() for pool in mine)
