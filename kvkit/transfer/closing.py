"""Closing a cache: finish pending work under one deadline, and log what is not saved."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvkit.transfer.write_pipeline import Batch, WriteJob, WritePipeline
from kvkit.workers import Workers

log = logging.getLogger(__name__)

TIERS_S = 1.0
"""Seconds reserved for closing the tiers, at most a quarter of the total time."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """Records that tiers do not have yet, and their bytes, by tier; false if there are none.

    Attributes:
        uncopied: number of records of pending stores that were not passed to any tier yet.
    """

    records: Counter[str]
    sizes: Counter[str]
    uncopied: int

    def __bool__(self) -> bool:
        return bool(self.uncopied or self.records.total())

    def __str__(self) -> str:
        descriptions = [
            f"{count} records ({self.sizes[tier] / 2**20:.1f} MiB) for tier {tier!r}"
            for tier, count in self.records.items()
        ]
        if self.uncopied:
            descriptions.append(f"{self.uncopied} records of stores that are not copied yet")
        return ", ".join(descriptions)


def close(writes: WritePipeline, background: Sequence[Workers], timeout_s: float) -> None:
    """Finish pending writes, end the threads and close the tiers, within `timeout_s` seconds in all.

    Logs what is to be saved before waiting, in case the process is killed meanwhile, and at the end what was
    not saved.

    Args:
        background: threads of lookups, prefetches, loads and stores.
    """
    until = time.monotonic() + timeout_s
    save_deadline = until - min(TIERS_S, timeout_s / 4)
    reason = f"after {timeout_s:.1f} s"
    try:
        if to_save := unsaved(writes):
            log.info("close: saving %s; at most %.1f s", to_save, timeout_s)
        for workers in background:
            workers.close(0.0)  # stops them all from taking new jobs before waiting for any
        for workers in background:
            if not workers.close(_left_s(save_deadline)):
                log.warning("close: a job of %r has not ended and is abandoned", workers.name)
        writes.outstanding.wait(_left_s(save_deadline))
    except BaseException as error:  # a second signal: SIGKILL may follow
        until, reason = time.monotonic(), f"before {type(error).__name__}"
        raise
    finally:
        cancelled = writes.close()
        writes.tiers.close(_left_s(until))
        if lost := unsaved(writes, cancelled):
            log.warning(
                "close: not saved %s, and lost: %s; want a larger shutdown_timeout_s, or a faster tier",
                reason,
                lost,
            )


def unsaved(writes: WritePipeline, cancelled: Sequence[WriteJob] = ()) -> Unsaved:
    """Count unended writes, cancelled ones, and `Unsaved.uncopied` records."""
    records, sizes = Counter[str](), Counter[str]()
    for job in cancelled:
        records[job.batch.tier] += 1
        sizes[job.batch.tier] += job.size
    for start, count in writes.outstanding.starts().items():
        if isinstance(start, Batch):
            records[start.tier] += count
            sizes[start.tier] += count * sum(f.record_bytes for f in start.formats) // len(start.formats)
    return Unsaved(records, sizes, writes.tiers.pending_stores.uncopied())


def _left_s(until: float) -> float:
    return max(0.0, until - time.monotonic())
