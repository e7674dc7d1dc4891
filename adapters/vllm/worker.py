"""The workers' side: lookups, loads and saves of one rank, carried out by its `Cache`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from kvkit.adapters.vllm import pages, stats
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.prefetches import Prefetches
from kvkit.adapters.vllm.settings import Settings
from kvkit.adapters.vllm.speed import Speed
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
from kvkit.adapters.vllm.tally import Tally
from kvkit.cache import Cache, Loaded, Stored
from kvkit.config import Config, open_cache
from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.prompt import PromptPiece, Prompts, tail_of
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.addresses import of_rank
from kvkit.moving.layerwise import LayerLoad
from kvkit.moving.sequence import Hit, SequencePages, UnknownModel
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.01
"""How long a step that computes nothing waits for a lookup or a load, so that the engine does not spin."""
SAVE_WAIT_S = 0.25
"""How long a step waits for the last one's saves while there are too few slots, before it calls them off."""
NEWS_S = 5.0
"""How long a request waits for word of its transfer once the prefill engine has answered: that one asks for
room before it computes."""

NOTHING = Loaded(0)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The answer to `ask`, to be given by `until` on the monotonic clock."""

    ask: Ask
    hit: Transfer[Hit]
    until: float


@dataclass(frozen=True, slots=True)
class _Found:
    """What question `number` found: whole chunks, and the blocks of an unfilled one behind them."""

    number: int
    hit: Hit
    tail: Hit | None


@dataclass(slots=True)
class _Loading:
    """A load: by `transfer`, by `layers`, or by neither where it is done, or there was nothing to load.

    Attributes:
        base: token that its first chunk begins with.
        began: on the monotonic clock.
        tail: of the blocks behind the last whole chunk, by a transfer of their own.
        whole: tokens that come before the tail.
    """

    load: LoadTask
    base: int
    began: float
    transfer: Transfer[Loaded] | None = None
    tail: Transfer[Loaded] | None = None
    whole: int = 0
    layers: LayerLoad | None = None
    result: Loaded = NOTHING

    @property
    def done(self) -> bool:
        return self.layers is None and all(move.done() for move in self._moves)

    def cancel(self) -> None:
        """Have it end soon. The pages are in use until it is done."""
        for move in self._moves:
            move.cancel()

    def loaded(self) -> Loaded:
        """What was loaded; waits for it."""
        if self.layers is not None:
            for _ in self.layers:
                pass
            return self.layers.loaded
        loaded = self.result if self.transfer is None else _result(self.transfer) or NOTHING
        if self.tail is None or loaded.tokens < self.whole:
            return loaded
        tail = _result(self.tail) or NOTHING
        by_tier = Counter(loaded.by_tier) + Counter(tail.by_tier)
        return Loaded(loaded.tokens + tail.tokens, by_tier)

    @property
    def _moves(self) -> list[Transfer[Loaded]]:
        return [move for move in (self.transfer, self.tail) if move is not None]


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
        self._lookups: dict[str, _Lookup] = {}
        self._refused: list[LookupAnswer] = []
        self._hits: dict[str, _Found] = {}
        self._awaited: dict[str, tuple[Ask, float]] = {}  # since when, on the monotonic clock
        self._received: dict[str, str] = {}
        self._loading: dict[str, _Loading] = {}
        self._saving: list[Transfer[Stored]] = []
        self._patience_s = SAVE_WAIT_S
        self._kept: set[str] = set()
        self._sent: set[str] = set()
        self._handed_off: set[str] = set()
        self._windows = pages.has_windows(specs)
        self._receiver: Receiver | None = None
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
        handoff = self.cache.tiers.get(HANDOFF)
        if isinstance(handoff, HandoffTier):
            self._receiver, self._prompts = handoff.receiver, self._open_prompts(handoff)
            if self._receiver is not None:
                self._receiver.watch(self._wake)
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
            if ask.transfer and self._receiver is not None:
                self._received[ask.request] = ask.transfer
                self._awaited[ask.request] = ask, time.monotonic()
            else:
                self._look_up(ask)
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
        for load in step.loads:
            found = self._hits.pop(load.request, None)
            chunk = self._namespace.chunk_tokens
            first, last = load.start // chunk, -(-load.stop // chunk)
            loading = _Loading(load, first * chunk, time.monotonic())
            if found is not None and found.number == load.number:
                part = found.hit.part(min(first, found.hit.plan.chunks), last)
                places = self._places(load.blocks, 0, (last - first) * chunk)
                if found.tail is not None and load.stop > found.hit.tokens:
                    self._load_tail(loading, found.hit, found.tail)
                if self._settings.load == "layerwise":
                    loading.layers = self.cache.load_layers(part, places)
                elif self._settings.load == "sync":
                    # in this thread, so in the order of the engine's stream, which may be zeroing the pages
                    loading.result = self.cache.load(part, places)
                else:
                    loading.transfer = self.cache.load_async(part, places)
                    loading.transfer.add_done_callback(self._wake)
            self._loading[load.request] = loading
            self._tally.begin(load.request)
        if self._settings.load == "sync":
            self._finish_all(step.number)

    def _load_tail(self, loading: _Loading, hit: Hit, tail: Hit) -> None:
        """Start loading what lies behind the whole chunks of `hit`, as far as it is not there."""
        load, size = loading.load, tail.chunks.chunk_tokens
        first, last = max(load.start - hit.tokens, 0) // size, -(-(load.stop - hit.tokens) // size)
        start, stop = (hit.tokens + count * size - loading.base for count in (first, last))
        loading.whole = max(0, hit.tokens - loading.base)
        loading.tail = self.cache.load_async(tail.part(first, last), self._places(load.blocks, start, stop))
        loading.tail.add_done_callback(self._wake)

    def wait_for_layer(self, name: str) -> None:
        """Return when a layer is loaded, for every load of this step."""
        for loading in self._loading.values():
            for number in loading.layers or ():
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
            self._hits.pop(name, None)
            self._awaited.pop(name, None)
            if name in self._lookups:
                self._lookups.pop(name).hit.cancel()
            if name in self._loading:
                self._loading[name].cancel()
            else:
                self._release(name)
            if name in self._lengths:  # what was to be begun for it has been
                self._tally.over(name, self._lengths.pop(name))
        done = {name for name, loading in self._loading.items() if loading.done}
        if self._prompts is not None:
            self._prompts.go_on()
            for name in self._prompts.done(requests):
                self._handed_off.add(name)
        sent = {name for name in self._sent | self._handed_off if self._may_free(name)}
        self._sent -= sent
        self._handed_off -= sent
        return done, {name for name in done if not self._finish(self._loading.pop(name))}, sent

    def invalid_blocks(self) -> set[int]:
        """Blocks that were to be loaded since the last call and hold nothing."""
        found, self._invalid = self._invalid, set()
        return found

    def report(self) -> WorkerReport | None:
        """What the scheduler does not know yet."""
        self._receive()
        answers, self._refused = self._refused, []
        now = time.monotonic()
        for name, lookup in list(self._lookups.items()):
            if not lookup.hit.done() and now < lookup.until:
                continue
            del self._lookups[name]
            hit = None
            if lookup.hit.done():
                hit = _result(lookup.hit)
            else:
                lookup.hit.cancel()
                log.info("%s: not looked up within %s s", name, self._settings.lookup_timeout_s)
            answers.append(self._answer(lookup.ask, hit))
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

    def _receive(self) -> None:
        """Look up for requests whose transfers arrived, or will not."""
        assert self._receiver is not None or not self._awaited
        self._seen = self._wakes
        for name, (ask, since) in list(self._awaited.items()):
            assert self._receiver is not None
            status = self._receiver.status(ask.transfer)
            over = status is not None and status.phase in (None, Phase.COMMITTED)
            patience_s = self._settings.handoff_timeout_s
            if status is None and ask.computed_there:
                patience_s = min(patience_s, NEWS_S)
            if over or time.monotonic() >= since + patience_s:
                if status is None or status.phase is not Phase.COMMITTED:
                    reason = "it did not come" if status is None else status.reason or str(status.phase)
                    log.warning("%s: nothing from the prefill engine: %s", name, reason)
                del self._awaited[name]
                self._look_up(ask)

    def _answer(self, ask: Ask, hit: Hit | None) -> LookupAnswer:
        """What a lookup found, and the blocks of an unfilled chunk that came with it."""
        rank, space = self._namespace.rank, self._space(ask.sequence)
        if hit is None or space is None:
            return LookupAnswer(ask.request, ask.number, rank, 0, ())
        tail = None
        if ask.request in self._received and len(hit.chunks) == hit.plan.chunks:
            rest = tail_of(hit.chunks, ask.sequence.tokens, self._block, ask.sequence.rest)
            if rest is not None:
                tail = self.cache.lookup(*rest, retrieve_from=(HANDOFF,))
        self._hits[ask.request] = _Found(ask.number, hit, tail)
        found = [part for part in (hit, tail) if part is not None]
        segments = tuple(segment for part in found for segment in _segments(part))
        tokens = min(sum(part.tokens for part in found), len(ask.sequence.tokens))
        return LookupAnswer(ask.request, ask.number, rank, tokens, segments)

    def _release(self, request: str) -> None:
        """Give back what was received for a request."""
        transfer = self._received.pop(request, None)
        if transfer is not None and self._receiver is not None:
            self._receiver.release(transfer)

    def _may_free(self, request: str) -> bool:
        """Whether no save and no transfer of a finished request reads its pages."""
        saved = request not in self._kept
        return saved and (self._prompts is None or request not in self._prompts)

    def _places(self, blocks: Tables, start: int, stop: int) -> list[SequencePages]:
        """Where tokens [start, stop) lie, counted from the first of `blocks`."""
        places = []
        for group in self._groups:
            first, last = start // group.block_tokens, -(-stop // group.block_tokens)
            places.append(group.place(blocks[group.table][first:last], stop - start))
        return places

    def _piece(self, send: SendTask, ready: Callable[[], object] | None) -> PromptPiece:
        def pages(start: int, stop: int) -> list[SequencePages]:
            return self._places(send.blocks, start - send.first, stop - send.first)

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

    def _look_up(self, ask: Ask) -> None:
        timeout_s, space = self._settings.lookup_timeout_s, self._space(ask.sequence)
        if space is None:
            self._refused.append(self._answer(ask, None))
            return
        hit = self.cache.lookup_async(
            ask.sequence.tokens,
            space,
            wait_s=timeout_s / 2,  # a slow save shall not cost what the tiers have already
            first=ask.computed // self._namespace.chunk_tokens,
            prefill_tokens_per_s=self._settings.prefill_tokens_per_s or self._speed.tokens_per_s,
        )
        hit.add_done_callback(self._wake)
        if ask.request in self._lookups:  # nobody waits for the answer to an earlier question
            self._lookups[ask.request].hit.cancel()
        self._lookups[ask.request] = _Lookup(ask, hit, time.monotonic() + timeout_s)

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
        transfer.add_done_callback(lambda done: self._stats.stored(_result(done), time.monotonic() - began))
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
            if not self._finish(self._loading.pop(name)):
                self._failed_step = step

    def _finish(self, loading: _Loading) -> bool:
        """Note how a load ended; whether it kept its promise."""
        loaded, load = loading.loaded(), loading.load
        self._release(load.request)
        end = min(loading.base + loaded.tokens, load.stop)
        kept = end == load.stop
        self._stats.loaded(loaded, time.monotonic() - loading.began, kept)
        self._tally.hit(load.request, loaded.by_tier)
        self._tally.done(load.request)
        if not kept:
            log.warning("%s: loaded up to token %d of %d", load.request, max(end, load.start), load.stop)
            self._failed.append(load.request)
            if len(load.blocks) == 1:  # ids mean something in one group only
                size = self._groups[0].block_tokens
                self._invalid.update(load.blocks[0][(max(end, load.start) - loading.base) // size :])
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
            lookups = [lookup.hit for lookup in self._lookups.values()]
            transfers = bool(self._awaited) or (self._prompts is not None and self._prompts.under_way)
            under_way = bool(lookups) or bool(self._loading) or transfers
            some = any(lookup.done() for lookup in lookups) or any(x.done for x in self._loading.values())
            came = transfers and self._wakes != self._seen
            return some or came or not under_way

        until, came_last = time.monotonic() + IDLE_WAIT_S, True
        while came_last:
            awaited = len(self._awaited)
            with self._changed:
                self._changed.wait_for(something, until - time.monotonic())
            if awaited:
                self._receive()
            came_last = len(self._awaited) < awaited

    def _wake(self, _: object) -> None:
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _forget(self, epoch: str) -> None:
        """Have nothing found that was stored before: other weights wrote it. Shared tiers keep it."""
        self._epoch = epoch
        self._namespace = replace(self._base, revision=f"{self._base.revision}#{epoch}")
        self._hits.clear()
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


T = TypeVar("T")


def _result(transfer: Future[T]) -> T | None:
    """What a transfer that is done, or will be soon, came to; None if it failed."""
    try:
        return transfer.result()
    except CancelledError:
        return None
    except Exception as error:
        log.warning("a lookup, a load or a save failed: %s", error or type(error).__name__)
        return None


def _segments(hit: Hit) -> tuple[tuple[str, int], ...]:
    size = hit.chunks.chunk_tokens
    return tuple((s.tier, (s.stop - s.start) * size) for s in hit.plan.segments)
