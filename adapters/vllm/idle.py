"""The workers' side of an engine without a cache: nothing is looked up, loaded, saved or sent."""

from __future__ import annotations

from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.vllm.step import StepMetadata, WorkerReport


class IdleWorker:
    """A stand-in for `kvkit.adapters.vllm.worker.Worker` that does nothing and opens no tier."""

    def begin(self, step: StepMetadata) -> None:
        """Do nothing."""

    start_loads = save = begin

    def end_saves(self) -> None:
        """Do nothing."""

    end_reads = close = weights_changed = release_pages = restore_pages = end_saves

    def computed(self, name: str) -> None:
        """Do nothing."""

    wait_for_layer = computed

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Return no answer."""

    def finish(self, request_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Return that no request has ended."""
        return set(), set(), set()

    def invalid_blocks(self) -> set[int]:
        """Return no blocks."""
        return set()

    def report(self) -> WorkerReport | None:
        """Report nothing."""

    def open_blending(self, runner: Any) -> None:
        """Do nothing."""
