"""Slots of the staging arena are leased, shared, awaited and released without loss."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import PAGE_BYTES, Lease, Staging, StagingError, StagingTimeout, release_all
from kvkit.workers import Stopped

DEADLINE_S = 60.0


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for_waiters(staging: Staging, count: int) -> None:
    """Return when `count` callers wait for slots. They do not announce themselves, so look until they do."""
    wait_for(lambda: staging.waiting >= count)


def test_slots_are_whole_pages_apart_from_each_other() -> None:
    staging = Staging(PAGE_BYTES + 1, 3)
    assert staging.slot_bytes == 2 * PAGE_BYTES
    leases = staging.acquire(3, 0, at_least=3)
    for lease in leases:
        assert lease.array.ctypes.data % PAGE_BYTES == 0
        assert len(lease.array) == len(lease.buffer) == staging.slot_bytes
        lease.array[:] = lease.slot + 1
    for lease in leases:
        assert bytes(lease.buffer) == bytes([lease.slot + 1]) * staging.slot_bytes
    release_all(leases)
    staging.close()


def test_who_asks_is_told_of_slots_that_come_free() -> None:
    staging = Staging(1, 2)
    seen: list[int] = []
    staging.when_freed(lambda: seen.append(staging.free))
    leases = staging.acquire(2, 0)
    share = leases[0].share()
    leases[0].release()
    assert seen == []
    leases[1].release()
    share.release()
    assert seen == [1, 2]
    staging.close()


def test_the_arena_is_touched_in_the_background() -> None:
    staging = Staging(1 << 20, 20)
    assert staging.ready.wait(DEADLINE_S)
    staging.close()


@pytest.mark.parametrize(("initialised", "gpu"), [(True, 3), (False, 0)])
def test_the_arena_is_pinned_for_every_gpu_through_the_current_one(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, gpu: int
) -> None:
    """A thread of its own is on GPU 0: whatever it calls, it must name the GPU first. CUDA stands in."""
    calls: list[tuple[object, ...]] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        calls.append(("enter", index))
        yield
        calls.append(("leave", index))

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: calls.append(("register", *given)) or 0,
        cudaHostUnregister=lambda *given: calls.append(("unregister", *given)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    staging = Staging(PAGE_BYTES, 2)
    assert staging.ready.wait(DEADLINE_S)
    address = staging.arrays[0].ctypes.data
    portable, mapped = 1, 2
    register = ("register", address, 2 * PAGE_BYTES, portable | mapped)
    assert calls == [("enter", gpu), register, ("leave", gpu)]
    calls.clear()
    staging.close()
    assert calls == [("enter", gpu), ("unregister", address), ("leave", gpu)]


def test_what_cannot_be_pinned_is_ready_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", refuse)
    staging = Staging(PAGE_BYTES, 2)
    assert staging.ready.wait(DEADLINE_S)
    assert "could not be pinned (Cannot re-initialize" in caplog.text
    staging.acquire(1, 0)[0].release()
    staging.close()


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 1), (1, 0), (-1, 1)])
def test_impossible_sizes(slot_bytes: int, slots: int) -> None:
    with pytest.raises(StagingError, match=f"slot_bytes={slot_bytes}, slots={slots}"):
        Staging(slot_bytes, slots)


def test_what_is_asked_for_must_be_possible() -> None:
    staging = Staging(1, 4)
    for at_most, at_least in [(0, 1), (2, 3), (9, 5), (1, 0)]:
        with pytest.raises(StagingError, match=f"at_least={at_least}, at_most={at_most}.*4 slots"):
            staging.acquire(at_most, 0, at_least=at_least)
    staging.close()


def test_as_many_as_there_are() -> None:
    staging = Staging(1, 4)
    first = staging.acquire(3, 0)
    second = staging.acquire(3, 0)
    assert [len(first), len(second), staging.free] == [3, 1, 0]
    assert len({lease.slot for lease in first + second}) == 4
    with pytest.raises(StagingTimeout, match="1 of 4 slots"):
        staging.acquire(1, 0)
    release_all(first)
    with pytest.raises(StagingTimeout):
        staging.acquire(4, 0, at_least=4)
    release_all(second)
    assert staging.free == 4
    staging.check_integrity()
    staging.close()


def test_a_slot_returns_with_its_last_share() -> None:
    staging = Staging(1, 1)
    (lease,) = staging.acquire(1, 0)
    share = lease.share()
    lease.used = 7
    assert share.used == 7
    assert len(share.record) == 7
    assert share.slot == lease.slot
    lease.release()
    staging.check_integrity()
    assert staging.free == 0
    share.release()
    assert staging.free == 1
    (again,) = staging.acquire(1, 0)
    assert again.used == 0, "a new lease starts empty"
    again.release()
    staging.close()


def test_a_lease_is_released_once() -> None:
    staging = Staging(1, 1)
    (lease,) = staging.acquire(1, 0)
    lease.release()
    for misuse in (lease.release, lease.share):
        with pytest.raises(StagingError, match="slot 0"):
            misuse()
    (other,) = staging.acquire(1, 0)
    with pytest.raises(StagingError):
        lease.release()
    assert staging.free == 0, "a second release must not free the next holder's slot"
    other.release()
    staging.check_integrity()
    staging.close()


def test_leaving_the_context_releases() -> None:
    staging = Staging(1, 1)
    with staging.acquire(1, 0)[0]:
        assert staging.free == 0
    with pytest.raises(RuntimeError, match="inside"), staging.acquire(1, 0)[0]:
        raise RuntimeError("inside")
    with staging.acquire(1, 0)[0] as lease:
        lease.release()
    assert staging.free == 1
    staging.close()


def test_waiting_ends_when_a_slot_comes_free() -> None:
    staging = Staging(1, 1)
    (lease,) = staging.acquire(1, 0)
    got: list[Lease] = []
    waiter = start(lambda: got.extend(staging.acquire(1, DEADLINE_S)))
    wait_for_waiters(staging, 1)
    assert got == []
    lease.release()
    waiter.join(DEADLINE_S)
    assert len(got) == 1
    release_all(got)
    staging.close()


def test_first_come_first_served() -> None:
    staging = Staging(1, 4)
    held = staging.acquire(4, 0)
    order: list[int] = []
    waiters = []
    for i, at_least in enumerate([3, 1, 2]):

        def work(i: int = i, at_least: int = at_least) -> None:
            leases = staging.acquire(at_least, DEADLINE_S, at_least=at_least)
            order.append(i)
            release_all(leases)

        waiters.append(start(work))
        wait_for_waiters(staging, i + 1)
    held.pop().release()
    with pytest.raises(StagingTimeout):
        staging.acquire(1, 0)  # one is free, and others came first
    assert order == []
    held.pop().release()
    held.pop().release()
    for waiter in waiters:
        waiter.join(DEADLINE_S)
    assert order[0] == 0, "the one who came first, and wants most, is served first"
    assert sorted(order) == [0, 1, 2]
    release_all(held)
    staging.check_integrity()
    assert staging.free == 4
    staging.close()


def test_who_gives_up_lets_the_next_go_on() -> None:
    staging = Staging(1, 2)
    (held, free) = staging.acquire(2, 0, at_least=2)
    got: list[Lease] = []
    refused: list[Exception] = []

    def wants_two() -> None:
        try:
            staging.acquire(2, 0.2, at_least=2)
        except StagingTimeout as error:
            refused.append(error)

    first = start(wants_two)
    wait_for_waiters(staging, 1)
    second = start(lambda: got.extend(staging.acquire(1, DEADLINE_S)))
    free.release()
    first.join(DEADLINE_S)
    second.join(DEADLINE_S)
    assert len(refused) == len(got) == 1
    release_all([held, *got])
    staging.close()


def test_who_is_stopped_waits_no_more_and_the_next_goes_on() -> None:
    staging = Staging(1, 2)
    held, free = staging.acquire(2, 0, at_least=2)
    stop = threading.Event()
    got: list[Lease] = []
    stopped: list[Exception] = []

    def wants_two() -> None:
        try:
            staging.acquire(2, DEADLINE_S * 10, at_least=2, stopped=stop.is_set)
        except Stopped as error:
            stopped.append(error)

    first = start(wants_two)
    wait_for_waiters(staging, 1)
    second = start(lambda: got.extend(staging.acquire(1, DEADLINE_S * 10)))
    wait_for_waiters(staging, 2)
    free.release()
    staging.wake()  # nobody was stopped
    wait_for_waiters(staging, 2)
    stop.set()
    staging.wake()
    first.join(DEADLINE_S)
    second.join(DEADLINE_S)
    assert len(stopped) == len(got) == 1
    release_all([held, *got])
    with staging.acquire(1, 0, stopped=stop.is_set)[0]:
        pass  # it takes no wait
    staging.check_integrity()
    assert staging.free == 2
    staging.close()


def test_who_keeps_waiting_asks_for_slots_again() -> None:
    """What is kept after somebody began to wait is given up as well."""
    staging = Staging(1, 1)
    (lease,) = staging.acquire(1, 0)
    asked: list[int] = []

    def reclaim(missing: int) -> None:
        asked.append(missing)
        if len(asked) == 3:
            lease.release()

    staging.on_shortage(reclaim)
    with staging.acquire(1, DEADLINE_S)[0]:
        assert asked == [1, 1, 1]
    staging.close()


def test_closing_wakes_who_waits() -> None:
    staging = Staging(1, 1)
    (lease,) = staging.acquire(1, 0)
    errors: list[Exception] = []

    def work() -> None:
        try:
            staging.acquire(1, DEADLINE_S * 10)
        except StagingError as error:
            errors.append(error)

    waiters = [start(work) for _ in range(3)]
    wait_for_waiters(staging, 3)
    staging.close()
    for waiter in waiters:
        waiter.join(DEADLINE_S)
    assert len(errors) == 3
    with pytest.raises(StagingError, match="closed"):
        staging.acquire(1, 0)
    lease.array[:] = 1  # memory on loan outlives the arena
    lease.release()
    staging.check_integrity()
    staging.close()


def test_many_users_of_few_slots() -> None:
    """24 users, each never waiting while it holds: all get through, and nobody writes another's slot."""
    staging = Staging(PAGE_BYTES, 5)
    served: Counter[int] = Counter()
    errors: list[BaseException] = []

    def user(i: int) -> None:
        try:
            for turn in range(20):
                leases = staging.acquire(2 + (i + turn) % 4, DEADLINE_S, at_least=1 + i % 2)
                for lease in leases:
                    lease.array[:] = i
                shares = [lease.share() for lease in leases]
                release_all(leases)
                assert all(np.all(share.array == i) for share in shares)
                release_all(shares)
                served[i] += 1
        except BaseException as error:
            errors.append(error)

    users = [start(lambda i=i: user(i)) for i in range(24)]  # type: ignore[misc] # mypy: lambda defaults
    for thread in users:
        thread.join(DEADLINE_S)
    assert errors == []
    assert served == dict.fromkeys(range(24), 20)
    staging.check_integrity()
    assert staging.free == 5
    staging.close()


class StagingMachine(RuleBasedStateMachine):
    """Any order of acquire, share and release, against a count of references."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(64, 4)
        self.references: Counter[int] = Counter()

    @rule(target=leases, at_most=st.integers(1, 4))
    def acquire(self, at_most: int) -> Lease | None:
        free = 4 - len(+self.references)
        try:
            taken = self.staging.acquire(at_most, 0)
        except StagingTimeout:
            assert free == 0
            return None
        assert len(taken) == min(at_most, free)
        for lease in taken:
            assert self.references[lease.slot] == 0
            lease.used = 1 + lease.slot
        release_all(taken[1:])
        self.references[taken[0].slot] += 1
        return taken[0]

    @rule(target=leases, lease=leases)
    def share(self, lease: Lease | None) -> Lease | None:
        if lease is None:
            return None
        self.references[lease.slot] += 1
        return lease.share()

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        assert lease.used == 1 + lease.slot
        lease.release()
        self.references[lease.slot] -= 1
        with pytest.raises(StagingError):
            lease.release()

    @invariant()
    def agrees(self) -> None:
        self.staging.check_integrity()
        assert self.staging.free == 4 - len(+self.references)

    def teardown(self) -> None:
        self.staging.close()


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_shared_arena_is_the_same_memory_for_who_maps_it() -> None:
    staging = Staging(PAGE_BYTES, 3, shared=True)
    assert staging.descriptor is not None
    other = mmap.mmap(staging.descriptor, 3 * PAGE_BYTES)
    with staging.acquire(1, 0)[0] as lease:
        lease.array[:] = 9
        assert other[lease.slot * PAGE_BYTES : (lease.slot + 1) * PAGE_BYTES] == bytes([9]) * PAGE_BYTES
        other[lease.slot * PAGE_BYTES] = 1
        assert lease.array[0] == 1
    descriptor = staging.descriptor
    staging.close()
    assert staging.descriptor is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert other[:1] == bytes(staging.buffers[0][:1])  # until the last view is gone


def test_a_shared_arena_cannot_be_truncated_under_its_users() -> None:
    staging = Staging(PAGE_BYTES, 3, shared=True)
    assert staging.descriptor is not None
    for size in (PAGE_BYTES, 4 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(staging.descriptor, size)
    staging.close()


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_cannot_be_had_is_an_error(shared: bool) -> None:
    with pytest.raises((OSError, OverflowError)):
        Staging(1 << 61, 1, shared=shared)


@pytest.mark.parametrize("slots", [1, 7, 40])
def test_shared_memory_begins_where_huge_pages_may(slots: int) -> None:
    """Whatever is mapped above it. Whether there are huge pages is for the kernel to say."""
    around = [Staging(3 * PAGE_BYTES + 1, 1 + i, shared=bool(i % 2)) for i in range(6)]
    staging = Staging((5 << 20) + 1, slots, shared=True)
    assert staging.arrays.ctypes.data % (2 << 20) == 0
    assert staging.ready.wait(DEADLINE_S)
    for each in (staging, *around):
        each.close()


def test_shared_memory_is_mapped_where_there_is_no_address_space_for_another_try() -> None:
    code = """
import os, resource
from kvkit.staging import map_shared
size = 200 << 20
file = os.memfd_create("memory")
os.ftruncate(file, size)
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + size + (10 << 20),) * 2)
print(len(map_shared(file, size)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{200 << 20}\n", done.stderr
