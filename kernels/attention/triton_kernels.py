"""Triton kernels of attention and its helpers, launched by `kvkit.kernels.attention.triton`.

Scores are in units of log2, because the hardware has exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

RUNTIME = ["heads", "table_stride", "window", "count", "length", "limit", "part_rows", "pack"]
"""Arguments that differ from call to call: new values compile nothing."""


@triton.constexpr_function
def main_channels(size):
    """Return the channels of a head's main part, a power of two.

    The main part is the padded head, unless a main part and a rest together have fewer channels.
    """
    padded = max(16, triton.next_power_of_2(size))
    half = padded // 2
    return half if half + max(16, triton.next_power_of_2(size - half)) < padded else padded


@triton.constexpr_function
def rest_channels(size):
    """Return the channels of a head's rest, padded to a power of two: 64 of 576 = 512 + 64; 0: no rest."""
    rest = size - main_channels(size)
    return max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


@triton.jit
def _rows(ends, unit, GROUP: tl.constexpr, PACK: tl.constexpr, COUNT: tl.constexpr):
    """Return row, query head and validity of each lane of a tile, between the rows at `ends`.

    Every call computes them again, because the loads are volatile.
    """
    UNITS: tl.constexpr = (GROUP + PACK - 1) // PACK
    lane = tl.arange(0, COUNT)
    row = tl.load(ends, volatile=True) + lane // PACK
    group_head = unit % UNITS * PACK + lane % PACK
    valid = (lane < COUNT // PACK * PACK) & (row < tl.load(ends + 1, volatile=True)) & (group_head < GROUP)
    return row, unit // UNITS * GROUP + group_head, valid


@triton.jit
def _blocks(table, start, end, PAGE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Return block ids of the tile of keys from `start` on; 0 from `end` on, or if one block has all."""
    if PAGE == 0:
        block = 0
    elif PAGE % TILE_KEYS == 0:  # the tile is within a block
        block = tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        j = start + tl.arange(0, TILE_KEYS)
        block = tl.load(table + j // PAGE, mask=j < end, other=0)
    return block


@triton.jit
def _places(
    block, start, BLOCK: tl.constexpr, TOKEN: tl.constexpr, PAGE: tl.constexpr, TILE_KEYS: tl.constexpr
):
    """Return the offsets of a tile's keys from `start` on, in pages with these block and token strides."""
    lane = tl.arange(0, TILE_KEYS)
    if PAGE == 0:
        token = start + lane
    elif PAGE % TILE_KEYS == 0:
        token = start % PAGE + lane
    else:
        token = (start + lane) % PAGE
    return block.to(tl.int64) * BLOCK + token.to(tl.int64) * TOKEN if PAGE else token.to(tl.int64) * TOKEN


@triton.jit
def _load_rows(
    pointers, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr
):
    """Load [rows, WIDTH], channels from FIRST on of rows of SIZE; zeros beyond and, if MASKED, outside."""
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    pointers = pointers[:, None] + channel
    if MASKED:
        rows = tl.load(pointers, mask=inside[:, None] & (channel < SIZE), other=0.0)
    elif FIRST + WIDTH > SIZE:
        rows = tl.load(pointers, mask=channel < SIZE, other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def _dot(a, b, acc, INTERPRET: tl.constexpr, TENSOR_CORES: tl.constexpr = True):
    """Return acc + a b. Products of float32 are sums of three of TF32 (https://arxiv.org/abs/2203.03341)."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3" if TENSOR_CORES and is_cuda() else "ieee")


@triton.jit
def _capped(s, softcap, CAPPED: tl.constexpr):
    """Return scaled products as scores, in units of log2."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s))) if CAPPED else s


@triton.jit
def _attend_keys(
    acc, acc_rest, norm, top, block, q, q_rest, position, start, stop, begin, end, k, v, table,
    scale, softcap, window,
    K_BLOCK: tl.constexpr, K_TOKEN: tl.constexpr, V_BLOCK: tl.constexpr, V_TOKEN: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, VALUES: tl.constexpr, LATENT: tl.constexpr, INTERPRET: tl.constexpr,
    TILE_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys from `start` to `stop` to the running sums and maximum.

    `block` has the ids of the tile at `start` on entry, and of the tile at `stop` on return. The table is
    read one tile ahead, so that K and V, with addresses that depend on it, can be fetched ahead too.
    """
    MAIN: tl.constexpr = main_channels(SIZE)
    REST: tl.constexpr = rest_channels(SIZE)
    V_MAIN: tl.constexpr = main_channels(V_SIZE)
    V_REST: tl.constexpr = rest_channels(V_SIZE)
    for first in range(start, stop, TILE_KEYS):
        first = tl.multiple_of(first, TILE_KEYS)
        pointers = k + _places(block, first, K_BLOCK, K_TOKEN, PAGE, TILE_KEYS)
        j = first + tl.arange(0, TILE_KEYS)
        inside = (j >= begin) & (j < end)
        keys = _load_rows(pointers, inside, 0, MAIN, SIZE, MASKED)
        s = _dot(q, tl.trans(keys), None, INTERPRET)
        if REST:
            s = _dot(q_rest, tl.trans(_load_rows(pointers, inside, MAIN, REST, SIZE, MASKED)), s, INTERPRET)
        if MASKED:
            s = _capped(s * scale, softcap, CAPPED)
            seen = inside[None, :] & (j[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (j[None, :] > position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            # a row may have seen no key yet: -inf - -inf is NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s - shift[:, None])
        elif CAPPED:
            s = _capped(s * scale, softcap, CAPPED)
            new_top = tl.maximum(top, tl.max(s, 1))
            shift = new_top
            p = tl.exp2(s - shift[:, None])
        else:  # the scale is not negative: products have their maximum where scores have it
            new_top = tl.maximum(top, tl.max(s, 1) * scale)
            shift = new_top
            p = tl.exp2(s * scale - shift[:, None])
        fade = tl.exp2(top - shift)
        norm = norm * fade + tl.sum(p, 1)
        if VALUES:
            weights = p.to(keys.dtype)
            if LATENT:
                values = keys
            else:
                pointers = v + _places(block, first, V_BLOCK, V_TOKEN, PAGE, TILE_KEYS)
                values = _load_rows(pointers, inside, 0, V_MAIN, V_SIZE, MASKED)
            acc = _dot(weights, values, acc * fade[:, None], INTERPRET)
            if V_REST:
                values = _load_rows(pointers, inside, V_MAIN, V_REST, V_SIZE, MASKED)
                acc_rest = _dot(weights, values, acc_rest * fade[:, None], INTERPRET)
        top = new_top
        block = _blocks(table, first + TILE_KEYS, end, PAGE, TILE_KEYS)
    return acc, acc_rest, norm, top, block


@triton.jit(do_not_specialize=RUNTIME)
def attend(
    q, k, v, tables, positions, work, out, lse, part_out, part_lse,
    scale, softcap, window, table_stride, q_row, q_head, k_block, k_head, v_block, v_head, heads,
    K_BLOCK: tl.constexpr, K_TOKEN: tl.constexpr, V_BLOCK: tl.constexpr, V_TOKEN: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, LATENT: tl.constexpr,
    SPLIT: tl.constexpr, INTERPRET: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute o and lse, of all or part of the keys, for one item of `Tiles.items`.

    A program takes PACK query heads of a KV head. With LATENT, V is the main part of K, in the same memory.
    """
    REST: tl.constexpr = rest_channels(SIZE)
    V_MAIN: tl.constexpr = main_channels(V_SIZE)
    V_REST: tl.constexpr = rest_channels(V_SIZE)
    UNITS: tl.constexpr = (GROUP + PACK - 1) // PACK
    item = work + (tl.program_id(0) // (heads * UNITS)) * 8
    unit = tl.program_id(0) % (heads * UNITS)
    head = unit // UNITS
    request = tl.load(item)
    begin, full_begin, full_end, end = (
        tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6),
    )  # fmt: skip
    table = tables + request.to(tl.int64) * table_stride
    row, query_head, valid = _rows(item + 1, unit, GROUP, PACK, TILE_ROWS)
    pointers = q + row.to(tl.int64) * q_row + query_head.to(tl.int64) * q_head
    queries = _load_rows(pointers, valid, 0, main_channels(SIZE), SIZE, True)
    queries_rest = _load_rows(pointers, valid, main_channels(SIZE), REST, SIZE, True) if REST else queries
    position = tl.load(positions + row, mask=valid, other=-1)
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    if PAGE == 0:  # one block has all keys
        only = tl.load(table).to(tl.int64)
        k += only * k_block
        v += only * v_block

    start = begin // TILE_KEYS * TILE_KEYS
    full_start = tl.cdiv(full_begin, TILE_KEYS) * TILE_KEYS
    if WINDOWED:
        full_start = tl.minimum(full_start, tl.cdiv(end, TILE_KEYS) * TILE_KEYS)
    full_stop = tl.maximum(full_end // TILE_KEYS * TILE_KEYS, full_start)
    acc = tl.zeros([TILE_ROWS, V_MAIN if VALUES else 16], tl.float32)
    acc_rest = tl.zeros([TILE_ROWS, V_REST if VALUES and V_REST else 16], tl.float32)
    norm = tl.zeros([TILE_ROWS], tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    bounds = (start, full_start, full_stop, end)
    block = _blocks(table, start if WINDOWED else full_start, end, PAGE, TILE_KEYS)
    for part in tl.static_range(0 if WINDOWED else 1, 3):  # only the keys in the middle are seen by all rows
        acc, acc_rest, norm, top, block = _attend_keys(
            acc, acc_rest, norm, top, block, queries, queries_rest, position,
            bounds[part], bounds[part + 1], begin, end, k, v, table,
            scale, softcap, window, K_BLOCK, K_TOKEN, V_BLOCK, V_TOKEN,
            SIZE, V_SIZE, PAGE, WINDOWED, CAPPED, VALUES, LATENT, INTERPRET, TILE_KEYS, part != 1,
        )  # fmt: skip

    row, query_head, valid = _rows(item + 1, unit, GROUP, PACK, TILE_ROWS)  # recomputed after the loops
    logsum = tl.where(norm == 0, float("-inf"), top + tl.log2(tl.where(norm == 0, 1.0, norm)))
    inverse = 1.0 / tl.where(norm == 0, 1.0, norm)
    place = row.to(tl.int64) * heads * GROUP + query_head
    if SPLIT:
        part = tl.load(item + 7)
        if part >= 0:
            at = (part.to(tl.int64) * heads * UNITS + unit) * TILE_ROWS + tl.arange(0, TILE_ROWS)
            tl.store(part_lse + at, logsum)
            if VALUES:
                _store(part_out, at, valid, acc, inverse, 0, V_SIZE)
                if V_REST:
                    _store(part_out, at, valid, acc_rest, inverse, V_MAIN, V_SIZE)
        valid = valid & (row < tl.where(part < 0, row + 1, 0))
    tl.store(lse + place, logsum * 0.6931471805599453, mask=valid)
    if VALUES:
        _store(out, place, valid, acc, inverse, 0, V_SIZE)
        if V_REST:
            _store(out, place, valid, acc_rest, inverse, V_MAIN, V_SIZE)


@triton.jit(do_not_specialize=RUNTIME)
def attend_dense(
    q, k, v, tables, positions, work, out, lse, part_out, part_lse,
    scale, softcap, window, table_stride, heads,
    q_row: tl.constexpr, q_head: tl.constexpr, k_block: tl.constexpr, k_head: tl.constexpr,
    v_block: tl.constexpr, v_head: tl.constexpr,
    K_BLOCK: tl.constexpr, K_TOKEN: tl.constexpr, V_BLOCK: tl.constexpr, V_TOKEN: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, LATENT: tl.constexpr,
    SPLIT: tl.constexpr, INTERPRET: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute `attend` with strides known to the compiler, as JAX's arrays have them.

    jax-triton says of no number that it is a multiple of 16, without which addresses take no wide accesses.
    """
    attend(
        q, k, v, tables, positions, work, out, lse, part_out, part_lse,
        scale, softcap, window, table_stride, q_row, q_head, k_block, k_head, v_block, v_head, heads,
        K_BLOCK, K_TOKEN, V_BLOCK, V_TOKEN, SIZE, V_SIZE, GROUP, PACK, PAGE,
        WINDOWED, CAPPED, VALUES, LATENT, SPLIT, INTERPRET, TILE_ROWS, TILE_KEYS,
    )  # fmt: skip


@triton.jit
def _store(out, place, valid, acc, factor, FIRST: tl.constexpr, V_SIZE: tl.constexpr):
    """Write factor * acc to o at `place`, channels from FIRST on."""
    channel = FIRST + tl.arange(0, acc.shape[1])[None, :]
    inside = valid[:, None] & (channel < V_SIZE)
    o = (acc * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * V_SIZE + channel, o, mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def merge(
    part_out, part_lse, work, out, lse, heads, part_rows,
    V_SIZE: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge o and lse of some rows of an `attend` program from parts, each weighted by its exp(lse)."""
    V_PADDED: tl.constexpr = triton.next_power_of_2(V_SIZE)
    UNITS: tl.constexpr = (GROUP + PACK - 1) // PACK
    item = work + (tl.program_id(0) // (heads * UNITS)) * 4
    unit = tl.program_id(0) % (heads * UNITS)
    first_row, after_row = tl.load(item), tl.load(item + 1)
    first_part, parts = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row, group_head = first_row + lane // PACK, unit % UNITS * PACK + lane % PACK
    valid = (row < after_row) & (lane < part_rows // PACK * PACK) & (group_head < GROUP)
    channel = tl.arange(0, V_PADDED)[None, :]
    acc = tl.zeros([ROWS, V_PADDED], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(parts):
        at = ((first_part + part) * heads * UNITS + unit) * part_rows + lane
        logsum = tl.load(part_lse + at, mask=valid, other=float("-inf"))
        new_top = tl.maximum(top, logsum)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade, weight = tl.exp2(top - shift), tl.exp2(logsum - shift)
        norm = norm * fade + weight
        if VALUES:
            o = tl.load(
                part_out + at[:, None] * V_SIZE + channel, mask=valid[:, None] & (channel < V_SIZE), other=0.0
            )
            acc = acc * fade[:, None] + o * weight[:, None]
        top = new_top
    logsum = tl.where(norm == 0, float("-inf"), top + tl.log2(tl.where(norm == 0, 1.0, norm)))
    place = row.to(tl.int64) * heads * GROUP + unit // UNITS * GROUP + group_head
    tl.store(lse + place, logsum * 0.6931471805599453, mask=valid)
    if VALUES:
        _store(out, place, valid, acc, 1.0 / tl.where(norm == 0, 1.0, norm), 0, V_SIZE)


@triton.jit(do_not_specialize=RUNTIME)
def weigh(
    q, k, v, tables, positions, lse, out,
    scale, softcap, window, table_stride, q_row, q_head, k_block, k_head, v_block, v_head,
    heads, count, length, pack,
    K_BLOCK: tl.constexpr, K_TOKEN: tl.constexpr, V_BLOCK: tl.constexpr, V_TOKEN: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr,
    INTERPRET: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Sum to out [Hq, length] what all rows of `pack` query heads of a KV head pay to keys, read once."""
    MAIN: tl.constexpr = main_channels(SIZE)
    REST: tl.constexpr = rest_channels(SIZE)
    splits = tl.cdiv(GROUP, pack)
    start = tl.program_id(0) // (heads * splits) * TILE_KEYS
    unit = tl.program_id(0) % (heads * splits)
    head, group_head = unit // splits, unit % splits * pack
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    if PAGE == 0:
        only = tl.load(tables).to(tl.int64)
        k += only * k_block
        v += only * v_block
    block = _blocks(tables, start, length, PAGE, TILE_KEYS)
    j = start + tl.arange(0, TILE_KEYS)
    inside = j < length
    pointers = k + _places(block, start, K_BLOCK, K_TOKEN, PAGE, TILE_KEYS)
    keys = _load_rows(pointers, inside, 0, MAIN, SIZE, True)
    keys_rest = _load_rows(pointers, inside, MAIN, REST, SIZE, True) if REST else keys
    norm = tl.full([TILE_KEYS], 1.0, tl.float32)
    if VALUES:
        pointers = v + _places(block, start, V_BLOCK, V_TOKEN, PAGE, TILE_KEYS)
        values = _load_rows(pointers, inside, 0, main_channels(V_SIZE), V_SIZE, True).to(tl.float32)
        norm = tl.sum(values * values, 1)
        if rest_channels(V_SIZE):
            values = _load_rows(
                pointers, inside, main_channels(V_SIZE), rest_channels(V_SIZE), V_SIZE, True
            ).to(tl.float32)
            norm += tl.sum(values * values, 1)
        norm = tl.sqrt(norm)
    lane, total = tl.arange(0, TILE_ROWS), tl.zeros([TILE_KEYS], tl.float32)
    query_head, first = head * GROUP + group_head, tl.full([], 0, tl.int32)
    for _ in range(tl.minimum(pack, GROUP - group_head) * tl.cdiv(count, TILE_ROWS)):
        valid = lane < count - first
        rows = q + first.to(tl.int64) * q_row + query_head.to(tl.int64) * q_head + lane.to(tl.int64) * q_row
        queries = _load_rows(rows, valid, 0, MAIN, SIZE, True)
        position = tl.load(positions + first + lane, mask=valid, other=-1)
        sums = lse + first.to(tl.int64) * heads * GROUP + query_head
        logsum = tl.load(sums + lane * heads * GROUP, mask=valid, other=0.0)
        # keys are the product's rows, so that a sum over queries stays within a warp. With two TF32 numbers
        # for each, 256 channels would not fit the registers
        s = _dot(keys, tl.trans(queries), None, INTERPRET, SIZE <= 128)
        if REST:
            queries = _load_rows(rows, valid, MAIN, REST, SIZE, True)
            s = _dot(keys_rest, tl.trans(queries), s, INTERPRET, SIZE <= 128)
        s = _capped(s * scale, softcap, CAPPED)
        seen = j[:, None] <= position[None, :]
        if WINDOWED:
            seen = seen & (j[:, None] > position[None, :] - window)
        # a row with a logsumexp of -inf sees no key
        p = tl.exp2(s - (logsum * 1.4426950408889634)[None, :])
        total = tl.where(first == 0, 0.0, total) + tl.sum(tl.where(seen, p, 0.0), 1)
        first += TILE_ROWS
        tl.store(
            out + query_head.to(tl.int64) * length + j,
            total * norm,
            mask=j < tl.where(first < count, 0, length),
        )
        query_head += (first >= count).to(tl.int32)
        first = tl.where(first >= count, 0, first)


@triton.jit
def _turn(
    source, target, cos_sin, keep, to,
    SIZE: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEVIATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate a head of rows from `source` to `target` [ROWS]; `keep` masks the reads, `to` the writes.

    With DEVIATION, returns the squared distance [ROWS] of the new values from the old.
    """
    HALF: tl.constexpr = CHANNELS // 2
    PADDED: tl.constexpr = triton.next_power_of_2(HALF)
    moved = tl.zeros([ROWS], tl.float32)
    pair = tl.arange(0, PADDED)[None, :]
    reads, writes = keep[:, None] & (pair < HALF), to[:, None] & (pair < HALF)
    cos = tl.load(cos_sin[:, None] + pair, mask=reads, other=0.0)
    sin = tl.load(cos_sin[:, None] + HALF + pair, mask=reads, other=0.0)
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PADDED)[None, :]
        reads, writes = keep[:, None] & (channel < CHANNELS), to[:, None] & (channel < CHANNELS)
        x = tl.load(source[:, None] + FIRST + channel, mask=reads, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [ROWS, PADDED, 2]))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [ROWS, 2 * PADDED])
        moved += _put(turned, target[:, None] + FIRST + channel, writes, DEVIATION)
    else:
        a = tl.load(source[:, None] + FIRST + pair, mask=reads, other=0.0).to(tl.float32)
        b = tl.load(source[:, None] + FIRST + HALF + pair, mask=reads, other=0.0).to(tl.float32)
        moved += _put(a * cos - b * sin, target[:, None] + FIRST + pair, writes, DEVIATION)
        moved += _put(b * cos + a * sin, target[:, None] + FIRST + HALF + pair, writes, DEVIATION)
    if CHANNELS < SIZE:
        channel = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
        rest = (channel < FIRST) | ((channel >= FIRST + CHANNELS) & (channel < SIZE))
        x = tl.load(source[:, None] + channel, mask=keep[:, None] & rest, other=0.0).to(tl.float32)
        moved += _put(x, target[:, None] + channel, to[:, None] & rest, DEVIATION)
    return moved


@triton.jit
def _put(x, target, writes, DEVIATION: tl.constexpr):
    """Store float32 x; with DEVIATION, return each row's squared distance from the old values."""
    rounded = x.to(target.dtype.element_ty)
    moved = tl.zeros([x.shape[0]], tl.float32)
    if DEVIATION:
        before = tl.load(target, mask=writes, other=0.0).to(tl.float32)
        distance = tl.where(writes, rounded.to(tl.float32) - before, 0.0)
        moved = tl.sum(distance * distance, 1)
    tl.store(target, rounded, mask=writes)
    return moved


@triton.jit(do_not_specialize=RUNTIME)
def scatter_rows(
    q, k, v, cos_sin, slots, k_pages, v_pages, out, deviation,
    q_row, q_head, k_row, k_head, v_row, v_head,
    k_block, k_page_head, k_token, v_block, v_page_head, v_token,
    count, heads, query_heads, tokens, limit,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr,
    INTERLEAVED: tl.constexpr, DEVIATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate rows of one query head or of K's heads (one; all with DEVIATION), or copy one head of V."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    unit = tl.program_id(1).to(tl.int64)
    key_units = 1 if DEVIATION else heads
    cos_sin += row * CHANNELS
    if unit < query_heads:
        _turn(
            q + row * q_row + unit * q_head, out + (row * query_heads + unit) * SIZE, cos_sin, inside, inside,
            SIZE, FIRST, CHANNELS, INTERLEAVED, False, ROWS,
        )  # fmt: skip
    else:
        slot = tl.load(slots + row, mask=inside, other=-1)
        keep = (slot >= 0) & (slot < limit)
        slot = tl.where(keep, slot, 0)
        block, token = slot // tokens, slot % tokens
        if unit < query_heads + key_units:
            head = unit - query_heads  # the first of several with DEVIATION
            source = k + row * k_row + head * k_head
            target = k_pages + block * k_block + token * k_token + head * k_page_head
            moved = tl.zeros([ROWS], tl.float32)
            for _ in range(heads if DEVIATION else 1):
                moved += _turn(
                    source, target, cos_sin, keep, keep, SIZE, FIRST, CHANNELS, INTERLEAVED, DEVIATION, ROWS
                )
                source += k_head
                target += k_page_head
            if DEVIATION:
                tl.store(deviation + row, moved, mask=inside)
        else:
            head = unit - query_heads - key_units
            channel = tl.arange(0, triton.next_power_of_2(V_SIZE))[None, :]
            mask = keep[:, None] & (channel < V_SIZE)
            x = tl.load(v + (row * v_row + head * v_head)[:, None] + channel, mask=mask, other=0.0)
            target = v_pages + block * v_block + token * v_token + head * v_page_head
            tl.store(target[:, None] + channel, x, mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def measure(
    new, old, out, new_row, new_head, old_row, old_head, count, heads, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """Write to out [T] the squared distance of new and old over heads, in their order, and channels."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    mask = (row < count)[:, None] & (channel < SIZE)
    total = tl.zeros([ROWS], tl.float32)
    new += (row * new_row)[:, None] + channel
    old += (row * old_row)[:, None] + channel
    for _ in range(heads):
        a, b = tl.load(new, mask=mask, other=0.0), tl.load(old, mask=mask, other=0.0)
        distance = a.to(tl.float32) - b.to(tl.float32)
        total += tl.sum(distance * distance, 1)
        new += new_head
        old += old_head
    tl.store(out + row, total, mask=row < count)
