"""Pack and unpack for CPU tensors: a numba kernel over all layers and chunks, run by a few threads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from llvmlite import ir
from llvmlite.binding import ffi
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvkit.format.layout import SMALLEST_AMAX, LayerGroup
from kvkit.kernels.caches import compiled
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config, power_of_2
from kvkit.kernels.tuning.tables import best

DTYPES = ("float32", "float16", "bfloat16")
FORMS = (None, "fp8", "int8")
PIECE_BYTES = 1 << 19  # taken by a thread at a time; measured: 256 KiB to 4 MiB differ by 3 %
INLINE_BYTES = 4 << 20  # a smaller job takes one thread by default: a second wakes up too late
STREAM_BYTES = 32 << 20  # a larger job writes around the caches by default: it does not fit them
LINE_BYTES = 64
AHEAD_BYTES = 2048  # measured: 512 gains nothing, 4096 loses on short runs

F = TypeVar("F", bound=Callable[..., Any])


def hide_from_scans(library: object) -> None:
    """Give llvmlite's library an empty `__dict__`. Mutates the library.

    The library returns a function for every name, `__dict__` too. Code that inspects all modules, as vLLM
    does on a CPU when an engine starts, takes that function for a dict and fails.
    """
    functions = getattr(library, "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})


hide_from_scans(ffi.lib)


def jit(function: F) -> F:
    return cast(F, compiled(function))


class Job(NamedTuple):
    """Chunks to pack (`to_records`) or unpack, as numba takes them. Make it with `of`."""

    parts: NDArray[np.int64]  # [P, 7], `Pages.table`
    span: int  # consecutive slots at the token stride: N, or more if blocks are contiguous
    heads: int  # H
    row_bytes: int  # bytes of a record's row: C elements, or codes and scales
    records: NDArray[np.int64]  # [chunks], addresses of canonical [L, H, T, C]
    slots: NDArray[np.int64]  # [chunks, T], below the number of slots; a slot < 0 is skipped
    runs: NDArray[np.int64]  # [chunks, T], number of tokens from each on at the token stride
    to_records: bool
    bytes: int  # bytes of pages to move
    rows: int  # (part, token) rows of a piece, which a thread takes at a time

    @staticmethod
    def of(pages: Pages, records: NDArray[np.int64], slots: NDArray[np.int64], to_records: bool) -> Job:
        """Make a job; see the fields."""
        parts, span, heads, row_bytes = pages.table, pages.span, pages.heads, pages.group.stored.row_bytes
        size = slots.size * heads * sum(parts[:, 2].tolist())
        rows = max(1, PIECE_BYTES * slots.size * len(parts) // max(1, size))
        runs = _runs(slots, span)
        return Job(parts, span, heads, row_bytes, records, slots, runs, to_records, size, rows)


class Conversion(NamedTuple):
    """Conversion of rows by 8-bit codes, a rotation of K, or both, as numba takes it. Make it with `of`."""

    kind: int  # index of the pages' dtype in `DTYPES`
    form: int  # index of the records' precision in `FORMS`
    cos_sin: NDArray[np.float32]  # [U, R], empty if nothing is rotated
    which: NDArray[np.int32]  # [chunks, T], each token's row of `cos_sin`
    first: int  # first rotary channel
    interleaved: bool  # whether pairs are neighbours, not halves
    channels: int  # C, channels of K and V
    k_bytes: int  # bytes of K in a row of the pages

    @staticmethod
    def of(group: LayerGroup, rotation: ResolvedRotation | None) -> Conversion | None:
        """Make the conversion between pages of `group` and its records; None if bytes are copied."""
        if rotation is None and group.precision is None:
            return None
        rope, cos_sin, which = rotation or (None, np.empty((0, 0), np.float32), np.empty((0, 0), np.int32))
        first, interleaved = (rope.first, rope.interleaved) if rope else (0, False)
        kind, form = DTYPES.index(group.dtype), FORMS.index(group.precision)
        k_bytes = group.k_size * group.item_bytes
        return Conversion(kind, form, cos_sin, which, first, interleaved, group.channels, k_bytes)


@functools.cache
def configs() -> tuple[KernelConfig, ...]:
    """Return all configurations that a job can be tuned to on this machine.

    THREADS is the number of threads; 0: as many as the caller allows. With STREAM, writes bypass the caches.
    """
    threads = 0, *(2**i for i in range(10) if 2**i < (os.cpu_count() or 1))
    return tuple(_config(n, stream) for n in threads for stream in (0, 1))


def default_config(job: Job) -> KernelConfig:
    """Return a configuration that is good for a job on most machines."""
    return _config(int(job.bytes < INLINE_BYTES), int(job.bytes >= STREAM_BYTES))


@functools.cache
def _config(threads: int, stream: int) -> KernelConfig:
    return host_config(THREADS=threads, STREAM=stream)


def bucket(job: Job, conversion: Conversion | None) -> ProblemBucket:
    """Return the bucket of a job: jobs of equal conversion, similar bytes and similar contiguous bytes."""
    together, token_stride = int(job.parts[0, 2]), int(job.parts[0, 6])
    if conversion is not None:
        words = DTYPES[conversion.kind], FORMS[conversion.form], "rotated" if conversion.cos_sin.size else ""
        form = " ".join(filter(None, words))
    else:
        form = "bytes"
        if together == token_stride == job.row_bytes:
            together *= int(job.runs[0, 0])
    sizes = power_of_2(job.bytes), power_of_2(together)
    return ProblemBucket("pack" if job.to_records else "unpack", form, sizes)


def move(
    job: Job,
    conversion: Conversion | None,
    threads: int,
    owners: object,
    config: KernelConfig | None = None,
) -> None:
    """Pack or unpack, as defined by the `reference` beside this. Checks nothing; mutates pages or records.

    Args:
        conversion: conversion of the rows; None: bytes are copied.
        threads: most threads, the caller's included.
        owners: owners of the memory at the job's addresses: kept alive until the last thread is done.
        config: one of `configs`; None: the best known on this machine.
    """
    if config is None:
        config = best(bucket(job, conversion), default_config(job), configs(), move_rows, host=True)
    tiles = dict(config.tiles)
    stream, turn = bool(tiles["STREAM"]), np.zeros(1, np.int64)

    def work(_: object) -> None:
        if conversion is None:
            move_rows(turn, job, stream)
        else:
            room = np.empty(4 * (2 * int(job.parts[:, 2].max()) + LINE_BYTES), np.uint8)
            move_rows(turn, job, stream, conversion, room)

    _share(work, min(tiles["THREADS"] or threads, threads), owners)


def _share(work: Callable[[object], None], threads: int, owners: object) -> None:
    """Run `work` on `threads` threads, one of them the caller's, and wait for all."""
    if threads == 1:
        work(owners)
        return
    futures = [_pool(os.getpid(), threads - 1).submit(work, owners) for _ in range(threads - 1)]
    work(owners)
    for future in futures:
        if not future.cancel():
            future.result()


@functools.cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    """Return threads of this process: a forked child has another `pid` and so gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="kvkit-pages")


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _take(context: Any, turn: Any) -> Any:
    """Atomically return the number at an address and increment it."""

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
    """Copy whole lines to a line boundary, without reading the target into the caches first.

    Prefetches the source: the processor's own prefetching stops at every 4 KiB.
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
    """Order streamed stores: without it, old bytes may be read after the end of the job is reported."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@jit
def _copy(target: int, source: int, count: int, stream: bool) -> None:
    if stream and (target | count) & (LINE_BYTES - 1) == 0:
        _stream(target, source, count)
    else:
        _memcpy(target, source, count)


@jit
def _runs(slots: NDArray[np.int64], span: int) -> NDArray[np.int64]:
    """Count the tokens from each on that are at the token stride, [chunks, T]."""
    chunks, tokens = slots.shape
    runs = np.ones_like(slots)
    for chunk in range(chunks):
        for t in range(tokens - 2, -1, -1):
            slot, after = slots[chunk, t], slots[chunk, t + 1]
            if after == slot + 1 and after % span != 0:  # never from -1 to 0: 0 begins a span
                runs[chunk, t] += runs[chunk, t + 1]
    return runs


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def at(context: Any, address: Any, like: Any) -> Any:
    """Return a pointer to numbers like `like`. Arrays of it cost nothing; slices count references."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@jit
def _bits(value: Any) -> Any:
    """Return the bits of a float32."""
    return np.float32(value).view(np.uint32)


@jit
def _float(bits: Any) -> Any:
    """Return the float32 of 32 bits."""
    return np.uint32(bits).view(np.float32)


@jit
def widen(raw: int, wide: int, n: int, kind: int) -> None:
    """Convert n `DTYPES[kind]`, which is not float32, to float32."""
    source, target = carray(at(raw, np.uint16), n), carray(at(wide, np.float32), n)
    if kind == 1:
        for i in range(n):
            half = np.uint32(source[i])
            size = np.uint32(half & 0x7FFF)
            bias = np.uint32(112 << 23) if size < 0x7C00 else np.uint32(224 << 23)  # 224: infinity and NaN
            large = _float(np.uint32(np.uint32(size << 13) + bias))
            x = large if size >= 0x400 else np.float32(np.int32(size)) * np.float32(2**-24)
            target[i] = -x if half >= 0x8000 else x
    else:
        for i in range(n):
            target[i] = _float(np.uint32(np.uint32(source[i]) << 16))


@jit
def narrow(wide: int, raw: int, n: int, kind: int) -> None:
    """Convert n float32 to `DTYPES[kind]`, to the nearest, ties to even: the inverse of `widen`."""
    source, target = carray(at(wide, np.float32), n), carray(at(raw, np.uint16), n)
    if kind == 1:
        for i in range(n):
            bits = _bits(source[i])
            size = np.uint32(bits & 0x7FFFFFFF)
            large = np.uint32(np.uint32(size + 0xFFF + (size >> 13 & 1) - (112 << 23)) >> 13)
            small = np.uint32(_bits(_float(size) + np.float32(0.5)) - 0x3F000000)  # 0.5's last bit is 2^-24
            half = large if size >= 0x38800000 else small
            special = np.uint32(0x7C00 if size <= 0x7F800000 else 0x7E00)
            half = half if size < 0x477FF000 else special
            target[i] = half | (bits >> 16 & 0x8000)
    else:
        for i in range(n):
            bits = _bits(source[i])
            nearest = np.uint32(np.uint32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
            target[i] = nearest if np.uint32(bits & 0x7FFFFFFF) <= 0x7F800000 else np.uint32(0x7FC0)


@jit
def _quantise(wide: int, codes: int, scale: int, n: int, form: int) -> None:
    """Quantise one row of K or V as `reference.quantise` does: n codes and their scale."""
    source, target = carray(at(wide, np.float32), n), carray(at(codes, np.uint8), n)
    target_scale = carray(at(scale, np.float32), 1)
    most = np.uint32(0)
    for i in range(n):
        size = np.uint32(_bits(source[i]) & 0x7FFFFFFF)  # as whole numbers, NaN is the largest
        most = size if size > most else most
    amax, largest = _float(most), np.float32(448.0 if form == 1 else 127.0)
    tiny = amax < np.float32(SMALLEST_AMAX)
    inverse = np.float32(0) if tiny else largest / amax
    target_scale[0] = np.float32(0) if tiny else amax / largest
    if form == 1:
        for i in range(n):
            bits = _bits(source[i] * inverse)
            size = np.uint32(bits & 0x7FFFFFFF)
            large = np.uint32(np.uint32(size + 0x7FFFF + (size >> 20 & 1) - (120 << 23)) >> 20)
            small = np.uint32(_bits(_float(size) + np.float32(16384.0)) - 0x46800000)  # last bit is 2^-9
            code = large if size >= 0x3C800000 else small
            code = code if size <= 0x7F800000 else np.uint32(0x7F)
            target[i] = code | (bits >> 24 & 0x80)
    else:
        for i in range(n):
            target[i] = _bits(source[i] * inverse + np.float32(12582912.0))  # 1.5 * 2^23: its last bit is 1


@jit
def _dequantise(codes: int, scale: int, wide: int, n: int, form: int) -> None:
    """Dequantise one row of K or V: the inverse of `_quantise`."""
    target, factor = carray(at(wide, np.float32), n), carray(at(scale, np.float32), 1)[0]
    if form == 1:
        source = carray(at(codes, np.uint8), n)
        for i in range(n):
            code = np.uint32(source[i])
            size = np.uint32(code & 0x7F)
            bias = np.uint32(120 << 23) if size < 0x7F else np.uint32(240 << 23)  # 240: NaN
            large = _float(np.uint32(np.uint32(size << 20) + bias))
            x = large if size >= 8 else np.float32(np.int32(size)) * np.float32(2**-9)
            target[i] = (-x if code >= 0x80 else x) * factor
    else:
        signed = carray(at(codes, np.int8), n)
        for i in range(n):
            target[i] = np.float32(signed[i]) * factor


@jit
def rotate(x: int, turns: int, pairs: int, interleaved: bool) -> None:
    """Rotate the pairs of x [2 * pairs] in place by cos and sin [2 * pairs]: neighbours, or halves of x."""
    cos, sin = carray(at(turns, np.float32), pairs), carray(at(turns + 4 * pairs, np.float32), pairs)
    if interleaved:
        both = carray(at(x, np.float32), 2 * pairs)
        for i in range(pairs):
            a, b = both[2 * i], both[2 * i + 1]
            both[2 * i] = a * cos[i] - b * sin[i]
            both[2 * i + 1] = b * cos[i] + a * sin[i]
    else:
        first, second = carray(at(x, np.float32), pairs), carray(at(x + 4 * pairs, np.float32), pairs)
        for i in range(pairs):
            a, b = first[i], second[i]
            first[i] = a * cos[i] - b * sin[i]
            second[i] = b * cos[i] + a * sin[i]


@jit
def _row(
    page: int,
    record: int,
    first_byte: int,
    width: int,
    turns: int,
    room: NDArray[np.int64],
    to_records: bool,
    stream: bool,
    kind: int,
    form: int,
    channels: int,
    first: int,
    rotary: int,
    interleaved: bool,
) -> None:
    """Move K or V of one head and token; `turns` is the address of its cos and sin, or 0."""
    raw, codes, scale = room[0], room[1], room[2]
    wide = raw if kind == 0 else room[3]
    item = 4 if kind == 0 else 2
    n = width // item
    in_codes, in_scale = record + first_byte // item, record + channels + (4 if first_byte else 0)
    if to_records:
        _memcpy(raw, page, width)
        if kind:
            widen(raw, wide, n, kind)
        _quantise(wide, codes, scale, n, form)
        _memcpy(in_codes, codes, n)
        _memcpy(in_scale, scale, 4)
    elif form:
        _memcpy(codes, in_codes, n)
        _memcpy(scale, in_scale, 4)
        _dequantise(codes, scale, wide, n, form)
        if turns:
            rotate(wide + first * 4, turns, rotary // 2, interleaved)
        if kind:
            narrow(wide, raw, n, kind)
        _copy(page, raw, width, stream)
    elif turns:
        _memcpy(raw, record, width)
        if kind:  # channels that are not rotated keep their bits
            widen(raw + first * item, wide, rotary, kind)
            rotate(wide, turns, rotary // 2, interleaved)
            narrow(wide, raw + first * item, rotary, kind)
        else:
            rotate(raw + first * item, turns, rotary // 2, interleaved)
        _copy(page, raw, width, stream)
    else:
        _copy(page, record + first_byte, width, stream)


@jit
def move_rows(
    turn: NDArray[np.int64],
    job: Job,
    stream: bool,
    conversion: Conversion | None = None,
    memory: Any = None,
) -> None:
    """Take pieces of the job's rows, in the order (chunk, part, token), until none is left.

    A conversion takes each row through float32 in `memory`, which fits the processor's nearest cache. numba
    compiles one function for bytes and one for conversions, each without the other's branches.
    """
    parts, span, heads, row_bytes, records, slots, runs, to_records, _, rows = job
    if conversion is not None:
        kind, form, cos_sin, which, first, interleaved, channels, k_bytes = conversion
        rotary, room = cos_sin.shape[1], _room(memory)
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
            base = records[chunk] + layer * heads * tokens * row_bytes
            while t < stop:
                slot, run = slots[chunk, t], min(runs[chunk, t], stop - t)
                t += run
                if slot < 0:
                    continue
                block, n = divmod(slot, span)
                page, record = address + block * block_stride + n * token_stride, base + (t - run) * row_bytes
                if conversion is None:
                    outer, outer_page, outer_record = heads, head_stride, tokens * row_bytes
                    inner, inner_page, inner_record = run, token_stride, row_bytes
                    count = width
                    if width == token_stride == row_bytes:
                        inner, count = 1, run * width
                    elif to_records and token_stride > head_stride:
                        # contiguous reads and scattered writes: measured faster than the reverse
                        outer, outer_page, outer_record = run, token_stride, row_bytes
                        inner, inner_page, inner_record = heads, head_stride, tokens * row_bytes
                    for i in range(outer):
                        for j in range(inner):
                            in_page = page + i * outer_page + j * inner_page
                            in_record = record + first_byte + i * outer_record + j * inner_record
                            if to_records:
                                _copy(in_record, in_page, count, stream)
                            else:
                                _copy(in_page, in_record, count, stream)
                    continue
                split = k_bytes if first_byte == 0 and k_bytes < width else width
                for head in range(heads):
                    for j in range(run):
                        in_page = page + head * head_stride + j * token_stride
                        in_record = record + (head * tokens + j) * row_bytes
                        for at, size in ((0, split), (split, width - split)):
                            byte = first_byte + at
                            turns = 0
                            if rotary and byte == 0:
                                turns = cos_sin.ctypes.data + which[chunk, t - run + j] * 4 * rotary
                            if size:
                                _row(
                                    in_page + at,
                                    in_record,
                                    byte,
                                    size,
                                    turns,
                                    room,
                                    to_records,
                                    stream,
                                    kind,
                                    form,
                                    channels,
                                    first,
                                    rotary,
                                    interleaved,
                                )
    if stream:
        _fence()


@jit
def _room(memory: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the addresses of four rows in memory, each at the beginning of a line."""
    step = len(memory) // 4
    return (memory.ctypes.data + LINE_BYTES - 1 + np.arange(4) * step) // LINE_BYTES * LINE_BYTES
