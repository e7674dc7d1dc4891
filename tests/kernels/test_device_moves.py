"""Moves between a GPU and the host take turns through a buffer, in the right order of streams and events."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from run_sizes import examples
from test_pages_numba import Conversion, Job, check, check_conversion, conversions, jobs

from kvkit.format.rope import Rotation
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import device, streams
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.kernels.pages.copies import Copies
from kvkit.kernels.pages.device import COPY_ENGINE, KERNEL, DeviceMove, Pages, turns_of
from kvkit.kernels.tuning.configs import Launch

GPU = torch.device("cuda", 1)


@given(st.integers(1, 200), st.integers(1, 10**9), st.integers(0, 10**9))
def test_turns_fit_the_buffer_and_take_each_record_once(count: int, each: int, buffer: int) -> None:
    turns = turns_of(count, each, buffer)
    assert [i for turn in turns for i in turn] == list(range(count))
    for turn in turns:
        assert len(turn) == 1 or len(turn) * each <= buffer
    assert len(turns) == 1 or 2 * each > buffer or len(turns) <= -(-count // (buffer // each))


def through_a_buffer(budget: int, reached: int) -> Any:
    """A move of which the kernel may reach every `reached`-th record itself, with a buffer of `budget`."""

    def move(
        pages: Pages,
        records: list[NDArray[np.uint8]],
        job: Job,
        to_records: bool,
        rotation: Rotation | None = None,
    ) -> None:
        turns = (
            None if rotation is None else ResolvedRotation(rotation.rope, *rotation.resolve(*job.slots.shape))
        )
        wanted = DeviceMove(pages, job.ids, job.granular == "slots", to_records, turns)
        given = [device._tensor(record) for record in records]
        addresses = [
            record.data_ptr() if reached and i % reached == 0 else None for i, record in enumerate(given)
        ]
        held = set[int]()
        for step in device.steps(wanted, given, addresses, budget):
            step.run()
            if isinstance(step, Copies):
                held |= {tensor.data_ptr() for pair in step.pairs for tensor in pair}
        buffers = held - {record.data_ptr() for record in given}
        if records:
            assert len(buffers) <= max(1, budget // len(records[0]))

    return move


budgets = st.integers(0, 5000)
"""In bytes: less than a record of the jobs, and more than all of them."""


@settings(max_examples=examples(10), deadline=None)
@given(job=jobs(), budget=budgets, reached=st.integers(0, 3))
def test_any_layout_in_turns(job: Job, budget: int, reached: int) -> None:
    check(job, through_a_buffer(budget, reached))


@settings(max_examples=examples(5), deadline=None)
@given(conversion=conversions(), budget=budgets)
def test_any_conversion_in_turns(conversion: Conversion, budget: int) -> None:
    check_conversion(conversion, through_a_buffer(budget, 2))


class Cuda:
    """The calls of torch.cuda that order streams, written down; "engine" is the thread's current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.capturing = False
        self.current = self.stream("engine")
        fakes = {
            "device": lambda to: self._within("device", to),
            "stream": lambda stream: self._within("stream", stream.name),
            "current_stream": lambda to: self.current,
            "is_current_stream_capturing": lambda: self.capturing,
            "Event": lambda blocking=False: self.event(f"done {blocking=}"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(
            streams,
            "own_stream",
            lambda to, to_records: self.stream(f"own {to} {'out' if to_records else 'in'}"),
        )
        monkeypatch.setattr(streams, "outside_captures", lambda: self._within("outside captures"))

    @contextmanager
    def _within(self, *what: Any) -> Iterator[None]:
        self.calls.append(("enter", *what))
        try:
            yield
        finally:
            self.calls.append(("leave", *what))

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            query=lambda: self.calls.append((name, "is asked")),
            wait_event=lambda event: self.calls.append((name, "waits for", event.name)),
            record_event=lambda: self.event(f"all of {name}"),
        )

    def event(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.calls.append((stream.name, "records", name)),
            synchronize=lambda: self.calls.append(("host", "waits for", name)),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def ordered(waits: list[str], way: str = "out") -> list[tuple[Any, ...]]:
    """The calls of a move that waits for these events."""
    own = f"own {GPU} {way}"
    return [
        ("enter", "device", GPU),
        ("enter", "outside captures"),
        (own, "is asked"),
        *((own, "waits for", event) for event in waits),
        ("enter", "stream", own),
        ("the move",),
        ("leave", "stream", own),
        (own, "records", "done blocking=True"),
        ("host", "waits for", "done blocking=True"),
        ("leave", "outside captures"),
        ("leave", "device", GPU),
    ]


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_move_waits_for_what_the_engine_has_so_far(cuda: Cuda, way: str) -> None:
    """The device is current all the while; the host waits for the move's own event, and for no stream."""
    with streams.own(GPU, way == "out", None):
        cuda.calls.append(("the move",))
    assert cuda.calls == ordered(["all of engine"], way)


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b"]])
def test_a_move_waits_for_given_events_only(cuda: Cuda, names: list[str]) -> None:
    with streams.own(GPU, True, [cuda.event(name) for name in names]):
        cuda.calls.append(("the move",))
    assert cuda.calls == ordered(names)


def test_a_move_that_fails_is_waited_for(cuda: Cuda) -> None:
    """Copies that were queued before may still write: the memory must not be given back yet."""

    def fail() -> None:
        with streams.own(GPU, True, ()):
            cuda.calls.append(("the move",))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert cuda.calls == ordered([])


def test_marks_are_of_gpus_once_each(cuda: Cuda) -> None:
    cpu = torch.device("cpu")
    assert [event.name for event in streams.marks([GPU, cpu, GPU])] == ["all of engine"]
    assert streams.marks([cpu]) == ()


def test_addresses_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver stands in: memory from 1 << 40 on is pinned, and lies elsewhere for the device."""

    def attribute(found: Any, kind: int, address: Any) -> int:
        assert kind == 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER in cuda.h
        if address.value < 1 << 40:
            return 1  # CUDA_ERROR_INVALID_VALUE
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = address.value + 4096
        return 0

    monkeypatch.setattr(streams, "cuda_driver", lambda: SimpleNamespace(cuPointerGetAttribute=attribute))
    assert streams.device_address(5 << 40) == (5 << 40) + 4096
    assert streams.device_address(4096) is None
    monkeypatch.setattr(streams, "cuda_driver", lambda: None)
    assert streams.device_address(5 << 40) is None


def on_gpu() -> Any:
    """A pack whose pages are on a GPU that is not there."""
    pages: Any = SimpleNamespace(device=GPU)
    return DeviceMove(pages, np.zeros((2, 1), np.int64), False, True)


@pytest.mark.parametrize("way", [KERNEL, COPY_ENGINE])
def test_moves_of_arrays_are_queued_on_the_own_stream(
    way: int, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [np.zeros(64, np.uint8) for _ in range(2)]
    pinned = records[1].ctypes.data

    def steps(
        wanted: DeviceMove,
        given: Sequence[torch.Tensor],
        addresses: Sequence[int | None],
        budget: int,
        programs: int,
    ) -> Iterator[Any]:
        assert [record.data_ptr() for record in given] == [record.ctypes.data for record in records]
        assert addresses == [None, pinned + 1 if programs else None]
        assert programs == way
        yield SimpleNamespace(run=lambda: cuda.calls.append(("the move",)))

    monkeypatch.setattr(device, "steps", steps)
    monkeypatch.setattr(device, "best_programs", lambda size, count, to_records: way)
    monkeypatch.setattr(streams, "device_address", {pinned: pinned + 1}.get)
    device.move(on_gpu(), records, [cuda.event("a")])
    assert cuda.calls == [("enter", "device", GPU), *ordered(["a"]), ("leave", "device", GPU)]


def test_a_capturing_stream_is_refused(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.capturing = True
    monkeypatch.setattr(device, "steps", lambda *given: pytest.fail("it went on"))
    with pytest.raises(LaunchError, match="capturing a CUDA graph"):
        device.move(on_gpu(), [np.zeros(64, np.uint8)] * 2)
    assert [call[0] for call in cuda.calls] == ["enter", "leave"]


def test_steps_copy_in_and_out_of_the_buffer() -> None:
    """Packing copies records in only where something is skipped."""
    from kvkit.format.layout import LayerGroup

    group = LayerGroup((0,), 1, 4, 0, "uint8", block_tokens=2)
    pages, records = Pages.of(group, group.pages(4)), [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
    ids = np.array([[0], [-1], [2]])
    for to_records, copied_in in ((True, [0, 1, 0]), (False, [1, 1, 1])):
        wanted = DeviceMove(pages, ids, False, to_records)
        kinds = [
            len(step.pairs) if isinstance(step, Copies) else Launch
            for step in device.steps(wanted, records, [None] * 3, 1)
        ]
        out = [1] if to_records else []
        assert kinds == [part for count in copied_in for part in (count, Launch, *out)]
