"""Have what the first load and store will start compiled and loaded before a request waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkit.format import record
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import pack, unpack
from kvkit.moving.reads import MAX_IN_FLIGHT
from kvkit.moving.sequence import ChunkRows, SequencePages
from kvkit.staging import Lease

COUNTS = (1, MAX_IN_FLIGHT)
"""Chunks of a move, whose number has a part in how it is done."""


def warm_up(pages: Sequence[SequencePages], formats: Sequence[RecordFormat], lease: Lease) -> None:
    """Pack and unpack chunks of no tokens: all of a group's layers, and one. Pages stay as they are.

    Args:
        pages, formats: a layer group each.
        lease: of a slot, in which payloads lie as they will; mutated.
    """
    for group, form in zip(pages, formats, strict=True):
        payload = record.payload(form, lease.array)
        for chunks in COUNTS:
            nowhere = np.full((chunks, group.table(form)[1]), -1, np.int64)
            rows: ChunkRows = {"slots": nowhere} if group.blocks is None else {"blocks": nowhere}
            for part, size in ((group.pages, len(payload)), (group.pages.layer(0), form.layer_bytes)):
                pack(part, [payload[:size]] * chunks, **rows, after=())
                unpack(part, [payload[:size]] * chunks, **rows, after=())
