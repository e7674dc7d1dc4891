"""Wrappers that make any tier slow, or faulty by a plan, for tests of code that uses tiers."""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from kvkit.staging import Lease, release_all
from kvkit.tiers.base import OnComplete, Ranges, Tier, complete

_Start = Callable[[Sequence[Lease], OnComplete], None]


def _delegated(method: str) -> Callable[..., Any]:
    """Return a method of `Wrapper` that calls that of the same name of the inner tier."""

    def call(self: Wrapper, *args: Any, **named: Any) -> Any:
        return getattr(self.inner, method)(*args, **named)

    return call


class Wrapper(Tier):
    """A tier that delegates to `inner`; a base class for changing single operations."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        for attribute in Tier.__annotations__:
            setattr(self, attribute, getattr(inner, attribute))

    def limit(self, slot_bytes: int) -> None:
        super().limit(slot_bytes)
        self.inner.limit(slot_bytes)

    match_prefix = _delegated("match_prefix")
    get = _delegated("get")
    put = _delegated("put")
    delete = _delegated("delete")
    size = _delegated("size")
    scan = _delegated("scan")
    borrow = _delegated("borrow")
    get_ranges = _delegated("get_ranges")
    waiting = _delegated("waiting")
    subscribe = _delegated("subscribe")
    pin = _delegated("pin")
    prioritise = _delegated("prioritise")
    note_request = _delegated("note_request")
    note_answer = _delegated("note_answer")
    describe = _delegated("describe")
    close = _delegated("close")


class LatencyTier(Wrapper):
    """A tier that delays each get, put and lookup of `inner`.

    Closing does not wait for the delays: delayed operations start at once.

    Args:
        inner: the tier.
        get_s, put_s: seconds before each batch of gets or puts starts.
        run_s: seconds before each lookup is answered.
    """

    def __init__(self, inner: Tier, *, get_s: float = 0.0, put_s: float = 0.0, run_s: float = 0.0) -> None:
        super().__init__(inner)
        self._get_s, self._put_s, self._run_s = get_s, put_s, run_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._delayed: set[threading.Thread] = set()

    def match_prefix(self, names: Sequence[str]) -> int:
        self._closing.wait(self._run_s)
        return self.inner.match_prefix(names)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._start_later(self._get_s, partial(self.inner.get, names), leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._start_later(self._put_s, partial(self.inner.put, names), leases, on_complete)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            delayed = list(self._delayed)
        for thread in delayed:
            thread.join()
        self.inner.close()

    def _start_later(
        self, seconds: float, start: _Start, leases: Sequence[Lease], on_complete: OnComplete
    ) -> None:
        """Start an operation after a delay, with shares of its slots."""
        shares = [lease.share() for lease in leases]

        def wait_and_start() -> None:
            self._closing.wait(seconds)
            start(shares, on_complete)
            release_all(shares)
            with self._lock:
                self._delayed.discard(thread)

        thread = threading.Thread(target=wait_and_start, name=f"kvkit-{self.name}-later", daemon=True)
        with self._lock:
            self._delayed.add(thread)
            thread.start()


class Fault(StrEnum):
    """A fault of one operation on one object.

    FAIL: it fails with OSError. HANG: it waits for `FaultyTier.release`, then proceeds as usual. FLIP: a get
    returns one wrong bit. TRUNCATE: a get returns the first half. DROP: a put completes but stores nothing.
    """

    FAIL = "fail"
    HANG = "hang"
    FLIP = "flip"
    TRUNCATE = "truncate"
    DROP = "drop"


Plan = Callable[[str, str], Fault | None]
"""(operation, object name) -> the fault, or None. Called from any thread.

Operations: "count" (`match_prefix`, with the first object's name), "get", "put", "delete", "size".
"""


def random_plan(seed: int, share: float, faults: dict[str, Sequence[Fault]]) -> Plan:
    """Return a plan that gives a `share` (0 to 1) of the objects one of `faults[operation]`.

    The plan depends on seed, operation and name alone, not on the order of calls or on threads.
    """

    def plan(operation: str, name: str) -> Fault | None:
        choices = faults.get(operation, ())
        rng = np.random.default_rng([seed, zlib.crc32(f"{operation} {name}".encode())])
        if not choices or rng.random() >= share:
            return None
        return choices[int(rng.integers(len(choices)))]

    return plan


class FaultyTier(Wrapper):
    """A tier that adds the faults of `plan` to `inner`. Keeps the contract: each name completes once.

    If the get of a record has a fault, `borrow` returns None for it. Closing releases all hanging operations.
    """

    def __init__(self, inner: Tier, plan: Plan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._lock = threading.Lock()
        self._hanging: list[Callable[[], None]] = []
        self._released = threading.Event()

    def release(self) -> None:
        """End every hang, now and from now on."""
        with self._lock:
            self._released.set()
            hanging, self._hanging = self._hanging, []
        for resume in hanging:
            resume()

    @property
    def hanging(self) -> int:
        """Number of gets and puts that hang."""
        with self._lock:
            return len(self._hanging)

    def match_prefix(self, names: Sequence[str]) -> int:
        if names:
            self._apply_fault("count", names[0])
        return self.inner.match_prefix(names)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._move("get", self.inner.get, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._move("put", self.inner.put, names, leases, on_complete)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._apply_fault("delete", name)
            self.inner.delete([name])

    def size(self, name: str) -> int | None:
        self._apply_fault("size", name)
        return self.inner.size(name)

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        self._apply_fault("get", name)
        self.inner.get_ranges(name, ranges, buffers)
        if self._plan("get", name) in (Fault.FLIP, Fault.TRUNCATE):
            buffers[-1][0] ^= 1

    def borrow(self, name: str) -> Lease | None:
        return self.inner.borrow(name) if self._plan("get", name) is None else None

    def close(self) -> None:
        self.release()
        self.inner.close()

    def _apply_fault(self, operation: str, name: str) -> None:
        """Apply the fault of a synchronous operation."""
        fault = self._plan(operation, name)
        if fault is Fault.FAIL:
            raise _failure(operation, name)
        if fault is Fault.HANG:
            self._released.wait()

    def _move(
        self,
        operation: str,
        start: Callable[[Sequence[str], Sequence[Lease], OnComplete], None],
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        for name, lease in zip(names, leases, strict=True):
            fault = self._plan(operation, name)
            if fault is Fault.FAIL:
                complete(on_complete, name, lease.share(), _failure(operation, name))
            elif fault is Fault.DROP:
                complete(on_complete, name, lease.share(), None)
            elif fault in (Fault.FLIP, Fault.TRUNCATE):
                start([name], [lease], partial(self._corrupt, fault, lease.share(), on_complete))
            elif fault is not Fault.HANG or not self._hang(partial(start, [name]), lease, on_complete):
                start([name], [lease], on_complete)

    def _hang(self, start: _Start, lease: Lease, on_complete: OnComplete) -> bool:
        """Keep an operation, with a share of its slot, until `release`; return False if that was called."""
        share = lease.share()

        def resume() -> None:
            with share:
                start([share], on_complete)

        with self._lock:
            if not self._released.is_set():
                self._hanging.append(resume)
                return True
        share.release()
        return False

    @staticmethod
    def _corrupt(
        fault: Fault, lease: Lease, on_complete: OnComplete, name: str, error: BaseException | None
    ) -> None:
        """Corrupt the record that was read, then report success."""
        if error is None and fault is Fault.TRUNCATE:
            lease.used //= 2
        elif error is None and lease.used:
            bit = zlib.crc32(name.encode()) % (8 * lease.used)
            lease.array[bit // 8] ^= np.uint8(1 << bit % 8)
        complete(on_complete, name, lease, error)


def _failure(operation: str, name: str) -> OSError:
    return OSError(errno.EIO, f"planned fault: {operation}", name)
