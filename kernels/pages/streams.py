"""Streams of kvkit's own for moves between a GPU and the host, ordered with an engine's by events."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvkit.environment import cuda_driver, outside_captures

CudaEvents = Sequence[torch.cuda.Event]
"""Events that a move waits for."""


@functools.cache
def own_stream(device: torch.device, to_records: bool) -> torch.cuda.Stream:
    """Return this process's stream for moves in one direction, which runs beside an engine's work."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def marks(devices: Iterable[torch.device]) -> CudaEvents:
    """Record events after the work on this thread's current streams, one per GPU among `devices`.

    They order moves of another thread, because its current streams are not those of the engine.
    """
    gpus = {device for device in devices if device.type == "cuda"}
    return tuple(torch.cuda.current_stream(gpu).record_event() for gpu in gpus)


@contextmanager
def own(device: torch.device, to_records: bool, after: CudaEvents | None) -> Iterator[torch.cuda.Stream]:
    """Make `device` and kvkit's stream the current ones; at the end, wait for the stream by an event.

    Work queued within runs after the events `after`, or after the work on the current stream so far (None).
    After exit, even by an error, the GPU is done with the work: memory may be reused.
    """
    # the device first: else the stream's exit would return to GPU 0, and CUDA make a context there
    with torch.cuda.device(device), outside_captures():
        stream = own_stream(device, to_records)
        stream.query()  # gives a new thread the device's context, which `device_address` needs
        for event in marks([device]) if after is None else after:
            stream.wait_event(event)
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
            done.synchronize()  # sleeps: a spinning thread would take a core from the engine


def device_address(address: int) -> int | None:
    """Return the current device's address of host memory; None if kernels cannot reach it.

    They reach memory that is pinned and mapped, by an address that may differ from the host's:
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__UNIFIED.html.
    """
    driver, found = cuda_driver(), ctypes.c_uint64()
    if driver is None:
        return None
    attribute = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    error = driver.cuPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_uint64(address))
    return None if error else found.value
