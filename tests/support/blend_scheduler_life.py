"""vLLM's own scheduler with kvkit's connector, over made-up workers that know what each block holds.

The KV of a token is exact, and then named by all tokens up to it, or it is of one request alone. A forward
pass checks that a request finds its own KV at every position, a save that all of it is exact.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_models import QWEN, save, save_with_tokenizer
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_engine import connector

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.vllm.step import (
    Arrival,
    BlendDone,
    BlendTask,
    LoadTask,
    SaveTask,
    StepMetadata,
    Tables,
    WorkerReport,
)
from kvkit.blend.plan import plan_blend

BLOCK, CHUNK, WINDOW = 4, 8, 10
Tokens = tuple[int, ...]
KV = tuple[Any, ...]
"""("exact", all tokens up to it) or ("own", request, position, how it was made)."""


@cache
def config(asynchronous: bool, marks: tuple[str, str] | None) -> VllmConfig:
    tiers = {"chunk_tokens": CHUNK, "tiers": {"memory": {"capacity": "1MiB"}}}
    blend = {"unchecked": True, "marks": marks}
    folder = Path(tempfile.mkdtemp())
    made = EngineArgs(
        model=str(save(QWEN, folder) if marks is None else save_with_tokenizer(folder)),
        skip_tokenizer_init=marks is None,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_transfer_config=KVTransferConfig(**connector(tiers, blend=blend)),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ).create_engine_config()
    made.cache_config.block_size = BLOCK
    made.cache_config.enable_prefix_caching = True
    made.scheduler_config.async_scheduling = asynchronous
    return made


@dataclass
class Part:
    """What one step computes of a request: tokens [start, stop) into these blocks."""

    request: Request
    start: int
    stop: int
    tables: Tables


@dataclass
class Blending:
    """A blend under way; `arrival`: what this rank, or all of them, have of it; None: not loaded yet."""

    task: BlendTask
    arrival: Arrival | None = None
    go: bool = False


@dataclass
class Life:
    """An engine whose workers are made up.

    Args:
        blocks: of the pool, the null block among them.
        windows: whether a second KV cache group has a sliding window.
        lag: steps that are scheduled before the first of them is executed, 0 or 1.
        ranks: workers; all but the first have less of documents, now and then.
        marks: of documents, by SmolLM2's tokenizer.
    """

    blocks: int
    windows: bool = False
    lag: int = 0
    ranks: int = 1
    seed: int = 0
    marks: tuple[str, str] | None = None
    tiers: set[Tokens] = field(default_factory=set)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    done: dict[str, list[BlendDone]] = field(default_factory=dict)
    loading: list[LoadTask] = field(default_factory=list)
    blending: list[Blending] = field(default_factory=list)
    asked: list[LookupRequest] = field(default_factory=list)
    preemptions: int = 0

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        made = config(self.lag > 0, self.marks)
        made.cache_config.num_gpu_blocks = self.blocks
        made.parallel_config.world_size = self.ranks
        shape: Any = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**shape))]
        if self.windows:
            groups.append(KVCacheGroupSpec(["layer.1"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
        self.looks = [None, WINDOW][: len(groups)]
        kind: Any = AsyncScheduler if self.lag else VllmScheduler
        manager = StructuredOutputManager(made)
        caches = KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.vllm: Any = kind(made, caches, manager, block_size=BLOCK, log_stats=True)
        self.vllm.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self.pool = self.vllm.kv_cache_manager.block_pool
        self.events: list[Any] = []
        self.random = random.Random(self.seed)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.pages: dict[tuple[int, int, int], KV] = {}
        self.own: dict[str, dict[int, KV]] = {}
        self.names: dict[Any, Tokens] = {}
        self.known: dict[str, int] = {}  # blocks of a request that `names` has
        self.seen: dict[str, Request] = {}
        self.scheduled: list[tuple[Any, list[Part]]] = []
        self.report = WorkerReport()
        self.now = 0.0
        self.kvkit = self.vllm.connector._scheduler_side
        self.kvkit.engine.now = lambda: self.now
        self.received: set[str] = set()
        self.lost: set[int] = set()
        self.failed: set[str] = set()

    # what users do

    def add(self, tokens: list[int], most: int, blend: dict[str, Any] | None = None) -> str:
        """A request for at most `most` tokens; its name."""
        name = f"r{len(self.seen)}"
        extra = None if blend is None else {"kv_transfer_params": {"blend": blend}}
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, eos_token_id=0)
        self.seen[name] = Request(name, tokens, params, None, block_hasher=self.hasher)
        self.vllm.add_request(self.seen[name])
        return name

    def abort(self, name: str) -> None:
        self.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # what the engine does

    def step(self) -> None:
        """Schedule a step, and execute the one that is due."""
        self.now += 0.02
        if self.vllm.has_requests():
            output = self.vllm.schedule()
            self.preemptions += len(output.preempted_req_ids or ())
            self.scheduled.append((output, list(self._parts(output))))
        while len(self.scheduled) > (self.lag if self.vllm.has_requests() else 0):
            self._execute(*self.scheduled.pop(0))
        if not self.scheduled and self.random.random() < 0.2:
            self.check()

    def finish_load(self, fails: bool = False) -> None:
        """One thing that is loaded or blended in the background comes a stage further."""
        over = {name for name, request in self.seen.items() if request.is_finished()}
        may = [b for b in self.blending if b.arrival is None or b.go or b.task.request_id in over]
        choices: list[Any] = [*self.loading, *may]
        if not choices:
            return
        chosen = self.random.choice(choices)
        if isinstance(chosen, LoadTask):
            self.end_load(chosen, fails)
        elif chosen.arrival is None:
            self._arrive(chosen, fails)
        else:
            self._finish_blend(chosen, fails)

    def drain(self) -> None:
        """Let everything come to its end."""
        for _ in range(3000):
            if not self.vllm.has_requests() and not self.scheduled:
                break
            self.finish_load()
            self.step()
        assert not self.vllm.requests, {n: r.status for n, r in self.vllm.requests.items()}
        assert self.pool.get_num_free_blocks() == self.blocks - 1, "a block is lost"
        assert not self.loading
        assert not self.blending
        self.check()

    def check(self) -> None:
        """No name that others have stands for anything but exact KV; what is told of is nothing else."""
        own: set[Any] = set()
        for request in self.seen.values():
            self._name(request)
            own.update(getattr(request._block_hasher, "names", ()) if not request.is_finished() else ())
        for key, blocks in self.pool.cached_block_hash_to_block._cache.items():
            name, group = get_block_hash(key), get_group_id(key)
            if name not in self.names:
                assert name in own, "a block that nobody can hit is kept"
                continue
            tokens = self.names[name]
            for block in blocks if isinstance(blocks, dict) else [blocks.block_id]:
                for i in range(BLOCK):
                    count = len(tokens) - BLOCK + i + 1
                    assert self.pages[group, block, i] == ("exact", tokens[:count])
        told = {maybe_convert_block_hash(name): tokens for name, tokens in self.names.items()}
        for event in self.events:
            if isinstance(event, BlockStored):
                assert all(name in told for name in event.block_hashes), "something private is told of"
                if event.group_idx in (0, None):
                    end = told[event.block_hashes[-1]]
                    assert list(end[-len(event.token_ids) :]) == event.token_ids
        self.events.clear()

    def kv(self, request: Request, position: int) -> KV:
        """What a request's KV is."""
        own = self.own.get(request.request_id, {})
        if position > min(own, default=position):
            return own.get(position, ("own", request.request_id, position, "computed"))
        return own.get(position, ("exact", tuple(request.all_token_ids[: position + 1])))

    # what the workers do

    def _parts(self, output: Any) -> Iterator[Part]:
        for name, count in output.num_scheduled_tokens.items():
            request = self.vllm.requests[name]
            stop = request.num_computed_tokens
            yield Part(request, stop - count, stop, self.vllm.kv_cache_manager.get_block_ids(name))

    def _execute(self, output: Any, parts: list[Part]) -> None:
        step: StepMetadata = output.kv_connector_metadata
        self.asked += step.lookups
        for go in step.arrivals:
            for blending in self.blending:
                if (blending.task.request_id, blending.task.number) == (go.request_id, go.number):
                    blending.arrival, blending.go = go, True
        for load in step.loads:
            self.own.pop(load.request_id, None)  # it is blended no more
        for part in parts:
            self._compute(part)
        for task in step.saves:
            self._save(task)
        self.loading += step.loads
        self.blending += map(Blending, step.blends)
        if self.random.random() < 0.7:
            self._answer()
        report, self.report = self.report, WorkerReport()
        told = KVConnectorOutput(
            finished_sending={task.request_id for task in step.saves if task.last},
            finished_recving=self.received,
            failed_recving=self.failed if self.windows else set(),
            invalid_block_ids=set() if self.windows else self.lost,
            kv_connector_worker_meta=None if report == WorkerReport() else report,
        )
        self.received, self.failed, self.lost = set(), set(), set()
        names = [part.request.request_id for part in parts]
        sampled = [self._sample(part) for part in parts]
        found = ModelRunnerOutput(
            names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=told
        )
        for outputs in self.vllm.update_from_output(output, found).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self.cached[one.request_id] = one.prefill_stats.num_cached_tokens
                if one.kv_transfer_params is not None:
                    self.answers[one.request_id] = one.kv_transfer_params

    def _compute(self, part: Part) -> None:
        """Compute tokens of a request, which looks at all that it has before them."""
        request, tokens = part.request, part.request.num_tokens
        if part.start <= min(self.own.get(request.request_id, ()), default=-1):
            del self.own[request.request_id]  # it is blended no more: all is computed anew
        self._look(request, part.tables, part.start, part.start)
        for position in range(part.start, part.stop):
            kv = self.kv(request, position) if position < tokens else ("unknown",)
            self._write(part.tables, position, kv)

    def _look(self, request: Request, tables: Tables, position: int, stop: int) -> None:
        """A token looks at what comes before `stop` and in its window."""
        for group, look in enumerate(self.looks):
            for seen in range(0 if look is None else max(0, position - look + 1), stop):
                block = tables[group][seen // BLOCK]
                held = self.pages.get((group, block, seen % BLOCK))
                assert block > 0, "a row looks at a block that is not there"
                assert held == self.kv(request, seen), (request.request_id, group, position, seen)

    def _write(self, tables: Tables, position: int, kv: KV) -> None:
        for group, table in enumerate(tables):
            if table[position // BLOCK] > 0:
                self.pages[group, table[position // BLOCK], position % BLOCK] = kv

    def _save(self, task: SaveTask) -> None:
        first, tokens = task.first * CHUNK, tuple(task.sequence.tokens.tolist())
        for group, table in enumerate(task.blocks):
            for position in range(first, len(tokens)):
                block = table[(position - first) // BLOCK]
                assert block >= 0 or self.looks[group]
                if block >= 0:
                    held = self.pages[group, block, position % BLOCK]
                    assert held == ("exact", tokens[: position + 1]), "something approximate is saved"
        self.tiers.update(tokens[:end] for end in range(first + CHUNK, len(tokens) + 1, CHUNK))

    def _sample(self, part: Part) -> list[int]:
        tokens = part.request.all_token_ids
        return [sum(tokens) % 50 + 200] if part.stop >= len(tokens) else []

    def _answer(self) -> None:
        for lookup in self.asked:
            found = self._found(lookup.sequence.tokens)
            documents = tuple(self._found(document.tokens) for document in lookup.documents)
            for rank in range(self.ranks):
                less = tuple(max(0, n - CHUNK * (rank and self.random.randrange(2))) for n in documents)
                segments = (("memory", found),) if found else ()
                answer = LookupAnswer(lookup.request_id, lookup.number, rank, found, segments, less)
                self.report.answers.append(answer)
        self.asked.clear()

    def _found(self, tokens: Any) -> int:
        ids = tuple(tokens.tolist())
        count = 0
        while count + CHUNK <= len(ids) and ids[: count + CHUNK] in self.tiers:
            count += CHUNK
        return count

    def end_load(self, task: LoadTask, fails: bool) -> None:
        self.loading.remove(task)
        base = task.start // CHUNK * CHUNK
        stop = self.random.randrange(task.start, task.stop, BLOCK) if fails else task.stop
        self._load(task, stop)
        self._receive(task.request_id, task.blocks[0][(stop - base) // BLOCK :] if fails else None)

    def _load(self, task: LoadTask, stop: int) -> None:
        base, tokens = task.start // CHUNK * CHUNK, self.seen[task.request_id].all_token_ids
        for group, table in enumerate(task.blocks):
            for position in range(task.start, stop):
                block = table[(position - base) // BLOCK]
                assert block >= 0 or self.looks[group]
                if block >= 0:
                    self.pages[group, block, position % BLOCK] = "exact", tuple(tokens[: position + 1])

    def _receive(self, request_id: str, lost: list[int] | None) -> None:
        """What was under way for a request is over; `lost`: blocks that were promised, and hold nothing."""
        self.received.add(request_id)
        if lost is not None:
            self.report.failed.append(request_id)
            self.failed.add(request_id)
            self.lost.update(block for block in lost if block > 0)

    def _arrive(self, blending: Blending, fails: bool) -> None:
        """Documents are there; of some, less than was found."""
        task = blending.task
        exact = task.exact
        if task.prefix is not None:
            if fails:
                exact = self.random.randrange(task.prefix.start, task.prefix.stop, BLOCK)
            self._load(task.prefix, exact)
        documents = tuple(span.first + span.stop - span.start for span in task.spans)
        if fails:
            documents = tuple(max(0, n - CHUNK * self.random.randrange(2)) for n in documents)
        blending.arrival = Arrival(task.request_id, task.number, -1, exact, documents)
        if self.ranks == 1:
            blending.go = True
            return
        for rank in range(self.ranks):
            less = tuple(n - rank * CHUNK for n in documents)
            self.report.arrivals.append(Arrival(task.request_id, task.number, rank, exact, less))

    def _finish_blend(self, blending: Blending, fails: bool) -> None:
        self.blending.remove(blending)
        task, arrival = blending.task, blending.arrival
        assert arrival is not None
        request, request_id = self.seen[task.request_id], task.request_id
        if fails:
            self._receive(request_id, task.blocks[0][arrival.exact // BLOCK :])
            return
        spans = tuple(map(type(task.spans[0]).found, task.spans, arrival.documents))
        plan = plan_blend(len(task.sequence.tokens), arrival.exact, spans)
        reused = np.flatnonzero(plan.reused)
        chosen = task.selected
        if chosen is None:
            chosen = np.array([p for p in reused.tolist() if self.random.random() < 0.3], np.int32)
        before, own = dict(self.own.get(request_id, {})), self.own.setdefault(request_id, {})
        for position in reused.tolist():
            own[position] = "own", request_id, position, "selected" if position in chosen else "reused"
        assert (task.selected is None) == (request_id not in self.done)
        assert request_id not in self.done or own == before, "it is not blended as it was before"
        last = len(task.sequence.tokens) - 1
        self._look(request, task.blocks, arrival.exact, arrival.exact)
        for position in range(arrival.exact, last):
            self._write(task.blocks, position, self.kv(request, position))
        for position in {*plan.computed.tolist(), *chosen.tolist()} - {last}:
            if position >= arrival.exact:
                self._look(request, task.blocks, position, position + 1)
        counts = int(plan.exact.sum()), len(reused), len(plan.computed)
        done = BlendDone(request_id, *counts, spans, chosen, {})
        self.report.blended.append(done)
        self.done.setdefault(request_id, []).append(done)
        self._receive(request_id, None)

    def _name(self, request: Request) -> None:
        """Note what vLLM calls blocks of these tokens where nothing is private."""
        tokens = list(request.all_token_ids)
        if self.known.get(request.request_id) == len(tokens) // BLOCK:
            return
        self.known[request.request_id] = len(tokens) // BLOCK
        params = SamplingParams(max_tokens=1)
        for i, name in enumerate(Request("", tokens, params, None, block_hasher=self.hasher).block_hashes):
            self.names.setdefault(name, tuple(tokens[: (i + 1) * BLOCK]))
