"""The workers' side: lookups, loads and saves of one rank, carried out by its `Cache`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvkit.adapters.engine.loads import PagesOf, PromptHit, PromptLoad, result_of
from kvkit.adapters.engine.lookups import Lookups, Question
from kvkit.adapters.engine.prefetches import Prefetches
from kvkit.adapters.engine.speed import Speed
from kvkit.adapters.engine.tally import Tally
from kvkit.adapters.vllm import pages, stats
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.settings import Settings
from kvkit.adapters.vllm.step import (
    Ask,
    LoadTask,
    LookupAnswer,
    SaveTask,
    SendTask,
    Sequence,
    StepMetadata,
    Tables,
    WorkerReport,
)
from kvkit.cache import Cache, Stored
from kvkit.config import Config, open_cache
from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.prompt import PromptPiece, Prompts
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.addresses import of_rank
from kvkit.moving.sequence import SequencePages, UnknownModel
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.01
"""How long a step that computes nothing waits for a lookup or a load, so that the engine does not spin."""
SAVE_WAIT_S = 0.25
"""How long a step waits for the last one's saves while there are too few slots, before it calls them off."""


class Worker:
    """One rank's cache, and what is under way between it and vLLM's pages. For the thread that runs steps.

    Args:
        config: the tiers.
        settings: how to load.
        specs: of every layer, per KV cache group of vLLM.
        blocks: vLLM's blocks.
        namespace: given the layout, this rank's; without LoRA and salt.
        tells_stores: whether reports say what was stored.
        served: what requests call the base model, where they may name adapters, too; None: it has any name.
        loras: the adapters of this worker; None where there are none.
    """

    def __init__(
        self,
        config: Config,
        settings: Settings,
        specs: list[dict[str, Any]],
        blocks: int,
        namespace: Callable[[KVLayout], Namespace],
        tells_stores: bool,
        served: Collection[str] | None = None,
        loras: Loras | None = None,
    ) -> None:
        self._config = config
        self._loras = loras
        self._settings = settings
        self._specs = specs
        self._blocks = blocks
        self._namespace_of = namespace
        self._tells_stores = tells_stores
        self._served = served
        self._lengths: dict[str, int] = {}  # tokens, of requests that have ended, until `finish`
        self._adapters: dict[str, str] = {}  # what they hold, by the name that requests have for them
        self._stored: deque[tuple[str, str, int]] = deque()
        self._changed = threading.Condition()
        self._wakes = self._seen = 0
        self._loading: dict[str, tuple[LoadTask, PromptLoad]] = {}
        self._saving: list[Transfer[Stored]] = []
        self._patience_s = SAVE_WAIT_S
        self._kept: set[str] = set()
        self._sent: set[str] = set()
        self._handed_off: set[str] = set()
        self._windows = pages.has_windows(specs)
        self._prompts: Prompts | None = None
        self._block = math.lcm(*(next(iter(group.values())).block_size for group in specs))
        self._began = time.monotonic()
        self._invalid: set[int] = set()
        self._failed: list[str] = []
        self._failed_step = 0
        self._told_step = 0
        self._epoch = ""

    def open(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Open the cache over vLLM's pages, [B, H, N, C] by layer name.

        Raises:
            ConfigError: a setting is impossible for this model.
        """
        opaque = next(iter(tensors.values())).device.type == "cpu"
        layout, self._groups = pages.group_pages(self._specs, tensors, self._blocks, opaque)
        self._namespace = self._base = self._namespace_of(layout)
        config = self._config.model_copy(update={"server": self._config.server.of_rank(self._namespace.rank)})
        self.cache: Cache = open_cache(config, layout, self._namespace, self.space_of)
        self._stats = stats.Recorder(self.cache)
        self._tally = Tally(tells=self._namespace.rank == 0)
        self._prefetches = Prefetches(self.cache)
        self._speed = Speed(self._namespace.chunk_tokens)
        self._save_to = tuple(tier for tier in self.cache.policy.store_to if tier != HANDOFF)
        self._receiver: Receiver | None = None
        handoff = self.cache.tiers.get(HANDOFF)
        if isinstance(handoff, HandoffTier):
            self._receiver, self._prompts = handoff.receiver, self._open_prompts(handoff)
            if self._receiver is not None:
                self._receiver.watch(self._wake)
        told = self._settings.prefill_tokens_per_s
        self._lookups = Lookups(
            self.cache,
            self._receiver,
            block_tokens=self._block,
            timeout_s=self._settings.lookup_timeout_s,
            handoff_timeout_s=self._settings.handoff_timeout_s,
            tokens_per_s=lambda: told or self._speed.tokens_per_s,
            wake=self._wake,
        )
        self._number = {
            name: layer
            for group in self._groups
            for name, layer in zip(group.names, group.pages.group.layers, strict=True)
        }
        self._cuda = self._groups[0].pages.device.type == "cuda"

    def space_of(self, model: str | None, salt: str) -> Namespace:
        """What is stored now for requests with that model's name (None: the base model) and cache salt.

        For any thread. An adapter is known once a request has named it: what it holds is read then.

        Raises:
            UnknownModel: none has, and it is not the base model.
        """
        lora = self._adapters.get(model or "", "")
        if not (lora or model is None or self._served is None or model in self._served):
            raise UnknownModel(f"model = {model!r}: neither served nor an adapter that any request has had")
        return replace(self._namespace, lora=lora, salt=salt)

    def settle(self) -> None:
        """See to it that no save reads the pages any more: before anything may write to them.

        Copies and the forward pass that they wait for are waited for; tiers that do not give slots back are
        not.
        """
        until = time.monotonic() + self.cache.timeout_s
        wait(self._saving, self._patience_s)
        while not self.cache.staging.waiting and time.monotonic() < until:
            if not wait(self._saving, self._patience_s).not_done:
                break
        late = [transfer for transfer in self._saving if not transfer.done()]
        for transfer in late:
            transfer.revoke()
        self._stats.called_off(len(late))
        if self._saving:  # a tier that keeps up the saves shall not keep up every step as long
            self._patience_s = max(self._patience_s / 2, SAVE_WAIT_S / 32) if late else SAVE_WAIT_S
        self._saving.clear()
        self._sent |= self._kept
        self._kept.clear()

    def vacate(self) -> None:
        """See to it that nothing reads the pages any more, what is handed off included."""
        self.settle()
        if self._prompts is not None:
            self._prompts.release_pages()

    def begin(self, step: StepMetadata) -> None:
        """Start the lookups and prefetches of a step, and ask for room for what it will send."""
        if self._windows:  # a window that moves on leaves blocks to others while their request goes on
            self.vacate()
        else:
            self.settle()
        if step.epoch != self._epoch:
            self._forget(step.epoch)
        self._lengths.update(step.ended)
        if self._receiver is not None:
            for transfer in step.unwanted:
                self._receiver.release(transfer, "not wanted")
        for ask in step.asks:
            self._lookups.ask(self._question(ask))
        self._receive()
        for name in step.called_off:
            self._prefetches.end(name)
        for queued in step.prefetches:
            space = self._space(queued.sequence)
            if space is not None:
                self._prefetches.add(queued.request, queued.sequence.tokens, space, queued.computed)
        self._prefetches.go_on()
        if self._prompts is not None:
            for send in step.sends:
                address, what = of_rank(send.address, self._namespace.rank), send.sequence
                space = self._space(what)
                self._prompts.begin(send.request, send.transfer, address, what.tokens, space, what.rest)
        self._began = time.monotonic()

    def start_loads(self, step: StepMetadata) -> None:
        """Start the loads of a step; where the step waits for them, return when they are done."""
        for task in step.loads:
            self._tally.begin(task.request)
            self._loading[task.request] = (
                task,
                PromptLoad.begin(
                    self.cache,
                    self._lookups.claim(task.request, task.number),
                    task.start,
                    task.stop,
                    self._pages_of(task.blocks, self._chunk_start(task.start)),
                    self._settings.load,
                    self._wake,
                ),
            )
        if self._settings.load == "sync":
            self._finish_all(step.number)

    def wait_for_layer(self, name: str) -> None:
        """Return when a layer is loaded, for every load of this step."""
        for _, load in self._loading.values():
            for number in load.layers or ():
                if number == self._number[name]:
                    break

    def save(self, step: StepMetadata) -> None:
        """Start the saves of a step; they read the pages until `settle`."""
        self._kept.update(save.request for save in step.saves if save.last)
        if self._settings.load == "layerwise":
            self._finish_all(step.number)
        if self._failed_step > step.heard:
            return  # what was computed since may rest on tokens that were not loaded
        ready = self._forward_done(step.computed) if step.saves or step.sends else None
        if not self._cuda:
            self._speed.note(step.computed, time.monotonic() - self._began)
        for save in step.saves:
            self._save(save, ready)
        if self._prompts is not None:
            for send in step.sends:
                if self._complete(send, send.first, send.stop) == send.stop - send.first:
                    self._prompts.send(send.request, self._piece(send, ready))
                else:
                    self._prompts.cancel(send.request, send.last)
            if self._settings.send == "sync" and step.sends:
                self._prompts.wait(self._settings.handoff_timeout_s)
            else:
                self._prompts.go_on()
        if step.idle:
            self._rest()

    def finish(self, requests: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Forget requests. Returns those whose loads are done, and those among them that got less.

        The third set is of those whose blocks were kept for a last save, and no longer need to be.
        """
        for name in requests:
            self._lookups.cancel(name)
            if name in self._loading:
                self._loading[name][1].cancel()
            else:
                self._lookups.release(name)
            if name in self._lengths:  # what was to be begun for it has been
                self._tally.over(name, self._lengths.pop(name))
        done = {name for name, (_, load) in self._loading.items() if load.done}
        if self._prompts is not None:
            self._prompts.go_on()
            for name in self._prompts.done(requests):
                self._handed_off.add(name)
        sent = {name for name in self._sent | self._handed_off if self._may_free(name)}
        self._sent -= sent
        self._handed_off -= sent
        return done, {name for name in done if not self._finish(*self._loading.pop(name))}, sent

    def invalid_blocks(self) -> set[int]:
        """Blocks that were to be loaded since the last call and hold nothing."""
        found, self._invalid = self._invalid, set()
        return found

    def report(self) -> WorkerReport | None:
        """What the scheduler does not know yet."""
        self._receive()
        answers = [self._answer(question, hit) for question, hit in self._lookups.answers()]
        failed, self._failed = self._failed, []
        failed_step = self._failed_step if self._failed_step != self._told_step else 0
        self._told_step = self._failed_step
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        if not answers and not failed and not failed_step and not stored:
            return None
        return WorkerReport(answers, failed, failed_step, stored)

    def take_stats(self) -> stats.Stats | None:
        """What was counted since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Finish what was started, but for prefetches, and close the cache."""
        self._prefetches.end_all()
        if self._loras is not None:
            self._loras.close()
        self.cache.close()

    def _receive(self) -> bool:
        """Look up what was sent for requests, and came or will not; whether there was any."""
        self._seen = self._wakes
        return self._lookups.receive()

    def _question(self, ask: Ask) -> Question:
        return Question(
            ask.request,
            ask.number,
            ask.sequence.tokens,
            partial(self._space, ask.sequence),
            rest=ask.sequence.rest,
            computed=ask.computed,
            transfer=ask.transfer,
            computed_there=ask.computed_there,
        )

    def _answer(self, question: Question, hit: PromptHit | None) -> LookupAnswer:
        segments = () if hit is None else hit.segments
        tokens = min(sum(tokens for _, tokens in segments), len(question.tokens))
        return LookupAnswer(question.request, question.number, self._namespace.rank, tokens, segments)

    def _may_free(self, request: str) -> bool:
        """Whether no save and no transfer of a finished request reads its pages."""
        saved = request not in self._kept
        return saved and (self._prompts is None or request not in self._prompts)

    def _chunk_start(self, token: int) -> int:
        return token // self._namespace.chunk_tokens * self._namespace.chunk_tokens

    def _pages_of(self, blocks: Tables, base: int) -> PagesOf:
        """Where tokens lie whose `blocks` begin with token `base`."""

        def pages(start: int, stop: int) -> list[SequencePages]:
            return [
                group.place(
                    blocks[group.table][
                        (start - base) // group.block_tokens : -(-(stop - base) // group.block_tokens)
                    ],
                    stop - start,
                )
                for group in self._groups
            ]

        return pages

    def _piece(self, send: SendTask, ready: Callable[[], object] | None) -> PromptPiece:
        pages = self._pages_of(send.blocks, send.first)
        return PromptPiece(send.first, send.stop, pages, ready or (lambda: None), send.last)

    def _open_prompts(self, handoff: HandoffTier) -> Prompts | None:
        if handoff.sender is None:
            return None
        tiers = self.cache.tiers
        return Prompts(
            self.cache,
            handoff.sender,
            shared=tuple(name for name in self.cache.policy.retrieve_from if tiers[name].scope == "shared"),
            block_tokens=self._block,
            allocation_s=self._settings.handoff_timeout_s,
            wake=self._wake,
        )

    def _save(self, save: SaveTask, ready: Callable[[], object] | None) -> None:
        """Store what a request computed; handing off is not this one's business."""
        sequence, began, space = save.sequence, time.monotonic(), self._space(save.sequence)
        first = save.first * self._namespace.chunk_tokens
        tokens = self._complete(save, first, len(sequence.tokens))
        if not self._save_to or space is None or not tokens:
            return
        self._tally.begin(save.request)
        chunks = self.cache.chunks(sequence.tokens[: first + tokens], space)
        transfer = self.cache.store_chunks(
            chunks.part(save.first, len(chunks)),
            [group.place(save.blocks[group.table], tokens) for group in self._groups],
            to=self._save_to,
            ready=ready or (lambda: None),
            on_stored=self._note_stored(save),
            on_done=lambda: self._tally.done(save.request),
            copy_first=True,
        )
        transfer.add_done_callback(lambda done: self._stats.stored(result_of(done), time.monotonic() - began))
        self._saving.append(transfer)

    def _complete(self, part: SaveTask | SendTask, first: int, stop: int) -> int:
        """How many of tokens [first, stop) have all of their blocks."""
        count = pages.complete_tokens(self._groups, part.blocks, self._namespace.chunk_tokens, first, stop)
        if count < stop - first:
            log.warning("%s: tokens from %d on lack blocks, and are not stored", part.request, first + count)
        return count

    def _note_stored(self, save: SaveTask) -> Callable[[str, int], None]:
        def note(tier: str, chunk: int) -> None:
            self._tally.stored(save.request, tier, self._namespace.chunk_tokens)
            if self._tells_stores:
                self._stored.append((save.request, tier, save.first + chunk))

        return note

    def _finish_all(self, step: int) -> None:
        """End the loads that a step waits for."""
        for name in list(self._loading):
            if not self._finish(*self._loading.pop(name)):
                self._failed_step = step

    def _finish(self, task: LoadTask, load: PromptLoad) -> bool:
        """Note how a load ended; whether it kept its promise."""
        end, loaded = load.finish()
        self._lookups.release(task.request)
        kept = end == task.stop
        self._stats.loaded(loaded, time.monotonic() - load.began, kept)
        self._tally.hit(task.request, loaded.by_tier)
        self._tally.done(task.request)
        if not kept:
            end = max(end, task.start)
            log.warning("%s: loaded up to token %d of %d", task.request, end, task.stop)
            self._failed.append(task.request)
            if len(task.blocks) == 1:  # ids mean something in one group only
                size = self._groups[0].block_tokens
                self._invalid.update(task.blocks[0][(end - load.base) // size :])
                self._invalid.discard(-1)
        return kept

    def _forward_done(self, computed: int) -> Callable[[], object] | None:
        """What waits until the pages hold what this step computes; None: they do."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        began = self._began

        def wait_for_it() -> None:
            event.synchronize()
            self._speed.note(computed, time.monotonic() - began)

        return wait_for_it

    def _rest(self) -> None:
        """Wait a little for a transfer, a lookup or a load: step after step would keep a core they need.

        What arrives is looked up at once: that takes less than one more step does.
        """

        def something() -> bool:
            transfers = self._lookups.awaiting or (self._prompts is not None and self._prompts.under_way)
            under_way = self._lookups.under_way or bool(self._loading) or transfers
            some = self._lookups.done or any(load.done for _, load in self._loading.values())
            came = transfers and self._wakes != self._seen
            return some or came or not under_way

        until, came_last = time.monotonic() + IDLE_WAIT_S, True
        while came_last:
            with self._changed:
                self._changed.wait_for(something, until - time.monotonic())
            came_last = self._lookups.awaiting and self._receive()

    def _wake(self, _: object) -> None:
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _forget(self, epoch: str) -> None:
        """Have nothing found that was stored before: other weights wrote it. Shared tiers keep it."""
        self._epoch = epoch
        self._namespace = replace(self._base, revision=f"{self._base.revision}#{epoch}")
        self._lookups.clear()
        self._prefetches.end_all()
        for name, tier in self.cache.tiers.items():
            if tier.near:
                self.cache.clear(name)

    def _space(self, sequence: Sequence) -> Namespace | None:
        """Of a sequence's KV; None where none of it is to be looked up, stored or sent."""
        if sequence.lora is None:
            return replace(self._namespace, salt=sequence.salt)
        known = None if self._loras is None else self._loras.identity(sequence.lora)
        if known is None:
            self._adapters.pop(sequence.lora.name, None)
            return None
        self._adapters[sequence.lora.name] = known
        return replace(self._namespace, lora=known, salt=sequence.salt)
