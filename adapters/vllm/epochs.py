"""Epochs of one engine's KV: resets, new weights and versions of weights begin them."""

from __future__ import annotations

import logging

from kvkit.adapters.engine.epoch_names import EpochNames
from kvkit.adapters.vllm.engine import VllmEngine
from kvkit.adapters.vllm.events import Events
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.step import WorkerReport

log = logging.getLogger(__name__)


class Epochs:
    """The epochs of the scheduler's side. KV of earlier epochs is not found any more."""

    def __init__(self, scheduler: Scheduler, engine: VllmEngine, events: Events | None) -> None:
        self._scheduler, self._engine, self._events = scheduler, engine, events
        self._names = EpochNames()
        self._warned = False

    def note_computed(self) -> None:
        """Note that a step computes KV."""
        self._names.note_computed()

    def update_from_workers(self, report: WorkerReport) -> None:
        """Begin an epoch if the weights of the workers changed in the current one."""
        if report.new_weights == self._scheduler.epoch:
            log.warning("the model's weights changed without a reset of the cache: kvkit resets it")
            self.reset()

    def reset(self) -> None:
        """Begin an epoch, so that KV stored before is not found.

        If the weights got a version and no KV was computed since, the version's epoch stays: its KV is valid.
        """
        self._begin(self._names.reset())

    def falls_asleep(self) -> None:
        """Note that the next reset is that of a sleep over which the weights stay, and so does the epoch."""
        self._names.falls_asleep()

    def wakes_up(self) -> None:
        """Note that the next reset is no sleep's."""
        self._names.wakes_up()

    def weights_changed(self) -> None:
        """Begin an epoch for weights without a version."""
        self._begin(self._names.weights_changed())

    def set_weight_version(self, version: str) -> None:
        """Begin the epoch that engines with this version of the weights share."""
        self._begin(self._names.set_weight_version(version), shared=True)

    def own_cache_reset(self) -> None:
        """Warn, once, that vLLM's own prefix cache was reset without kvkit's tiers."""
        if not self._warned:
            self._warned = True
            log.warning(
                "vLLM's own prefix cache was reset, but KV in kvkit's tiers stays: if the weights have "
                "changed, reset with reset_connector, or give them a version"
            )

    def _begin(self, epoch: str, shared: bool = False) -> None:
        """Begin an epoch. `shared`: True if other engines may have stored KV in it."""
        self._scheduler.begin_epoch(epoch, self._engine.keeps_cached_blocks())
        if self._events is not None:
            self._events.begin_epoch(epoch, complete=not shared)
