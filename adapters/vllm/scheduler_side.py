"""The connector in vLLM's scheduler: an engine's `Scheduler`, KV events and epochs."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvkit.adapters.vllm import compat, pages, shutdown, states
from kvkit.adapters.vllm.blending import requests
from kvkit.adapters.vllm.blending.blend_planner import BlendPlanner
from kvkit.adapters.vllm.blending.blocks import PrivateBlocks, ScratchBlocks
from kvkit.adapters.vllm.engine import VllmEngine
from kvkit.adapters.vllm.epochs import Epochs
from kvkit.adapters.vllm.events import Events
from kvkit.adapters.vllm.gate import check_precision, documents_context
from kvkit.adapters.vllm.marks import Marks
from kvkit.adapters.vllm.planner import SchedulerConfig
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.settings import Settings
from kvkit.adapters.vllm.step import WorkerReport
from kvkit.blend.gate import Context
from kvkit.config import Config

log = logging.getLogger(__name__)


class SchedulerSide:
    """The connector's half in vLLM's scheduler.

    Args:
        tables: specs of vLLM's block tables.
        caches: True if any KV of this engine can be cached.
        stores: True if anything is saved.
        sends_events: True if vLLM's subscribers get events of what tiers hold.

    Attributes:
        scheduler: the scheduler of requests' lookups, loads and saves.
        engine: vLLM's engine, as `scheduler` sees it.
        events: KV events; None: the engine sends none.
        epochs: epochs of KV, begun by resets and new weights.

    Raises:
        ConfigError: `precision` is set for a model that has not been found fit for it.
        BlendError: `blend` is set for a model that has not been found fit for it.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        config: Config,
        tables: list[KVCacheSpec],
        *,
        caches: bool,
        stores: bool,
        sends_events: bool,
    ) -> None:
        self._settings, self._config, self._tables = settings, config, tables
        self._context = _check_models(vllm_config, settings, config)
        shutdown.log_short_limits(config, vllm_config)
        if not stores:
            log.info("records hold the heads of several ranks: each rank loads its part, and stores nothing")
        if vllm_config.model_config.multimodal_config is not None:
            compat.is_available("media")
        compat.watch_engine_core()
        self._hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        self.events = _open_events(vllm_config, config, self._hash_tokens) if sends_events else None
        self.engine = VllmEngine(vllm_config, settings, config, caches, self.events)
        scheduler_config = SchedulerConfig(
            config.chunk_tokens,
            pages.check_chunks(config.chunk_tokens, tables),
            ranks=vllm_config.parallel_config.world_size,
            blocking_load=settings.load != "async",
            save_generated=settings.save_generated,
            stores=stores,
            windows=pages.has_windows(s for s in tables if not isinstance(s, MambaSpec)),
            states=states.state_tables(tables),
            snapshot_every=settings.snapshot_every,
            recompute_last_block=compat.draft_reads_ahead(vllm_config.speculative_config),
            approximate=frozenset(n for n, tier in config.tiers.items() if tier.precision is not None),
        )
        self.scheduler = Scheduler(scheduler_config, self.engine)
        self.epochs = Epochs(self.scheduler, self.engine, self.events)

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Use vLLM's `KVCacheManager` to keep approximate KV private and to allocate blocks for blends."""
        self.engine.kv_cache_manager = manager
        blend, config = self._settings.blend, self.scheduler.config
        if blend is None and not config.approximate:
            return
        private = PrivateBlocks(manager, self._hash_tokens)
        if blend is None:
            self.scheduler.bind(private)
            return
        marks = Marks.of(blend.marks, self.engine.encode) if blend.marks else None
        windows = tuple(pages.window_of(spec, config.chunk_tokens) for spec in self._tables)
        scratch = ScratchBlocks(manager, config.block_tokens, windows)
        lead = self.engine.encode("", special=True) if marks and self._context == "alone" else None
        read = partial(requests.read, settings=blend, marks=marks, lead=lead)
        self.scheduler.bind(private, BlendPlanner(config, self.engine, read, private, scratch))

    def update_from_output(self, output: KVConnectorOutput) -> None:
        """Apply the workers' report, which comes with a step's output."""
        report: WorkerReport | None = output.kv_connector_worker_meta
        if self.scheduler.blends is not None:
            for request_id in output.finished_recving or ():
                self.scheduler.blends.scratch.release(request_id)
        if report is not None:
            self.scheduler.update_from_workers(report)
            if self.events is not None:
                self.events.update_from_workers(report)
            self.epochs.update_from_workers(report)

    def hit_sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Return how many of the `tokens` tokens that a request loaded last came from each kind of source."""
        by_source: Counter[CacheHitSource] = Counter()
        for tier, count in self.scheduler.tier_tokens(request.request_id, tokens).items():
            by_source[self._source(tier)] += count
        blended = tokens - by_source.total()
        return by_source | Counter({CacheHitSource.EXTERNAL_UNSPECIFIED: blended} if blended > 0 else {})

    def _source(self, tier: str) -> CacheHitSource:
        if tier not in self._config.tiers:
            return CacheHitSource.P2P
        return CacheHitSource.HOST if self._config.tiers[tier].in_memory else CacheHitSource.DISK


def _check_models(vllm_config: Any, settings: Settings, config: Config) -> Context:
    """Refuse an engine whose model has not been found fit for its settings; return documents' context."""
    context: Context = "prefix"
    if settings.blend is not None:
        context = documents_context(vllm_config, settings.blend)
    config.check_model(partial(check_precision, vllm_config))
    return context


def _open_events(vllm_config: Any, config: Config, hash_tokens: int) -> Events:
    parallel = vllm_config.parallel_config
    hash_function = compat.find("get_hash_fn_by_name")(vllm_config.cache_config.prefix_caching_hash_algo)
    return Events(
        config.tiers,
        config.chunk_tokens,
        hash_tokens,
        parallel.world_size,
        pages.ranks_per_host(parallel),
        vllm_config.kv_events_config.buffer_steps,
        partial(compat.find("hash_block_tokens"), hash_function),
    )
