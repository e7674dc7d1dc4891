"""kvkit's tiers as a secondary tier of vLLM's own offloading (`OffloadingConnector`), by module path.

vLLM copies chunks of KV between the GPU and its region of host memory, and asks its secondary tiers for what
the region lacks. A chunk's bytes of all layers and ranks are a page of `KeyedPages`, under vLLM's block hash.

    {"type": "KVKitTier", "module_path": "kvkit.adapters.vllm_tier.tier", "kvkit_config": "kvkit.toml"}
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvkit.adapters.engine import tier_settings
from kvkit.adapters.engine.epoch_names import EpochNames
from kvkit.adapters.engine.keyed_pages import KeyedPages, KeyedStore
from kvkit.adapters.vllm import compat, request_policy
from kvkit.adapters.vllm.connector import log_as_vllm
from kvkit.adapters.vllm.settings import complete_limits
from kvkit.adapters.vllm_tier.settings import WHERE, TierSettings
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from kvkit.workers import Transfer

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

log = logging.getLogger(__name__)


class KVKitTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed for mypy
    """A secondary tier whose chunks are verified records in kvkit's tiers.

    vLLM calls it in the scheduler's process; nothing but `drain_jobs` and `shutdown` waits.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: see `SecondaryTierManager`.
        settings: `TierSettings`.

    Raises:
        ConfigError: a setting is unknown or impossible, or a tier cannot be opened.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_as_vllm()
        self._settings, config = tier_settings.read(TierSettings, settings, WHERE)
        self._limits = complete_limits(self._settings.requests, config, f"{WHERE}requests")
        model, engine = offloading_spec.config.model, offloading_spec.config.parallel.data_parallel_index
        config = config.model_copy(update={"server": config.server.of_rank(engine)})
        self._store = KeyedStore(
            config,
            self.block_size_bytes,
            model=model.name.rstrip("/").rpartition("/")[2],
            dtype=model.dtype,
            weights=self._settings.identity or _unshared(model.name),
        )
        self._pages = self._store.pages(self.block_size_bytes, page_layout(offloading_spec.config))
        by_scope = {"node": Locality.LOCAL, "shared": Locality.REMOTE}
        scopes = {by_scope[tier.scope] for tier in self._store.cache.tiers.values()}
        own = self._settings.locality
        self.locality = Locality[own] if own else scopes.pop() if len(scopes) == 1 else None
        memory = np.asarray(primary_kv_view).view(np.uint8).reshape(-1, self.block_size_bytes)
        self._memory = self._pages.memory(torch.from_numpy(memory))
        self._lookups = _Lookups(self._pages, tier_type)
        cache = offloading_spec.config.cache
        groups = offloading_spec.config.groups
        self._chunk_tokens = [group.tokens_per_block * cache.blocks_per_chunk for group in groups]
        self._under_way: dict[int, _Job] = {}
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._epochs = EpochNames()
        self._epoch_of: dict[str, str] = {}  # the epoch in which each request began
        compat.watch_engine_core()
        self._wants_events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = _Job(job_metadata, self._done)
        self._under_way[job_metadata.job_id] = job
        self._epochs.note_computed()
        if self._epoch_of.get(job_metadata.req_context.req_id) != self._epochs.current:
            job.end(0)  # computed with other weights, at least in part
            return
        policy = _policy(job_metadata.req_context)
        if policy.store_to == ():
            job.end(0)
            return
        try:
            self._pages.store(
                job.keys,
                self._memory,
                job.rows,
                lambda complete: job.end(len(job.keys) if complete else 0),
                policy,
                self._positions(job.keys, job_metadata.req_context, policy),
            )
        except Exception as error:  # it would end vLLM's scheduler, and the job would never end
            self._fail(job, "store", error)

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = _Job(job_metadata, self._done)
        self._under_way[job_metadata.job_id] = job

        def loaded(transfer: Transfer[int]) -> None:
            if transfer.cancelled():
                job.end(0)
            elif (error := transfer.exception()) is not None:
                self._fail(job, "load", error)
            else:
                job.end(transfer.result())

        try:
            job.transfer = self._pages.load_async(job.keys, self._memory, job.rows)
        except Exception as error:  # as above
            self._fail(job, "load", error)
        else:
            job.transfer.add_done_callback(loaded)  # type: ignore[arg-type]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while not self._done.empty():
            job = self._done.get()
            del self._under_way[job.metadata.job_id]
            results.append(job.result(self.block_size_bytes))
            if job.metadata.is_promotion:
                self._lookups.mark_miss(job.keys[job.count :])  # or vLLM would ask for them again and again
            elif job.complete and self._wants_events:
                self._events.append(OffloadingEvent(job.keys, self.medium, False, self.locality))
        return results

    def has_pending_work(self) -> bool:
        return bool(self._under_way)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._pages.touch(list(keys))
        policy = _policy(req_context)
        if policy.retains:
            self._pages.retain(list(keys), policy, self._positions(keys, req_context, policy))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._epoch_of[req_context.req_id] = self._epochs.current
        policy = request_policy.read(
            req_context.req_id,
            req_context.kv_transfer_params,
            req_context.kv_hints,
            self._limits,
            f"{WHERE}requests",
        )
        req_context.set_state(policy)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)
        self._epoch_of.pop(req_context.req_id, None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()
        if context.new_req_ids:
            self._epochs.note_computed()

    def weights_changed(self) -> None:
        """Find no chunks of the old weights any more (`compat.watch_engine_core`)."""
        self._pages.begin_epoch(self._epochs.weights_changed())

    def set_weight_version(self, version: str) -> None:
        """Share chunks only with engines that have this version of the weights."""
        self._pages.begin_epoch(self._epochs.set_weight_version(version))

    def connector_reset(self) -> None:
        """Find no chunks that were stored before a reset of the connector's cache."""
        self._pages.begin_epoch(self._epochs.reset())

    def falls_asleep(self) -> None:
        """Keep chunks over a sleep that keeps the weights (`compat.watch_engine_core`)."""
        if self._settings.keep_over_sleep:
            self._epochs.falls_asleep()

    def wakes_up(self) -> None:
        """Forget chunks at the next reset again (`compat.watch_engine_core`)."""
        self._epochs.wakes_up()

    def drain_jobs(self) -> None:
        for job in list(self._under_way.values()):
            job.wait()

    def shutdown(self) -> None:
        for job in self._under_way.values():
            if job.transfer is not None:
                job.transfer.cancel()
        self.drain_jobs()
        self._lookups.shutdown()
        self._store.close()
        if hasattr(self, "_memory"):  # vLLM may call this again
            del self._memory  # it frees the region next

    def _fail(self, job: _Job, kind: str, error: BaseException) -> None:
        log.warning("tier %r: a %s of %d chunks failed: %r", self.tier_type, kind, len(job.keys), error)
        job.end(0)

    def _positions(
        self, keys: Collection[OffloadKey], context: ReqContext, policy: RequestPolicy
    ) -> list[int]:
        """Return the first token of each chunk in its request, if the policy depends on it."""
        if not policy.prefixes:
            return []
        ends = (context.get_offload_key_position(key) or 0 for key in keys)
        sizes = (self._chunk_tokens[get_offload_group_idx(key)] for key in keys)
        return [max(0, end - size) for end, size in zip(ends, sizes, strict=True)]


def page_layout(config: Any) -> dict[str, Any]:
    """Return what determines a chunk's bytes, besides tokens and weights, from vLLM's `OffloadingConfig`.

    Ranks do not count where vLLM vouches that the bytes are the same for any number of them.
    """
    parallel = asdict(config.parallel)
    sizes = {name: parallel[name] for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")}
    alike = config.parallel.is_parallelism_agnostic or config.replicated_layout
    return {
        "engine": "vllm offloading",
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "ranks": {} if alike else sizes,
    }


def _policy(context: ReqContext) -> RequestPolicy:
    """Return the policy that a request had when it began; for others, such as prefetches, the default one."""
    policy: RequestPolicy | None = context.get_state(RequestPolicy)
    return policy or DEFAULT_REQUEST_POLICY


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # as above
    """Lookups in the background, a batch for each request and step."""

    def __init__(self, pages: KeyedPages, tier_type: str) -> None:
        self._pages = pages
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Sequence[bool]:
        return self._pages.held(keys)

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Leave keys that are being looked up anew: with them vLLM 0.32 would end the scheduler."""
        known = self._lookup_state
        super().mark_miss([key for key in keys if key in known and known[key].result is not None])


@dataclass(eq=False)
class _Job:
    """A store or load of vLLM's, until vLLM has heard of its end.

    Args:
        done: gets the job when it has ended.

    Attributes:
        transfer: the load; None: a store.
        count: leading chunks that were moved.
    """

    metadata: TransferJob
    done: queue.SimpleQueue[_Job]
    transfer: Transfer[int] | None = None
    count: int = 0

    def __post_init__(self) -> None:
        self.keys = list(self.metadata.keys)
        self.rows = np.asarray(self.metadata.chunk_ids, np.int64)
        self._began = time.monotonic()
        self._seconds = 0.0
        self._ended = threading.Event()

    @property
    def complete(self) -> bool:
        return self.count == len(self.keys)

    def end(self, count: int) -> None:
        """Note how many leading chunks were moved. Called once, from any thread."""
        self.count, self._seconds = count, time.monotonic() - self._began
        self.done.put(self)
        self._ended.set()

    def wait(self) -> None:
        """Wait for the end; loads and stores have deadlines."""
        self._ended.wait()

    def result(self, chunk_bytes: int) -> JobResult:
        """Return vLLM's report of the end."""
        partial = tuple(self.keys[: self.count]) if self.metadata.is_promotion and self.count else None
        return JobResult(
            self.metadata.job_id,
            self.complete,
            successful_keys=None if self.complete else partial,
            transfer_time=self._seconds,
            transfer_bytes=self.count * chunk_bytes,
        )


def _unshared(model: str) -> str:
    """Return an identity of weights that no other engine has."""
    log.warning(
        "the weights of %s are not identified, so pages do not outlive this engine: give `identity` in "
        "secondary_tiers, or let vLLM load kvkit's plug-in",
        model,
    )
    return f"unknown-{uuid.uuid4().hex}"
