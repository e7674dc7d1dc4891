"""kvkit as a KV connector of vLLM: hands each of vLLM's calls to the scheduler's or the workers' side.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVKitConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kvkit_config": "kvkit.toml"}}'
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
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

from kvkit.adapters.engine.question import Lora, Sequence
from kvkit.adapters.vllm import pages
from kvkit.adapters.vllm import params as parameters
from kvkit.adapters.vllm.events import Events
from kvkit.adapters.vllm.identity import model_identity
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.media import LEAST_TOKENS, Media, identity
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.settings import Settings, read_settings
from kvkit.adapters.vllm.stats import PromMetrics, Stats
from kvkit.adapters.vllm.step import StepMetadata, WorkerReport
from kvkit.adapters.vllm.worker import Worker
from kvkit.config import Config
from kvkit.format.layout import KVLayout, Namespace
from kvkit.settings import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

log = logging.getLogger(__name__)
NAME = "KVKitConnector"


def register() -> None:
    """Make the connector known to vLLM by its name. May be called again; vLLM does so in each process."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def log_as_vllm() -> None:
    """Have kvkit's log go where vLLM's goes, at the same level, unless somebody has configured logging."""
    ours, theirs = logging.getLogger("kvkit"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), not theirs.handlers
        ours.setLevel(theirs.level)


class KVKitConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not typed for mypy
    """A best-effort cache: what it does not find, or cannot load, is computed.

    vLLM makes one for its scheduler (`_scheduler`) and one for each worker (`_worker`, once there are pages).

    Raises:
        ConfigError: a setting is unknown, or impossible for this model.
    """

    _scheduler: Scheduler
    _worker: Worker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._settings, self._config = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._specs = pages.layer_specs(kv_cache_config, current_platform.is_cpu())
        blocks = pages.check_chunks(self._config.chunk_tokens, self._specs)
        _check(self._settings, self._config, vllm_config, len(blocks))
        events, lora = vllm_config.kv_events_config, vllm_config.lora_config
        self._tells_stores = events is not None and events.enable_kv_cache_events
        self._loras: Loras | None = None
        self._events: Events | None = None
        if role == KVConnectorRole.WORKER:
            if lora is not None:
                self._loras = Loras(str(lora.lora_dtype).removeprefix("torch."))
                self._loras.watch()
            return
        self._media = Media()
        ranks = vllm_config.parallel_config.world_size
        self._scheduler = Scheduler(
            self._config.chunk_tokens,
            blocks,
            self._sequence,
            windows=pages.has_windows(spec for group in self._specs for spec in group.values()),
            ranks=ranks,
            waits=self._settings.load != "async",
            save_generated=self._settings.save_generated,
            clock=time.monotonic,
            handoff=self._handoff,
            has=self._has,
            on_save=self._on_save,
        )
        if self._tells_stores:
            hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
            self._events = Events(self._config.tiers, self._config.chunk_tokens, hash_tokens, ranks)

    @property
    def requires_kv_delivery(self) -> bool:
        handoff = self._config.handoff
        return self._kv_transfer_config.kv_role == "kv_producer" and handoff is not None and handoff.sends

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layerwise"

    # the workers' side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        opaque = next(iter(kv_caches.values())).device.type == "cpu"
        layout, groups = pages.group_pages(self._specs, kv_caches, self._kv_cache_config.num_blocks, opaque)
        model = self._vllm_config.model_config
        self._worker = Worker(
            self._config,
            self._settings,
            layout,
            groups,
            self._namespace(layout),
            self._tells_stores,
            None if self._loras is None else (model.served_model_name, model.model),
            self._loras,
        )

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if kv_connector_metadata.preempted:
            self._worker.vacate()
        else:
            self._worker.settle()

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata
        self._worker.begin(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._settings.load == "layerwise":
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are saved after the forward, over all layers at once."""

    def wait_for_save(self) -> None:
        self._worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed, sent = self._worker.finish(finished_req_ids)
        # with one group of layers, the blocks that failed say more: what came before them is kept
        one = len(self._kv_cache_config.kv_cache_groups) == 1
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=set() if one else failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.report()

    def get_kv_connector_stats(self) -> Stats | None:
        return self._worker.stats.take() if hasattr(self, "_worker") else None

    def shutdown(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.close()

    # the scheduler's side

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._media.of(request)  # also where nothing of it is asked for: vLLM sees its media from now on
        self._scheduler.admit(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found: Counter[CacheHitSource] = Counter()
        for tier, tokens in self._scheduler.sources(request.request_id, num_external_tokens).items():
            found[self._source(tier)] += tokens
        return found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        state = scheduler_output.kv_connector_block_state
        step = self._scheduler.plan(scheduler_output.num_scheduled_tokens, state.get_block_ids)
        step.preempted = bool(scheduler_output.preempted_req_ids)
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report: WorkerReport | None = connector_output.kv_connector_worker_meta
        if report is not None:
            self._scheduler.hear(report)
            if self._events is not None:
                for stored in report.stored:
                    self._events.stored(*stored)

    def take_events(self) -> list[KVCacheEvent]:
        return [] if self._events is None else self._events.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        told = self._scheduler.answer(request)
        return self._scheduler.finish(request, block_ids if whole else None), told if whole else None

    def reset_cache(self) -> bool:
        self._scheduler.forget(uuid.uuid4().hex)
        return True

    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to take a step although it has no request: the workers hear of a reset in steps."""
        return self._scheduler.has_news

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        return PromMetrics(*arguments)

    def _handoff(self, request: Any) -> RemoteDecode | RemotePrefill | None:
        """What a request's parameters ask for. What is wrong with them costs it the handoff, no more."""
        handoff = self._config.handoff
        try:
            return parameters.read(request.kv_transfer_params, handoff.peers) if handoff else None
        except ConfigError as error:
            log.warning("%s: nothing is handed off: %s", request.request_id, error)
            return None

    def _has(self, request: Any) -> int:
        """Tokens that vLLM's own prefix cache has of a request."""
        _, tokens, _ = self._kv_cache_manager.get_computed_blocks(request)
        return int(tokens)

    def _on_save(self, request: Any, first: int, stop: int) -> None:
        if self._events is not None:
            self._events.saved(request, first, stop)

    def _source(self, tier: str) -> CacheHitSource:
        if tier not in self._config.tiers:
            return CacheHitSource.P2P
        return CacheHitSource.HOST if self._config.tiers[tier].in_memory else CacheHitSource.DISK

    def _sequence(self, request: Any, tokens: int) -> Sequence | None:
        """The first `tokens` tokens of vLLM's request; None where what some stand for is not known."""
        media = self._media.of(request)
        if request.prompt_embeds is not None or media is None:
            return None
        told = request.lora_request
        lora = told and Lora(
            told.lora_int_id, told.lora_path, told.lora_name, told.is_3d_lora_weight, told.load_inplace
        )
        ids, rest = identity(request.all_token_ids[:tokens], media, chunk_tokens=self._config.chunk_tokens)
        return Sequence(ids, lora, request.cache_salt or "", rest)

    def _namespace(self, layout: KVLayout) -> Namespace:
        """Of this rank's KV, without LoRA and salt."""
        config, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        name, revision = model_identity(self._vllm_config)
        return self._config.namespace(
            layout,
            model=name,
            dtype=str(config.dtype).removeprefix("torch."),
            revision=revision,
            rank=parallel.rank % parallel.world_size,
            world=parallel.world_size,
            isa=_instruction_set(self._vllm_config) if layout.groups[0].opaque else "",
        )


def _check(settings: Settings, config: Config, vllm_config: Any, tables: int) -> None:
    """
    Raises:
        ConfigError: kvkit cannot serve this arrangement, or its settings do not go with vLLM's.
    """
    load, handoff, role = settings.load, config.handoff, vllm_config.kv_transfer_config.kv_role
    parallel, media = vllm_config.parallel_config, vllm_config.model_config.multimodal_config
    if load != "async" and (tables > 1 or parallel.world_size > 1):
        raise ConfigError(
            f"load = {load!r}: with {tables} KV cache groups and {parallel.world_size} ranks, vLLM cannot "
            "take back a step whose load failed; want load = 'async'"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name} = {size}: want 1; kvkit stores no tokens that are spread over ranks")
    if media is not None and config.chunk_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"chunk_tokens = {config.chunk_tokens}: want at least {LEAST_TOKENS} for a model that takes "
            "images or other media: their digests have no room in fewer ids"
        )
    if handoff is not None:
        given, fits = handoff.role, {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role, "both")
        if {fits, given} == {"prefill", "decode"}:
            raise ConfigError(f"handoff.role = {given!r}: kv_role is {role!r}; want {fits!r} or 'both'")
        if handoff.receives and load != "async":
            raise ConfigError(f"load = {load!r}: an engine that is handed KV loads it with 'async'")
    overlap = load == "async" and vllm_config.max_concurrent_batches > 1
    if overlap and role == "kv_producer" and (tiers := config.resolved_policy().retrieve_from):
        raise ConfigError(
            f"kv_role = {role!r}: it loads from {', '.join(tiers)}, and vLLM keeps the blocks of "
            "overlapping steps apart for 'kv_both' and 'kv_consumer' alone; want 'kv_both', or load = 'sync'"
        )


def _instruction_set(vllm_config: Any) -> str:
    """What decides the order of K within vLLM's CPU pages."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    config, cache = vllm_config.model_config, vllm_config.cache_config
    order = _get_attn_isa(config.dtype, cache.block_size, config.get_head_size(), cache.cache_dtype)
    return f"{order}/{torch.backends.cpu.get_cpu_capability()}"
