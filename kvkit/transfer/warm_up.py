"""Compile and load the kernels of the first load and store before a request waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkit.format import record
from kvkit.format.layout import LayerGroup
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.staging import Lease, Staging
from kvkit.transfer.read_pipeline import MAX_IN_FLIGHT
from kvkit.transfer.sequence import ChunkRows, SequencePages

COUNTS = (1, MAX_IN_FLIGHT)
"""Numbers of chunks per move that select different kernels."""


def warm_up(
    pages: Sequence[SequencePages], formats: Sequence[RecordFormat], staging: Staging, timeout_s: float
) -> None:
    """Pack and unpack chunks without tokens in a slot of `staging`. Changes no pages.

    Args:
        pages, formats: one entry per layer group.
        timeout_s: timeout of each wait for the slot.
    """
    staging.ready.wait(timeout_s)  # unpinned memory takes another code path
    (lease,) = staging.acquire(1, timeout_s)
    with lease:
        _move_nothing(pages, formats, lease)


def warm_up_cpu() -> None:
    """Load or compile the CPU kernels, so that the first request does not wait for this."""
    group = LayerGroup(layers=(0,), kv_heads=1, k_size=1, v_size=0, dtype="uint8", block_tokens=1)
    pages = Pages.of(group, group.pages(1))
    block = np.zeros((1, 1), np.int64)
    pack(pages, [np.zeros(1, np.uint8)], blocks=block)
    unpack(pages, [np.zeros(1, np.uint8)], blocks=block)


def _move_nothing(pages: Sequence[SequencePages], formats: Sequence[RecordFormat], lease: Lease) -> None:
    """Move all layers of each group, and one layer, at their usual offset in the slot. Mutates the slot."""
    for group, record_format in zip(pages, formats, strict=True):
        payload = record.payload(record_format, lease.array)
        for chunks in COUNTS:
            absent = np.full((chunks, group.table(record_format)[1]), -1, np.int64)
            rows: ChunkRows = {"slots": absent} if group.blocks is None else {"blocks": absent}
            one_layer = group.pages.layer(0), record_format.layer_bytes
            for moved_pages, size in ((group.pages, len(payload)), one_layer):
                pack(moved_pages, [payload[:size]] * chunks, **rows, after=())
                unpack(moved_pages, [payload[:size]] * chunks, **rows, after=())
