"""Ways of records between pinned memory and a GPU's pages: the copy engine or a kernel. Pure."""

from __future__ import annotations

from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config

COPY_ENGINE = 0
"""A copy of each record to or from a buffer on the GPU, and a kernel between buffer and pages."""

KERNEL = 16
"""Programs of a kernel that reaches the records itself: few, so that an engine's have room."""

WAYS = (COPY_ENGINE, 8, 16, 32)
"""Ways to tune. They are timed alone, where more programs could win, but would starve an engine."""

SMALL_BYTES, MANY = 256 << 10, 16
"""Without tuning, a kernel moves records that are smaller than this, if there are at least MANY.

On an H100 with PCIe 5, the kernel took 0.6 of the copy engine's time for 32 records of 128 KiB to the pages
and 0.42 from them; for 32 of 1 MiB, 0.93 and 0.90 (`make gpu`, step "moving"). But matrix products beside the
kernel took 1.4 and 1.9 times as long, and 1.07 beside the copy engine. On an A30 other sizes are best:
https://github.com/vllm-project/vllm/issues/57555.
"""


def entry(way: int) -> KernelConfig:
    """Return the entry of tuned tables for a way."""
    return host_config(PROGRAMS=way)


def untuned(record_bytes: int, records: int) -> int:
    """Return the way to use without tuning."""
    return KERNEL if record_bytes < SMALL_BYTES and records >= MANY else COPY_ENGINE


def way_bucket(record_bytes: int, records: int, to_records: bool) -> ProblemBucket:
    """Return the bucket of moves that share a way, for any layout of pages and form of records."""
    sizes = tuple(1 << (size - 1).bit_length() for size in (record_bytes, records))
    return ProblemBucket("pages_to_host" if to_records else "host_to_pages", "", sizes)
