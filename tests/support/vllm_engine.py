"""A real vLLM engine on the CPU, in a process of its own, for the tests of the connector.

Run as a program it takes one JSON list [method, arguments] a line and answers with one JSON line each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from vllm_process import Fork

from kvkit.adapters.huggingface import smollm2

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU."""

SIZES = {"chunk_tokens": BLOCK, "staging": "64MiB"}

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
        environment: variables of the process that differ from the usual.
    """

    def __init__(self, **environment: str) -> None:
        there, requests = os.pipe()
        answers, back = os.pipe()
        self._process = Fork("vllm_engine", [], (there, back, 2), environment)
        os.close(there)
        os.close(back)
        self._requests, self._answers = os.fdopen(requests, "w"), os.fdopen(answers)

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
            "kv_cache_memory_bytes": 1 << 29,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        }
        self._call("open", chosen | options)
        return self

    def generate(
        self,
        prompts: Sequence[list[int]],
        tokens: int = 8,
        blends: Sequence[Settings | None] = (),
        **sampling: Any,
    ) -> list[Settings]:
        """Greedy continuations of prompts that come together.

        In `sampling`, `lora` is a LoRARequest's fields; `cache_salt` and `image`, the pixels of a side, are
        those of all prompts.

        Of each its tokens, logprobs, cached tokens, reason to end, `handoff`, its kv_transfer_params, and
        log-probabilities: `likely`, at each place, of as many tokens as `logprobs` in `sampling` says; and
        `scored`, of the prompt's tokens but the first where there is a `prompt_logprobs`.

        Args:
            blends: of each prompt what it asks of blending, None: nothing. Empty: nobody asks.
        """
        found: list[Settings] = self._call("generate", prompts, tokens, list(blends), sampling)
        return found

    def submit(
        self, name: str, prompt: list[int], tokens: int = 8, blend: Settings | None = None, **more: Any
    ) -> None:
        """Have a request wait for `step`; `more` are the prompt's `cache_salt` and `image`."""
        self._call("submit", name, prompt, tokens, blend, more)

    def step(self, steps: int) -> dict[str, Settings]:
        """Take so many steps; the answers that are complete, as `generate` has them, by request."""
        found: dict[str, Settings] = self._call("step", steps)
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
            self._requests.close()
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
        self._requests.write(json.dumps([method, arguments]) + "\n")
        self._requests.flush()
        return self._answer()

    def _answer(self) -> Any:
        for line in self._answers:
            if line.startswith(MARK):
                answer = json.loads(line.removeprefix(MARK))
                assert "error" not in answer, answer["error"]
                return answer["result"]
        raise AssertionError("the engine ended")


MARK = "kvkit-test "


class _Served:
    """What the child does."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.taken: list[Any] = []
        self.asked: list[int] | None = None
        self.numbered = 0

    def open(self, options: Settings) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.close()
        transfer, events = options.pop("kv_transfer_config"), options.pop("kv_events_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        if events is not None:
            options["kv_events_config"] = KVEventsConfig(**events)
        try:
            self.llm = LLM(**options)
        except BaseException:
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise

    def generate(
        self, prompts: list[list[int]], tokens: int, blends: list[Settings | None], sampling: Settings
    ) -> list[Settings]:
        from kvkit.cache import CacheTimeout  # not before vLLM's start: it imports numba

        lora, more = sampling.pop("lora", None), {k: sampling.pop(k) for k in _MORE if k in sampling}
        params = [_sampling(tokens, blend, **sampling) for blend in blends or [None] * len(prompts)]
        given = [_prompt(p, **more) for p in prompts]
        adapter = None if lora is None else self._adapter(lora)
        answers = self.llm.generate(given, params, use_tqdm=False, lora_request=adapter)
        self.come_to_rest()
        for worker in _workers():  # the next call finds what this one saved, however busy the machine is
            worker.end_saves()
            with suppress(CacheTimeout):  # a tier of the test that hangs
                worker.cache.flush(5.0)
        return [_told(answer, out) for answer in answers for out in answer.outputs]

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """The vectors of prompts, of a pooling model."""
        found = self.llm.embed([_prompt(p) for p in prompts], use_tqdm=False)
        return [one.outputs.embedding for one in found]

    def submit(
        self, name: str, prompt: list[int], tokens: int, blend: Settings | None, more: Settings
    ) -> None:
        self.llm.llm_engine.add_request(name, _prompt(prompt, **more), _sampling(tokens, blend))

    def step(self, steps: int) -> dict[str, Settings]:
        answers = [answer for _ in range(steps) for answer in self.llm.llm_engine.step()]
        return {one.request_id: _told(one, one.outputs[0]) for one in answers if one.finished}

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def preempt(self) -> None:
        """Have all that runs give up its blocks, and come again.

        Where steps overlap, vLLM complains afterwards that the blocks of the step under way are not free.
        """
        with suppress(*((RuntimeError,) if self.overlaps() else ())):
            self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def selected(self) -> list[int]:
        """Which tokens of the newest blend were computed again."""
        (worker,) = _workers()
        found: list[int] = worker.blends.last.selected.tolist()
        return found

    def free_blocks(self) -> tuple[int, int]:
        """How many of vLLM's blocks are free, and how many there are."""
        pool = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # one stands for blocks that are not there

    def _adapter(self, lora: Settings) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(**lora)

    def add_lora(self, lora: Settings) -> None:
        self.llm.llm_engine.add_lora(self._adapter(lora))

    def come_to_rest(self) -> None:
        """Take the steps that are left."""
        while self.busy():
            self.llm.llm_engine.step()

    def overlaps(self) -> bool:
        """Whether a step is scheduled before the last one's tokens are known."""
        return bool(self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def busy(self) -> bool:
        """Whether steps are left to take; a core in another process takes them itself."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        return core is not None and bool(core.scheduler.has_requests())

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
            worker.end_saves()
            worker.cache.flush()
            worker.cache.check_integrity()

    def record_bytes(self, tokens: int) -> int:
        """Of a chunk of so many tokens, over all groups of layers."""
        from kvkit.transfer.sequence import formats_of

        (worker,) = _workers()
        space = replace(worker.cache.namespace, chunk_tokens=tokens)
        return sum(form.record_bytes for form in formats_of(worker.cache.layout, space))

    def waits(self) -> list[bool]:
        """Of each session that the memory tier's policy knows: whether it waits for a tool's result."""
        (worker,) = _workers()
        known = worker.cache.tiers["memory"]._state.policy._sessions
        return [session.tool_call for session in known.values()]

    def call(self, module: str, function: str, *arguments: Any) -> list[Any]:
        """What a function of another module of the tests returns for each rank's model runner."""
        found: list[Any] = self.llm.collective_rpc(_call, 120.0, (module, function, *arguments))
        return found

    def transfers(self) -> dict[str, str]:
        """The phase of what is being received or waits to be used."""
        receivers = [worker.cache.tiers["handoff"].receiver for worker in _workers()]
        return {name: str(phase) for it in receivers for name, phase in it.transfers().items()}

    def lookups(self) -> int:
        """How many the workers were asked since this was first called."""
        from kvkit.adapters.engine.lookups import Lookups

        if self.asked is None:
            self.asked, ask = [], Lookups.begin_lookup

            def note(lookups: Any, lookup: Any) -> None:
                self.asked.append(lookup.number)
                ask(lookups, lookup)

            Lookups.begin_lookup = note
        return len(self.asked)

    def keep_last_word(self) -> None:
        """Of the next transfer all is sent but the message that this was all."""
        from kvkit.handoff.protocol.messages import Commit
        from kvkit.handoff.transport.link import Link

        queue_message = Link.queue_message

        def keep(link: Any, message: Any) -> None:
            if isinstance(message, Commit):
                Link.queue_message = queue_message
            else:
                queue_message(link, message)

        Link.queue_message = keep

    def clear(self, tier: str) -> None:
        for worker in _workers():
            worker.cache.clear(tier)

    def pin(self, tokens: list[int], seconds: float) -> int:
        """Of what requests without adapter and salt store; how many tokens are pinned."""
        (worker,) = _workers()
        pinned: int = worker.cache.pin(tokens, seconds, worker.namespaces.named(None, ""))
        return pinned

    def take_slots(self) -> None:
        """Leave none for saves and loads until `give_slots_back`."""
        for worker in _workers():
            staging = worker.cache.staging
            self.taken += staging.acquire(staging.free, 60.0, at_least=staging.free)

    def give_slots_back(self) -> None:
        for lease in self.taken:
            lease.release()
        self.taken.clear()

    def reload(self, folder: str, how: str) -> None:
        """Give the engine other weights, by vLLM's own method or by the model's. Only norms may differ."""
        if how == "vLLM":
            self.llm.collective_rpc("reload_weights", 120.0, (), {"weights_path": folder})
        else:
            self.llm.collective_rpc(_load, 120.0, (folder,))

    def advised(
        self,
        prompt: list[int],
        session: str | None = None,
        hints: Sequence[Settings] = (),
        trace: str = "",
        params: Settings | None = None,
    ) -> int:
        """Answer one prompt with a session's id, an orchestrator's hints or a trace; how much was cached."""
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        actions = [KvHintAction(f"a{i}", **hint) for i, hint in enumerate(hints)]
        envelope = KvHintsEnvelope("0.1", "message", actions) if actions else None
        engine, self.numbered = self.llm.llm_engine, self.numbered + 1
        name = f"advised-{self.numbered}"
        sampling = _sampling(1, None, extra_args={"kv_transfer_params": params} if params else None)
        headers = {"traceparent": trace} if trace else None
        engine.add_request(
            name,
            _prompt(prompt),
            sampling,
            session_id=session,
            kv_hints=envelope,
            trace_headers=headers,
        )
        answers = []
        while engine.has_unfinished_requests():
            answers += engine.step()
        self.come_to_rest()
        self.flush()
        cached: int = answers[-1].num_cached_tokens
        return cached

    def sleep_and_wake(self, level: int) -> None:
        self.llm.sleep(level)
        self.llm.wake_up()

    def set_weight_version(self, version: str) -> None:
        self.llm.llm_engine.set_weight_version(version)

    def reset(self, connector: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def close(self) -> None:
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()


_MORE = ("cache_salt", "image")
"""What comes with prompts, not with their sampling."""


def _prompt(tokens: list[int], cache_salt: str | None = None, image: int | None = None) -> Settings:
    """As vLLM takes it; the image is a square of so many pixels, always the same."""
    given: Settings = {"prompt_token_ids": tokens} | ({"cache_salt": cache_salt} if cache_salt else {})
    if image is not None:
        pixels = np.random.default_rng(0).integers(0, 256, (image, image, 3), np.uint8)
        given["multi_modal_data"] = {"image": pixels}
    return given


def _sampling(tokens: int, blend: Settings | None, **more: Any) -> Any:
    from vllm import SamplingParams

    asked = {} if blend is None else {"extra_args": {"kv_transfer_params": {"blend": blend}}}
    given = {"max_tokens": tokens, "logprobs": 0} | asked | more
    return SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **given)


def _told(answer: Any, out: Any) -> Settings:
    """What the parent is told of an answer."""
    steps = zip(out.logprobs, out.token_ids, strict=True)
    return {
        "tokens": list(out.token_ids),
        "cached": answer.num_cached_tokens,
        "reason": out.finish_reason,
        "handoff": answer.kv_transfer_params,
        "logprobs": [step[token].logprob for step, token in steps],
        "likely": [{token: one.logprob for token, one in step.items()} for step in out.logprobs],
        "scored": [
            step[token].logprob
            for token, step in zip(answer.prompt_token_ids, answer.prompt_logprobs or (), strict=False)
            if step is not None
        ],
    }


def _workers() -> Iterator[Any]:
    """kvkit's side of the worker in this process, alone or within a MultiConnector, if it caches anything."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    for one in getattr(connector, "sub_connectors", [connector]):
        if hasattr(getattr(one, "_worker", None), "cache"):
            yield one._worker


def _call(worker: Any, module: str, function: str, *arguments: Any) -> Any:
    return getattr(importlib.import_module(module), function)(worker.model_runner, *arguments)


def _load(worker: Any, folder: str) -> None:
    from safetensors.torch import load_file

    held = load_file(Path(folder) / "model.safetensors").items()  # vLLM has packed the others for its CPU
    worker.model_runner.get_model().load_weights((name, one) for name, one in held if "layernorm" in name)


def _serve() -> None:
    gc.freeze = gc.unfreeze = lambda: None  # what was imported stays frozen, and no engine after its end
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
