"""A real vLLM engine on the CPU, in a process of its own, for the tests of the connector.

Run as a program it takes one JSON list [method, arguments] a line and answers with one JSON line each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvkit.adapters.huggingface import smollm2

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU."""

SIZES = {"chunk_tokens": BLOCK, "staging": "64MiB"}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

Settings = dict[str, Any]


def prompt(tokens: int, seed: int = 0, vocabulary: int = 49_000) -> list[int]:
    """Token ids that make no sense, but always the same."""
    return np.random.default_rng(seed).integers(100, vocabulary, tokens).tolist()


def connector(settings: Settings, policy: str = "recompute", role: str = "kv_both", **more: Any) -> Settings:
    """The `kv_transfer_config` of kvkit with these tiers; `more` are settings of the connector.

    A busy machine does not turn hits into misses: lookups may take long, and computing is never the faster.
    """
    return {
        "kv_connector": "KVKitConnector",
        "kv_connector_module_path": "kvkit.adapters.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "kvkit": {"chunk_tokens": BLOCK, "staging": "64MiB"} | settings,
            "lookup_timeout_s": 20.0,
            "prefill_tokens_per_s": 0.01,
            **more,
        },
    }


def on_disk(folder: Path) -> Settings:
    return {"tiers": {"disk": {"url": f"file://{folder}"}}}


class Engine:
    """A process with one vLLM `LLM` at a time. A context manager that ends it.

    Args:
        environment: variables of the process, besides `ENVIRONMENT`.
    """

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | environment,
        )

    def open(self, transfer: Settings | None, model: Path | None = None, **options: Any) -> Self:
        """Close the `LLM` that is open and make another.

        Args:
            transfer: its `kv_transfer_config`; None: without a connector.
            model: folder; None: SmolLM2.
            options: of vLLM's `LLM`.
        """
        chosen = {
            "model": str(model or smollm2.fetch()),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        }
        self._call("open", chosen | options)
        return self

    def generate(self, prompts: Sequence[list[int]], tokens: int = 8, **sampling: Any) -> list[Settings]:
        """Greedy continuations of prompts that come together; `lora` in `sampling` is a LoRARequest's fields.

        Of each its tokens, logprobs, cached tokens, reason to end, and `handoff`, its kv_transfer_params.
        """
        found: list[Settings] = self._call("generate", prompts, tokens, sampling)
        return found

    def text(self, *prompts: list[int], tokens: int = 8, **sampling: Any) -> list[list[int]]:
        """The tokens alone."""
        return [answer["tokens"] for answer in self.generate(prompts, tokens, **sampling)]

    def cached(self, *prompts: list[int], tokens: int = 8, **sampling: Any) -> list[int]:
        """How many tokens of each prompt were not computed."""
        return [answer["cached"] for answer in self.generate(prompts, tokens, **sampling)]

    def metrics(self) -> dict[str, float]:
        """vLLM's Prometheus samples by name and labels, those of the engine and of rank 0 left out."""
        found: dict[str, float] = self._call("metrics")
        return found

    def flush(self) -> None:
        """Wait until what was saved is in the tiers."""
        self._call("flush")

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a function of this module in the engine's process."""
        return self._call(method, *arguments)

    def close(self) -> None:
        """End the engine as a user would: it saves what is under way."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self.kill()

    def _call(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer = json.loads(line.removeprefix(MARK))
                assert "error" not in answer, answer["error"]
                return answer["result"]
        raise AssertionError(f"the engine ended with {self._process.wait()}")


MARK = "kvkit-test "


class _Served:
    """What the child does."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.taken: list[Any] = []

    def open(self, options: Settings) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.platforms import current_platform

        self.close()
        transfer, events = options.pop("kv_transfer_config"), options.pop("kv_events_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        if events is not None:
            options["kv_events_config"] = KVEventsConfig(**events)
        self.llm = LLM(**options)
        # vLLM's kernels are in place for good; a second search for them stumbles over llvmlite's modules
        current_platform.__class__.register_triton_kernel_overrides = classmethod(lambda cls: None)

    def generate(self, prompts: list[list[int]], tokens: int, sampling: Settings) -> list[Settings]:
        from vllm import SamplingParams

        from kvkit.cache import CacheTimeout  # not before vLLM's start: it imports numba

        salt, lora = sampling.pop("cache_salt", None), sampling.pop("lora", None)
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0, **sampling
        )
        given = [{"prompt_token_ids": p} | ({"cache_salt": salt} if salt else {}) for p in prompts]
        adapter = None if lora is None else self._adapter(lora)
        answers = self.llm.generate(given, params, use_tqdm=False, lora_request=adapter)
        self._finish()
        for worker in _workers():  # the next call finds what this one saved, however busy the machine is
            worker.settle()
            with suppress(CacheTimeout):  # a tier of the test that hangs
                worker.cache.flush(5.0)
        return [
            {
                "tokens": list(out.token_ids),
                "cached": answer.num_cached_tokens,
                "reason": out.finish_reason,
                "handoff": answer.kv_transfer_params,
                "logprobs": [step[t].logprob for step, t in zip(out.logprobs, out.token_ids, strict=True)],
            }
            for answer in answers
            for out in answer.outputs
        ]

    def _adapter(self, lora: Settings) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(**lora)

    def add_lora(self, lora: Settings) -> None:
        self.llm.llm_engine.add_lora(self._adapter(lora))

    def _finish(self) -> None:
        """Take the steps that are left after the last answer; a core in another process does so itself."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        found = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("vllm:"):
                    alike = {("rank", "0"), *((k, sample.labels.get(k)) for k in ("model_name", "engine"))}
                    labels = {k: v for k, v in sample.labels.items() if (k, v) not in alike}
                    shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                    found[f"{sample.name}{{{shown}}}"] = sample.value
        return found

    def flush(self) -> None:
        for worker in _workers():
            worker.settle()
            worker.cache.flush()
            worker.cache.check_integrity()

    def record_bytes(self, tokens: int) -> int:
        """Of a chunk of so many tokens, over all groups of layers."""
        from kvkit.moving.sequence import formats_of

        (worker,) = _workers()
        space = replace(worker.cache.namespace, chunk_tokens=tokens)
        return sum(form.record_bytes for form in formats_of(worker.cache.layout, space))

    def transfers(self) -> dict[str, str]:
        """The phase of what is being received or waits to be used."""
        receivers = [worker.cache.tiers["handoff"].receiver for worker in _workers()]
        return {name: str(phase) for it in receivers for name, phase in it.transfers().items()}

    def keep_last_word(self) -> None:
        """Of the next transfer all is sent but the message that this was all."""
        from kvkit.handoff.protocol.messages import Commit
        from kvkit.handoff.transport.link import Link

        say = Link.say

        def keep(link: Any, message: Any) -> None:
            if isinstance(message, Commit):
                Link.say = say
            else:
                say(link, message)

        Link.say = keep

    def clear(self, tier: str) -> None:
        for worker in _workers():
            worker.cache.clear(tier)

    def take_slots(self) -> None:
        """Leave none for saves and loads until `give_slots_back`."""
        for worker in _workers():
            staging = worker.cache.staging
            self.taken += staging.acquire(staging.free, 60.0, at_least=staging.free)

    def give_slots_back(self) -> None:
        for lease in self.taken:
            lease.release()
        self.taken.clear()

    def reset(self, connector: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def close(self) -> None:
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()


def _workers() -> Iterator[Any]:
    """kvkit's side of the worker in this process, alone or within a MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    for one in getattr(connector, "sub_connectors", [connector]):
        if getattr(one, "_worker", None) is not None:
            yield one._worker


def _serve() -> None:
    gc.unfreeze = lambda: None  # or vLLM collects garbage among all that was imported, 8 times an engine
    importlib.import_module("vllm.entrypoints.llm")  # takes seconds, in which the test goes on
    served = _Served()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        answer: Settings = {}
        try:
            answer["result"] = getattr(served, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer["error"] = f"{type(error).__name__}: {error}"
        print(f"\n{MARK}{json.dumps(answer)}", flush=True)
    served.close()


if __name__ == "__main__":
    _serve()
