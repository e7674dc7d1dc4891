"""The connector in a worker of vLLM: a rank's cache, and the order in which a step calls its capabilities.

To add a capability, write a `Capability` and add it to `Worker.capabilities`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.vllm.blending.blender import Blender
from kvkit.adapters.vllm.blending.check import open_row_runner
from kvkit.adapters.vllm.blending.executor import BlendExecutor, DocumentPages
from kvkit.adapters.vllm.blending.warm_up import warm_up_attention
from kvkit.adapters.vllm.capability import Capability, FinishedRequests, WorkerContext
from kvkit.adapters.vllm.gate import documents_context
from kvkit.adapters.vllm.handoff.send_executor import SendExecutor
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.namespaces import Namespaces
from kvkit.adapters.vllm.pages import GroupPages, has_windows
from kvkit.adapters.vllm.settings import Settings
from kvkit.adapters.vllm.step import StepMetadata, WorkerReport
from kvkit.adapters.vllm.tier_reports import TierReports
from kvkit.adapters.vllm.tiers.load_executor import LoadExecutor
from kvkit.adapters.vllm.tiers.prefetch_executor import PrefetchExecutor
from kvkit.adapters.vllm.tiers.save_executor import SaveExecutor
from kvkit.cache import Cache
from kvkit.config import Config, open_cache
from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.tier import HandoffTier
from kvkit.transfer.sequence import formats_of

IDLE_WAIT_S = 0.01
"""Seconds that an idle step waits for a lookup or a load, so that the engine does not spin."""


class Worker:
    """One rank's cache, and its transfers from and to vLLM's pages. For the thread that runs steps.

    Args:
        config: kvkit's configuration.
        settings: the connector's settings.
        layout: layout of vLLM's KV cache.
        groups: pages of the KV cache, an entry per group of the layout.
        namespace: namespace of this rank, without LoRA and salt.
        reports_tiers: True if the worker reports what tiers hold.
        served: names of the base model in requests, if these may name adapters; None: any name.
        loras: adapters of this worker; None: there are none.

    Attributes:
        capabilities: in the order in which each phase of a step goes through them.
        blends: executor of blends; None before `open_blending`.

    Raises:
        ConfigError: a setting is impossible for this model.
    """

    def __init__(
        self,
        config: Config,
        settings: Settings,
        layout: KVLayout,
        groups: list[GroupPages],
        namespace: Namespace,
        reports_tiers: bool,
        served: Collection[str] | None = None,
        loras: Loras | None = None,
    ) -> None:
        self.namespaces = Namespaces(namespace, served, loras)
        config = config.model_copy(update={"server": config.server.of_rank(namespace.rank)})
        self.cache: Cache = open_cache(config, layout, namespace, self.namespaces.named)
        context = WorkerContext(self.cache, settings, groups, self.namespaces, reports_tiers)
        self._context = context
        self.stats = context.stats
        self._loras = loras
        self._windows = has_windows(group.spec for group in groups)
        self._released: set[str] = (
            set()
        )  # requests whose save or transfer is over, until nothing holds blocks
        self._step_began = time.monotonic()
        if context.on_gpu:
            self.cache.warm_up([group.sequence_pages([], namespace.chunk_tokens) for group in groups])
        handoff = self.cache.tiers.get(HANDOFF)
        sender, receiver = None, None
        if isinstance(handoff, HandoffTier):
            sender, receiver = handoff.sender, handoff.receiver
        self._loads = LoadExecutor(context, receiver)
        self._saves = SaveExecutor(context)
        self.capabilities: list[Capability] = [self._saves, self._loads, PrefetchExecutor(context)]
        if reports_tiers:
            self.capabilities.append(TierReports(context, config.tiers))
        if sender is not None:
            self.capabilities.append(SendExecutor(context, sender))
        self.blends: BlendExecutor | None = None

    def open_blending(self, runner: Any) -> None:
        """Set up blending by vLLM's model runner, once it has its pages. Mutates pages: none is in use yet.

        Raises:
            BlendError: prompts of this model, or as the engine runs it, cannot be blended.
        """
        rows, pages, ropes = open_row_runner(runner)
        warm_up_attention(rows)
        document_pages = DocumentPages.of(self._context.groups, pages, ropes)
        document_pages.warm_up(formats_of(self.cache.layout, self.namespaces.current))
        self.add_blending(Blender(rows, pages, ropes), document_pages)
        blend = self._context.settings.blend
        if self.cache.server is not None and blend is not None:
            self.cache.server.engine["blend_context"] = documents_context(runner.vllm_config, blend)

    def add_blending(self, blender: Blender, pages: DocumentPages) -> None:
        """Blend prompts from now on."""
        self.blends = BlendExecutor(self._context, self._loads.lookups, blender, pages)
        self.capabilities.append(self.blends)

    def end_saves(self) -> None:
        """End all reads of the pages by saves, before anything may write to them."""
        self._saves.end_reads()

    def end_reads(self) -> None:
        """End all reads of the pages, by saves and by sends, before blocks get other owners."""
        for capability in self.capabilities:
            capability.end_reads()

    def weights_changed(self) -> None:
        """Note that the model's weights changed: no KV is loaded, saved or sent any more.

        This lasts until the scheduler has received the report of it and begins another epoch.
        """
        self._drop_kv()
        self.namespaces.stale = True
        self._context.report.new_weights = self._context.epoch

    def release_pages(self) -> None:
        """Stop all reads and writes of the pages until `restore_pages`, and wait for those in flight."""
        self.end_reads()
        self._drop_kv()
        for capability in self.capabilities:
            capability.end_writes()
        self.namespaces.asleep = True

    def restore_pages(self) -> None:
        """Use the pages again. Their contents are no KV."""
        self.namespaces.asleep = False

    def begin_step(self, step: StepMetadata) -> None:
        """Start the lookups and prefetches of a step, and ask receivers for room for what it will send."""
        if self._windows:  # other requests may get blocks that a running request's window has left
            self.end_reads()
        else:
            self.end_saves()
        if step.epoch != self._context.epoch:
            self._begin_epoch(step.epoch)
        self._context.number = step.number
        self._context.spans.note_traces(step.traces)
        for capability in self.capabilities:
            capability.begin_step(step)
        self._step_began = time.monotonic()

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer a lookup between steps, as `Lookups.lookup_inline` does."""
        return self._loads.lookup_inline(lookup)

    def start_loads(self, step: StepMetadata) -> None:
        """Start the loads and blends of a step; with sync loading, wait until the loads are done."""
        for capability in self.capabilities:
            capability.start_loads(step)

    def wait_for_layer(self, name: str) -> None:
        """Wait until every load of this step has loaded the layer `name`."""
        for capability in self.capabilities:
            capability.wait_for_layer(name)

    def layer_computed(self, name: str) -> None:
        """Note that this step has computed the layer `name`."""
        for capability in self.capabilities:
            capability.layer_computed(name)

    def start_saves(self, step: StepMetadata) -> None:
        """Start the saves and sends of a step. Saves read the pages until `end_saves`."""
        self._loads.finish_layerwise()
        if self._loads.failed_step > step.acked_failure_step:
            for capability in self.capabilities:
                capability.discard_step()
            return  # KV computed since may depend on tokens that were not loaded
        if not self._context.on_gpu:
            self._context.prefill_speed.note_step(step.computed, time.monotonic() - self._step_began)
        reads_pages = bool(step.saves or step.sends)
        ready = self._forward_done(step.computed) if reads_pages and self._context.on_gpu else lambda: None
        for capability in self.capabilities:
            capability.start_saves(step, ready)
        if step.idle:
            self._wait_while_idle()

    def finish_requests(self, request_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Forget requests, and advance blends.

        Returns:
            Ids of requests whose loads or blends are done; of those whose loads returned less than the
            lookup found; and of those whose blocks a last save or a transfer no longer needs.
        """
        finished = FinishedRequests()
        for capability in self.capabilities:
            capability.finish_requests(request_ids, finished)
        self._context.spans.forget(request_ids)
        self._released |= finished.released
        sent = {
            request_id
            for request_id in self._released
            if not any(capability.holds_blocks(request_id) for capability in self.capabilities)
        }
        self._released -= sent
        return finished.received, finished.failed, sent

    def invalid_blocks(self) -> set[int]:
        """Return the blocks whose loads failed since the last call: their contents are invalid."""
        return self._loads.take_invalid_blocks()

    def report(self) -> WorkerReport | None:
        """Return the events since the last report; None if there are none."""
        for capability in self.capabilities:
            capability.add_to_report()
        report, self._context.report = self._context.report, WorkerReport()
        return report if report != WorkerReport() else None

    def close(self) -> None:
        """Finish what is in flight, except prefetches, and close the cache within `shutdown_timeout_s`."""
        deadline = time.monotonic() + self.cache.shutdown_timeout_s
        for capability in self.capabilities:
            capability.close()
        if self._loras is not None:
            self._loras.close()
        self.cache.close(max(0.0, deadline - time.monotonic()))

    def _begin_epoch(self, epoch: str) -> None:
        """Begin an epoch: lookups no longer find earlier records. Tiers outside this process keep them."""
        self._context.epoch = epoch
        for capability in self.capabilities:
            capability.begin_epoch()
        self.namespaces.begin_epoch(epoch)
        self._drop_kv()
        for name, tier in self.cache.tiers.items():
            if tier.slots or name == HANDOFF:  # its records are in slots of this process
                self.cache.clear(name)

    def _drop_kv(self) -> None:
        for capability in self.capabilities:
            capability.drop_kv()

    def _forward_done(self, computed: int) -> Callable[[], object]:
        """Return a function that waits until the pages hold what this step computes."""
        device, step_began = self._context.groups[0].pages.device, self._step_began
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))

        def wait_for_pages() -> None:
            with torch.cuda.device(device):  # the cache's threads use GPU 0 otherwise
                event.synchronize()
            self._context.prefill_speed.note_step(computed, time.monotonic() - step_began)

        return wait_for_pages

    def _wait_while_idle(self) -> None:
        """Wait briefly for a transfer, a lookup or a load: idle steps would occupy a core that these need.

        Prompts whose transfers arrive meanwhile are looked up at once, without waiting for another step.
        """
        wakeups = self._context.wakeups

        def can_continue() -> bool:
            if any(capability.has_result for capability in self.capabilities):
                return True
            if any(capability.awaits_transfer for capability in self.capabilities):
                return wakeups.unseen
            return not any(capability.busy for capability in self.capabilities)

        deadline, received = time.monotonic() + IDLE_WAIT_S, True
        while received:
            wakeups.wait_for(can_continue, deadline - time.monotonic())
            received = self._loads.receive()


class IdleWorker:
    """A stand-in for `Worker` in an engine without a cache. It does nothing and opens no tier."""

    def begin_step(self, step: StepMetadata) -> None:
        """Do nothing."""

    start_loads = start_saves = begin_step

    def end_saves(self) -> None:
        """Do nothing."""

    end_reads = close = weights_changed = release_pages = restore_pages = end_saves

    def layer_computed(self, name: str) -> None:
        """Do nothing."""

    wait_for_layer = layer_computed

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Return no answer."""

    def finish_requests(self, request_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Return that no request has ended."""
        return set(), set(), set()

    def invalid_blocks(self) -> set[int]:
        """Return no blocks."""
        return set()

    def report(self) -> WorkerReport | None:
        """Report nothing."""

    def open_blending(self, runner: Any) -> None:
        """Do nothing."""
