"""Which way records in pinned memory go to a GPU's pages and back: its copy engine's or a kernel's. Pure."""

from __future__ import annotations

from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config

COPY_ENGINE = host_config(PROGRAMS=0)
"""A copy of each record to or from a buffer on the GPU, and a kernel between that and the pages."""

KERNEL = host_config(PROGRAMS=16)
"""So many programs of a kernel that reaches the records itself: few, so that an engine's have room."""

WAYS = (COPY_ENGINE, *(host_config(PROGRAMS=count) for count in (8, 16, 32)))
"""Tuning times them alone: what takes more programs could win that, and starve an engine."""

SMALL_BYTES, MANY = 256 << 10, 16
"""Smaller records, if there are so many, are a kernel's where nothing was tuned.

On an H100 with PCIe 5 the kernel took 0.6 of the copy engine's time for 32 records of 128 KiB to the pages
and 0.42 from them, for as many of 1 MiB 0.93 and 0.90 (`make gpu`, step "moving"); but products that ran
beside it 1.4 and 1.9 times theirs, beside the copy engine 1.07. On an A30 other sizes are best:
https://github.com/vllm-project/vllm/issues/57555.
"""


def programs_of(way: KernelConfig) -> int:
    """Programs of the kernel, 0 where the copy engine moves the records."""
    return dict(way.tiles)["PROGRAMS"]


def untuned(record_bytes: int, records: int) -> KernelConfig:
    """The way where nothing was tuned."""
    return KERNEL if record_bytes < SMALL_BYTES and records >= MANY else COPY_ENGINE


def way_bucket(record_bytes: int, records: int, to_records: bool) -> ProblemBucket:
    """The moves that share a way, whatever the layout of the pages and the form of the records."""
    sizes = tuple(1 << (size - 1).bit_length() for size in (record_bytes, records))
    return ProblemBucket("pages_to_host" if to_records else "host_to_pages", "", sizes)
