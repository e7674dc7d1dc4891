"""vLLM engines in processes of their own that take turns: one that is not awake is stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvkit.adapters.huggingface import smollm2
from kvkit.lab.serve.systems import free_port

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU."""
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""KV of a token of SmolLM2 in float32: layers, K and V, heads, head size, bytes."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "UCX_NET_DEVICES": "lo",
}
"""Of the process that starts engines."""
_WATCHED_S = 0.5
_IDLE_S = 0.001
"""vLLM's pause after a step that computed nothing."""
Settings = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """What came of a prompt.

    Attributes:
        times_s: seconds until each token.
        cached_tokens: of the prompt, not computed.
        params: the `kv_transfer_params` of the answer.
    """

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    params: Settings | None = None


class Engine:
    """SmolLM2 in float32 in a process of its own, stopped but within `awake`. A context manager that ends it.

    Args:
        transfer: its `kv_transfer_config`; None: without a connector.
        package: folder of a package that only it sees.
        options: of vLLM's `LLM`, where they are not as all engines have them.
    """

    def __init__(self, transfer: Settings | None, package: Path | None = None, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, transfer, package, free_port(), options))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self._pipe.recv()
        os.kill(self.pid, signal.SIGSTOP)

    def ask(self, prompt: Sequence[int], tokens: int, params: Settings | None = None) -> Answer:
        """The beginning of a greedy answer; `params` are the request's `kv_transfer_params`."""
        answer: Answer = self._do("ask", prompt, tokens, params)
        return answer

    def counters(self) -> Counter[str]:
        """vLLM's metrics by name, those with a `stage` by name and stage."""
        found: Counter[str] = self._do("counters")
        return found

    def flush(self) -> None:
        """Wait until what its connector saves is in the tiers."""
        self._do("flush")

    def reset(self) -> None:
        """Have vLLM forget the blocks of its own prefix cache."""
        self._do("reset")

    def _do(self, *asked: Any) -> Any:
        self._pipe.send(asked)
        return self._pipe.recv()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def awake(pids: Sequence[int]) -> Iterator[None]:
    """Let processes run that are stopped before and after."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def _serve(
    pipe: Connection, transfer: Settings | None, package: Path | None, port: int, options: Settings
) -> None:
    """Do what is asked until the pipe is closed; take steps as long as vLLM has something to do."""
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    if package is not None:
        sys.path.insert(0, str(package))
    from vllm import LLM
    from vllm.config import KVTransferConfig

    chosen: Settings = {
        "model": str(smollm2.fetch()),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 64,
        "disable_log_stats": False,
        "kv_transfer_config": None if transfer is None else KVTransferConfig(**transfer),
    }
    engine: Any = LLM(**chosen | options).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    _make_way()
    pipe.send("ready")
    while True:
        if scheduler.has_requests() and not pipe.poll():  # one that was answered may still be sent or saved
            if not engine.step():
                time.sleep(_IDLE_S)
            continue
        what, *arguments = pipe.recv()
        if what == "ask":
            pipe.send(ask_once(engine, *arguments))
        elif what == "counters":
            pipe.send(_counters())
        elif what == "flush":
            pipe.send(flush(engine, scheduler))
        else:
            pipe.send(engine.reset_prefix_cache())


def ask_once(engine: Any, prompt: Sequence[int], tokens: int, params: Settings | None) -> Answer:
    """The beginning of a greedy answer of an engine in this process; arguments as in `Engine.ask`."""
    from vllm import SamplingParams

    answer, began = Answer(), time.perf_counter()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    engine.add_request(str(began), {"prompt_token_ids": prompt}, sampling)
    while True:
        outputs = engine.step()
        for output in outputs:
            new = output.outputs[0].token_ids[len(answer.tokens) :]
            answer.tokens += new
            answer.times_s += [time.perf_counter() - began] * len(new)
            if output.finished:
                answer.params, answer.cached_tokens = output.kv_transfer_params, output.num_cached_tokens
                return answer
        if not outputs:
            time.sleep(_IDLE_S)


def _counters() -> Counter[str]:
    from prometheus_client import REGISTRY

    found: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            stage = sample.labels.get("stage")
            found[sample.name if stage is None else f"{sample.name} {stage}"] += sample.value
    return found


def flush(engine: Any, scheduler: Any) -> None:
    """Wait until what the connector of an engine in this process saves is in the tiers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    while scheduler.has_requests():
        engine.step()
    if has_kv_transfer_group():
        worker = get_kv_transfer_group()._worker
        worker.end_saves()
        worker.cache.flush()


def _make_way() -> None:
    """Give the lowest priority to threads of this process that never sleep."""
    import psutil

    def used_s() -> dict[int, float]:
        return {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}

    before = used_s()
    time.sleep(_WATCHED_S)
    for thread, now in used_s().items():
        if now - before.get(thread, now) > _WATCHED_S / 5:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
