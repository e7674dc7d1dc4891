"""Pack and unpack for CPU tensors: one numba kernel over all layers and chunks, shared by a few threads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

PIECE_BYTES = 1 << 19  # what a thread takes at a time
INLINE_BYTES = 4 << 20  # a smaller job is done before a second thread has woken up
STREAM_BYTES = 32 << 20  # what a larger job writes leaves the caches anyway, so it is written around them
LINE_BYTES = 64
AHEAD_BYTES = 2048  # measured: 512 gains nothing, 4096 loses on short runs

F = TypeVar("F", bound=Callable[..., Any])


def _jit(function: F) -> F:
    return cast(F, numba.njit(nogil=True, cache=True)(function))


def move(
    parts: NDArray[np.int64],
    span: int,
    heads: int,
    row_bytes: int,
    records: NDArray[np.int64],
    slots: NDArray[np.int64],
    to_records: bool,
    threads: int,
    owners: object,
) -> None:
    """Pack (`to_records`) or unpack, as `kvkit.kernels.reference` says. Checks nothing; writes where told.

    Args:
        parts: [P, 7], `Pages.table`.
        span: slots whose rows are the token stride apart: N, or more where blocks follow one another.
        heads: H.
        row_bytes: C in bytes.
        records: [chunks], addresses of canonical [L, H, T, C].
        slots: [chunks, T], below the number of slots; a slot < 0 is skipped.
        threads: at most so many work at it, the caller's included.
        owners: of the memory at these addresses: kept alive until the last thread is done.
    """
    chunks, tokens = slots.shape
    job_bytes = chunks * tokens * heads * int(parts[:, 2].sum())
    rows = max(1, PIECE_BYTES * chunks * tokens * len(parts) // max(1, job_bytes))
    turn = np.zeros(1, np.int64)
    runs = _runs(slots, span)
    stream = job_bytes >= STREAM_BYTES

    def work(_: object) -> None:
        _move(turn, rows, parts, span, heads, row_bytes, records, slots, runs, to_records, stream)

    if threads == 1 or job_bytes < INLINE_BYTES:
        work(owners)
        return
    others = [_pool(os.getpid(), threads - 1).submit(work, owners) for _ in range(threads - 1)]
    work(owners)
    for other in others:
        if not other.cancel():
            other.result()


@functools.cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked child has another `pid` and so gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="kvkit-pages")


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _take(context: Any, turn: Any) -> Any:
    """Atomically: the number at an address, which is then one more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        address = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", address, number(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _memcpy(context: Any, target: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _stream(context: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy of whole lines to a line boundary, without reading the target into the caches first.

    Asks for the source early: the processor's own prefetching stops at every 4 KiB.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, count = args
        number, flag, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        vector = ir.VectorType(number, 4)
        width = 32
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0i8"
        )
        hint = builder.module.add_metadata([flag(1)])
        with cgutils.for_range(builder, builder.udiv(count, number(LINE_BYTES))) as line:
            offset = builder.mul(line.index, number(LINE_BYTES))
            ahead = builder.add(source, builder.add(offset, number(AHEAD_BYTES)))
            builder.call(prefetch, [builder.inttoptr(ahead, byte), flag(0), flag(3), flag(1)])
            offsets = [builder.add(offset, number(i)) for i in range(0, LINE_BYTES, width)]
            values = [
                builder.load(builder.inttoptr(builder.add(source, o), vector.as_pointer()), align=1)
                for o in offsets
            ]
            for o, value in zip(offsets, values, strict=True):
                store = builder.store(
                    value, builder.inttoptr(builder.add(target, o), vector.as_pointer()), align=width
                )
                store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _fence(context: Any) -> Any:
    """Streamed stores are unordered: without this, who is told that the job is done may read old bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_jit
def _copy(target: int, source: int, count: int, stream: bool) -> None:
    if stream and (target | count) & (LINE_BYTES - 1) == 0:
        _stream(target, source, count)
    else:
        _memcpy(target, source, count)


@_jit
def _runs(slots: NDArray[np.int64], span: int) -> NDArray[np.int64]:
    """How many tokens from each on lie the token stride apart. [chunks, T]"""
    chunks, tokens = slots.shape
    runs = np.ones_like(slots)
    for chunk in range(chunks):
        for t in range(tokens - 2, -1, -1):
            slot, after = slots[chunk, t], slots[chunk, t + 1]
            if after == slot + 1 and after % span != 0:  # never from -1 to 0: 0 begins a span
                runs[chunk, t] += runs[chunk, t + 1]
    return runs


@_jit
def _move(
    turn: NDArray[np.int64],
    rows: int,
    parts: NDArray[np.int64],
    span: int,
    heads: int,
    row_bytes: int,
    records: NDArray[np.int64],
    slots: NDArray[np.int64],
    runs: NDArray[np.int64],
    to_records: bool,
    stream: bool,
) -> None:
    """Take pieces of `rows` rows, in the order (chunk, part, token), until none is left."""
    chunks, tokens = slots.shape
    total = chunks * len(parts) * tokens
    while True:
        begin = _take(turn.ctypes.data) * rows
        if begin >= total:
            break
        end = min(begin + rows, total)
        while begin < end:
            place, t = divmod(begin, tokens)
            stop = min(tokens, t + end - begin)
            begin += stop - t
            chunk, p = divmod(place, len(parts))
            layer, first_byte, width, address, block_stride, head_stride, token_stride = parts[p]
            base = records[chunk] + layer * heads * tokens * row_bytes + first_byte
            while t < stop:
                slot, run = slots[chunk, t], min(runs[chunk, t], stop - t)
                if slot >= 0:
                    block, n = divmod(slot, span)
                    page = address + block * block_stride + n * token_stride
                    record = base + t * row_bytes
                    outer, outer_page, outer_record = heads, head_stride, tokens * row_bytes
                    inner, inner_page, inner_record = run, token_stride, row_bytes
                    count = width
                    if width == token_stride == row_bytes:
                        inner, count = 1, run * width
                    elif to_records and token_stride > head_stride:
                        # reads go straight on, writes jump: measured faster than the other way round
                        outer, outer_page, outer_record, inner, inner_page, inner_record = (
                            inner,
                            inner_page,
                            inner_record,
                            outer,
                            outer_page,
                            outer_record,
                        )
                    for i in range(outer):
                        for j in range(inner):
                            in_page = page + i * outer_page + j * inner_page
                            in_record = record + i * outer_record + j * inner_record
                            if to_records:
                                _copy(in_record, in_page, count, stream)
                            else:
                                _copy(in_page, in_record, count, stream)
                t += run
    if stream:
        _fence()
