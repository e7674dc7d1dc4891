"""The workers' side: lookups, loads and saves of one rank, carried out by its `Cache`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from kvkit.adapters.vllm import groups, stats
from kvkit.adapters.vllm.messages import Answer, Ask, Load, Report, Save, Sequence, Step
from kvkit.adapters.vllm.settings import Settings
from kvkit.cache import Cache, Loaded, Stored
from kvkit.config import Config, ServerConfig, open_cache
from kvkit.layers import LayerLoad
from kvkit.layout import KVLayout, Namespace
from kvkit.sequence import Hit
from kvkit.transfers import Transfer

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.01
"""How long a step that computes nothing waits for a lookup or a load, so that the engine does not spin."""
SAVE_WAIT_S = 0.25
"""How long a step waits for the last one's saves while there are too few slots, before it calls them off."""


NOTHING = Loaded(0)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The answer to question `number`, to be given by `until` on the monotonic clock."""

    number: int
    hit: Transfer[Hit]
    until: float


@dataclass(slots=True)
class _Loading:
    """A load: by `transfer`, by `layers`, or by neither where it is done, or there was nothing to load.

    Attributes:
        base: token that its first chunk begins with.
        began: on the monotonic clock.
    """

    load: Load
    base: int
    began: float
    transfer: Transfer[Loaded] | None = None
    layers: LayerLoad | None = None
    result: Loaded = NOTHING

    @property
    def done(self) -> bool:
        return self.layers is None and (self.transfer is None or self.transfer.done())

    def cancel(self) -> None:
        """Have it end soon. The pages are in use until it is done."""
        if self.transfer is not None:
            self.transfer.cancel()

    def loaded(self) -> Loaded:
        """What was loaded; waits for it."""
        if self.layers is not None:
            for _ in self.layers:
                pass
            return self.layers.loaded
        return self.result if self.transfer is None else _result(self.transfer) or NOTHING


class Worker:
    """One rank's cache, and what is under way between it and vLLM's pages. For the thread that runs steps.

    Args:
        config: the tiers.
        settings: how to load.
        specs: of every layer, per KV cache group of vLLM.
        blocks: vLLM's blocks.
        namespace: given the layout, this rank's; without LoRA and salt.
        tells_stores: whether reports say what was stored.
    """

    def __init__(
        self,
        config: Config,
        settings: Settings,
        specs: list[dict[str, Any]],
        blocks: int,
        namespace: Callable[[KVLayout], Namespace],
        tells_stores: bool,
    ) -> None:
        self._config = config
        self._settings = settings
        self._specs = specs
        self._blocks = blocks
        self._namespace_of = namespace
        self._tells_stores = tells_stores
        self._stored: deque[tuple[str, str, int]] = deque()
        self._changed = threading.Condition()
        self._lookups: dict[str, _Lookup] = {}
        self._hits: dict[str, tuple[int, Hit]] = {}
        self._loading: dict[str, _Loading] = {}
        self._saving: list[Transfer[Stored]] = []
        self._patience_s = SAVE_WAIT_S
        self._kept: set[str] = set()
        self._sent: set[str] = set()
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
        layout, self._groups = groups.group_pages(self._specs, tensors, self._blocks, opaque)
        self._namespace = self._base = self._namespace_of(layout)
        first = self._namespace.rank == 0
        # one rank's endpoint is enough, and a port takes one
        config = self._config if first else self._config.model_copy(update={"server": ServerConfig()})
        self.cache: Cache = open_cache(config, layout, self._namespace)
        self._stats = stats.Recorder(self.cache, counts_tokens=first)
        self._number = {
            name: layer
            for group in self._groups
            for name, layer in zip(group.names, group.pages.group.layers, strict=True)
        }
        self._cuda = self._groups[0].pages.device.type == "cuda"

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

    def begin(self, step: Step) -> None:
        """Start the lookups of a step."""
        self.settle()
        if step.epoch != self._epoch:
            self._forget(step.epoch)
        for ask in step.asks:
            self._look_up(ask)

    def start_loads(self, step: Step) -> None:
        """Start the loads of a step; where the step waits for them, return when they are done."""
        for load in step.loads:
            number, hit = self._hits.pop(load.request, (0, None))
            chunk = self._namespace.chunk_tokens
            first, last = load.start // chunk, -(-load.stop // chunk)
            loading = _Loading(load, first * chunk, time.monotonic())
            if hit is not None and number == load.number:
                part = hit.part(first, last)
                tokens = (last - first) * chunk
                places = [group.place(load.blocks[group.table], tokens) for group in self._groups]
                if self._settings.load == "layerwise":
                    loading.layers = self.cache.load_layers(part, places)
                elif self._settings.load == "sync":
                    # in this thread, so in the order of the engine's stream, which may be zeroing the pages
                    loading.result = self.cache.load(part, places)
                else:
                    loading.transfer = self.cache.load_async(part, places)
                    loading.transfer.add_done_callback(self._wake)
            self._loading[load.request] = loading
        if self._settings.load == "sync":
            self._finish_all(step.number)

    def wait_for_layer(self, name: str) -> None:
        """Return when a layer is loaded, for every load of this step."""
        for loading in self._loading.values():
            for number in loading.layers or ():
                if number == self._number[name]:
                    break

    def save(self, step: Step) -> None:
        """Start the saves of a step; they read the pages until `settle`."""
        self._kept.update(save.request for save in step.saves if save.last)
        if self._settings.load == "layerwise":
            self._finish_all(step.number)
        if self._failed_step > step.heard:
            return  # what was computed since may rest on tokens that were not loaded
        ready = self._forward_done() if step.saves else None
        for save in step.saves:
            self._save(save, ready)
        if step.idle:
            self._rest()

    def finish(self, requests: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Forget requests. Returns those whose loads are done, and those among them that got less.

        The third set is of those whose blocks were kept for a last save, and no longer need to be.
        """
        for name in requests:
            self._hits.pop(name, None)
            if name in self._lookups:
                self._lookups.pop(name).hit.cancel()
            if name in self._loading:
                self._loading[name].cancel()
        done = {name for name, loading in self._loading.items() if loading.done}
        sent, self._sent = self._sent, set()
        return done, {name for name in done if not self._finish(self._loading.pop(name))}, sent

    def invalid_blocks(self) -> set[int]:
        """Blocks that were to be loaded since the last call and hold nothing."""
        found, self._invalid = self._invalid, set()
        return found

    def report(self) -> Report | None:
        """What the scheduler does not know yet."""
        answers = []
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
            if hit is not None:
                self._hits[name] = lookup.number, hit
            tokens, segments = (0, ()) if hit is None else (hit.tokens, _segments(hit))
            answers.append(Answer(name, lookup.number, self._namespace.rank, tokens, segments))
        failed, self._failed = self._failed, []
        failed_step = self._failed_step if self._failed_step != self._told_step else 0
        self._told_step = self._failed_step
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        if not answers and not failed and not failed_step and not stored:
            return None
        return Report(answers, failed, failed_step, stored)

    def take_stats(self) -> stats.Stats | None:
        """What was counted since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Finish what was started and close the cache."""
        self.cache.close()

    def _look_up(self, ask: Ask) -> None:
        timeout_s = self._settings.lookup_timeout_s
        # a save that takes longer than half of the time shall not cost what the tiers have already
        hit = self.cache.lookup_async(ask.sequence.tokens, self._space(ask.sequence), wait_s=timeout_s / 2)
        hit.add_done_callback(self._wake)
        if ask.request in self._lookups:  # nobody waits for the answer to an earlier question
            self._lookups[ask.request].hit.cancel()
        self._lookups[ask.request] = _Lookup(ask.number, hit, time.monotonic() + timeout_s)

    def _save(self, save: Save, ready: Callable[[], object] | None) -> None:
        sequence, began = save.sequence, time.monotonic()
        tokens = len(sequence.tokens) - save.first * self._namespace.chunk_tokens
        transfer = self.cache.store_async(
            sequence.tokens,
            [group.place(save.blocks[group.table], tokens) for group in self._groups],
            self._space(sequence),
            first=save.first,
            ready=ready,
            on_stored=self._note_stored(save) if self._tells_stores else None,
            copy_first=True,
        )
        transfer.add_done_callback(lambda done: self._stats.stored(_result(done), time.monotonic() - began))
        self._saving.append(transfer)

    def _note_stored(self, save: Save) -> Callable[[str, int], None]:
        return lambda tier, chunk: self._stored.append((save.request, tier, save.first + chunk))

    def _finish_all(self, step: int) -> None:
        """End the loads that a step waits for."""
        for name in list(self._loading):
            if not self._finish(self._loading.pop(name)):
                self._failed_step = step

    def _finish(self, loading: _Loading) -> bool:
        """Note how a load ended; whether it kept its promise."""
        loaded, load = loading.loaded(), loading.load
        end = min(loading.base + loaded.tokens, load.stop)
        kept = end == load.stop
        self._stats.loaded(loaded, time.monotonic() - loading.began, kept)
        if not kept:
            log.warning("%s: loaded up to token %d of %d", load.request, max(end, load.start), load.stop)
            self._failed.append(load.request)
            if len(load.blocks) == 1:  # ids mean something in one group only
                size = self._groups[0].block_tokens
                self._invalid.update(load.blocks[0][(max(end, load.start) - loading.base) // size :])
                self._invalid.discard(-1)
        return kept

    def _forward_done(self) -> Callable[[], object] | None:
        """What waits until the pages hold what this step computes; None: they do."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def _rest(self) -> None:
        """Wait a little for a lookup or a load."""

        def something() -> bool:
            lookups = [lookup.hit for lookup in self._lookups.values()]
            under_way = bool(lookups) or bool(self._loading)
            some = any(lookup.done() for lookup in lookups) or any(x.done for x in self._loading.values())
            return some or not under_way

        with self._changed:
            self._changed.wait_for(something, IDLE_WAIT_S)

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _forget(self, epoch: str) -> None:
        """Have nothing found that was stored before: other weights wrote it. Shared tiers keep it."""
        self._epoch = epoch
        self._namespace = replace(self._base, revision=f"{self._base.revision}#{epoch}")
        self._hits.clear()
        for name, tier in self.cache.tiers.items():
            if tier.near:
                self.cache.clear(name)

    def _space(self, sequence: Sequence) -> Namespace:
        return replace(self._namespace, lora=sequence.lora, salt=sequence.salt)


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
