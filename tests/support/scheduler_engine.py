"""An engine as the scheduler's side of the vLLM connector sees it, made up: each answer can be replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.planner import SchedulerConfig
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy


def tokens_of(request: Any, count: int) -> Sequence:
    assert count <= request.num_tokens, "a token that is not known"
    return Sequence(np.array(request.tokens[:count], np.int32))


@dataclass
class FakeEngine:
    """One that has all blocks free and nothing cached."""

    now: Callable[[], float] = lambda: 0.0
    sequence: Callable[[Any, int], Sequence | None] = tokens_of
    cached_tokens: Callable[[Any], int] = lambda request: 0
    free_blocks: Callable[[], int] = lambda: sys.maxsize
    handoff_of: Callable[[Any], RemoteDecode | RemotePrefill | None] = lambda request: None
    policy_of: Callable[[Any], RequestPolicy] = lambda request: DEFAULT_REQUEST_POLICY
    trace_of: Callable[[Any], dict[str, str]] = lambda request: {}
    calls_tool: Callable[[Any], bool | None] = lambda request: None
    lookup_inline: Callable[[LookupRequest], LookupAnswer | None] = lambda lookup: None
    expect_chunks: Callable[[Any, int, int], object] = lambda request, first, stop: None


def scheduler_of(chunk_tokens: int, block_tokens: tuple[int, ...], **given: Any) -> Scheduler:
    """A scheduler over a `FakeEngine`: fields of the engine and of `SchedulerConfig` by name."""
    engine = {field.name: given.pop(field.name) for field in fields(FakeEngine) if field.name in given}
    return Scheduler(SchedulerConfig(chunk_tokens, block_tokens, **given), FakeEngine(**engine))
