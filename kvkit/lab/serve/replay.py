"""Prompts of words for the requests of a trace: equal chunks become equal text, about a token per word."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from kvkit.lab.serve.workloads import CompletionRequest, text_of
from kvkit.lab.simulate.traces import Trace


def replayed(
    trace: Trace, seed: int, requests: int, speed: float | None = None, tool_call_token: int | None = None
) -> list[CompletionRequest]:
    """Return the first `requests` of a trace as completion requests, in order of arrival.

    Requests of a session are sent one after the other. A prompt has fixed words for each of its chunks, and
    words of its own for the tokens after the last whole chunk. The trace's answers are not replayed; those
    that call a tool can be marked.

    Args:
        seed: seed of the words.
        speed: speed-up of the trace's arrival times; None: send as soon as a slot is free.
        tool_call_token: id of the token that an answer is made to begin with where the trace's calls a tool.
    """
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    completion_requests = []
    for i, request in enumerate(trace.requests[:requests]):
        names = request.chunks[: request.prompt_chunks]
        rest_tokens = request.input_tokens - len(names) * trace.block_tokens
        texts = [text_of(_random(seed, name), trace.block_tokens) for name in names]
        texts += [text_of(_random(seed, f"rest {i}"), rest_tokens)] if rest_tokens else []
        first = trace.requests[0].timestamp_ms
        completion_requests.append(
            CompletionRequest(
                session=numbers.setdefault(request.session, len(numbers)),
                text=" ".join(texts),
                again=bool(names) and names[0] in seen,
                arrival_s=0.0 if speed is None else (request.timestamp_ms - first) / 1000 / speed,
                follows=False,
                first_token=tool_call_token if request.tool_call else None,
            )
        )
        seen.update(names[:1])
    return completion_requests


def prompts_alone(trace: Trace, requests: int) -> Trace:
    """Return the trace without answers, as `replayed` sends it, to simulate the same requests."""
    selected = trace.requests[:requests]
    prompts = (
        replace(request, chunks=request.chunks[: request.prompt_chunks], output_tokens=0)
        for request in selected
    )
    return Trace(trace.block_tokens, tuple(prompts))


def _random(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])
