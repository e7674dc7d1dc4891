"""A trace's requests as prompts of words: what is equal in the trace is equal text, about a token a word."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from kvkit.bench.workloads import CompletionRequest, text_of
from kvkit.simulate.traces import Trace


def replayed(trace: Trace, seed: int, requests: int, speed: float | None = None) -> list[CompletionRequest]:
    """The first `requests` of a trace, in the order of their arrival.

    A session's requests come one after the other. What a server answers is not what the trace tells: a prompt
    has words that stand for its chunks, and words of its own where it fills none.

    Args:
        seed: of the words.
        speed: so many times as fast as the trace; None: as soon as there is room.
    """
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    made = []
    for i, request in enumerate(trace.requests[:requests]):
        names = request.chunks[: request.prompt_chunks]
        rest = request.input_tokens - len(names) * trace.block_tokens
        parts = [text_of(_random(seed, name), trace.block_tokens) for name in names]
        parts += [text_of(_random(seed, f"rest {i}"), rest)] if rest else []
        first = trace.requests[0].timestamp_ms
        made.append(
            CompletionRequest(
                session=numbers.setdefault(request.session, len(numbers)),
                text=" ".join(parts),
                again=bool(names) and names[0] in seen,
                arrival_s=0.0 if speed is None else (request.timestamp_ms - first) / 1000 / speed,
                follows=False,
            )
        )
        seen.update(names[:1])
    return made


def prompts_alone(trace: Trace, requests: int) -> Trace:
    """What `replayed` sends of a trace, for a simulation of the same: its answers are stored nowhere."""
    some = trace.requests[:requests]
    alone = (replace(one, chunks=one.chunks[: one.prompt_chunks], output_tokens=0) for one in some)
    return Trace(trace.block_tokens, tuple(alone))


def _random(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])
