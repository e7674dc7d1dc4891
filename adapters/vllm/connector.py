"""kvkit as a KV connector of vLLM: passes vLLM's calls to the scheduler's or the workers' side.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVKitConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kvkit_config": "kvkit.toml"}}'
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import Counter
from contextlib import suppress
from functools import partial
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
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Lora, Sequence
from kvkit.adapters.vllm import compat, pages, shutdown, states
from kvkit.adapters.vllm import params as parameters
from kvkit.adapters.vllm.blending import requests
from kvkit.adapters.vllm.blending.order import PageOrder
from kvkit.adapters.vllm.blending.private import PrivateBlocks
from kvkit.adapters.vllm.blending.scheduling import Blends
from kvkit.adapters.vllm.blending.scratch import Scratch
from kvkit.adapters.vllm.checks import check_arrangement, why_uncached
from kvkit.adapters.vllm.events import Events
from kvkit.adapters.vllm.gate import check_model, check_precision
from kvkit.adapters.vllm.identity import draft_identity, lora_settings, model_identity
from kvkit.adapters.vllm.idle import IdleWorker
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.media import Media, identity
from kvkit.adapters.vllm.params import HandoffUnavailable, RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.settings import WHERE, read_settings
from kvkit.adapters.vllm.stats import PromMetrics, Refusals, Stats
from kvkit.adapters.vllm.step import StepMetadata, WorkerReport
from kvkit.adapters.vllm.worker import Worker
from kvkit.adapters.vllm.written import check_written
from kvkit.blend.plan import BlendError, Selection
from kvkit.format.layout import KVLayout, Namespace
from kvkit.settings import ConfigError
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from kvkit.transfer.requests import FIELD, read

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

log = logging.getLogger(__name__)
NAME = "KVKitConnector"


def register() -> None:
    """Register the connector with vLLM by its name. May be called again; vLLM calls it in each process."""
    with suppress(ValueError):  # already registered
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    compat.tell_of_runner()


def log_as_vllm() -> None:
    """Log to vLLM's handlers at vLLM's level, unless kvkit's or the root logger has handlers already."""
    ours, theirs = logging.getLogger("kvkit"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), not theirs.handlers
        ours.setLevel(theirs.level)


class KVKitConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not typed for mypy
    """A best-effort cache: vLLM computes all KV that the cache does not find or cannot load.

    vLLM creates one for its scheduler (`_scheduler`) and one for each worker (`_worker`, once there are
    pages).

    Raises:
        ConfigError: a setting is unknown, or impossible for this model, or `precision` is set for a model
            that has not been found fit for it.
        BlendError: `blend` is set for a model that has not been found fit for it.
    """

    _scheduler: Scheduler
    _worker: Worker | IdleWorker

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
        self._states = {
            table: states.runs(spec) for table, spec in enumerate(self._tables) if isinstance(spec, MambaSpec)
        }
        check_arrangement(self._settings, self._config, vllm_config, len(blocks), self._states.values())
        if self._settings.blend is not None:
            compat.check("blend")
        stores = not self._reads_parts()
        events, lora = vllm_config.kv_events_config, vllm_config.lora_config
        asked = events is not None and events.enable_kv_cache_events
        self._tells_stores = asked and compat.offered("events")
        self._refusals = Refusals()
        self._loras: Loras | None = None
        self._events: Events | None = None
        if role == KVConnectorRole.WORKER:
            if self._uncached:
                self._worker = IdleWorker()
            if lora is not None:
                self._loras = Loras.watched(lora_settings(lora))
            compat.watch_worker()
            if self._settings.blend is not None and not compat.tells_of_runner():
                raise ConfigError(
                    f"{WHERE}.blend: want kvkit among vLLM's plug-ins, but VLLM_PLUGINS leaves it out"
                )
            return
        blend = self._settings.blend
        if blend is not None and not blend.unchecked:
            selection = Selection(blend.methods[0], blend.ratio, coverage=blend.coverage)
            check_model(vllm_config, selection, "blend.unchecked = true")
        self._config.check_model(partial(check_precision, vllm_config))
        shutdown.tell(self._config, vllm_config)
        if not stores:
            log.info("records hold the heads of several ranks: each rank loads its part, and stores nothing")
        if vllm_config.model_config.multimodal_config is not None:
            compat.offered("media")
        compat.watch_engine_core()
        self._version_is_new = self._warned = False
        self._media = Media()
        ranks, drafts = vllm_config.parallel_config.world_size, vllm_config.speculative_config
        self._scheduler = Scheduler(
            self._config.chunk_tokens,
            blocks,
            self._sequence,
            windows=pages.has_windows(s for s in self._tables if not isinstance(s, MambaSpec)),
            states=self._states,
            snapshot_every=self._settings.snapshot_every,
            recompute_last_block=compat.draft_reads_ahead(drafts),
            ranks=ranks,
            blocking_load=self._settings.load != "async",
            stores=stores,
            save_generated=self._settings.save_generated,
            clock=time.monotonic,
            handoff=self._handoff,
            has=self._has,
            free=lambda: compat.free_blocks(self._kv_cache_manager),
            on_chunks=self._on_chunks,
            request_policy_of=self._request_policy_of,
            approximate=frozenset(n for n, t in self._config.tiers.items() if t.precision is not None),
            lookup_inline=self._lookup_inline,
        )
        self._hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        if self._tells_stores:
            hash_function = compat.find("get_hash_fn_by_name")(
                vllm_config.cache_config.prefix_caching_hash_algo
            )
            sizes = self._config.chunk_tokens, self._hash_tokens
            near = pages.ranks_per_host(vllm_config.parallel_config)
            self._events = Events(
                self._config.tiers,
                *sizes,
                ranks,
                near,
                events.buffer_steps,
                partial(compat.find("hash_block_tokens"), hash_function),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        handoff = self._config.handoff
        return self._kv_transfer_config.kv_role == "kv_producer" and handoff is not None and handoff.sends

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layerwise"

    # the workers' side

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
        size = self._vllm_config.parallel_config.pipeline_parallel_size
        layers = pages.stage_layers(self._specs, stages, size)
        parallel = self._vllm_config.parallel_config
        others = parallel.data_parallel_index * parallel.world_size
        limit_s = shutdown.limit_s(self._config, self._vllm_config)
        update = {"server": self._config.server.of_rank(others), "shutdown_timeout_s": limit_s}
        config = self._config.model_copy(update=update)
        precision = self._config.precision
        orders = self._orders(kv_caches) if opaque and precision is not None else None
        layout, groups = pages.group_pages(
            self._specs, kv_caches, blocks, opaque, heads, layers, precision, orders
        )
        if self._states:
            found = layout, groups
            layout, groups = pages.add_states(found, self._specs, kv_caches, self._config.chunk_tokens)
        self._worker = Worker(
            config,
            self._settings,
            layout,
            groups,
            self._namespace(layout, ranks_share=heads is not None),
            self._tells_stores,
            None if self._loras is None else (model.served_model_name, model.model),
            self._loras,
        )

    def _orders(self, kv_caches: dict[str, torch.Tensor]) -> dict[str, PageOrder]:
        """Return the order of K and V in a CPU's pages, by layer. Mutates blocks that no request uses.

        Raises:
            ConfigError: pages of a layer hold something else, or K and V in fewer bits already.
        """
        modules = compat.attention_layers(self._vllm_config)
        known: dict[Any, PageOrder | None] = {}
        for name, held in kv_caches.items():
            form = held.shape[1:], held.dtype, getattr(modules[name], "head_size", None)
            where = f"precision = {self._config.precision!r}: layer {name}"
            if not held.dtype.is_floating_point or held.element_size() < 2:
                raise ConfigError(f"{where} holds {held.dtype}; want none")
            try:
                known[name] = known[form] = known.get(form) or PageOrder.of(modules[name])
            except BlendError as error:
                raise ConfigError(f"{where}: {error}") from error
        return {name: order for name in kv_caches if (order := known[name])}

    def open_runner(self, runner: Any) -> None:
        """Take vLLM's model runner, once it has its pages (`compat.tell_of_runner`)."""
        compat.watch_loads(runner.get_model(), self._worker.weights_changed)
        if self._settings.blend is not None:
            self._worker.open_blending(runner)

    def weights_changed(self) -> None:
        """Stop using KV of the old weights (`compat.watch_worker`, `compat.watch_engine_core`)."""
        if hasattr(self, "_worker"):
            self._worker.weights_changed()
        elif hasattr(self, "_scheduler"):
            self._version_is_new = False  # the version is of older weights
            self._forget(uuid.uuid4().hex)

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
        self._worker.begin(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._settings.load == "layerwise":
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pack KV to hand off; chunks are saved after the forward pass, for all layers at once."""
        self._worker.computed(layer_name)

    def wait_for_save(self) -> None:
        self._worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed, sent = self._worker.finish(finished_req_ids)
        # with one KV cache group, failed blocks are more exact: blocks before them are kept
        one = len(self._kv_cache_config.kv_cache_groups) == 1
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=set() if one else failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.report()

    def get_kv_connector_stats(self) -> Stats | None:
        if not hasattr(self, "_worker"):
            return self._refusals.take()
        return self._worker.stats.take() if isinstance(self._worker, Worker) else None

    def shutdown(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.close()

    # the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        blend = self._settings.blend
        if blend is None and not self._scheduler.approximate:
            return
        private = self._scheduler.private = PrivateBlocks(kv_cache_manager, self._hash_tokens)
        if blend is None:
            return
        marks = blend.marks and requests.Marks.of(blend.marks, self._encode)
        windows = tuple(pages.window_of(spec, self._config.chunk_tokens) for spec in self._tables)
        self._scheduler.blends = Blends(
            lambda request: requests.read(request, blend, marks),
            private,
            Scratch(kv_cache_manager, self._scheduler.block_tokens, windows),
        )

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._media.of(request)  # also for requests without a lookup: vLLM sees their media from now on
        self._scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found: Counter[CacheHitSource] = Counter()
        for tier, tokens in self._scheduler.sources(request.request_id, num_external_tokens).items():
            found[self._source(tier)] += tokens
        blended = num_external_tokens - found.total()
        return found | Counter({CacheHitSource.EXTERNAL_UNSPECIFIED: blended} if blended > 0 else {})

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        state = scheduler_output.kv_connector_block_state
        step = self._scheduler.plan(scheduler_output.num_scheduled_tokens, state.get_block_ids)
        step.preempted = bool(scheduler_output.preempted_req_ids)
        if scheduler_output.num_scheduled_tokens:
            self._version_is_new = False
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report: WorkerReport | None = connector_output.kv_connector_worker_meta
        for request_id in connector_output.finished_recving or ():
            self._scheduler.received(request_id)
        if report is not None:
            self._scheduler.update_from_workers(report)
            if self._events is not None:
                self._events.hear(report)
            if report.new_weights == self._scheduler.epoch:
                log.warning("the model's weights changed without a reset of the cache: kvkit resets it")
                self.reset_cache()

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
        """Begin an epoch, so that KV stored before is not found.

        If the weights got a version since KV was last computed, its epoch stays: its KV is of these weights.
        """
        if self._version_is_new:
            self._forget(self._scheduler.epoch)
        else:
            self._forget(uuid.uuid4().hex)
        return True

    def set_weight_version(self, version: str) -> None:
        """Share KV only with engines that have this version of the weights (`compat.watch_engine_core`)."""
        digest = hashlib.blake2b(version.encode(), digest_size=16).hexdigest()
        self._forget(f"weights-{digest}", shared=True)
        self._version_is_new = True

    def own_cache_reset(self) -> None:
        """Warn, once, that vLLM's own prefix cache was reset without kvkit's tiers."""
        if not self._warned:
            self._warned = True
            log.warning(
                "vLLM's own prefix cache was reset, but KV in kvkit's tiers stays: if the weights have "
                "changed, reset with reset_connector, or give them a version"
            )

    def _forget(self, epoch: str, shared: bool = False) -> None:
        """Begin an epoch. `shared`: other engines may have stored KV in it."""
        self._scheduler.forget(epoch, compat.keeps_cached_blocks(self._kv_cache_manager))
        if self._events is not None:
            self._events.forget(epoch, complete=not shared)

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must run a step even without requests: steps announce resets to the workers."""
        return self._scheduler.has_pending_reset

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        return PromMetrics(*arguments)

    def _handoff(self, request: Any) -> RemoteDecode | RemotePrefill | None:
        """Return the handoff that a request asks for; None, with a warning, if its parameters are invalid."""
        try:
            return parameters.read_for(request.kv_transfer_params, self._config.handoff)
        except HandoffUnavailable as error:
            if self._refusals.first(str(error)):
                log.warning("%s: nothing is handed off (logged once): %s", request.request_id, error)
        except ConfigError as error:
            self._refusals.add()
            log.warning("%s: nothing is handed off: %s", request.request_id, error)
        return None

    def _reads_parts(self) -> bool:
        """Return whether records hold more heads than a rank has, so that ranks only load parts of them.

        Raises:
            ConfigError: so, and the engine is to hand off or to blend.
        """
        ranks, stages = self._settings.record_ranks, self._settings.record_stages
        heads = pages.rank_heads(self._vllm_config, self._specs, ranks, stages)
        each = (spec for specs in self._specs for spec in specs.values())
        if heads is None or not any(heads.reads_parts(spec) for spec in each):
            return False
        for name, given in (("handoff", self._config.handoff), ("blend", self._settings.blend)):
            if given is not None:
                raise ConfigError(
                    f"record_ranks = {ranks}: this engine's {heads.ranks} ranks have parts of such records, "
                    f"which can be loaded, but not handed off or blended; want {heads.ranks}, or no {name}"
                )
        return True

    def _request_policy_of(self, request: Any) -> RequestPolicy:
        """Return a request's policy. An invalid one is ignored, with a warning, except `store = false`."""
        said = (request.kv_transfer_params or {}).get(FIELD)
        if said is None:
            return DEFAULT_REQUEST_POLICY
        where, limits = f"{parameters.WHERE}.{FIELD}", f"{WHERE}.requests"
        try:
            return read(said, self._settings.requests, where, limits)
        except ConfigError as error:
            unstored = isinstance(said, dict) and said.get("store") is False
            log.warning("%s: kv_cache is ignored, except store = false: %s", request.request_id, error)
            return RequestPolicy(store_to=()) if unstored else DEFAULT_REQUEST_POLICY

    def _lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Ask the worker at once if it is the only one and in this process; otherwise return None."""
        engine = self._kv_transfer_config.engine_id
        for connector in compat.connectors() if self._vllm_config.parallel_config.world_size == 1 else ():
            if isinstance(connector, KVKitConnector) and connector._kv_transfer_config.engine_id == engine:
                return connector._worker.lookup_inline(lookup)
        return None

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a mark."""
        tokenizer = compat.find("cached_tokenizer_from_config")(self._vllm_config.model_config)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _has(self, request: Any) -> int:
        """Return the number of leading tokens of a request in vLLM's own prefix cache."""
        return compat.computed_tokens(self._kv_cache_manager, request)

    def _on_chunks(self, request: Any, first: int, stop: int) -> None:
        if self._events is not None:
            self._events.expect(request, first, stop)

    def _source(self, tier: str) -> CacheHitSource:
        if tier not in self._config.tiers:
            return CacheHitSource.P2P
        return CacheHitSource.HOST if self._config.tiers[tier].in_memory else CacheHitSource.DISK

    def _sequence(self, request: Any, tokens: int) -> Sequence | None:
        """Return the first `tokens` tokens of vLLM's request; None if their KV cannot be cached."""
        media = self._media.of(request)
        if self._uncached or request.prompt_embeds is not None or media is None:
            return None
        told = request.lora_request
        lora = told and Lora(
            told.lora_int_id, told.lora_path, told.lora_name, told.is_3d_lora_weight, told.load_inplace
        )
        ids, rest = identity(request.all_token_ids[:tokens], media, chunk_tokens=self._config.chunk_tokens)
        return Sequence(ids, lora, request.cache_salt or "", rest)

    def _namespace(self, layout: KVLayout, ranks_share: bool = False) -> Namespace:
        """Return the namespace of this rank's KV, without adapter and salt."""
        config, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        name, revision = model_identity(self._vllm_config)
        return self._config.namespace(
            layout,
            model=name,
            dtype=str(config.dtype).removeprefix("torch."),
            revision=revision,
            draft=draft_identity(self._vllm_config),
            rank=parallel.rank % parallel.world_size,
            world=parallel.world_size,
            ranks_share=ranks_share,
            isa=_instruction_set(self._vllm_config) if layout.groups[0].opaque else "",
        )


def _instruction_set(vllm_config: Any) -> str:
    """Return what determines the order of K within vLLM's CPU pages."""
    return f"{compat.cpu_page_order(vllm_config)}/{torch.backends.cpu.get_cpu_capability()}"
