"""Client of OpenAI-compatible servers that times every piece of a streamed completion."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvkit.format.urls import shown
from kvkit.lab.files import BenchError
from kvkit.lab.serve.workloads import CompletionRequest
from kvkit.workers import Workers

HIT_COUNTERS = ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits")
"""vLLM's counters of prompt tokens found in its own cache and in that of a connector."""
_METRICS_S = 30.0
_FORCING = 100
"""The largest `logit_bias` of OpenAI's API: the token is sampled."""


@dataclass(frozen=True, slots=True)
class Target:
    """Server that answered a request for its models."""

    name: str
    url: str  # scheme, host, port and the path before "/v1/completions"
    model: str
    vllm: bool  # whether it accepts token ids and `ignore_eos`
    blends: bool = False  # whether requests with documents ask it to blend them


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one request. The server counts the tokens; `again` is copied from the request."""

    again: bool
    text: str = ""
    ttft_s: float = 0.0  # until the first piece of text; 0 after an error
    gaps_s: tuple[float, ...] = ()  # between pieces of text: a token each, or several if the server lags
    total_s: float = 0.0  # until the end of the stream
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # prompt tokens not computed; None if the server does not report them
    exact: bool | None = None  # whether the text begins with the exact answer; None if none is known
    top: Mapping[str, float] | None = None  # log-probabilities of the likeliest first tokens, if requested
    error: str | None = None  # reason for an incomplete answer


def connect(name: str, url: str, model: str | None = None, timeout_s: float = 30.0) -> Target:
    """Ask a server for its models, and select the first if `model` is None.

    Raises:
        BenchError: the URL is invalid, no server answers there, or it does not have the model.
    """
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname or shown(url) != url:
        raise BenchError(f"url = {shown(url)!r}: want http://HOST:PORT or https://HOST, and no more")
    base = url.rstrip("/").removesuffix("/v1")
    try:
        models = json.loads(_get(f"{base}/v1/models", timeout_s))["data"]
        known = {str(entry["id"]): entry for entry in models}
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url}: no OpenAI-compatible server ({_describe(error)})") from error
    selected = model or next(iter(known), None)
    if selected is None or selected not in known:
        raise BenchError(f"model = {selected!r}: {url} has {', '.join(known) or 'none'}")
    return Target(name, base, selected, vllm=known[selected].get("owned_by") == "vllm")


def drive(
    server: Target, requests: Sequence[CompletionRequest], concurrency: int, timeout_s: float
) -> tuple[list[Completion], float]:
    """Send every request, with at most `concurrency` in flight, and return the answers and the duration.

    A request is sent after its arrival time and after the previous answer of its session. Answers are in the
    order of the requests; the duration is in seconds. A failed request gives an answer with an error, and
    ends its session. Each request has the timeout `timeout_s`.
    """
    sessions: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
    for index, request in enumerate(requests):
        sessions[request.session].append((request.arrival_s, index))
    ready = [queue.popleft() for queue in sessions.values()]
    heapify(ready)
    answers = [Completion(request.again, error="an earlier turn failed") for request in requests]
    history: dict[int, str] = defaultdict(str)
    running: dict[Future[Completion], int] = {}
    workers = Workers(concurrency, "client")
    start = time.perf_counter()
    while ready or running:
        due_s = ready[0][0] - (time.perf_counter() - start) if ready else None
        if due_s is not None and due_s <= 0 and len(running) < concurrency:
            _, index = heappop(ready)
            request = requests[index]
            prompt = history[request.session] + request.text if request.follows else request.text
            history[request.session] = prompt
            running[workers.submit(partial(ask, server, request, prompt, timeout_s))] = index
            continue
        if not running:
            time.sleep(due_s or 0.0)
            continue
        free = len(running) < concurrency
        done, _ = wait(running, due_s if free else None, FIRST_COMPLETED)
        for future in done:
            index = running.pop(future)
            session = requests[index].session
            answers[index] = answer = future.result()
            history[session] += answer.text
            if answer.error is None and sessions[session]:
                heappush(ready, sessions[session].popleft())
    workers.close(timeout_s)
    return answers, time.perf_counter() - start


def ask(
    server: Target, request: CompletionRequest, prompt: str, timeout_s: float, **fields: Any
) -> Completion:
    """Stream one greedy completion; errors of the server or the network are returned, not raised.

    A prompt with documents is sent to vLLM as token ids, so that a document has the same ids at every
    position; tokenization is not timed. `fields` are added to the body of the request.
    """
    body = _body(server, request, prompt) | fields
    times: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    finished, error, top = False, None, None
    start = time.perf_counter()
    try:
        if server.vllm and request.documents:
            body["prompt"], spans = tokenize(server, prompt, request.documents, timeout_s)
            if server.blends and request.again:
                blend_request = {"documents": spans, "prefix": spans[0][0]}
                body["kv_transfer_params"] = {"blend": blend_request} | body.get("kv_transfer_params", {})
            start = time.perf_counter()
        for event in stream(f"{server.url}/v1/completions", body, timeout_s):
            if "error" in event:
                raise ValueError(event["error"])
            for choice in event.get("choices") or ():
                finished = finished or choice.get("finish_reason") is not None
                if top is None and choice.get("logprobs"):
                    top = choice["logprobs"]["top_logprobs"][0]
                if choice.get("text") or (finished and not times):
                    times.append(time.perf_counter())
                    pieces.append(choice.get("text") or "")
            usage = event.get("usage") or usage
    except (OSError, http.client.HTTPException, ValueError, LookupError, AttributeError, TypeError) as caught:
        error = _describe(caught)
    end = time.perf_counter()
    if error is not None or not finished:
        timed_out = end - start >= timeout_s
        error = f"not answered within {timeout_s:g} s" if timed_out else error or "the stream ended early"
        return Completion(request.again, total_s=end - start, error=error)
    details = usage.get("prompt_tokens_details") or {}
    text = "".join(pieces)
    return Completion(
        request.again,
        text,
        times[0] - start,
        tuple(b - a for a, b in itertools.pairwise(times)),
        end - start,
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or len(pieces)),
        details.get("cached_tokens"),
        None if request.answer is None else text.strip().startswith(request.answer),
        top,
    )


def _body(server: Target, request: CompletionRequest, prompt: str) -> dict[str, Any]:
    """Return the body of a greedy request that streams its answer and reports its token counts."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.first_token is not None:
        body["logit_bias"] = {str(request.first_token): _FORCING}
    return body | {"ignore_eos": True} if server.vllm else body


def tokenize(
    server: Target, text: str, documents: Sequence[tuple[int, int]], timeout_s: float
) -> tuple[list[int], list[list[int]]]:
    """Return vLLM's token ids of a text and the span [start, stop) of each document in them.

    Documents are tokenized separately from the text around them.

    Args:
        documents: characters [start, stop) of `text`, ascending.

    Raises:
        OSError, HTTPException: the server does not answer.
    """
    cuts = [0, *itertools.chain.from_iterable(documents), len(text)]
    ids: list[int] = []
    ends = [0]
    for start, stop in itertools.pairwise(cuts):
        body = {"model": server.model, "prompt": text[start:stop], "add_special_tokens": not ids}
        with exchange("POST", f"{server.url}/tokenize", json.dumps(body).encode(), timeout_s) as response:
            ids += json.loads(response.read())["tokens"]
        ends.append(len(ids))
    return ids, [list(span) for span in itertools.pairwise(ends)][1::2]


def counted_hits(server: Target) -> int | None:
    """Return prompt tokens that a vLLM server found in caches since its start; None without such metrics."""
    try:
        counters = _counters(server, HIT_COUNTERS)
    except BenchError:
        return None
    return int(sum(sample.value for sample in counters)) if counters else None


def loaded_tokens(server: Target) -> dict[str, int]:
    """Return tokens that a vLLM server with kvkit's connector has loaded so far, by tier.

    Raises:
        BenchError: the server's metrics cannot be read.
    """
    counters = _counters(server, ["vllm:kvkit_loaded_tokens"])
    return {s.labels["tier"]: int(s.value) for s in counters if s.labels["rank"] == "0"}


def blend_tokens(server: Target) -> Counter[str]:
    """Return tokens of prompts that a vLLM server with kvkit's connector has blended so far, by kind.

    Kinds: `exact`, `reused`, `selected` (a part of `reused`) and `computed`.

    Raises:
        BenchError: the server's metrics cannot be read.
    """
    kinds = {f"vllm:kvkit_blend_{kind}_tokens": kind for kind in ("exact", "reused", "selected", "computed")}
    counters = _counters(server, list(kinds))
    return Counter({kinds[s.name.removesuffix("_total")]: int(s.value) for s in counters})


def _counters(server: Target, names: Sequence[str]) -> list[Sample]:
    """Return the samples of the named counters of a server; raises as `samples`."""
    return [sample for sample in samples(server, names) if sample.name.endswith("_total")]


def samples(server: Target, names: Sequence[str]) -> list[Sample]:
    """Return all samples of the named metrics of a server.

    Raises:
        BenchError: the server's metrics cannot be read.
    """
    try:
        text = _get(f"{server.url}/metrics", _METRICS_S).decode()
        families = [f for f in text_string_to_metric_families(text) if f.name in names]
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BenchError(f"{server.url}/metrics: {_describe(error)}") from error
    return [sample for family in families for sample in family.samples]


def _get(url: str, timeout_s: float) -> bytes:
    with exchange("GET", url, None, timeout_s) as response:
        return response.read()


def stream(url: str, body: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of a streamed response as they arrive; raises as `exchange`."""
    with exchange("POST", url, json.dumps(body).encode(), timeout_s) as response:
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if len(data) == len(line.strip()):  # a comment, a blank line, another field
                continue
            if data == b"[DONE]":
                return
            yield json.loads(data)


@contextmanager
def exchange(
    method: str, url: str, body: bytes | None, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    """Send one request on a new connection and yield the response; cut the connection after `timeout_s`.

    A socket's own timeout restarts with each byte, so a server that sends byte by byte would never time out.

    Raises:
        OSError, HTTPException: the server does not answer, or its status is not 200.
    """
    address = urlsplit(url)
    connection_type = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    start = time.monotonic()
    with closing(connection_type(address.netloc, timeout=timeout_s)) as connection:
        connection.connect()
        timer = threading.Timer(max(0.0, start + timeout_s - time.monotonic()), _shut_down, [connection.sock])
        timer.daemon = True
        timer.start()
        try:
            connection.request(method, address.path + (address.query and f"?{address.query}"), body, headers)
            with closing(connection.getresponse()) as response:
                if response.status != 200:
                    text = response.read(4096).decode(errors="replace")
                    raise http.client.HTTPException(f"HTTP {response.status}: {text}")
                yield response
        finally:
            timer.cancel()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the socket may be closed already
        connection.shutdown(socket.SHUT_RDWR)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
