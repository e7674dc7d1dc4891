"""Run a Gluon kernel's own source on the CPU, its warpgroups by turns in an order that a seed decides.

Triton has no interpreter of Gluon. Here the kernel's functions run as Python, with torch for the language.
Layouts are ignored. Copies into shared memory and asynchronous products happen at any time until they are
waited for: memory that a copy is on the way to is NaN, and a product reads what memory holds when it runs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from kvkit.kernels.tuning.configs import Launch

WARPGROUP = 128
"""Threads of a warpgroup."""


class Value(torch.Tensor):
    """A tensor of Gluon; a scalar has no axes."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)  # type: ignore[return-value]

    def split(self) -> tuple[Value, Value]:  # type: ignore[override]
        low, high = self.unbind(-1)
        return low, high  # type: ignore[return-value]


def value(x: Any) -> Value:
    if not isinstance(x, torch.Tensor):
        x = torch.tensor(x, dtype=torch.int32 if isinstance(x, int) else None)
    return x.as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Elements of memory, by offset."""

    memory: torch.Tensor  # [elements]
    offset: Any

    @staticmethod
    def to(tensor: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(memory, value(torch.tensor(tensor.storage_offset())))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def where(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets, and which of them are accessed; these are within the memory."""
        seen = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        offset, seen = torch.broadcast_tensors(self.offset.long(), seen)
        accessed = offset[seen]
        assert not accessed.numel() or 0 <= accessed.min() <= accessed.max() < len(self.memory)
        return offset, seen

    def load(self, mask: Any = None, other: float = 0) -> Value:
        offset, seen = self.where(mask)
        return value(
            torch.where(seen, self.memory[torch.where(seen, offset, 0)], other).to(self.memory.dtype)
        )

    def store(self, x: Any, mask: Any = None) -> None:
        offset, seen = self.where(mask)
        places, count = offset[seen], int(seen.sum())
        assert len(places.unique()) == count, "an element is stored twice"
        self.memory[places] = torch.broadcast_to(value(x).to(self.memory.dtype), offset.shape)[seen]


@dataclass(frozen=True)
class Shared:
    """Shared memory."""

    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, x: Value) -> None:
        self.data.copy_(x)


@dataclass
class Barrier:
    """A barrier that completes a phase when `count` have arrived."""

    count: int = 0
    arrived: int = 0
    phase: int = 0

    def arrive(self, count: int) -> None:
        self.arrived += count
        assert self.arrived <= self.count, "more arrive at a barrier than it counts"
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity % 2


@dataclass(frozen=True)
class Barriers:
    every: tuple[Barrier, ...]

    def index(self, i: Any) -> Barrier:
        return self.every[int(i)]


@dataclass(eq=False)
class Product:
    """An asynchronous product: its result, once it ran."""

    run: Callable[[], Value]
    result: Value | None = None


@dataclass(eq=False)
class Warpgroup:
    """A partition: a thread that runs when it is its turn."""

    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    passes: Callable[[], bool] = lambda: True  # whether it can go on
    waits_at: str = ""
    ended: bool = False
    fenced: bool = False  # whether products may read what was copied before the last wait
    copies: list[Callable[[], None]] = field(default_factory=list)  # on the way
    arrivals: list[Callable[[], None]] = field(default_factory=list)  # at barriers, by copies
    products: list[Product] = field(default_factory=list)  # in flight

    def finish(self, products: int) -> None:
        """Run the oldest products, until no more than so many are in flight."""
        while len(self.products) > products:
            done = self.products.pop(0)
            done.result = done.run()

    def complete(self) -> None:
        """Complete all copies on the way."""
        while self.copies:
            self.copies.pop(0)()


class Stopped(BaseException):
    """Ends the threads of warpgroups that nobody waits for."""


class Deadlock(AssertionError):
    """Every warpgroup waits for another."""


class Program:
    """One program of a kernel."""

    def __init__(self, program: int, seed: int) -> None:
        self.program, self.random = program, random.Random(f"{seed} {program}")
        self.warpgroups: list[Warpgroup] = []
        self.back, self.stopped = threading.Semaphore(0), False
        self.errors: list[BaseException] = []
        self.now: Warpgroup | None = None
        self.steps = 0

    def switch(self, waits_at: str = "", passes: Callable[[], bool] = lambda: True) -> Warpgroup:
        """Let any warpgroup go on; return this one, when it is its turn and `passes`."""
        own = self.now
        assert own is not None, "only within gl.warp_specialize"
        own.passes, own.waits_at = passes, waits_at
        self.back.release()
        own.turn.acquire()
        if self.stopped:
            raise Stopped
        return own

    def specialize(self, partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], _: Any) -> None:
        """Run the partitions until all have ended."""
        assert [4, *warps] == [4] * len(partitions)
        threads = []
        for i, (function, arguments) in enumerate(partitions):
            own = Warpgroup(f"{function.__name__} {i}")
            self.warpgroups.append(own)
            threads.append(threading.Thread(target=self._run, args=(own, function, arguments), daemon=True))
            threads[-1].start()
        try:
            while not self.errors and not all(one.ended for one in self.warpgroups):
                self.random.choice(list(self._steps()))()
                self.steps += 1
        finally:
            self.stopped = True
            for one in self.warpgroups:
                one.turn.release()
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]
        assert not any(one.arrivals or one.products or one.copies for one in self.warpgroups), (
            "left in flight"
        )

    def _steps(self) -> Iterator[Callable[[], None]]:
        """All that may happen next."""
        found = False
        for one in self.warpgroups:
            if not one.ended and one.passes():
                yield lambda one=one: self._go_on(one)  # type: ignore[misc]
                found = True
            for arrival in one.arrivals:
                yield lambda one=one, arrival=arrival: (one.arrivals.remove(arrival), arrival())  # type: ignore[misc]
                found = True
            if one.products:
                yield lambda one=one: one.finish(len(one.products) - 1)  # type: ignore[misc]
            if one.copies:
                yield lambda one=one: one.copies.pop(self.random.randrange(len(one.copies)))()  # type: ignore[misc]
        if not found:
            raise Deadlock({one.name: one.waits_at for one in self.warpgroups if not one.ended})

    def _go_on(self, one: Warpgroup) -> None:
        self.now = one
        one.turn.release()
        self.back.acquire()

    def _run(self, own: Warpgroup, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        own.turn.acquire()
        try:
            if not self.stopped:
                function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            self.errors.append(error)
        own.ended = True
        if not self.stopped:
            self.back.release()

    def language(self) -> dict[str, Any]:
        """The names of Gluon that a kernel's module has."""
        return {
            "gl": Language(self),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: Barrier, init=self._init, wait=self._wait, arrive=self._arrive
            ),
            "async_copy": SimpleNamespace(mbarrier_arrive=self._arrive_by_copies),
            "copy_async": self._copy,
            "fence_async_shared": self._fence,
            "warpgroup_mma": self._mma,
            "warpgroup_mma_wait": self._mma_wait,
        }

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def _wait(self, barrier: Barrier, parity: Any) -> None:
        parity = int(parity)
        own = self.switch(f"{barrier}, parity {parity}", lambda: barrier.passes(parity))
        own.fenced = False

    def _arrive(self, barrier: Barrier, count: int) -> None:
        self.switch()
        barrier.arrive(count)

    def _copy(self, target: Shared, source: Pointer, mask: Any) -> None:
        own = self.switch()
        target.data.fill_(torch.nan)
        assert target.data.shape == source.offset.shape
        own.copies.append(lambda: target.store(source.load(mask, 0)))

    def _arrive_by_copies(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        own = self.switch()
        pending = list(own.copies)

        def arrival() -> None:
            for copy in pending:
                if copy in own.copies:
                    own.copies.remove(copy)
                    copy()
            barrier.arrive(WARPGROUP)

        own.arrivals.append(arrival)

    def _fence(self) -> None:
        self.switch().fenced = True

    def _mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        own = self.switch()
        assert own.fenced, "a product may not see what was copied"

        def run() -> Value:
            left = a.data if isinstance(a, Shared) else a
            assert left.dtype == b.dtype
            product = value(left.float() @ b.data.float())
            assert product.shape == acc.shape
            return product + acc if use_acc else product

        own.products.append(Product(run))
        return own.products[-1]

    def _mma_wait(self, in_flight: int, deps: list[Product]) -> Value:
        own = self.switch()
        own.finish(in_flight)
        (product,) = deps
        assert product.result is not None, "read before it is there"
        return product.result


class Language:
    """The names of `gluon.language` that kernels use."""

    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    static_range, exp2, log2, where = range, torch.exp2, torch.log2, torch.where

    def __init__(self, program: Program) -> None:
        self.warp_specialize = program.specialize
        self.program = value(program.program)
        self.BlockedLayout = self.SliceLayout = self.DotOperandLayout = self.NVMMASharedLayout = (
            self._no_layout
        )

    def _no_layout(self, *_: Any, **__: Any) -> None:
        return None

    def constexpr(self, x: Any) -> Any:
        return x

    def static_assert(self, holds: bool, message: str) -> None:
        assert holds, message

    def program_id(self, axis: int) -> Value:
        assert axis == 0
        return self.program

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Barriers:
        if layout is Barrier:
            return Barriers(tuple(Barrier() for _ in range(prod(shape))))
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    def arange(self, start: int, end: int, layout: Any) -> Value:
        return value(torch.arange(start, end, dtype=torch.int32))

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Value:
        return self.full(shape, 0, dtype, layout)

    def full(self, shape: list[int], fill: float, dtype: torch.dtype, layout: Any) -> Value:
        return value(torch.full(shape, fill, dtype=dtype))

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0, volatile: bool = False) -> Value:
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, x: Any, mask: Any = None) -> None:
        pointer.store(x, mask)

    def convert_layout(self, x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    def join(self, low: Value, high: Value) -> Value:
        return torch.stack((low, high), -1)  # type: ignore[return-value]

    def maximum(self, a: Any, b: Any) -> Any:
        return torch.maximum(value(a), value(b))

    def minimum(self, a: Any, b: Any) -> Any:
        return torch.minimum(value(a), value(b))

    def max(self, x: Value, axis: int) -> Any:
        return x.amax(axis)

    def sum(self, x: Value, axis: int) -> Any:
        return torch.sum(x, axis)

    def cdiv(self, a: Any, b: Any) -> Any:
        return -(-a // b)

    def inline_asm_elementwise(
        self, asm: str, constraints: str, operands: list[Value], *_: Any, **__: Any
    ) -> Any:
        dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[asm.split(".")[2]]
        assert asm == f"cvt.rn.{asm.split('.')[2]}.f32 $0, $2, $1;"
        low, high = (x.to(dtype).view(torch.int16).to(torch.int32) for x in operands)
        return low & 0xFFFF | high << 16


def run(launch: Launch, seed: int = 0) -> int:
    """Run a launch of a Gluon kernel on CPU tensors; return the number of steps, which happen by turns."""
    module, steps = launch.kernel.fn.__globals__, 0
    given = {
        name: Pointer.to(x) if isinstance(x, torch.Tensor) else x for name, x in launch.arguments.items()
    }
    for i in range(prod(launch.grid)):
        program = Program(i, seed)
        kernel = interpreted(module, program)[launch.kernel.fn.__name__]
        kernel(**given, **dict(launch.config.tiles))
        steps += program.steps
    return steps


def interpreted(module: Mapping[str, Any], program: Program) -> dict[str, Any]:
    """The names of a kernel's module, with its functions as Python's."""
    names = dict(module) | program.language()
    for name, found in module.items():
        if isinstance(found, JITFunction):
            names[name] = FunctionType(found.fn.__code__, names, name, found.fn.__defaults__)
        elif isinstance(found, gl.constexpr):
            names[name] = found.value
    return names
