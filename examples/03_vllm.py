"""A conversation in vLLM with kvkit's tiers: what one turn has computed, the next one loads.

    python examples/03_vllm.py [folder]

It runs on a CPU with SmolLM2, in half a minute. `folder` keeps the KV (default: a new one); run it twice
with the same folder, and even the first turn is loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile

# The engine within this process starts faster; its threads must not compete with kvkit's for two cores.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvkit.adapters.huggingface import smollm2
from kvkit.bench import memory

SYSTEM = "You are the guide of a museum of natural history. Answer in one sentence. " + " ".join(
    f"Room {room} shows the {room}th age of the earth, its rocks, plants and animals."
    for room in range(1, 40)
)
QUESTIONS = ["What is in room 7?", "And in the next one?", "Which of the two is older?"]


def main(folder: str) -> None:
    """Ask every question, with the conversation so far in front of it."""
    kvkit = {
        "chunk_tokens": 128,  # a multiple of vLLM's blocks: 128 tokens on a CPU, 16 on a GPU
        "staging": "64MiB",
        "tiers": {"memory": {"capacity": "256MiB"}, "disk": {"url": f"file://{folder}"}},
    }
    model = str(smollm2.fetch())
    share = memory.share(model, tiers=320 << 20, most=1 << 30)  # vLLM alone would take nearly all there is
    print(share.words)
    llm = LLM(
        model=model,
        kv_cache_memory_bytes=share.block_bytes,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=False,  # to see kvkit alone; the two go together
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVKitConnector",
            kv_connector_module_path="kvkit.adapters.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"kvkit": kvkit},
        ),
    )
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        messages.append({"role": "assistant", "content": answer.outputs[0].text})
        first_s = answer.metrics.first_token_ts - answer.metrics.scheduled_ts
        prompt, loaded = len(answer.prompt_token_ids), answer.num_cached_tokens
        print(f"prompt: {prompt} tokens, loaded: {loaded}, prefill: {1000 * first_s:.0f} ms")
    llm.llm_engine.engine_core.shutdown()  # waits until everything is stored


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="kvkit-"))
