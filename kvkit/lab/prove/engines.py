"""Engines of `kvkit prove`: vLLM servers, started here or already running."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, Self

from kvkit.lab.files import BenchError
from kvkit.lab.prove.scenarios import ANSWER_TOKENS
from kvkit.lab.prove.verdict import Reply
from kvkit.lab.serve.client import Target, connect, exchange, samples, stream
from kvkit.lab.serve.systems import SAME_CORES, free_port, healthy, serving, tail
from kvkit.workers import Workers

ADAPTER = "prove-adapter"
PROBE = "kvkit.lab.prove.page_probe.PageProbe"
_LIKELY = 5
"""Number of likeliest tokens per position for which a server returns log-probabilities."""
_LONG_TOKENS = 256
"""Requested length of an answer that is abandoned."""
_TIMEOUT_S = 300.0
_START_S = 20.0
"""Longest wait for sent requests to run, or for a cache reset to succeed, in seconds."""
_PAUSE_S = 0.02
_COUNTERS = {
    "vllm:external_prefix_cache_hits_total": "loaded",
    "vllm:prefix_cache_hits_total": "own",
    "vllm:num_preemptions_total": "preempted",
    "vllm:num_requests_running": "running",
}
_FAILURES = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Model, options and environment of an engine to start."""

    model: str
    options: tuple[str, ...]  # vLLM's command-line options
    folder: Path  # where the log is written
    environment: Mapping[str, str]
    transfer: dict[str, Any] | None = None  # kv_transfer_config
    concurrent: bool = False  # whether other engines may start at the same time


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt as sent to an engine."""

    tokens: tuple[int, ...]
    salt: str = ""
    adapter: bool = False


class ProvedEngine:
    """An engine of a proof. As a context manager, it ends the server it started.

    Args:
        location: how to start the engine, or the URL of a running one.
        prefill: engine that computes the prompts and hands them off; None: this engine computes them.
    """

    def __init__(self, name: str, location: EngineLaunch | str, prefill: ProvedEngine | None = None) -> None:
        self.name, self._location, self._prefill_engine = name, location, prefill
        self._stack = ExitStack()
        self._pid: int | None = None
        self._watched_folder: Path | None = None
        self.target: Target | None = None
        self.no_pages_reason = "no probe was started"  # why pages are not compared; empty: they are
        self.dtype = ""

    @property
    def is_own(self) -> bool:
        """True if the engine is started here, and so may be ended here."""
        return isinstance(self._location, EngineLaunch)

    @property
    def handed_off(self) -> bool:
        """True if another engine computes the prompts and hands their KV to this one."""
        return self._prefill_engine is not None

    def open(self) -> Self:
        """Start the engine, or connect to the running one.

        Raises:
            BenchError: the engine does not start, or none runs at the URL.
        """
        if isinstance(self._location, str):
            self.target = connect(self.name, self._location)
        elif self._prefill_engine is None:
            self.target = self._start(self._location)
        else:
            with opening([self._prefill_engine], self._location.concurrent) as (prefill,):
                self.target = self._start(self._location)
                prefill()
        if self._watched_folder is not None:
            self.watch(self._watched_folder)
        return self

    def _start(self, launch: EngineLaunch) -> Target:
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", launch.model]
        command += ["--host", "127.0.0.1", "--port", str(port), *launch.options]
        if launch.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(launch.transfer)]
        environment = SAME_CORES | dict(launch.environment) | {"VLLM_SERVER_DEV_MODE": "1"}
        process = self._stack.enter_context(
            serving(self.name, command, environment, launch.folder, lambda: healthy(port))
        )
        self._pid = process.pid
        return connect(self.name, f"http://127.0.0.1:{port}", launch.model)

    def log(self) -> str:
        """Read the last lines of the engine's log; empty if it was not started here."""
        return (
            tail(self._location.folder / f"{self.name}.log")
            if isinstance(self._location, EngineLaunch)
            else ""
        )

    def close(self) -> None:
        """End the engine as a user would, if it was started here."""
        self._stack.close()
        if self._prefill_engine is not None:
            self._prefill_engine.close()

    def kill(self) -> None:
        """Send SIGKILL to the engine and its children."""
        assert self._pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def watch(self, folder: Path) -> None:
        """Start the probe, which copies pages to `folder`; if that fails, set `no_pages_reason`."""
        folder.mkdir(exist_ok=True)
        self._watched_folder = folder
        try:
            reply = self._post("/collective_rpc", {"method": "prove_watch", "args": [str(folder)]})
            self.dtype, self.no_pages_reason = reply["results"][0]["dtype"], ""
        except _FAILURES as error:
            self.no_pages_reason = f"the engine has no probe ({str(error)[:80]})"

    def skipped_tokens(self) -> int | None:
        """Return the tokens that needed no computing when requests were scheduled; None without a probe.

        Requests that were scheduled again after a preemption count, too.

        Raises:
            BenchError: the engine does not report them.
        """
        if self.no_pages_reason:
            return None
        try:
            return int(self._post("/collective_rpc", {"method": "prove_skipped"})["results"][0][0])
        except _FAILURES as error:
            raise BenchError(f"{self._target.url} does not report skipped tokens: {error!r}") from error

    def read_counts(self) -> Counter[str]:
        """Read vLLM's counts: `loaded` tokens, `own` hits, `preempted` and `running` requests.

        Raises:
            BenchError: the engine does not report them.
        """
        found = samples(self._target, [name.removesuffix("_total") for name in _COUNTERS])
        counted: Counter[str] = Counter()
        for sample in found:
            if sample.name in _COUNTERS:
                counted[_COUNTERS[sample.name]] += int(sample.value)
        return counted

    def capacity_tokens(self) -> int:
        """Return the number of tokens that the engine's blocks hold.

        Raises:
            BenchError: the engine does not report it.
        """
        for sample in samples(self._target, ["vllm:cache_config_info", "vllm:cache_config"]):
            with suppress(LookupError, ValueError):
                return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
        raise BenchError(f"{self._target.url} does not report how many blocks it has")

    def reset_prefix_cache(self) -> bool:
        """Reset the engine's own prefix cache; return whether that succeeded."""
        return self._reset("reset_running_requests=false")

    def preempt_requests(self) -> None:
        """Preempt all running requests; the engine schedules them again."""
        self._reset("reset_running_requests=true")

    def _reset(self, query: str) -> bool:
        """Reset the prefix cache; retry while blocks are in use, as by a connector that saves them."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            try:
                if self._post(f"/reset_prefix_cache?{query}", {})["success"]:
                    return True
            except _FAILURES:
                return False
            time.sleep(_PAUSE_S)
        return False

    def send_prompts(
        self, prompts: Sequence[SentPrompt], then: Callable[[], None] | None = None
    ) -> list[Reply]:
        """Send prompts together and return the answers; call `then` once all answers have begun."""
        begun = [Event() for _ in prompts]
        workers = Workers(len(prompts), "prove")
        answers = [
            workers.submit(partial(self._send_prompt, prompt, event.set))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        if then is not None:
            for event in begun:
                event.wait(_TIMEOUT_S)
            then()
        replies = [answer.result() for answer in answers]
        workers.close(_TIMEOUT_S)
        return replies

    def abandon_prompts(self, prompts: Sequence[SentPrompt], then: Callable[[], None]) -> bool:
        """Send prompts, call `then` while they are computed, and abandon the answers.

        Returns: whether a request was seen running; `then` is called in any case.
        """
        with ExitStack() as stack:
            for prompt in prompts:
                url = f"{self._target.url}/v1/completions"
                with suppress(*_FAILURES):
                    body = self._body(prompt) | {"max_tokens": _LONG_TOKENS}
                    stack.enter_context(exchange("POST", url, json.dumps(body).encode(), _TIMEOUT_S))
            seen = self._wait_until_running()
            then()
            return seen

    def _wait_until_running(self) -> bool:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.read_counts()["running"]:
                return True
            time.sleep(_PAUSE_S)
        return False

    def _send_prompt(self, prompt: SentPrompt, begun: Callable[[], None]) -> Reply:
        tokens: list[int] = []
        logprobs: list[float] = []
        likely: list[dict[int, float]] = []
        finished = False
        try:
            for event in stream(f"{self._target.url}/v1/completions", self._body(prompt), _TIMEOUT_S):
                if "error" in event:
                    raise ValueError(event["error"])
                for choice in event.get("choices") or ():
                    finished = finished or choice.get("finish_reason") == "length"
                    tokens += choice.get("token_ids") or ()
                    if reported := choice.get("logprobs"):
                        logprobs += reported["token_logprobs"]
                        likely += [_by_token_id(top) for top in reported["top_logprobs"]]
                    begun()
        except _FAILURES as error:
            return Reply(error=f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            begun()
        if not finished or not len(tokens) == len(logprobs) == len(likely):
            return Reply(error=f"the stream ended after {len(tokens)} tokens")
        return Reply(tuple(tokens), tuple(logprobs), tuple(likely))

    def compute(self, prompt: SentPrompt) -> dict[str, Any]:
        """Compute a prompt for another engine; return the kv_transfer_params to send to that engine."""
        request = {"do_remote_decode": True, "do_remote_prefill": False}
        body = self._body(prompt) | {"max_tokens": 1, "stream": False, "kv_transfer_params": request}
        params: dict[str, Any] = self._post("/v1/completions", body)["kv_transfer_params"]
        return params

    def _body(self, prompt: SentPrompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": ADAPTER if prompt.adapter else self._target.model,
            "prompt": list(prompt.tokens),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": _LIKELY,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        if prompt.salt:
            body["cache_salt"] = prompt.salt
        if self._prefill_engine is not None:
            body["kv_transfer_params"] = self._prefill_engine.compute(prompt)
        return body

    @property
    def _target(self) -> Target:
        assert self.target is not None, "the engine is not open"
        return self.target

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        with exchange("POST", self._target.url + path, json.dumps(body).encode(), _TIMEOUT_S) as response:
            return json.loads(response.read())


@contextmanager
def opening(engines: Sequence[ProvedEngine], concurrent: bool) -> Iterator[list[Callable[[], ProvedEngine]]]:
    """Yield a function for each engine that opens and returns it.

    With `concurrent`, all engines start at once, and each function waits for its engine. On exit, the context
    waits until no engine is starting; it closes none.
    """
    workers = Workers(len(engines), "prove")
    started = [workers.submit(engine.open) for engine in engines] if concurrent else []
    try:
        yield [future.result for future in started] or [engine.open for engine in engines]
    finally:
        wait(started)
        workers.close(_TIMEOUT_S)


def _by_token_id(top: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("token_id:")): value for name, value in top.items()}


def with_adapter(launch: EngineLaunch, folder: Path) -> EngineLaunch:
    """Return `launch` with the LoRA adapter in `folder`, which requests select as `ADAPTER`."""
    rank = int(json.loads((folder / "adapter_config.json").read_text())["r"])
    max_rank = next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)
    lora_options = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(max_rank))
    return replace(launch, options=(*launch.options, *lora_options, "--lora-modules", f"{ADAPTER}={folder}"))
