"""The workers' side: one rank's lookups, loads and saves, carried out by its `Cache`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch

from kvkit.adapters.engine.changes import Changes
from kvkit.adapters.engine.listing import Listing
from kvkit.adapters.engine.loads import PromptLoad, result_of
from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.engine.lookups import Lookups
from kvkit.adapters.engine.prefetches import Prefetches
from kvkit.adapters.engine.request_stats import RequestStats
from kvkit.adapters.engine.speed import Speed
from kvkit.adapters.vllm.blending.blender import Blender
from kvkit.adapters.vllm.blending.check import open_rows
from kvkit.adapters.vllm.blending.choosing import PagesOfLayers
from kvkit.adapters.vllm.blending.executor import BlendExecutor
from kvkit.adapters.vllm.blending.placing import Placing
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.namespaces import Namespaces
from kvkit.adapters.vllm.pages import GroupPages, complete_tokens, has_windows
from kvkit.adapters.vllm.settings import Settings
from kvkit.adapters.vllm.stats import Recorder
from kvkit.adapters.vllm.step import (
    BlendDone,
    Listed,
    LoadTask,
    NamedChunks,
    SaveTask,
    SendTask,
    StepMetadata,
    Tables,
    WorkerReport,
)
from kvkit.cache import Cache, Loaded, Stored
from kvkit.config import Config, open_cache
from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.prompt import PromptPiece, Prompts
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.tier import HandoffTier
from kvkit.transfer.sequence import Chunks, SequencePages, formats_of
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.01
"""Seconds that an idle step waits for a lookup or a load, so that the engine does not spin."""
LISTED_AT_ONCE = 32
"""Number of chunks from before the start that one step reports to the scheduler."""
SAVE_WAIT_S = 0.25
"""Seconds that a step waits for the last step's saves while slots are short, before it calls them off."""


class Worker:
    """One rank's cache, and its transfers from and to vLLM's pages. For the thread that runs steps.

    Args:
        config: kvkit's configuration.
        settings: the connector's settings.
        layout: layout of vLLM's KV cache.
        groups: pages of the KV cache, an entry per group of the layout.
        namespace: namespace of this rank, without LoRA and salt.
        tells_stores: whether to report what tiers hold.
        served: names of the base model in requests, if these may name adapters; None: any name.
        loras: adapters of this worker; None: there are none.

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
        tells_stores: bool,
        served: Collection[str] | None = None,
        loras: Loras | None = None,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self.namespaces = Namespaces(namespace, served, loras)
        self._tells_stores = tells_stores
        self._loras = loras
        self._changed = threading.Condition()
        self._wakes = self._seen = 0
        config = config.model_copy(update={"server": config.server.of_rank(namespace.rank)})
        self.cache: Cache = open_cache(config, layout, namespace, self.namespaces.named)
        self.stats = Recorder(self.cache)
        self._request_stats = RequestStats(tells=namespace.rank == 0)
        self._prefetches = Prefetches(self.cache)
        self._speed = Speed(namespace.chunk_tokens)
        tiers, policy = self.cache.tiers, self.cache.policy
        self._save_to = policy.store_to
        block_tokens = math.lcm(*(group.block_tokens for group in groups))
        sender, self._receiver, self._prompts = None, None, None
        handoff = tiers.get(HANDOFF)
        if isinstance(handoff, HandoffTier):
            sender, self._receiver = handoff.sender, handoff.receiver
        if self._receiver is not None:
            self._receiver.watch(self._wake)
        if sender is not None:
            shared = [name for name in policy.retrieve_from if tiers[name].scope == "shared"]
            self._prompts = Prompts(
                ChunkSender(sender, self.cache.layout, self.cache.writes),
                self.cache.namespace,
                held=partial(self.cache.held_async, tiers=shared) if shared else None,
                block_tokens=block_tokens,
                allocation_s=settings.handoff_timeout_s,
                wake=self._wake,
            )
        self._blends: BlendExecutor | None = None
        self._lookups = Lookups(
            self.cache,
            self._receiver,
            self.namespaces.of,
            block_tokens=block_tokens,
            timeout_s=settings.lookup_timeout_s,
            handoff_timeout_s=settings.handoff_timeout_s,
            tokens_per_s=lambda: settings.prefill_tokens_per_s or self._speed.tokens_per_s,
            rows_per_s=lambda: None if self._blends is None else self._blends.speed.tokens_per_s,
            wake=self._wake,
        )
        self._layers = {
            name: layer
            for group in groups
            for name, layer in zip(group.names, group.pages.group.layers, strict=True)
        }
        self._windows = has_windows(group.spec for group in groups)
        self._cuda = groups[0].pages.device.type == "cuda"
        if self._cuda:
            self.cache.warm_up([group.place([], namespace.chunk_tokens) for group in groups])
        self._loading: dict[str, tuple[LoadTask, PromptLoad]] = {}
        self._saving: list[Transfer[Stored]] = []
        self._patience_s = SAVE_WAIT_S
        self._kept: set[str] = set()  # requests whose blocks stay for their last save
        self._freed: set[str] = set()  # those whose save or transfer is over, until `finish` reports them
        self._lengths: dict[str, int] = {}  # prompt tokens of ended requests, until `finish`
        self._invalid: set[int] = set()
        self._report = WorkerReport()
        self._changes = Changes()
        self._listing: Listing | None = None
        self._watches_all = False
        if tells_stores:
            self._watches_all = self.cache.watch(tuple(config.tiers), self._changes.note)
            held = self._changes.records
            self._report.watches = self._watches_all and not held
            self._listing = Listing(self.cache, held, namespace)
        self._number = self._failed_step = 0
        self._epoch = ""
        self._began = time.monotonic()

    def open_blending(self, runner: Any) -> None:
        """Set up blending by vLLM's model runner, once it has its pages. Mutates pages: none is in use yet.

        Raises:
            BlendError: prompts of this model, or as the engine runs it, cannot be blended.
        """
        rows, ropes = open_rows(runner)
        pages = PagesOfLayers(rows)
        placing = Placing.of(self._groups, pages, ropes)
        placing.warm_up(formats_of(self.cache.layout, self._namespace))
        self._blends = BlendExecutor(
            self.cache,
            Blender(rows, pages),
            placing,
            pages=self._pages,
            world=self._namespace.world,
            wake=self._wake,
            on_loaded=self._blend_loaded,
            on_done=self._blended,
        )

    @property
    def _namespace(self) -> Namespace:
        return self.namespaces.current

    def settle(self) -> None:
        """Make all saves stop reading the pages, before anything may write to them.

        Waits for copies, and for the forward pass that they depend on, but not for tiers that do not free
        their slots: such saves are called off.
        """
        until = time.monotonic() + self.cache.timeout_s
        while wait(self._saving, self._patience_s).not_done:
            if self.cache.staging.waiting or time.monotonic() >= until:
                break
        late = [transfer for transfer in self._saving if not transfer.done()]
        for transfer in late:
            transfer.release_pages()
        self.stats.called_off(len(late))
        if self._saving:  # a slow tier must not delay every step as long
            self._patience_s = max(self._patience_s / 2, SAVE_WAIT_S / 32) if late else SAVE_WAIT_S
        self._saving.clear()
        for request_id in self._kept:
            self._over(request_id)
        self._freed |= self._kept
        self._kept.clear()

    def vacate(self) -> None:
        """Make saves and handoffs stop reading the pages; what handoffs still need is copied."""
        self.settle()
        if self._prompts is not None:
            self._prompts.release_pages()

    def weights_changed(self) -> None:
        """Note that the model's weights changed: no KV is loaded, saved or sent any more.

        This lasts until the scheduler has received the report of it and begins another epoch.
        """
        self._stop_using_kv()
        self.namespaces.stale = True
        self._report.new_weights = self._epoch

    def release_pages(self) -> None:
        """Stop all reads and writes of the pages until `restore_pages`, and wait for those in flight."""
        self.vacate()
        self._stop_using_kv()
        for _, load in self._loading.values():
            load.cancel()
            load.finish()
        if self._blends is not None:
            self._blends.cancel_all()
        self.namespaces.asleep = True

    def restore_pages(self) -> None:
        """Use the pages again. Their contents are no KV."""
        self.namespaces.asleep = False

    def _stop_using_kv(self) -> None:
        """Drop all lookups, and cancel prefetches and sends."""
        self._lookups.clear()
        self._prefetches.end_all()
        if self._prompts is not None:
            self._prompts.cancel_all()

    def begin(self, step: StepMetadata) -> None:
        """Start the lookups and prefetches of a step, and ask receivers for room for what it will send."""
        if self._windows:  # other requests may get blocks that a running request's window has left
            self.vacate()
        else:
            self.settle()
        if step.epoch != self._epoch:
            self._forget(step.epoch)
        self._number = step.number
        self._lengths.update(step.ended)
        # with drafts, vLLM calls `finish` before `save`
        self._kept.update(save.request_id for save in step.saves if save.last)
        if self._receiver is not None:
            for transfer in step.released_transfers:
                self._receiver.release(transfer, "not wanted")
        for lookup in step.lookups:
            self._lookups.ask(lookup)
        for task in step.retains:
            if space := self.namespaces.of(task.sequence):
                self.cache.retain(task.sequence.tokens, task.policy, space)
        if self._blends is not None:
            for agreed in step.arrivals:
                self._blends.go(agreed)
        self._receive()
        for request_id in step.cancelled_prefetches:
            self._prefetches.end(request_id)
        for queued in step.prefetches:
            space = self.namespaces.of(queued.sequence)
            if space is not None:
                self._prefetches.add(queued.request_id, queued.sequence.tokens, space, queued.computed)
        self._prefetches.go_on()
        if self._prompts is not None:
            for send in step.sends:
                prompt, space = send.sequence, self.namespaces.of(send.sequence)
                self._prompts.begin(
                    send.request_id, send.transfer, send.address, prompt.tokens, space, prompt.rest
                )
            # a peer's memory is not pinned, and a GPU copies faster into pinned memory
            self._prompts.compute({} if self._cuda else self._pieces(step))
        self._began = time.monotonic()

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer a lookup between steps, as `Lookups.lookup_inline` does."""
        answer = self._lookups.lookup_inline(lookup)
        if answer is not None:
            self._name(self._report, answer.request_id, 0, self._lookups.found(answer.request_id))
        return answer

    def start_loads(self, step: StepMetadata) -> None:
        """Start the loads and blends of a step; with sync loading, wait until the loads are done."""
        for task in step.loads:
            self._request_stats.begin(task.request_id)
            hit = self._lookups.claim(task.request_id, task.number)
            base = task.start - task.start % self._namespace.chunk_tokens
            where = partial(self._pages, task.blocks, base)
            how = self._settings.load
            load = PromptLoad(self.cache, hit, task.start, task.stop, where, how, self._wake)
            self._loading[task.request_id] = task, load
        if self._blends is not None:
            for blend in step.blends:
                self._request_stats.begin(blend.request_id)
                self._blends.begin(blend, self._lookups.claim(blend.request_id, blend.number))
        if self._settings.load == "sync":
            self._finish_all()

    def wait_for_layer(self, name: str) -> None:
        """Wait until every load of this step has loaded the layer `name`."""
        for _, load in self._loading.values():
            for number in load.layers or ():
                if number == self._layers[name]:
                    break

    def computed(self, name: str) -> None:
        """Note that this step has computed the layer `name`."""
        if self._prompts is not None and name in self._layers:
            self._prompts.computed(self._layers[name])

    def save(self, step: StepMetadata) -> None:
        """Start the saves and sends of a step. Saves read the pages until `settle`."""
        if self._settings.load == "layerwise":
            self._finish_all()
        if self._failed_step > step.acked_failure_step:
            if self._prompts is not None:
                self._prompts.drop()
            return  # KV computed since may depend on tokens that were not loaded
        if not self._cuda:
            self._speed.note(step.computed, time.monotonic() - self._began)
        reads = bool(step.saves or step.sends)
        ready = self._forward_done(step.computed) if reads and self._cuda else lambda: None
        for save in step.saves:
            self._save(save, ready)
        if self._prompts is not None:
            pieces = self._pieces(step, ready)
            for send in step.sends:
                if send.request_id in pieces:
                    self._prompts.send(send.request_id, pieces[send.request_id])
                else:
                    self._prompts.cancel(send.request_id, send.last)
            if self._settings.send == "sync" and step.sends:
                self._prompts.wait(self._settings.handoff_timeout_s)
            else:
                self._prompts.go_on()
        if step.idle:
            self._rest()

    def finish(self, request_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Forget requests, and advance blends.

        Returns:
            Ids of requests whose loads or blends are done; of those whose loads returned less than was
            promised; and of those whose blocks a last save or a transfer no longer needs.
        """
        if self._settings.load == "layerwise":  # with drafts, this comes before `save` and the drafts' run
            self._finish_all()
        for request_id in request_ids:
            self._lookups.cancel(request_id)
            if request_id in self._loading:
                self._loading[request_id][1].cancel()
            elif self._blends is None or not self._blends.cancel(request_id):
                self._lookups.release(request_id)
            if request_id not in self._kept:  # nothing more will begin for it
                self._over(request_id)
        done = {request_id for request_id, (_, load) in self._loading.items() if load.done}
        if self._prompts is not None:
            self._prompts.go_on()
            self._freed |= self._prompts.done(request_ids)
        sent = {
            request_id for request_id in self._freed - self._kept if request_id not in (self._prompts or ())
        }
        self._freed -= sent
        failed = {request_id for request_id in done if not self._finish(*self._loading.pop(request_id))}
        blended = set() if self._blends is None else self._blends.step()
        for request_id in blended:
            self._request_stats.done(request_id)
        return done | blended, failed, sent

    def invalid_blocks(self) -> set[int]:
        """Return the blocks whose loads failed since the last call: their contents are invalid."""
        found, self._invalid = self._invalid, set()
        return found

    def report(self) -> WorkerReport | None:
        """Return what happened since the last report, or None if nothing did."""
        self._receive()
        report, self._report = self._report, WorkerReport()
        report.answers = self._lookups.answers()
        if self._blends is not None:
            report.arrivals = self._blends.arrivals()
        if self._tells_stores:
            for answer in report.answers:
                self._name(report, answer.request_id, 0, self._lookups.found(answer.request_id))
            changes, lost = self._changes.take()
            report.changes = [(self._namespace.rank, change) for change in changes]
            if lost:
                report.watches = self._watches_all = False
            if self._listing is not None:
                self._list(report, self._listing)
        return report if report != WorkerReport() else None

    def close(self) -> None:
        """Finish what is in flight, except prefetches, and close the cache within `shutdown_timeout_s`."""
        until = time.monotonic() + self.cache.shutdown_timeout_s
        self._prefetches.end_all()
        if self._listing is not None:
            self._listing.close()
        if self._loras is not None:
            self._loras.close()
        if self._prompts is not None:
            self._prompts.close(self.cache.shutdown_timeout_s)
        self.cache.close(max(0.0, until - time.monotonic()))

    def _receive(self) -> bool:
        """Look up prompts whose transfers arrived or failed. Return whether there were any."""
        self._seen = self._wakes
        return self._lookups.receive()

    def _pages(self, blocks: Tables, base: int, start: int, stop: int) -> list[SequencePages]:
        """Return the pages of tokens [start, stop), per layer group; `blocks` begin with token `base`."""
        return [
            group.place(blocks[group.table][(start - base) // group.block_tokens :], stop - start)
            for group in self._groups
        ]

    def _save(self, save: SaveTask, ready: Callable[[], object]) -> None:
        """Store chunks that a request computed, in tiers other than a handoff."""
        sequence, began, space = save.sequence, time.monotonic(), self.namespaces.of(save.sequence)
        first = save.first * self._namespace.chunk_tokens
        tokens = self._complete(save, first, len(sequence.tokens))
        to = self._save_to if save.policy.store_to is None else save.policy.store_to
        if not to or space is None or not tokens:
            return

        def on_stored(tier: str, _: int) -> None:
            self._request_stats.stored(save.request_id, tier, self._namespace.chunk_tokens)

        self._request_stats.begin(save.request_id)
        chunks = self.cache.chunks(sequence.tokens[: first + tokens], space, save.policy)
        chunks = chunks.part(save.first, len(chunks))
        self._name(self._report, save.request_id, save.first, chunks)
        transfer = self.cache.store_chunks(
            chunks,
            self._pages(save.blocks, first, first, first + tokens),
            to=to,
            ready=ready,
            on_stored=on_stored,
            on_done=lambda: self._request_stats.done(save.request_id),
            copy_first=True,
        )
        transfer.add_done_callback(lambda done: self.stats.stored(result_of(done), time.monotonic() - began))
        self._saving.append(transfer)

    def _name(self, report: WorkerReport, request_id: str, first: int, chunks: Chunks | None) -> None:
        """Report the names of a request's records from chunk `first` on, if reports state what tiers hold."""
        if not self._tells_stores or chunks is None:
            return
        if chunks.formats[0].namespace.revision == self._namespace.revision:  # not from before a reset
            names = [tuple(chunks.records(i, i + 1)) for i in range(len(chunks))]
            named = NamedChunks(self._namespace.rank, self._epoch, request_id, first, names)
            report.named.append(named)

    def _list(self, report: WorkerReport, listing: Listing) -> None:
        """Report the next chunks that tiers held before the start."""
        chunks = listing.take(LISTED_AT_ONCE)
        is_all = listing.done and listing.is_all and self._watches_all
        if listing.done:
            listing.close()
            self._listing = None
        if chunks or is_all:
            report.listed.append(Listed(self._namespace.rank, self._epoch, chunks, is_all))

    def _pieces(
        self, step: StepMetadata, ready: Callable[[], object] = lambda: None
    ) -> dict[str, PromptPiece]:
        """Return the pieces that a step sends, by request id, without those that lack blocks."""
        return {
            send.request_id: PromptPiece(
                send.first, send.stop, partial(self._pages, send.blocks, send.first), ready, send.last
            )
            for send in step.sends
            if self._complete(send, send.first, send.stop) == send.stop - send.first
        }

    def _complete(self, part: SaveTask | SendTask, first: int, stop: int) -> int:
        """Return how many leading tokens of [first, stop) have all of their blocks."""
        count = complete_tokens(self._groups, part.blocks, self._namespace.chunk_tokens, first, stop)
        if count < stop - first:
            log.warning(
                "%s: tokens from %d on lack blocks, and are not stored", part.request_id, first + count
            )
        return count

    def _finish_all(self) -> None:
        """Finish the loads that a step waits for."""
        for request_id in list(self._loading):
            if not self._finish(*self._loading.pop(request_id)):
                self._failed_step = self._report.failed_step = self._number

    def _over(self, request_id: str) -> None:
        """Complete an ended request's stats: nothing more will begin for it."""
        if request_id in self._lengths:
            self._request_stats.over(request_id, self._lengths.pop(request_id))

    def _finish(self, task: LoadTask, load: PromptLoad) -> bool:
        """Note how a load ended. Return whether it loaded all that was promised."""
        end, loaded = load.finish()
        self._lookups.release(task.request_id)
        kept = end == task.stop
        self.stats.loaded(loaded, time.monotonic() - load.began, kept)
        self._request_stats.hit(task.request_id, loaded.by_tier)
        self._request_stats.done(task.request_id)
        if not kept:
            end = max(end, task.start)
            log.warning("%s: loaded up to token %d of %d", task.request_id, end, task.stop)
            self._report.failed.append(task.request_id)
            if len(task.blocks) == 1:  # with several groups, block ids are ambiguous
                size = self._groups[0].block_tokens
                self._invalid.update(task.blocks[0][(end - load.base) // size :])
                self._invalid.discard(-1)
        return kept

    def _blend_loaded(self, request_id: str, loaded: Loaded, seconds: float, kept: bool) -> None:
        """Note a blend's load."""
        self._lookups.release(request_id)
        self.stats.loaded(loaded, seconds, kept)
        self._request_stats.hit(request_id, loaded.by_tier)

    def _blended(self, done: BlendDone) -> None:
        """Note a blend that is done; rank 0 reports it to the scheduler."""
        self.stats.blended(done)
        if self._namespace.rank == 0:
            self._report.blended.append(done)

    def _forward_done(self, computed: int) -> Callable[[], object]:
        """Return a function that waits until the pages hold what this step computes."""
        device = self._groups[0].pages.device
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        began = self._began

        def wait_for_it() -> None:
            with torch.cuda.device(device):  # the cache's threads use GPU 0 otherwise
                event.synchronize()
            self._speed.note(computed, time.monotonic() - began)

        return wait_for_it

    def _rest(self) -> None:
        """Wait briefly for a transfer, a lookup or a load: steps in a loop would take a core that these need.

        Transfers that arrive are looked up at once: that takes less time than another step.
        """

        def something() -> bool:
            if self._lookups.done or any(load.done for _, load in self._loading.values()):
                return True
            if self._blends is not None and self._blends.can_go_on:
                return True
            if self._lookups.awaited or (self._prompts is not None and self._prompts.under_way):
                return self._wakes != self._seen
            blends = self._blends is not None and self._blends.busy
            return not (self._lookups.asked or self._loading or blends)

        until, came_last = time.monotonic() + IDLE_WAIT_S, True
        while came_last:
            with self._changed:
                self._changed.wait_for(something, until - time.monotonic())
            came_last = self._receive()

    def _wake(self, _: object) -> None:
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _forget(self, epoch: str) -> None:
        """Begin an epoch: lookups no longer find earlier records. Tiers outside this process keep them."""
        self._epoch = epoch
        if self._listing is not None:
            self._listing.close()
            self._listing = None
        self.namespaces.begin(epoch)
        self._stop_using_kv()
        for name, tier in self.cache.tiers.items():
            if tier.slots or name == HANDOFF:  # in slots of this process
                self.cache.clear(name)
