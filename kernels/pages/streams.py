"""Streams of kvkit's own for moves between a GPU and the host, in order with an engine's by events alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvkit.environment import cuda_driver, outside_captures

CudaEvents = Sequence[torch.cuda.Event]
"""What a move waits for."""


@functools.cache
def own_stream(device: torch.device, to_records: bool) -> torch.cuda.Stream:
    """The stream of this process for moves one way; what is on it runs beside an engine's work."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def marks(devices: Iterable[torch.device]) -> CudaEvents:
    """CudaEvents of what this thread's current streams have so far, one per GPU among `devices`.

    For who hands pages to another thread, whose current streams know nothing of the engine's.
    """
    gpus = {device for device in devices if device.type == "cuda"}
    return tuple(torch.cuda.current_stream(gpu).record_event() for gpu in gpus)


@contextmanager
def own(device: torch.device, to_records: bool, after: CudaEvents | None) -> Iterator[torch.cuda.Stream]:
    """Have the own stream be the current one, and `device` the current device; waits at the end, by an event.

    What is queued within runs after the events `after`, or after what the current stream has so far (None).
    Leaving it, even by an error, means that the GPU is done with it: memory may be reused.
    """
    # the device first: else the stream's context would go back to GPU 0, and CUDA make a context there
    with torch.cuda.device(device), outside_captures():
        stream = own_stream(device, to_records)
        stream.query()  # gives a new thread the device's context, which `device_address` asks
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
    """Where kernels of the current device find memory of the host; None if they cannot reach it.

    They reach what is pinned and mapped, by an address that may differ from the host's:
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__UNIFIED.html.
    """
    driver, found = cuda_driver(), ctypes.c_uint64()
    if driver is None:
        return None
    attribute = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    error = driver.cuPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_uint64(address))
    return None if error else found.value
