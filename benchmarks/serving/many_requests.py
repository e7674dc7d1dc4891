"""What the scheduler's side of the vLLM connector takes while many requests are there at once.

    python -m benchmarks.serving.many_requests --json benchmarks/results/many-requests-<machine>.json

Requests are vLLM's own, hashes of blocks included. Half of each prompt is held; answers and loads come a step
later. A step computes a token of each request whose prompt is done, and some of the other prompts. The model,
vLLM's scheduler and the workers are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.request import Request

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm.events import Events
from kvkit.adapters.vllm.media import Media, ids_in_keys
from kvkit.adapters.vllm.planner import SchedulerConfig
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.step import NamedChunks, StepMetadata, WorkerReport
from kvkit.lab.files import about
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

COUNTS = 10, 100, 1_000, 4_000
PROMPT, GENERATED, CHUNK, BLOCK = 2_048, 128, 256, 16
STEP_TOKENS = 8_192
"""Tokens of prompts that a step computes."""
SHARING = 10
"""Requests that begin alike."""


class _Engine:
    """An engine without a prefix cache, all of whose blocks are free."""

    def __init__(self, blocks: int, events: Events) -> None:
        self._blocks, self._media = blocks, Media()
        self.expect_chunks = events.expect

    def now(self) -> float:
        return time.monotonic()

    def sequence(self, request: Request, tokens: int) -> Sequence:
        media = self._media.of_request(request)
        assert media is not None
        ids, rest = ids_in_keys(request.all_token_ids[:tokens], media, chunk_tokens=CHUNK)
        return Sequence(ids, None, "", rest)

    def cached_tokens(self, request: Request) -> int:
        return 0

    def free_blocks(self) -> int:
        return self._blocks

    def handoff_of(self, request: Request) -> None:
        return None

    def policy_of(self, request: Request) -> RequestPolicy:
        return DEFAULT_REQUEST_POLICY

    def calls_tool(self, request: Request) -> bool | None:
        return None

    def trace_of(self, request: Request) -> dict[str, str]:
        return {}

    def lookup_inline(self, lookup: LookupRequest) -> None:
        return None


class Driven:
    """A scheduler's side, and `count` requests for it.

    Attributes:
        seconds: of this thread, by part.
        steps, request_steps: how many there were, and how many requests they computed something for.
        slowest_s: the step that took longest.
        collecting_s: what of that was Python's garbage collector, which looks at all that lives.
    """

    def __init__(self, count: int, windows: bool = False) -> None:
        init_none_hash(sha256_cbor)
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.seconds: Counter[str] = Counter()
        self.steps = self.request_steps = 0
        self.slowest_s = self.collecting_s = 0.0
        self._collected = self._pauses = self._pause_began = 0.0
        self._requests = [self._request(number, hasher) for number in range(count)]
        tables = (PROMPT + GENERATED) // BLOCK
        self._tables = {r.request_id: ([*range(1, tables + 1)],) for r in self._requests}
        hashes = partial(hash_block_tokens, sha256_cbor)
        self._events = Events({"disk": TierConfig(url="file:///kv")}, CHUNK, BLOCK, 1, hash_block=hashes)
        engine = _Engine(tables * (count + 2), self._events)
        self._scheduler = Scheduler(SchedulerConfig(CHUNK, (BLOCK,), windows=windows), engine)

    def run(self) -> None:
        """Take all requests from their arrival to their end."""
        gc.callbacks.append(self._note_collection)
        try:
            self._run()
        finally:
            gc.callbacks.remove(self._note_collection)

    def _run(self) -> None:
        waiting = {r.request_id: r for r in self._requests}
        running: dict[str, Request] = {}
        step = StepMetadata()
        for request in self._requests:
            with self._timed("lookups"):
                self._scheduler.on_new_request(request)
        while waiting or running or step.loads:
            before, collected = self.seconds.total(), self._collected
            self._hear(step, running)
            for request_id, request in list(waiting.items()):
                with self._timed("lookups"):
                    found, _ = self._scheduler.get_num_new_matched_tokens(request, 0)
                    if found is not None:
                        self._scheduler.update_state_after_alloc(request, self._tables[request_id], found)
                        del waiting[request_id]
            scheduled, room = {}, STEP_TOKENS
            for request_id, request in running.items():
                tokens = request.num_tokens - request.num_computed_tokens
                if tokens > 1:
                    tokens = min(tokens, room)
                    room -= tokens
                if tokens:
                    scheduled[request_id] = tokens
            with self._timed("plans"):
                step = self._scheduler.plan(scheduled, self._tables.get)
            for request_id, tokens in scheduled.items():
                self._compute(running, request_id, tokens)
            self.steps += 1
            self.request_steps += len(scheduled)
            if (took := self.seconds.total() - before) > self.slowest_s:
                self.slowest_s, self.collecting_s = took, self._collected - collected

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        """Called by Python's garbage collector as it begins and ends."""
        if phase == "start":
            self._pause_began = time.thread_time()
        else:
            self._pauses += time.thread_time() - self._pause_began

    def _hear(self, step: StepMetadata, running: dict[str, Request]) -> None:
        """Finish the last step's lookups, loads and saves."""
        report = WorkerReport()
        held = PROMPT // 2
        for ask in step.lookups:
            report.answers.append(LookupAnswer(ask.request_id, ask.number, 0, held, (("disk", held),)))
            self._name(report, ask.request_id, range(held // CHUNK))
        for save in step.saves:
            self._name(report, save.request_id, range(save.first, len(save.sequence.tokens) // CHUNK))
        with self._timed("events"):
            self._scheduler.update_from_workers(report)
            self._events.update_from_workers(report)
            self._events.take()
        for load in step.loads:
            request = running[load.request_id] = self._requests[int(load.request_id)]
            request.num_computed_tokens = load.stop

    def _compute(self, running: dict[str, Request], request_id: str, tokens: int) -> None:
        request = running[request_id]
        request.num_computed_tokens += tokens
        if request.num_computed_tokens < request.num_tokens:
            return
        request.append_output_token_ids(1 + request.num_tokens % 1000)
        if request.num_output_tokens == GENERATED:
            with self._timed("plans"):
                self._scheduler.request_finished(request, self._tables[request_id])
            del running[request_id]

    def _request(self, number: int, hasher: Callable[[Request], Any]) -> Request:
        """Its first half is that of some others."""
        half = PROMPT // 2
        tokens = [(number // SHARING * 7 + i) % 50_000 for i in range(half)]
        tokens += [(number * 11 + i) % 50_000 for i in range(half)]
        return Request(str(number), tokens, SamplingParams(max_tokens=GENERATED), None, block_hasher=hasher)

    def _name(self, report: WorkerReport, request_id: str, chunks: range) -> None:
        shared = PROMPT // 2 // CHUNK
        first = int(request_id) // SHARING
        names = [(f"{first}/{i}" if i < shared else f"{request_id}/{i}/own",) for i in chunks]
        report.named.append(NamedChunks(0, "", request_id, chunks.start, names))
        report.changes += [(0, ("disk", name, True)) for (name,) in names]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began, pauses = time.thread_time(), self._pauses
        yield
        self.seconds[part] += time.thread_time() - began
        self._collected += self._pauses - pauses


def measure(count: int) -> dict[str, Any]:
    """What `count` requests at once take, of a thread."""
    driven = Driven(count)
    driven.run()
    each = {part: seconds / count for part, seconds in driven.seconds.items()}
    return {
        "requests": count,
        "steps": driven.steps,
        "request_steps": driven.request_steps,
        "seconds_per_request": each,
        "slowest_step_s": driven.slowest_s,
        "collecting_s": driven.collecting_s,
    }


def main() -> None:
    """Measure every number of requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", nargs="+", type=int, default=COUNTS)
    arguments = parser.parse_args()
    results = []
    for count in arguments.requests:
        results.append(measure(count))
        print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        document = about("python -m benchmarks.serving.many_requests") | {"results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
