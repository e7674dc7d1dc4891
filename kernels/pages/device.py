"""Moves between pages on a GPU and records in any memory: by which engine, in batches, on which stream.

Records in host memory are moved by the GPU's copy engine through a buffer, or by a kernel of few programs
that accesses them itself. `kvkit tune` times both. Its results depend on the source of `steps`, on the names
in it, and on whether the driver takes copies in batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import streams
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.kernels.pages.copies import Copies, can_batch
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.tuning.configs import (
    KernelConfig,
    Launch,
    ProblemBucket,
    host_config,
    power_of_2,
    run_all,
)
from kvkit.kernels.tuning.tables import best

Record = NDArray[np.uint8] | torch.Tensor

BUFFER_BYTES = 64 << 20
"""Bytes of the GPU's buffer for records that the copy engine moves; a larger record gets a larger one."""

COPY_ENGINE = 0
"""Copies of the records to or from a buffer on the GPU, and a kernel between buffer and pages."""

KERNEL = 16
"""Programs of a kernel that accesses the records itself: few, so that an engine's kernels have room."""

PROGRAM_CHOICES = (COPY_ENGINE, 8, 16, 32)
"""Choices of the tuning: the copy engine, or so many programs of the kernel.

They are timed alone, where more programs could win, but would starve an engine."""

SMALL_BYTES, MANY = 256 << 10, 16
"""Without tuning, a kernel moves records that are smaller than this, if there are at least MANY.

On an H100 with PCIe 5, the kernel took 0.6 of the copy engine's time for 32 records of 128 KiB to the pages
and 0.42 from them; for 32 of 1 MiB, 0.93 and 0.90 (`make gpu`, step "moving"). But matrix products beside the
kernel took 1.4 and 1.9 times as long, and 1.07 beside the copy engine. On an A30 other sizes are best:
https://github.com/vllm-project/vllm/issues/57555.
"""

SMALL_IN_BATCH_BYTES = 64 << 10
"""The same where the driver takes copies in batches. An assumption, not measured: most of the copy engine's
time for small records was torch's call for each of them."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMove:
    """A pack (`to_records`) or unpack with arguments that `api` has checked.

    Args:
        ids: int64 [chunks, I], blocks or, with `slots`, each token's block * N + index in the block.
        turns: rotations of the keys; None: keys are not rotated.
    """

    pages: Pages
    ids: NDArray[np.int64]
    slots: bool
    to_records: bool
    turns: ResolvedRotation | None = None

    @property
    def record_alignment(self) -> int:
        """Bytes that a record's address must be a multiple of, for a kernel to access it."""
        return 1 if self.turns is None or self.pages.group.precision else self.pages.group.item_bytes

    def part(self, chunks: Sequence[int]) -> DeviceMove:
        """Return the move of some of the chunks, in ascending order."""
        if len(chunks) == len(self.ids):
            return self
        turns = self.turns and self.turns._replace(rows=self.turns.rows[chunks])
        return replace(self, ids=self.ids[chunks], turns=turns)

    def launch(self, addresses: Sequence[int], programs: int = 0) -> Launch:
        """Return the launch of the kernel for records at these device addresses. Uploads its small arrays.

        Args:
            programs: maximum number of programs, for slow memory; 0: a program for each tile.
        """
        from kvkit.kernels.pages import triton as kernels

        return kernels.move(
            self.pages,
            addresses,
            self.ids,
            self.to_records,
            slots=self.slots,
            rotation=self.turns,
            programs=programs,
        )


def move(
    wanted: DeviceMove,
    records: Sequence[Record],
    after: streams.CudaEvents | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Carry out a move as `api.pack` and `api.unpack` describe it. Mutates the records, or the pages.

    Tensors on the device are moved in the order of the current stream. With arrays among the records, all
    records are moved on a stream of kvkit's own, and the host waits.

    Args:
        after: events to wait for, instead of the work on the current stream so far.
        buffer_bytes: see `BUFFER_BYTES`.

    Raises:
        LaunchError: the current stream is capturing a graph; nothing was written.
    """
    device = wanted.pages.device
    tensors = [_tensor(record) for record in records]
    if device.type == "cpu":  # interpreted
        _run(wanted, tensors, [record.data_ptr() for record in tensors], buffer_bytes)
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "pages: the current stream is capturing a CUDA graph, and a replay would read block ids from "
                "freed memory: pack and unpack outside of it"
            )
        local_addresses = [record.data_ptr() if record.device == device else None for record in tensors]
        if None not in local_addresses:
            stream = torch.cuda.current_stream(device)
            for event in after or ():
                stream.wait_event(event)
            _run(wanted, tensors, local_addresses, buffer_bytes)
        else:
            with streams.own(device, wanted.to_records, after) as stream:
                programs = best_programs(len(tensors[0]), local_addresses.count(None), wanted.to_records)
                addresses = [
                    streams.device_address(record.data_ptr()) if address is None and programs else address
                    for address, record in zip(local_addresses, tensors, strict=True)
                ]
                _run(wanted, tensors, addresses, buffer_bytes, programs)
        for record in tensors:
            if record.device == device:
                record.record_stream(stream)


def _run(
    wanted: DeviceMove,
    records: Sequence[torch.Tensor],
    addresses: Sequence[int | None],
    buffer_bytes: int,
    programs: int = 0,
) -> None:
    """Run the steps of a move: a single launch where a kernel reaches all records, the usual case."""
    alignment = wanted.record_alignment
    found = [address for address in addresses if address is not None and address % alignment == 0]
    if len(found) == len(records):
        wanted.launch(found, programs).run()
    else:
        run_all(steps(wanted, records, addresses, buffer_bytes, programs))


def programs_config(programs: int) -> KernelConfig:
    """Return the configuration in tuned tables for a number of programs; 0: the copy engine."""
    return host_config(PROGRAMS=programs)


def untuned_programs(record_bytes: int, records: int, batched: bool) -> int:
    """Return the number of programs to use without tuning; 0: the copy engine.

    Args:
        batched: whether the driver takes copies in batches.
    """
    small_bytes = SMALL_IN_BATCH_BYTES if batched else SMALL_BYTES
    return KERNEL if record_bytes < small_bytes and records >= MANY else COPY_ENGINE


def transfer_bucket(record_bytes: int, records: int, to_records: bool, batched: bool) -> ProblemBucket:
    """Return the bucket of moves that share a tuned choice, for any layout of pages and any precision.

    Args:
        batched: whether the driver takes copies in batches: the copy engine is another with them.
    """
    sizes = power_of_2(record_bytes), power_of_2(records)
    form = "batched" if batched else ""
    return ProblemBucket("pages_to_host" if to_records else "host_to_pages", form, sizes)


def best_programs(record_bytes: int, records: int, to_records: bool) -> int:
    """Return the number of programs to move records in host memory: the tuned one, else the default."""
    choices, batched = {programs_config(programs): programs for programs in PROGRAM_CHOICES}, can_batch()
    bucket = transfer_bucket(record_bytes, records, to_records, batched)
    default = programs_config(untuned_programs(record_bytes, records, batched))
    return choices[best(bucket, default, choices, steps)]


def steps(
    wanted: DeviceMove,
    records: Sequence[torch.Tensor],
    addresses: Sequence[int | None],
    buffer_bytes: int,
    programs: int = 0,
) -> Iterator[Copies | Launch]:
    """Yield the steps of a move, to run in order on one stream; each is made when it is requested.

    Args:
        addresses: device address of each record; None if a kernel cannot or shall not use it.
        programs: most programs of the kernel for records with an address; 0: one for each tile.
    """
    group = wanted.pages.group
    aligned = 1 if wanted.turns is None or group.precision else group.item_bytes
    near = [i for i, address in enumerate(addresses) if address is not None and address % aligned == 0]
    if near:
        found = [address for i in near if (address := addresses[i]) is not None]
        yield wanted.part(near).launch(found, programs)
    rest = set(near)
    far = [i for i in range(len(records)) if i not in rest]
    if not far:
        return
    size = len(records[0])
    row_bytes = -(-size // 64) * 64
    turns = turns_of(len(far), row_bytes, buffer_bytes)
    rows = torch.empty(len(turns[0]), row_bytes, dtype=torch.uint8, device=wanted.pages.device)[:, :size]
    for turn in turns:
        chunks = [far[i] for i in turn]
        # skipped bytes stay unchanged: such a record is read into the buffer first
        read = [(not wanted.to_records) or bool((wanted.ids[i] < 0).any()) for i in chunks]
        ours = list(zip(rows, [records[i] for i in chunks], strict=False))
        yield Copies([(row, record) for (row, record), wants in zip(ours, read, strict=True) if wants])
        yield wanted.part(chunks).launch([row.data_ptr() for row, _ in ours])
        if wanted.to_records:
            yield Copies([(record, row) for row, record in ours])


def turns_of(count: int, each_bytes: int, buffer_bytes: int) -> list[range]:
    """Split `count` >= 1 records into ranges that fit a buffer, all but the last of equal length. Pure."""
    length = max(1, buffer_bytes // each_bytes)
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


def _tensor(record: Record) -> torch.Tensor:
    """Return a record's memory as a tensor, without torch's warning about read-only arrays."""
    if isinstance(record, torch.Tensor):
        return record
    if record.flags.writeable:  # the other way takes longer than the copy of a small record
        return torch.from_numpy(record)
    return torch.from_numpy(
        np.ctypeslib.as_array((ctypes.c_uint8 * len(record)).from_address(record.ctypes.data))
    )
