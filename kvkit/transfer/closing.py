"""Closing a cache: finish pending work under one deadline, and log what is not saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvkit.transfer.write_pipeline import WritePipeline
from kvkit.workers import Workers

log = logging.getLogger(__name__)

TIERS_S = 1.0
"""Seconds reserved for closing the tiers, at most a quarter of the total time."""


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
        if unsaved := writes.unsaved():
            log.info("close: saving %s; at most %.1f s", unsaved, timeout_s)
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
        if lost := cancelled + writes.unsaved():
            log.warning(
                "close: not saved %s, and lost: %s; want a larger shutdown_timeout_s, or a faster tier",
                reason,
                lost,
            )


def _left_s(until: float) -> float:
    return max(0.0, until - time.monotonic())
