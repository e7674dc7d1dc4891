"""Copies of bytes between a GPU and the host, by the copy engine: in one call of the driver, or one by one.

One by one, a small copy takes torch longer than the engine. The driver takes batches from CUDA 12.8 on:
cuMemcpyBatchAsync in https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkit.environment import cuda_driver

log = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy: as many contiguous bytes of each."""

SYMBOLS = (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True))
"""Symbols of the call in the driver's library, CUDA 13's first, and whether it has the argument failIdx."""

UNSUPPORTED = (34, 36, 500, 801)
"""CUDA_ERROR_STUB_LIBRARY, _CALL_REQUIRES_NEWER_DRIVER, _NOT_FOUND and _NOT_SUPPORTED."""

LEGACY_STREAMS = (0, 1)
"""Handles of the legacy default stream, on which the driver refuses batches."""

NO_INDEX = 2**64 - 1
"""Value of failIdx if an error belongs to no copy."""


class CopyError(RuntimeError):
    """The driver refused a batch of copies, or earlier work failed. Names the call and the code."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes in cuda.h. Hints of locations count for managed and pageable memory only."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read after the work that is queued before.
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: an engine computes beside the copies.
_ATTRIBUTES = _Attributes(srcAccessOrder=1, flags=1)


class BatchedCopy:
    """The driver's call for many copies. Thread-safe.

    Args:
        driver: NVIDIA's driver library.

    Attributes:
        supported: whether the driver has the call, and has not answered yet that it does not support it.
    """

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver, self._lock = driver, threading.Lock()
        found = [(name, indexed) for name, indexed in SYMBOLS if hasattr(driver, name)]
        self.supported = bool(found)
        self._name, self._has_index = found[0] if found else ("", False)

    def queue(self, pairs: Sequence[Pair], stream: int) -> bool:
        """Queue copies on a stream of the current device, in any order; return whether the driver took them.

        If it answers that it does not support the call, this is logged, and the caller copies otherwise.

        Args:
            pairs: at least one. Host memory must be pinned, and stay allocated until the copies are done.
            stream: handle of the stream, not of the legacy default one.

        Raises:
            CopyError: any other error. Some of the copies may have been queued.
        """
        count, index = len(pairs), ctypes.c_size_t(NO_INDEX)
        # arrays of ctypes take longer to fill
        targets = array("Q", [target.data_ptr() for target, _ in pairs])
        sources = array("Q", [source.data_ptr() for _, source in pairs])
        sizes = array("Q", [target.nbytes for target, _ in pairs])
        error = getattr(self._driver, self._name)(
            *(ctypes.c_void_p(each.buffer_info()[0]) for each in (targets, sources, sizes)),
            ctypes.c_size_t(count),
            ctypes.byref(_ATTRIBUTES),
            ctypes.byref(ctypes.c_size_t(0)),  # the attributes count from copy 0 on
            ctypes.c_size_t(1),
            *([ctypes.byref(index)] if self._has_index else []),
            ctypes.c_void_p(stream),
        )
        if error in UNSUPPORTED:
            self._disable(error)
        elif error:
            which = "" if index.value == NO_INDEX else f", copy {index.value}"
            raise CopyError(f"{self._name} of {count} copies{which}: CUDA error {self._described(error)}")
        return not error

    def _disable(self, error: int) -> None:
        with self._lock:
            first, self.supported = self.supported, False
        if first:
            log.warning(
                "%s is not supported here (CUDA error %s): records are copied one by one, which is slower "
                "for small ones",
                self._name,
                self._described(error),
            )

    def _described(self, error: int) -> str:
        """Return an error's number and name."""
        name = ctypes.c_char_p()
        known = not self._driver.cuGetErrorName(ctypes.c_int(error), ctypes.byref(name))
        return f"{error} {name.value.decode()}" if known and name.value else str(error)


@functools.cache
def batched_copy() -> BatchedCopy | None:
    """Return this process's call for batches; None without NVIDIA's driver."""
    driver: Any = None if torch.version.hip else cuda_driver()
    return None if driver is None else BatchedCopy(driver)


def can_batch() -> bool:
    """Return whether the driver takes batches, of copies that are fit for them: see `Copies.run`."""
    found = batched_copy()
    return found is not None and found.supported


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies of contiguous bytes, by the GPU's copy engine if one side is host memory."""

    pairs: Sequence[Pair]

    def run(self) -> None:
        """Queue the copies on the current stream; one to or from pageable memory may wait for it.

        Several copies between a GPU and pinned memory are one call, unless the current stream is the default
        one or the driver takes no batches.

        Raises:
            CopyError: the driver refused the call, or earlier work on the GPU failed.
        """
        stream = _batch_stream(self.pairs)
        call = None if stream is None else batched_copy()
        if stream is None or call is None or not call.queue(self.pairs, stream):
            self.run_singly()

    def run_singly(self) -> None:
        """Queue the copies as `run` does, each by a call of its own."""
        for target, source in self.pairs:
            target.copy_(source, non_blocking=True)


def _batch_stream(pairs: Sequence[Pair]) -> int | None:
    """Return the handle of the stream for a batch of these copies; None: they have to run one by one.

    Pageable memory may be reused as soon as torch's copy returns, but not so after a batch.
    """
    if len(pairs) < 2 or not can_batch() or not all(_is_pinned(*pair) for pair in pairs):
        return None
    target, source = pairs[0]
    device = target.device if target.is_cuda else source.device
    stream = int(torch.cuda.current_stream(device).cuda_stream)
    return None if stream in LEGACY_STREAMS else stream


def _is_pinned(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a copy is between a GPU and pinned memory."""
    return target.is_cuda != source.is_cuda and (source if target.is_cuda else target).is_pinned()
