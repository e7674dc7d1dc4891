"""Reports of one rank for vLLM's KV events: which records its tiers hold, at the start and from then on."""

from __future__ import annotations

from collections.abc import Iterable

from kvkit.adapters.engine.changes import Changes
from kvkit.adapters.engine.listing import Listing
from kvkit.adapters.vllm.capability import Capability, WorkerContext
from kvkit.adapters.vllm.step import Listed

LISTED_PER_STEP = 32
"""Number of chunks from before the start that one step reports to the scheduler."""


class TierReports(Capability):
    """Reports of the records that the tiers of one rank hold, or no longer hold.

    Args:
        tiers: names of the tiers.
    """

    def __init__(self, context: WorkerContext, tiers: Iterable[str]) -> None:
        self._context = context
        self._changes = Changes()
        self._watches_all = context.cache.tier_set.subscribe(tuple(tiers), self._changes.note)
        held = self._changes.records
        context.report.watches = self._watches_all and not held
        self._listing: Listing | None = Listing(context.cache, held, context.namespace)

    def begin_epoch(self) -> None:
        self._end_listing()

    def add_to_report(self) -> None:
        report, rank = self._context.report, self._context.namespace.rank
        changes, lost = self._changes.take()
        report.changes += [(rank, change) for change in changes]
        if lost:
            report.watches = self._watches_all = False
        if self._listing is not None:
            self._report_listed(self._listing)

    def close(self) -> None:
        self._end_listing()

    @property
    def is_listing(self) -> bool:
        """True while chunks from before the start are left to report."""
        return self._listing is not None

    def _report_listed(self, listing: Listing) -> None:
        """Report the next chunks that tiers held before the start."""
        context, chunks = self._context, listing.take(LISTED_PER_STEP)
        is_complete = listing.done and listing.is_complete and self._watches_all
        if listing.done:
            self._end_listing()
        if chunks or is_complete:
            context.report.listed.append(Listed(context.namespace.rank, context.epoch, chunks, is_complete))

    def _end_listing(self) -> None:
        if self._listing is not None:
            self._listing.close()
            self._listing = None
