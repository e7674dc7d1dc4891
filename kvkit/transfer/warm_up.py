"""Compiles and loads the kernels of the first load and store before a request waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkit.format import record
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import pack, unpack
from kvkit.staging import Lease
from kvkit.transfer.read_pipeline import MAX_IN_FLIGHT
from kvkit.transfer.sequence import ChunkRows, SequencePages

COUNTS = (1, MAX_IN_FLIGHT)
"""Numbers of chunks per move that select different kernels."""


def warm_up(pages: Sequence[SequencePages], formats: Sequence[RecordFormat], lease: Lease) -> None:
    """Pack and unpack chunks without tokens: all layers of a group, and one layer. Changes no pages.

    Args:
        pages, formats: one entry per layer group.
        lease: slot for payloads, at their usual offset; mutated.
    """
    for group, form in zip(pages, formats, strict=True):
        payload = record.payload(form, lease.array)
        for chunks in COUNTS:
            nowhere = np.full((chunks, group.table(form)[1]), -1, np.int64)
            rows: ChunkRows = {"slots": nowhere} if group.blocks is None else {"blocks": nowhere}
            for part, size in ((group.pages, len(payload)), (group.pages.layer(0), form.layer_bytes)):
                pack(part, [payload[:size]] * chunks, **rows, after=())
                unpack(part, [payload[:size]] * chunks, **rows, after=())
