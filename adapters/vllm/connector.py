"""kvkit's KV connector for vLLM: passes vLLM's calls to the scheduler's side or to a worker.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVKitConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kvkit_config": "kvkit.toml"}}'
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.vllm import compat, pages, shutdown, states
from kvkit.adapters.vllm.blending.page_order import find_page_orders
from kvkit.adapters.vllm.checks import check_arrangement, reads_slices, why_uncached
from kvkit.adapters.vllm.identity import lora_settings, rank_namespace
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.offloading import identify_tiers
from kvkit.adapters.vllm.scheduler_side import SchedulerSide
from kvkit.adapters.vllm.settings import NAME, WHERE, read_settings
from kvkit.adapters.vllm.stats import PromMetrics, Stats
from kvkit.adapters.vllm.step import StepMetadata, WorkerReport
from kvkit.adapters.vllm.worker import IdleWorker, Worker
from kvkit.adapters.vllm.written import check_written
from kvkit.settings import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

log = logging.getLogger(__name__)


def register() -> None:
    """Register the connector with vLLM by its name. May be called again; vLLM calls it in each process."""
    with suppress(ValueError):  # already registered
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    compat.share_runner()
    compat.complete_connector_settings(identify_tiers)


def log_as_vllm() -> None:
    """Log to vLLM's handlers at vLLM's level, unless kvkit's or the root logger has handlers already."""
    kvkit_log, vllm_log = logging.getLogger("kvkit"), logging.getLogger("vllm")
    if not kvkit_log.handlers and not logging.getLogger().handlers:
        kvkit_log.handlers, kvkit_log.propagate = list(vllm_log.handlers), not vllm_log.handlers
        kvkit_log.setLevel(vllm_log.level)


class KVKitConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not typed for mypy
    """A best-effort cache: vLLM computes all KV that the cache does not find or cannot load.

    vLLM creates one for its scheduler (`_scheduler_side`) and one for each worker (`_worker`, once there are
    pages).

    Raises:
        ConfigError: a setting is unknown, or impossible for this model, or `precision` is set for a model
            that has not been found fit for it.
        BlendError: `blend` is set for a model that has not been found fit for it.
    """

    _scheduler_side: SchedulerSide
    _worker: Worker | IdleWorker
    _loras: Loras | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._settings, self._config = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._uncached = why_uncached(vllm_config, kv_cache_config)
        if self._uncached:
            log.warning("kvkit caches nothing: %s", self._uncached)
        self._specs = pages.layer_specs(kv_cache_config, current_platform.is_cpu())
        self._tables = pages.table_specs(kv_cache_config)
        blocks = pages.check_chunks(self._config.chunk_tokens, self._tables)
        self._states = states.state_tables(self._tables)
        check_arrangement(self._settings, self._config, vllm_config, len(blocks), self._states.values())
        if self._settings.blend is not None:
            compat.check_feature("blend")
        stores = not reads_slices(vllm_config, self._specs, self._settings, self._config)
        events = vllm_config.kv_events_config
        self._sends_events = (
            events is not None and events.enable_kv_cache_events and compat.is_available("events")
        )
        if role == KVConnectorRole.WORKER:
            self._prepare_worker(vllm_config)
            return
        self._scheduler_side = SchedulerSide(
            vllm_config,
            kv_cache_config,
            self._settings,
            self._config,
            self._tables,
            caches=not self._uncached,
            stores=stores,
            sends_events=self._sends_events,
        )

    @property
    def engine_id(self) -> str:
        """Id of the engine, equal in its scheduler and its workers."""
        engine_id: str = self._kv_transfer_config.engine_id
        return engine_id

    @property
    def requires_kv_delivery(self) -> bool:
        handoff = self._config.handoff
        return self._kv_transfer_config.kv_role == "kv_producer" and handoff is not None and handoff.sends

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layerwise"

    # the workers' side

    def _prepare_worker(self, vllm_config: Any) -> None:
        """Watch this worker's process until vLLM registers its pages."""
        if self._uncached:
            self._worker = IdleWorker()
        if vllm_config.lora_config is not None:
            self._loras = Loras.watched(lora_settings(vllm_config.lora_config))
        compat.watch_worker()
        if self._settings.blend is not None and not compat.shares_runner():
            raise ConfigError(
                f"{WHERE}.blend: want kvkit among vLLM's plug-ins, but VLLM_PLUGINS leaves it out"
            )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._uncached:
            return
        opaque = next(iter(kv_caches.values())).device.type == "cpu"
        model, blocks = self._vllm_config.model_config, self._kv_cache_config.num_blocks
        if opaque:
            quantised = compat.keeps_fewer_bits(self._vllm_config)
            check_written(compat.attention_layers(self._vllm_config), kv_caches, quantised)
        ranks, stages = self._settings.record_ranks, self._settings.record_stages
        heads = pages.rank_heads(self._vllm_config, self._specs, ranks, stages)
        parallel = self._vllm_config.parallel_config
        layers = pages.stage_layers(self._specs, stages, parallel.pipeline_parallel_size)
        first_rank = parallel.data_parallel_index * parallel.world_size
        timeout_s = shutdown.cache_timeout_s(self._config, self._vllm_config)
        update = {"server": self._config.server.of_rank(first_rank), "shutdown_timeout_s": timeout_s}
        config = self._config.model_copy(update=update)
        precision = self._config.precision
        orders = find_page_orders(self._vllm_config, kv_caches, precision) if opaque and precision else None
        layout, groups = pages.group_pages(
            self._specs, kv_caches, blocks, opaque, heads, layers, precision, orders
        )
        if self._states:
            layout, groups = pages.add_states(layout, groups, self._specs, kv_caches, config.chunk_tokens)
        self._worker = Worker(
            config,
            self._settings,
            layout,
            groups,
            rank_namespace(self._vllm_config, config, layout, heads is not None),
            self._sends_events,
            None if self._loras is None else (model.served_model_name, model.model),
            self._loras,
        )

    def open_runner(self, runner: Any) -> None:
        """Receive vLLM's model runner, once it has its pages (`compat.share_runner`)."""
        compat.watch_weight_loads(runner.get_model(), self._worker.weights_changed)
        if self._settings.blend is not None:
            self._worker.open_blending(runner)

    def weights_changed(self) -> None:
        """Stop using KV of the old weights (`compat.watch_worker`, `compat.watch_engine_core`)."""
        if hasattr(self, "_worker"):
            self._worker.weights_changed()
        elif hasattr(self, "_scheduler_side"):
            self._scheduler_side.epochs.weights_changed()

    def unregister_kv_caches(self) -> None:
        """Release vLLM's pages, which lose their memory. May be called again."""
        if hasattr(self, "_worker"):
            self._worker.release_pages()

    def restore_kv_caches(self) -> None:
        """Use vLLM's pages again; their content is lost. May be called again."""
        if hasattr(self, "_worker"):
            self._worker.restore_pages()

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if kv_connector_metadata.preempted:
            self._worker.end_reads()
        else:
            self._worker.end_saves()

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata
        self._worker.begin_step(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._settings.load == "layerwise":
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pack KV to hand off. Chunks are saved after the forward pass, for all layers at once."""
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        self._worker.start_saves(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed, sent = self._worker.finish_requests(finished_req_ids)
        # with one KV cache group, failed blocks are reported instead: vLLM keeps the blocks before them
        single_group = len(self._kv_cache_config.kv_cache_groups) == 1
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=set() if single_group else failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.report()

    def get_kv_connector_stats(self) -> Stats | None:
        if not hasattr(self, "_worker"):
            return self._scheduler_side.engine.refusals.take() if hasattr(self, "_scheduler_side") else None
        return self._worker.stats.take() if isinstance(self._worker, Worker) else None

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer a handoff's lookup at once, from memory (`kvkit.adapters.vllm.engine.VllmEngine`)."""
        return self._worker.lookup_inline(lookup)

    def shutdown(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.close()

    # the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler_side.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        # also for requests without a lookup: vLLM sees their media from now on
        self._scheduler_side.engine.note_media(request)
        self._scheduler_side.scheduler.update_state_after_alloc(
            request, blocks.get_block_ids(), num_external_tokens
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._scheduler_side.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        state = scheduler_output.kv_connector_block_state
        step = self._scheduler_side.scheduler.plan(scheduler_output.num_scheduled_tokens, state.get_block_ids)
        step.preempted = bool(scheduler_output.preempted_req_ids)
        if scheduler_output.num_scheduled_tokens:
            self._scheduler_side.epochs.note_computed()
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.update_from_output(connector_output)

    def take_events(self) -> list[KVCacheEvent]:
        events = self._scheduler_side.events
        return [] if events is None else events.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        completed = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        scheduler = self._scheduler_side.scheduler
        answer = scheduler.answer(request)
        keeps_blocks = scheduler.request_finished(request, block_ids if completed else None)
        return keeps_blocks, answer if completed else None

    def reset_cache(self) -> bool:
        """Begin an epoch, so that KV stored before is not found."""
        self._scheduler_side.epochs.reset()
        return True

    def set_weight_version(self, version: str) -> None:
        """Share KV only with engines that have this version of the weights (`compat.watch_engine_core`)."""
        self._scheduler_side.epochs.set_weight_version(version)

    def own_cache_reset(self) -> None:
        """Warn that vLLM's own prefix cache was reset without kvkit's tiers (`compat.watch_engine_core`)."""
        self._scheduler_side.epochs.own_cache_reset()

    def falls_asleep(self) -> None:
        """Keep KV in the tiers over a sleep that keeps the weights (`compat.watch_engine_core`)."""
        if self._settings.keep_over_sleep:
            self._scheduler_side.epochs.falls_asleep()

    def wakes_up(self) -> None:
        """Forget KV at the next reset again (`compat.watch_engine_core`)."""
        self._scheduler_side.epochs.wakes_up()

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must run a step even without requests: one announces a reset to the workers."""
        return self._scheduler_side.scheduler.has_pending_reset

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        return PromMetrics(*arguments)
