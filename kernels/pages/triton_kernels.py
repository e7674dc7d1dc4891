"""Triton kernels that pack and unpack, launched by `kvkit.kernels.pages.triton`.

Each kernel finds its memory through a table of addresses. `copy_rows` moves bytes; `decode_rows` unpacks
records with rotated keys, quantised values, or both; `encode_rows` packs and quantises. The `reference`
beside this defines what they compute. Neighbouring lanes take neighbouring words, of 16 bytes where all
addresses and strides allow it.

A row is one head of one token; P is the number of parts, rows of `Pages.table` or, if K and V are converted,
of `Pages.halves`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

RUNTIME = ["parts_count", "heads", "tokens", "ids_count", "tiles", "count"]
"""Arguments that may differ from call to call: new values compile nothing."""


@triton.jit
def _turns(count, PERSISTENT: tl.constexpr):
    """Return how many tiles a program moves, one after another."""
    return tl.cdiv(count - tl.program_id(0), tl.num_programs(0)) if PERSISTENT else 1


@triton.jit
def _place(turn, tiles, heads, parts_count, PERSISTENT: tl.constexpr):
    """Return number within a head, head, part and chunk of a program's tile number `turn`."""
    if PERSISTENT:
        rest, head = _divide(tl.program_id(0) + turn * tl.num_programs(0), heads)
        rest, part = _divide(rest, parts_count)
    else:
        rest, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, tile = _divide(rest, tiles)
    return tile, head, part, chunk


@triton.jit
def _divide(a, b):
    """Return a // b and a % b of int32 that are not negative, in fewer instructions than for any int32."""
    a = a.to(tl.uint32)
    b = tl.cast(b, tl.uint32)
    return (a // b).to(tl.int32), (a % b).to(tl.int32)


@triton.jit
def _tokens(tile, ROW: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's first token, each lane's token counted from there, and its place in the row."""
    if TILE % ROW == 0:  # differences between a thread's lanes are known at compile time
        first, lane = tile * (TILE // ROW), tl.arange(0, TILE)
    else:
        first, lane = 0, tile * TILE + tl.arange(0, TILE)
    t, place = _divide(lane, ROW)
    return first, t, place


@triton.jit
def _page_rows(part, ids, t, inside, GRANULE: tl.constexpr, SLOTS: tl.constexpr):
    """Return offsets of tokens' rows in a head's pages, and which rows are moved. t, inside: [V]."""
    i, place = _divide(t, GRANULE)
    given = tl.load(ids + i, mask=inside, other=-1)
    keep = inside & (given >= 0)
    if SLOTS:
        given, place = (given >> 32).to(tl.int32), given.to(tl.int32)
    block, place = given.to(tl.uint32).to(tl.int64), place.to(tl.uint32).to(tl.int64)
    return block * tl.load(part + 4) + place * tl.load(part + 6), keep


@triton.jit
def _pointer(address, first, WORD: tl.constexpr, WIDTH: tl.constexpr):
    """Return a pointer to words from `first` on of the memory at `address`, aligned to WIDTH words."""
    pointer = tl.load(address).to(tl.pointer_type(WORD)) + first
    return tl.multiple_of(pointer, WIDTH * WORD.primitive_bitwidth // 8)


@triton.jit
def _lanes(first, lane, WIDTH: tl.constexpr):
    """Return first + lane, [V] and [1, W] to [V, W]; first is known to be a multiple of WIDTH."""
    return tl.multiple_of(first[:, None] + lane, (1, WIDTH))


@triton.jit(do_not_specialize=RUNTIME)
def copy_rows(
    parts,  # int64 [P, 7]; first byte, width and strides in words
    records,  # int64 [chunks], addresses
    ids,  # [chunks, ids_count], int32, blocks; of slots int64, block << 32 | place
    parts_count,  # P
    heads,
    tokens,
    ids_count,
    tiles,  # tiles of a head of a chunk's part
    count,  # number of all tiles
    TO_RECORDS: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,  # words of a vector
    RECORD_ROW: tl.constexpr,  # words of a record's row
    ROW: tl.constexpr,  # vectors of a page's row, at most
    GRANULE: tl.constexpr,  # tokens of an id
    SLOTS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy bytes unchanged. A tile is TILE vectors of a head of a chunk's part, in the record's order."""
    for turn in range(_turns(count, PERSISTENT)):
        tile, head, place, chunk = _place(turn, tiles, heads, parts_count, PERSISTENT)
        part = parts + place * 7
        first, t, vector = _tokens(tile, ROW, TILE)  # t and vector: [V]
        at = vector * WIDTH
        inside = (first + t < tokens) & (at < tl.load(part + 2).to(tl.int32))
        page_row, keep = _page_rows(part, ids + chunk * ids_count, first + t, inside, GRANULE, SLOTS)
        row = (tl.load(part) * heads + head) * tokens + first
        record = _pointer(records + chunk, row * RECORD_ROW + tl.load(part + 1), WORD, WIDTH)
        page = _pointer(part + 3, head * tl.load(part + 5), WORD, WIDTH)
        word = tl.arange(0, WIDTH)[None, :]  # [V, WIDTH] from here
        record += _lanes(t * RECORD_ROW + at, word, WIDTH)
        page += _lanes(page_row + at, word, WIDTH)
        mask = tl.broadcast_to(keep[:, None], (TILE, WIDTH))
        if TO_RECORDS:
            tl.store(record, tl.load(page, mask=mask), mask=mask)
        else:
            tl.store(page, tl.load(record, mask=mask), mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def decode_rows(
    parts,  # int64 [P, 7], K and V apart; first byte, width and strides in channels
    records,  # int64 [chunks], addresses
    ids,  # [chunks, ids_count], as for copy_rows
    cos_sin,  # float32 [U, 2 * PAIRS]
    which,  # int32 [chunks, tokens], each token's row of cos_sin
    parts_count,
    heads,
    tokens,
    ids_count,
    tiles,
    count,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,  # fp8, int8 or None
    CHANNELS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,  # that a scale is aligned to
    WIDTH: tl.constexpr,  # channels of a vector
    RECORD_WIDTH: tl.constexpr,  # channels that are together aligned in a record
    RECORD_ROW: tl.constexpr,  # of a record's row: channels, or bytes of codes and scales
    ROW: tl.constexpr,  # pairs of vectors of a page's row, at most
    FIRST: tl.constexpr,  # first rotary channel
    PAIRS: tl.constexpr,  # pairs of rotary channels, or 0
    INTERLEAVED: tl.constexpr,
    GRANULE: tl.constexpr,
    SLOTS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    TILE: tl.constexpr,
):
    """Unpack records: a' = a cos - b sin, b' = b cos + a sin for K's rotary pairs; code * scale for codes.

    A lane has two vectors: those of WIDTH rotary pairs, or two others side by side; V is split as K is.
    Computes in float32, rounded once; values that are neither rotated nor quantised keep their bits.
    """
    BITS: tl.constexpr = tl.int32 if DTYPE == "float32" else tl.int16
    CODE: tl.constexpr = BITS if FORM is None else tl.uint8
    for turn in range(_turns(count, PERSISTENT)):
        tile, head, place, chunk = _place(turn, tiles, heads, parts_count, PERSISTENT)
        part = parts + place * 7
        record_first, width = tl.load(part + 1), tl.load(part + 2).to(tl.int32)
        first, t, unit = _tokens(tile, ROW, TILE)  # t and unit: [V]
        inside = first + t < tokens
        page_row, keep = _page_rows(part, ids + chunk * ids_count, first + t, inside, GRANULE, SLOTS)
        row = ((tl.load(part) * heads + head) * tokens + first) * RECORD_ROW

        rotary = unit < PAIRS // WIDTH
        still = (unit - PAIRS // WIDTH) * 2 * WIDTH  # place among the channels that are not rotary
        after = still + WIDTH
        if INTERLEAVED:
            turned_a = FIRST + unit * 2 * WIDTH
            turned_b = turned_a + WIDTH
        else:
            turned_a = FIRST + unit * WIDTH
            turned_b = turned_a + PAIRS
        first_a = tl.where(rotary, turned_a, still + tl.where(still >= FIRST, 2 * PAIRS, 0))
        first_b = tl.where(rotary, turned_b, after + tl.where(after >= FIRST, 2 * PAIRS, 0))

        channel = tl.arange(0, WIDTH)[None, :]  # [V, WIDTH] from here
        mask_a = tl.broadcast_to((keep & (first_a < width))[:, None], (TILE, WIDTH))
        mask_b = tl.broadcast_to((keep & (first_b < width))[:, None], (TILE, WIDTH))
        record = _pointer(records + chunk, row + record_first, CODE, RECORD_WIDTH)
        a = tl.load(record + _lanes(t * RECORD_ROW + first_a, channel, RECORD_WIDTH), mask=mask_a)
        b = tl.load(record + _lanes(t * RECORD_ROW + first_b, channel, RECORD_WIDTH), mask=mask_b)
        if PAIRS > 0 and INTERLEAVED:
            a, b = _pairs_apart(a, b)
        if FORM is None:
            wide_a, wide_b = _widen(a, DTYPE), _widen(b, DTYPE)
        else:
            scales = tl.load(records + chunk) + row + CHANNELS + tl.where(record_first == 0, 0, 4)
            scale = _load_scale(scales, t, keep, RECORD_ROW, SCALE_BYTES)[:, None]
            wide_a, wide_b = _decode(a, FORM, INTERPRET) * scale, _decode(b, FORM, INTERPRET) * scale
        if PAIRS > 0:
            turned = keep & (unit < tl.where(record_first == 0, PAIRS // WIDTH, 0))  # V's are not
            turn_row = tl.load(which + chunk * tokens + first + t, mask=turned, other=0) * (2 * PAIRS)
            turned = turned[:, None]
            angle = cos_sin + _lanes(turn_row + unit * WIDTH, channel, WIDTH)
            cos = tl.load(angle, mask=tl.broadcast_to(turned, (TILE, WIDTH)), other=1.0)
            sin = tl.load(angle + PAIRS, mask=tl.broadcast_to(turned, (TILE, WIDTH)), other=0.0)
            turned_a = wide_a * cos - wide_b * sin
            turned_b = wide_b * cos + wide_a * sin
            if FORM is None:
                a = tl.where(turned, _narrow(turned_a, DTYPE, INTERPRET), a)
                b = tl.where(turned, _narrow(turned_b, DTYPE, INTERPRET), b)
            else:
                a = _narrow(tl.where(turned, turned_a, wide_a), DTYPE, INTERPRET)
                b = _narrow(tl.where(turned, turned_b, wide_b), DTYPE, INTERPRET)
        else:
            a, b = _narrow(wide_a, DTYPE, INTERPRET), _narrow(wide_b, DTYPE, INTERPRET)
        if PAIRS > 0 and INTERLEAVED:
            a, b = _pairs_together(a, b)
        page = _pointer(part + 3, head * tl.load(part + 5), BITS, WIDTH)
        tl.store(page + _lanes(page_row + first_a, channel, WIDTH), a, mask=mask_a)
        tl.store(page + _lanes(page_row + first_b, channel, WIDTH), b, mask=mask_b)


@triton.jit(do_not_specialize=RUNTIME)
def encode_rows(
    parts,  # int64 [P, 7], K and V apart; first byte, width and strides in channels
    records,  # int64 [chunks], addresses
    ids,  # [chunks, ids_count], as for copy_rows
    parts_count,
    heads,
    tokens,
    ids_count,
    tiles,
    count,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,  # fp8 or int8
    CHANNELS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,  # that a scale is aligned to
    WIDTH: tl.constexpr,  # channels that are together aligned in a page
    RECORD_WIDTH: tl.constexpr,  # the same in a record
    RECORD_ROW: tl.constexpr,  # bytes of a record's row
    COLUMNS: tl.constexpr,  # a power of 2, at least the channels of a row
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    GRANULE: tl.constexpr,
    SLOTS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    TILE: tl.constexpr,
):
    """Pack pages: scale = amax / LARGEST, code = x * (LARGEST / amax) rounded to nearest, ties to even.

    Computes in float32. Each row of K and of V has its own scale, reduced by neighbouring lanes.
    """
    BITS: tl.constexpr = tl.int32 if DTYPE == "float32" else tl.int16
    ROWS: tl.constexpr = TILE // COLUMNS if TILE > COLUMNS else 1
    for turn in range(_turns(count, PERSISTENT)):
        tile, head, place, chunk = _place(turn, tiles, heads, parts_count, PERSISTENT)
        part = parts + place * 7
        first, t = tile * ROWS, tl.arange(0, ROWS)
        inside = first + t < tokens
        page_row, keep = _page_rows(part, ids + chunk * ids_count, first + t, inside, GRANULE, SLOTS)
        record_first = tl.load(part + 1)
        row = ((tl.load(part) * heads + head) * tokens + first) * RECORD_ROW

        channel = tl.arange(0, COLUMNS)[None, :]  # [ROWS, COLUMNS] from here
        width = tl.multiple_of(tl.load(part + 2).to(tl.int32), WIDTH)
        mask = keep[:, None] & (channel < width)
        page = _pointer(part + 3, head * tl.load(part + 5), BITS, WIDTH)
        x = _widen(tl.load(page + _lanes(page_row, channel, WIDTH), mask=mask, other=0), DTYPE)
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(size, axis=1).to(tl.float32, bitcast=True)  # as whole numbers, NaN is the largest
        tiny = amax < SMALLEST
        largest = tl.full((ROWS,), LARGEST, tl.float32)
        inverse = tl.where(tiny, 0.0, tl.div_rn(largest, tl.where(tiny, 1.0, amax)))
        scale = tl.where(tiny, 0.0, tl.div_rn(amax, largest))
        record = _pointer(records + chunk, row + record_first, tl.uint8, RECORD_WIDTH)
        codes = _encode(x * inverse[:, None], FORM, LARGEST, INTERPRET)
        tl.store(record + _lanes(t * RECORD_ROW, channel, RECORD_WIDTH), codes, mask=mask)
        scales = tl.load(records + chunk) + row + CHANNELS + tl.where(record_first == 0, 0, 4)
        _store_scale(scales, t, scale, keep, RECORD_ROW, SCALE_BYTES)


@triton.jit
def _pairs_apart(a, b):
    """Return first and second of the pairs of neighbours in a then b, all [V, WIDTH]."""
    both = tl.permute(tl.join(a, b), (0, 2, 1))  # [V, 2, WIDTH]
    return tl.split(tl.reshape(both, (a.shape[0], a.shape[1], 2)))


@triton.jit
def _pairs_together(a, b):
    """Invert `_pairs_apart`."""
    both = tl.reshape(tl.join(a, b), (a.shape[0], 2, a.shape[1]))
    return tl.split(tl.permute(both, (0, 2, 1)))


@triton.jit
def _widen(bits, DTYPE: tl.constexpr):
    """Return the float32 of the bits of DTYPE."""
    if DTYPE == "float32":
        x = bits.to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _narrow(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Return the bits of DTYPE nearest to float32, ties to even."""
    if DTYPE == "float32":
        bits = x.to(tl.int32, bitcast=True)
    elif DTYPE == "float16":
        bits = x.to(tl.float16).to(tl.int16, bitcast=True)
    elif INTERPRET:  # the interpreter's conversion cuts the last bits off
        wide = x.to(tl.int32, bitcast=True)
        nearest = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        bits = tl.where((wide & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).to(tl.int16)
    else:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def _encode(x, FORM: tl.constexpr, LARGEST: tl.constexpr, INTERPRET: tl.constexpr):
    """Return the codes nearest to float32, ties to even, clamped to LARGEST; fp8: 0x7F for every NaN.

    fp8 codes come from hardware (https://docs.nvidia.com/cuda/parallel-thread-execution,
    cvt.rn.satfinite.e4m3x2) or, with equal results, from the bits of x: sm_80 and gfx942 have no e4m3fn.
    """
    if FORM == "fp8" and not INTERPRET and target_info.cuda_capability_geq(8, 9):
        # not by Triton's conversion: on sm_89, Triton 3.6 rounds twice, to float16 first
        code = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)  # leaves no product to fuse with a sum
        if FORM == "int8":
            code = (x + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: its last bit is 1
        else:
            bits = x.to(tl.int32, bitcast=True)
            size = bits & 0x7FFFFFFF
            normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
            tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            code = tl.where(size >= 0x3C800000, normal, tiny)  # below 2^-6; 16384's last bit is 2^-9
            code = tl.where(size > 0x7F800000, 0x7F, ((bits >> 24) & 0x80) | code)
        code = code.to(tl.uint8)
    return code


@triton.jit
def _decode(code, FORM: tl.constexpr, INTERPRET: tl.constexpr):
    """Return the float32 of codes."""
    if FORM == "int8":
        x = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif not INTERPRET and target_info.cuda_capability_geq(8, 9):
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        size = bits & 0x7F
        x = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        x = tl.where(size >= 8, x, size.to(tl.float32) * 0.001953125)  # 2^-9
        x = tl.where(size == 0x7F, float("nan"), x)
        sign = (bits & 0x80) << 24  # not -x: Triton 3.6 computes 0 - x, which is +0 for 0
        x = (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _load_scale(scales, t, keep, RECORD_ROW: tl.constexpr, BYTES: tl.constexpr):
    """Load float32 [V] of rows t; that of row 0 is at the address `scales`, in words of BYTES."""
    WORD: tl.constexpr = tl.uint32 if BYTES == 4 else tl.uint16 if BYTES == 2 else tl.uint8
    at = scales.to(tl.pointer_type(WORD)) + t * (RECORD_ROW // BYTES)
    bits = tl.load(at, mask=keep, other=0).to(tl.uint32)
    for i in tl.static_range(1, 4 // BYTES):
        bits |= tl.load(at + i, mask=keep, other=0).to(tl.uint32) << (8 * BYTES * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(scales, t, scale, keep, RECORD_ROW: tl.constexpr, BYTES: tl.constexpr):
    """Store scales: the inverse of `_load_scale`."""
    WORD: tl.constexpr = tl.uint32 if BYTES == 4 else tl.uint16 if BYTES == 2 else tl.uint8
    at = scales.to(tl.pointer_type(WORD)) + t * (RECORD_ROW // BYTES)
    bits = scale.to(tl.uint32, bitcast=True)
    for i in tl.static_range(4 // BYTES):
        tl.store(at + i, (bits >> (8 * BYTES * i)).to(WORD), mask=keep)
