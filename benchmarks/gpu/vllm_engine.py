"""`make gpu-vllm`: vLLM from its Python files alone, with kvkit: computed, loaded, blended, handed over.

The model has Llama-3.2-1B's sizes and random weights. What vLLM cannot do without its compiled files is
recorded as the step's failure, by name.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import vllm_files
from benchmarks.gpu.bench import Bench
from benchmarks.serving import engines

ROUNDS = 5
ANSWER = 4
STARTS_IN_S = 300
"""Seconds until a second engine has to be there."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model, and of prompts: `documents` of `document` tokens each behind as many."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    size: int = 64
    mlp: int = 8192
    vocabulary: int = 32000
    document: int = 2048
    documents: int = 3
    memory: int = 16 << 30
    blends: bool = True


SMALL = Sizes(2, 64, 4, 2, 16, 128, 512, document=16, documents=2, memory=64 << 20, blends=False)
"""To rehearse: Triton's interpreter would take minutes for a blend."""


def run(bench: Bench) -> None:
    """Record seconds to the first token by where a prompt's KV is from, and whether answers are equal."""
    on_gpu = bench.device.type == "cuda"
    sizes = Sizes() if on_gpu else SMALL
    operators = _prepare(on_gpu)
    with TemporaryDirectory(prefix="kvkit-") as folder:
        prompt, answer = _measure(bench, sizes, Path(folder))
        parts: dict[str, Callable[[], None]] = {
            "handed over": lambda: _hand_over(bench, sizes, Path(folder), prompt, answer)
        }
        if on_gpu:
            parts["with CUDA graphs"] = lambda: _with_graphs(bench, sizes, Path(folder), prompt, answer)
        for what, part in parts.items():
            try:
                part()
            except Exception as error:  # whatever vLLM lacks: the next part is tried
                bench.results.record(what, error=f"{type(error).__name__}: {error}"[:500])
    del operators


def _prepare(on_gpu: bool) -> Any:
    """Make vLLM run from its Python files in this process; return what has to live as long."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
    operators = vllm_files.leave_out_compiled()
    if not on_gpu:
        vllm_files.rehearse_on_cpu(operators)
    from kvkit.adapters.vllm.connector import register

    register()  # vLLM finds plug-ins of installed packages alone
    return operators


def _measure(bench: Bench, sizes: Sizes, folder: Path) -> tuple[list[int], engines.Answer]:
    """Record one engine's times; return the prompt and its computed answer."""
    random = np.random.default_rng(0)
    texts = random.integers(1, sizes.vocabulary, (sizes.documents + 1, sizes.document)).tolist()
    prompt = [token for text in texts for token in text]
    engine = _Engine(sizes, folder)
    bench.results.record("started", device=str(engine.device), **engine.versions)
    computed = engine.ask(prompt)
    bench.results.record("computed", s=computed.times_s[0], tokens=len(prompt), answer=computed.tokens)
    engine.flush()
    expected, loaded = computed.tokens, (len(prompt) - 1) // engine.chunk * engine.chunk
    for what in ("from memory", "from disk, restarted"):
        if what != "from memory":
            engine.close()
            engine = _Engine(sizes, folder)
        answers = [engine.ask(prompt) for _ in range(ROUNDS)]
        first = answers[0]
        middle = median(answer.times_s[0] for answer in answers)
        right = all(answer.tokens == expected for answer in answers)
        cached = [answer.cached_tokens for answer in answers]
        bench.results.record(
            what, first_s=first.times_s[0], s=middle, right=right, cached=cached, wanted=loaded
        )
    size = 2 * sizes.layers * sizes.kv_heads * sizes.size * 2 * loaded
    source, target = bench.pinned(size), torch.empty(size, dtype=torch.uint8, device=bench.device)
    seconds = bench.seconds(lambda: target.copy_(source, non_blocking=True))
    bench.results.record("copy of as many bytes", s=median(seconds), bytes=size)
    if sizes.blends:
        _blend(bench, engine, texts)
    engine.close()
    return prompt, computed


def _hand_over(bench: Bench, sizes: Sizes, folder: Path, prompt: list[int], computed: engines.Answer) -> None:
    """Record a prompt that one engine computes and another one, in a process of its own, answers."""
    address = f"unix://{folder}/socket"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    on_gpu = bench.device.type == "cuda"
    child = context.Process(target=_decode, args=(there, sizes, folder, address, on_gpu), daemon=True)
    child.start()
    there.close()
    try:
        assert here.poll(STARTS_IN_S), "the decode engine does not start"
        here.recv()
        engine = _Engine(sizes, folder, {"handoff": {"role": "prefill"}}, "kv_producer")
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "handoff": address}
        for turn in range(ROUNDS):
            changed = [*prompt[:-1], 1 + turn] if turn else prompt
            began = time.perf_counter()
            sent = engine.ask(changed, asked)
            prefilled_s = time.perf_counter() - began
            here.send((changed, sent.params))
            answer, cached = here.recv()
            both_s = time.perf_counter() - began
            right = answer == computed.tokens if not turn else None
            bench.results.record(
                "handed over", turn=turn, prefilled_s=prefilled_s, s=both_s, cached=cached, right=right
            )
        here.send(None)
        engine.close()
        child.join(60)
    finally:
        child.kill()


def _decode(pipe: Any, sizes: Sizes, folder: Path, address: str, on_gpu: bool) -> None:
    """Answer prompts with the KV that arrives at `address`, until None comes."""
    operators = _prepare(on_gpu)
    handoff = {"role": "decode", "listen": [address], "buffer": sizes.memory // 4}
    engine = _Engine(sizes, folder, {"handoff": handoff}, "kv_consumer")
    pipe.send("ready")
    while (given := pipe.recv()) is not None:
        prompt, params = given
        answer = engine.ask(prompt, params)
        pipe.send((answer.tokens, answer.cached_tokens))
    engine.close()
    del operators


def _with_graphs(
    bench: Bench, sizes: Sizes, folder: Path, prompt: list[int], computed: engines.Answer
) -> None:
    """Record seconds for each token after the first, from disk, with and without CUDA graphs for decoding."""
    for graphs in (False, True):
        engine = _Engine(sizes, folder, graphs=graphs)
        answer = engine.ask(prompt, tokens=32)
        right = answer.tokens[:ANSWER] == computed.tokens
        what = "with CUDA graphs" if graphs else "without CUDA graphs"
        bench.results.record(
            what, token_s=median(np.diff(answer.times_s).tolist()), first_s=answer.times_s[0], right=right
        )
        engine.close()


def _blend(bench: Bench, engine: _Engine, texts: Sequence[list[int]]) -> None:
    """Record documents that were computed behind the first text, each for itself, in another order."""
    prefix, *documents = texts
    length = len(prefix)
    for document in documents:
        engine.ask(prefix + document, _documents(length, [document], 0.0))
    engine.flush()
    for ratio in (0.15, 0.0):
        times, reused = [], []
        for turn in range(ROUNDS):
            order = documents[turn % len(documents) :] + documents[: turn % len(documents)]
            question = [1 + turn] * 16
            answer = engine.ask(
                prefix + [t for d in order for t in d] + question, _documents(length, order, ratio)
            )
            times.append(answer.times_s[0])
            reused.append((answer.params or {}).get("blend"))
        bench.results.record(f"blended, {ratio} recomputed", s=median(times), reused=reused)


def _documents(first: int, documents: Sequence[list[int]], ratio: float) -> dict[str, Any]:
    ends = np.cumsum([first, *map(len, documents)]).tolist()
    spans = [list(span) for span in itertools.pairwise(ends)]
    return {"blend": {"documents": spans, "prefix": first, "ratio": ratio}}


class _Engine:
    """vLLM in this process over memory and a folder.

    Args:
        folder: for the model's config and for records.
        kvkit: kvkit's configuration, besides the chunk size; None: memory and the folder.
        role: vLLM's `kv_role`.
        graphs: whether decoding steps run as CUDA graphs.
    """

    chunk = 16

    def __init__(
        self,
        sizes: Sizes,
        folder: Path,
        kvkit: dict[str, Any] | None = None,
        role: str = "kv_both",
        graphs: bool = False,
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(_config(sizes)))
        on_gpu = torch.cuda.is_available()
        tiers = {"memory": {"capacity": sizes.memory // 2}, "disk": {"url": f"file://{folder}/records"}}
        settings = {"chunk_tokens": self.chunk, **(kvkit or {"tiers": tiers})}
        extra: dict[str, Any] = {"kvkit": settings, "lookup_timeout_s": 20.0, "prefill_tokens_per_s": 0.01}
        if sizes.blends and kvkit is None:
            extra["blend"] = {"unchecked": True}
        transfer = KVTransferConfig(
            kv_connector="KVKitConnector",
            kv_connector_module_path="kvkit.adapters.vllm.connector",
            kv_role=role,
            kv_connector_extra_config=extra,
        )
        longest = (sizes.documents + 1) * sizes.document + 64
        self._llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16" if on_gpu else "float32",
            enforce_eager=not graphs,
            max_model_len=longest,
            max_num_batched_tokens=longest,
            max_num_seqs=4,
            block_size=16,
            kv_cache_memory_bytes=sizes.memory // 4,
            enable_prefix_caching=False,
            kv_transfer_config=transfer,
            compilation_config={"mode": 0, "custom_ops": ["none"]}
            | ({"cudagraph_mode": "FULL_DECODE_ONLY"} if graphs else {}),
            **({"attention_backend": "TRITON_ATTN"} if on_gpu else {}),
        )
        self._engine: Any = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return torch.device(self._core.model_executor.driver_worker.worker.device)

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of what the engine runs on."""
        import triton
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}

    def ask(
        self, prompt: list[int], params: dict[str, Any] | None = None, tokens: int = ANSWER
    ) -> engines.Answer:
        """Return the beginning of a greedy answer."""
        return engines.ask_once(self._engine, prompt, tokens, params)

    def flush(self) -> None:
        """Wait until what it saves is in the tiers."""
        engines.flush(self._engine, self._core.scheduler)

    def close(self) -> None:
        """End it, and free its memory."""
        self.flush()
        self._engine.engine_core.shutdown()
        self._llm = self._engine = self._core = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _config(sizes: Sizes) -> dict[str, Any]:
    """A Llama's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.size,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 1 << 17,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
