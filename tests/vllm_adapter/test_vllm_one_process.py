"""Engines opened one after another in one process, as in a notebook, all work with kvkit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from small_models import QWEN, VOCABULARY, save
from vllm_engine import BLOCK, prompt
from vllm_process import ENVIRONMENT

ENGINES = """
import sys
import kvkit.kernels.pages.numba  # a cache was used before
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

model, folder, tokens = sys.argv[1], sys.argv[2], eval(sys.argv[3])
tiers = {"disk": {"url": f"file://{folder}"}}
more = {"kvkit": {"chunk_tokens": 128, "staging": "64MiB", "tiers": tiers}, "lookup_timeout_s": 20.0}
more["prefill_tokens_per_s"] = 0.01
for _ in range(2):
    transfer = KVTransferConfig(
        kv_connector="KVKitConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=more,
    )
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 28,
        kv_transfer_config=transfer,
    )
    params = SamplingParams(max_tokens=1, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    print("cached", answer.num_cached_tokens, flush=True)
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
"""


@pytest.mark.nightly
def test_engines_follow_one_another(tmp_path: Path) -> None:
    """vLLM looks into all modules when an engine starts, and failed at llvmlite's, which numba imports."""
    model = save(QWEN, tmp_path / "model")
    arguments = [str(model), str(tmp_path / "kv"), str(prompt(3 * BLOCK, 1, VOCABULARY))]
    done = subprocess.run(
        [sys.executable, "-c", ENGINES, *arguments],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("cached")] == [
        "cached 0",
        f"cached {2 * BLOCK}",
    ], done.stderr[-2000:]
