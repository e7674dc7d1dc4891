"""Staging memory: fixed-size slots of one arena, leased and returned, with a timeout on waits."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkit.environment import outside_captures
from kvkit.workers import ForkGuard, Stopped

log = logging.getLogger(__name__)
PAGE_BYTES = mmap.PAGESIZE
RECLAIM_S = 0.25
"""Interval, in seconds, at which a waiting caller asks others to release slots."""
_PREFAULT_BYTES = 8 << 20
_HUGE_PAGE = 2 << 20
_TRIES = 64
"""Attempts to map memory at a multiple of `_HUGE_PAGE`."""
_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of cudaHostRegister: pinned for every GPU of the process, and mapped for their kernels."""


class StagingError(ValueError):
    """A size is invalid, or a lease is used after its release."""


class StagingTimeout(TimeoutError):
    """Too few slots came free before the deadline."""


class Lease:
    """A reference to a slot. The slot returns to the arena when its last reference is released.

    A context manager that releases the lease. `array` and `buffer` are valid until the release.

    Attributes:
        slot: index of the slot.
    """

    __slots__ = ("_arena", "_released", "slot")

    def __init__(self, arena: Arena, slot: int) -> None:
        self._arena = arena
        self._released = False
        self.slot = slot

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory of the slot, uint8 [slot_bytes]."""
        array: npt.NDArray[np.uint8] = self._arena.arrays[self.slot]
        return array

    @property
    def buffer(self) -> memoryview:
        """The memory of the slot, as a memoryview."""
        return self._arena.view(self.slot)

    @property
    def used(self) -> int:
        """Bytes of the slot that hold a record; shared by all references to the slot."""
        return self._arena.used[self.slot]

    @used.setter
    def used(self, size: int) -> None:
        self._arena.used[self.slot] = size

    @property
    def record(self) -> npt.NDArray[np.uint8]:
        """The first `used` bytes of the slot."""
        return self.array[: self.used]

    def same_slot(self, other: Lease) -> bool:
        """Return whether both leases refer to the same slot."""
        return self._arena is other._arena and self.slot == other.slot

    def share(self) -> Lease:
        """Return another reference to the slot, to be released separately."""
        return self._arena._share(self)

    def release(self) -> None:
        """Release this reference.

        Raises:
            StagingError: it was released before.
            Forked: this is a fork of the process that has the arena.
        """
        self._arena._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.release()


def release_all(leases: Iterable[Lease]) -> None:
    """Release all of `leases`."""
    for lease in leases:
        lease.release()


class Arena(ABC):
    """Slots of one memory, with a reference count each. Thread-safe.

    A background thread faults in the memory and, if CUDA is available, pins it through the GPU that is
    current where the arena is created. An arena belongs to the process that created it: in a fork, lease
    operations raise `Forked`.

    Args:
        memory: memory of a multiple of `slot_bytes` bytes.
        slot_bytes: bytes of a slot, a multiple of the page size.
        name: the arena's name in errors.

    Attributes:
        arrays: the memory, uint8 [slots, slot_bytes].
        used: bytes of each slot that hold a record.
    """

    def __init__(self, memory: mmap.mmap, slot_bytes: int, name: str) -> None:
        self._memory = memory
        with suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._fork_guard = ForkGuard(name)
        self.slot_bytes = slot_bytes
        self.slots = len(memory) // slot_bytes
        self.arrays = np.frombuffer(memory, np.uint8).reshape(self.slots, slot_bytes)
        self._whole = memoryview(memory)
        self.used = [0] * self.slots
        self._references = [0] * self.slots
        self._changed = threading.Condition()
        self._closed = False
        self._pinned: int | None = None  # the address registered with CUDA
        self._gpu = _current_gpu()
        self.ready = threading.Event()
        self._prefaulter = threading.Thread(target=self._prefault_and_pin, name="kvkit-prefault", daemon=True)
        self._prefaulter.start()

    @property
    def buffers(self) -> list[memoryview]:
        """The memory of every slot."""
        return [self.view(slot) for slot in range(self.slots)]

    def view(self, slot: int) -> memoryview:
        """Return the memory of a slot."""
        return self._whole[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def close(self) -> None:
        """Refuse new leases and wake waiting callers. The memory lives until its last view is gone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._prefaulter.join()
        if self._pinned is not None:
            import torch

            with torch.cuda.device(self._gpu), outside_captures():
                torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None

    @abstractmethod
    def _release(self, lease: Lease) -> None:
        """`Lease.release`."""

    def _share(self, lease: Lease) -> Lease:
        self._fork_guard.check()
        with self._changed:
            if lease._released:
                raise StagingError(f"slot {lease.slot}: shared after its release")
            self._references[lease.slot] += 1
            return Lease(self, lease.slot)

    def _drop_reference(self, lease: Lease) -> bool:
        """Drop a reference, under the lock; return whether it was the slot's last."""
        if lease._released:
            raise StagingError(f"slot {lease.slot}: released twice")
        lease._released = True
        self._references[lease.slot] -= 1
        return not self._references[lease.slot]

    def _prefault_and_pin(self) -> None:
        """Fault in the memory, and pin it for a GPU."""
        prefault(self._memory, lambda: self._closed)
        try:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_available() and not self._closed:
                self._pin(torch.cuda)
        except RuntimeError as error:  # from torch, such as in a fork of a process that used CUDA
            log.warning("staging memory could not be pinned (%s); transfers are slower", error)
        finally:
            self.ready.set()

    def _pin(self, cuda: Any) -> None:
        """Pin the memory with CUDA, given the module `torch.cuda`."""
        address = self.arrays[0].ctypes.data
        # a new thread starts on GPU 0, and would create a context there for every rank of an engine
        with cuda.device(self._gpu), outside_captures():
            error = int(cuda.cudart().cudaHostRegister(address, len(self._memory), _PORTABLE_AND_MAPPED))
        if error:
            raise RuntimeError(f"CUDA error {error}")
        self._pinned = address


class Staging(Arena):
    """An arena of `slots` slots of `slot_bytes` bytes (rounded up to whole pages). Thread-safe.

    Construction returns at once; a background thread faults in the memory. A fork's writes to a slot never
    reach this memory.

    Args:
        shared: put the memory in an anonymous file (memfd), for other processes of this host to map. Its size
            is fixed, and it is freed with the last process that has it. Forks do not map it: touching a slot
            in one causes SIGSEGV.

    Attributes:
        descriptor: file descriptor of a shared arena until `close`, else None.

    Raises:
        StagingError: a size is below 1.
        OSError: the memory is not available.
    """

    def __init__(self, slot_bytes: int, slots: int, *, shared: bool = False) -> None:
        if slot_bytes < 1 or slots < 1:
            raise StagingError(f"slot_bytes={slot_bytes}, slots={slots}: want at least 1 of each")
        slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        size = slot_bytes * slots
        self.descriptor = _sealed_memory(size) if shared else None
        if self.descriptor is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = map_shared(self.descriptor, size)
            keep_from_forks(memory)
        self._free = deque(range(slots))
        self._waiting: deque[object] = deque()
        self._reclaims: list[Callable[[int], None]] = []
        self._when_freed: list[Callable[[], None]] = []
        super().__init__(memory, slot_bytes, "this staging arena")

    @property
    def free(self) -> int:
        """Number of slots without a lease."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """Number of callers of `acquire` that wait for slots."""
        return len(self._waiting)

    def on_shortage(self, reclaim: Callable[[int], None]) -> None:
        """Register `reclaim`, called with the number of missing slots before a caller waits for them.

        The caller counts in `waiting` before `reclaim` is called, so a holder that keeps slots after that can
        check `waiting`.
        """
        with self._changed:
            self._reclaims.append(reclaim)

    def off_shortage(self, reclaim: Callable[[int], None]) -> None:
        """Unregister `reclaim`."""
        with self._changed:
            self._reclaims.remove(reclaim)

    def when_freed(self, freed: Callable[[], None]) -> None:
        """Register `freed`, called by the releasing thread after a slot came free. It must not raise."""
        with self._changed:
            self._when_freed.append(freed)

    def acquire(
        self, at_most: int, timeout_s: float, at_least: int = 1, stopped: Callable[[], bool] = lambda: False
    ) -> list[Lease]:
        """Lease `at_least` slots, or a multiple up to `at_most` if free; wait only for `at_least`.

        First come, first served. To avoid deadlocks, callers must not wait while holding leases: they use and
        release the slots they get before they acquire more.

        Args:
            stopped: returns whether to end the wait; must not take locks. Call `wake` when it may have become
                true.

        Raises:
            Forked: this is a fork of the process that has the arena.
            Stopped: `stopped` ended the wait.
            StagingTimeout: fewer than `at_least` slots came free within `timeout_s` seconds.
            StagingError: the arena is closed or has fewer than `at_least` slots, or `at_most` is below
                `at_least`.
        """
        if not 1 <= at_least <= min(at_most, self.slots):
            raise StagingError(
                f"at_least={at_least}, at_most={at_most}: want 1 <= at_least <= at_most, "
                f"and no more than the {self.slots} slots of the arena"
            )
        self._fork_guard.check()
        deadline = time.monotonic() + timeout_s
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)

        def ready() -> bool:
            return self._closed or (self._waiting[0] is ticket and len(self._free) >= at_least)

        try:
            while True:
                missing = at_least - len(self._free)
                for reclaim in tuple(self._reclaims) if missing > 0 else ():
                    reclaim(missing)
                with self._changed:
                    remaining_s = deadline - time.monotonic()
                    self._changed.wait_for(lambda: ready() or stopped(), min(remaining_s, RECLAIM_S))
                    if ready():
                        return self._lease(min(at_most, len(self._free)) // at_least * at_least)
                    if stopped():
                        raise Stopped
                    if remaining_s <= RECLAIM_S:
                        raise StagingTimeout(
                            f"{at_least} of {self.slots} slots did not come free within {timeout_s} s"
                        )
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def wake(self) -> None:
        """Make waiting callers check again whether they were stopped."""
        with self._changed:
            self._changed.notify_all()

    def check_integrity(self) -> None:
        """Check that no slot is lost or counted twice.
        Raises AssertionError if one is, which is a defect in kvkit."""
        with self._changed:
            free = Counter(self._free)
            for slot, references in enumerate(self._references):
                assert references >= 0, f"slot {slot} has {references} references"
                assert free[slot] == (references == 0), (
                    f"slot {slot}: {references} references, free {free[slot]} times"
                )

    def close(self) -> None:
        super().close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _lease(self, count: int) -> list[Lease]:
        if self._closed:
            raise StagingError("the staging arena is closed")
        slots = [self._free.popleft() for _ in range(count)]
        for slot in slots:
            self._references[slot] = 1
            self.used[slot] = 0
        return [Lease(self, slot) for slot in slots]

    def _release(self, lease: Lease) -> None:
        self._fork_guard.check()
        with self._changed:
            if not self._drop_reference(lease):
                return
            self._free.appendleft(lease.slot)  # the slot used last is the one in cache
            self._changed.notify_all()
            callbacks = tuple(self._when_freed)
        for callback in callbacks:
            callback()


def _current_gpu() -> int:
    """Return the calling thread's CUDA device, or 0 if CUDA is unused so far. Does not initialise CUDA."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0


def prefault(memory: mmap.mmap, stopped: Callable[[], bool], start: int = 0, stop: int | None = None) -> None:
    """Fault in bytes `start` to `stop` (None: the end) in pieces, until `stopped`, and make huge pages.

    The first touch of a page costs more than a copy of it; on a virtual machine it can cost a thousand times
    as much. Memory of files gets huge pages only on request by default; reads from them take half the time.

    Calls madvise through ctypes, because Python's own blocks all other threads meanwhile.
    """
    populate, collapse = getattr(mmap, "MADV_POPULATE_WRITE", 23), getattr(mmap, "MADV_COLLAPSE", 25)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    base: int = np.frombuffer(memory, np.uint8).ctypes.data
    end = len(memory) if stop is None else stop
    for first in range(start, end, _PREFAULT_BYTES):
        size = min(_PREFAULT_BYTES, end - first)
        # fails before Linux 5.14: pages are then faulted in on use
        if stopped() or madvise(base + first, size, populate):
            break
        aligned = -(-(base + first) // _HUGE_PAGE) * _HUGE_PAGE
        pages = (base + first + size - aligned) // _HUGE_PAGE
        if pages > 0 and not stopped():  # fails before Linux 6.1, and if no huge pages are left
            madvise(aligned, pages * _HUGE_PAGE, collapse)


def map_shared(descriptor: int, size: int, offset: int = 0) -> mmap.mmap:
    """Map a file, if possible at a multiple of the huge page size, as `prefault` needs it.

    `mmap.mmap` takes no address, and Linux maps right below the previous mapping, so padding mappings in
    between move the next one.
    """
    memory = mmap.mmap(descriptor, size, offset=offset)
    padding: list[mmap.mmap] = []
    with suppress(OSError):  # no address space left for another try
        for _ in range(_TRIES):
            start: int = np.frombuffer(memory, np.uint8).ctypes.data
            if not start % _HUGE_PAGE:
                break
            # too large to fit between other mappings
            gap = (start - size) % _HUGE_PAGE + 16 * _HUGE_PAGE
            padding += [memory, mmap.mmap(-1, gap, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)]
            memory = mmap.mmap(descriptor, size, offset=offset)
    return memory


def keep_from_forks(memory: mmap.mmap) -> None:
    """Keep forks from mapping `memory`, and from unmapping their own memory at its address."""
    memory.madvise(mmap.MADV_DONTFORK)
    os.register_at_fork(after_in_child=partial(_keep_alive_in_fork, weakref.ref(memory)))


def _keep_alive_in_fork(memory: weakref.ref[mmap.mmap]) -> None:
    """Keep the mmap object alive forever in a fork, by a reference from an at-fork hook."""
    os.register_at_fork(before=partial(id, memory()))


def _sealed_memory(size: int) -> int:
    """Create a memfd of `size` bytes that nobody can truncate while others map it."""
    descriptor = os.memfd_create("kvkit-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
