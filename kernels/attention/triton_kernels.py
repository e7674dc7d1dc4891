"""The Triton kernels of attention and its helpers, as `kvkit.kernels.attention.triton` launches them.

Scores are kept in units of log2: exp2 is what the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUNTIME = ["heads", "table_stride", "window", "count", "length", "limit", "part_rows"]
"""Numbers that differ from call to call: nothing is compiled anew for them."""


@triton.jit
def _blocks(table, start, end, PAGE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Block ids of the tile of keys from `start` on, or the one that has them all; 0 from `end` on."""
    if PAGE == 0:  # one block
        block = tl.load(table)
    elif PAGE % TILE_KEYS == 0:  # the tile is within a block
        block = tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        j = start + tl.arange(0, TILE_KEYS)
        block = tl.load(table + j // PAGE, mask=j < end, other=0)
    return block


@triton.jit
def _places(block, start, block_stride, token_stride, PAGE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Where the keys of a tile from `start` on begin in pages."""
    lane = tl.arange(0, TILE_KEYS)
    if PAGE == 0:
        token = start + lane
    elif PAGE % TILE_KEYS == 0:
        token = start % PAGE + lane
    else:
        token = (start + lane) % PAGE
    return block.to(tl.int64) * block_stride + token.to(tl.int64) * token_stride


@triton.jit
def _load_rows(base, places, inside, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[TILE_KEYS, SIZE padded to a power of two]: rows of pages, zeros outside."""
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > 16 else 16
    channel = tl.arange(0, PADDED)[None, :]
    pointers = base + places[:, None] + channel
    if MASKED:
        rows = tl.load(pointers, mask=inside[:, None] & (channel < SIZE), other=0.0)
    else:
        rows = tl.load(pointers) if PADDED == SIZE else tl.load(pointers, mask=channel < SIZE, other=0.0)
    return rows


@triton.jit
def _load_queries(
    q, first, after, head, q_row, q_head, SIZE: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """Queries [TILE_ROWS, SIZE padded] of a KV head's group; and the row, query head and validity of each."""
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > 16 else 16
    lane = tl.arange(0, TILE_ROWS)
    row = first + lane // GROUP
    query_head = head * GROUP + lane % GROUP
    valid = (lane < TILE_ROWS // GROUP * GROUP) & (row < after)
    channel = tl.arange(0, PADDED)[None, :]
    pointers = q + (row.to(tl.int64) * q_row + query_head.to(tl.int64) * q_head)[:, None] + channel
    return tl.load(pointers, mask=valid[:, None] & (channel < SIZE), other=0.0), row, query_head, valid


@triton.jit
def _products(q, k, INTERPRET: tl.constexpr):
    """q k^T [TILE_ROWS, TILE_KEYS]."""
    if INTERPRET:
        q, k = q.to(tl.float32), k.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _capped(s, softcap, CAPPED: tl.constexpr):
    """Scaled products as scores, in units of log2."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s))) if CAPPED else s


@triton.jit
def _attend_keys(
    acc, norm, top, block, q, position, start, stop, begin, end, k, v, table,
    scale, softcap, window, k_block, k_token, v_block, v_token,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, VALUES: tl.constexpr, ALIKE: tl.constexpr, INTERPRET: tl.constexpr,
    TILE_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the tiles of keys from `start` to `stop` into the running sums and maximum.

    `block` comes with the ids of the tile at `start` and leaves with those at `stop`: the table is read a
    tile ahead, so that K and V, whose addresses depend on it, can be fetched ahead, too.
    """
    for first in range(start, stop, TILE_KEYS):
        first = tl.multiple_of(first, TILE_KEYS)
        places = _places(block, first, k_block, k_token, PAGE, TILE_KEYS)
        j = first + tl.arange(0, TILE_KEYS)
        inside = (j >= begin) & (j < end)
        s = _products(q, _load_rows(k, places, inside, SIZE, MASKED), INTERPRET)
        if MASKED:
            s = _capped(s * scale, softcap, CAPPED)
            seen = inside[None, :] & (j[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (j[None, :] > position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            # a row may have seen nothing yet: -inf - -inf is NaN
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
            if not ALIKE:
                places = _places(block, first, v_block, v_token, PAGE, TILE_KEYS)
            values = _load_rows(v, places, inside, V_SIZE, MASKED)
            if INTERPRET:
                values = values.to(tl.float32)
            acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        top = new_top
        if PAGE != 0:
            block = _blocks(table, first + TILE_KEYS, end, PAGE, TILE_KEYS)
    return acc, norm, top, block


@triton.jit(do_not_specialize=RUNTIME)
def attend(
    q, k, v, tables, positions, work, out, lse, part_out, part_lse,
    scale, softcap, window, table_stride,
    q_row, q_head, k_block, k_head, k_token, v_block, v_head, v_token, heads,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, ALIKE: tl.constexpr,
    SPLIT: tl.constexpr, INTERPRET: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """One item of `Tiles.items` and one KV head: o and lse, or those of its part of the keys."""
    V_PADDED: tl.constexpr = triton.next_power_of_2(V_SIZE) if V_SIZE > 16 else 16
    item = work + (tl.program_id(0) // heads) * 8
    head = tl.program_id(0) % heads
    request, first_row, after_row = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, full_begin, full_end, end = (
        tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6),
    )  # fmt: skip
    table = tables + request.to(tl.int64) * table_stride
    queries, row, query_head, valid = _load_queries(
        q, first_row, after_row, head, q_row, q_head, SIZE, GROUP, TILE_ROWS
    )
    position = tl.load(positions + row, mask=valid, other=-1)
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head

    start = begin // TILE_KEYS * TILE_KEYS
    full_start = tl.cdiv(full_begin, TILE_KEYS) * TILE_KEYS
    if WINDOWED:
        full_start = tl.minimum(full_start, tl.cdiv(end, TILE_KEYS) * TILE_KEYS)
    full_stop = tl.maximum(full_end // TILE_KEYS * TILE_KEYS, full_start)
    acc = tl.zeros([TILE_ROWS, V_PADDED if VALUES else 16], tl.float32)
    norm = tl.zeros([TILE_ROWS], tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    bounds = (start, full_start, full_stop, end)
    block = _blocks(table, start if WINDOWED else full_start, end, PAGE, TILE_KEYS)
    for part in tl.static_range(0 if WINDOWED else 1, 3):  # only the keys in the middle are seen by all rows
        acc, norm, top, block = _attend_keys(
            acc, norm, top, block, queries, position, bounds[part], bounds[part + 1], begin, end, k, v, table,
            scale, softcap, window, k_block, k_token, v_block, v_token,
            SIZE, V_SIZE, PAGE, WINDOWED, CAPPED, VALUES, ALIKE, INTERPRET, TILE_KEYS, part != 1,
        )  # fmt: skip

    logsum = tl.where(norm > 0, top + tl.log2(tl.where(norm > 0, norm, 1.0)), float("-inf"))
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    channel = tl.arange(0, V_PADDED if VALUES else 16)[None, :]
    place = row.to(tl.int64) * heads * GROUP + query_head
    if SPLIT:
        part = tl.load(item + 7)
        if part >= 0:
            at = (part.to(tl.int64) * heads + head) * TILE_ROWS + tl.arange(0, TILE_ROWS)
            tl.store(part_lse + at, logsum)
            if VALUES:
                tl.store(part_out + at[:, None] * V_SIZE + channel, acc, mask=channel < V_SIZE)
        valid = valid & (row < tl.where(part < 0, after_row, 0))
    _store(out, lse, place, valid, acc, logsum, V_SIZE, VALUES)


@triton.jit
def _store(out, lse, place, valid, acc, logsum, V_SIZE: tl.constexpr, VALUES: tl.constexpr):
    """Write the o of some rows, which are at `place`, and their lse, in units of log2."""
    tl.store(lse + place, logsum * 0.6931471805599453, mask=valid)
    if VALUES:
        channel = tl.arange(0, acc.shape[1])[None, :]
        inside = valid[:, None] & (channel < V_SIZE)
        tl.store(out + place[:, None] * V_SIZE + channel, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def merge(
    part_out, part_lse, work, out, lse, heads, part_rows,
    V_SIZE: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """o and lse of one KV head of some rows of a tile, from its parts, each weighted by its exp(lse)."""
    V_PADDED: tl.constexpr = triton.next_power_of_2(V_SIZE)
    item = work + (tl.program_id(0) // heads) * 4
    head = tl.program_id(0) % heads
    first_row, after_row = tl.load(item), tl.load(item + 1)
    first_part, parts = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = first_row + lane // GROUP
    valid = (row < after_row) & (lane < part_rows)
    channel = tl.arange(0, V_PADDED)[None, :]
    acc = tl.zeros([ROWS, V_PADDED], tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(parts):
        at = ((first_part + part) * heads + head) * part_rows + lane
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
    logsum = tl.where(norm > 0, top + tl.log2(tl.where(norm > 0, norm, 1.0)), float("-inf"))
    place = row.to(tl.int64) * heads * GROUP + head * GROUP + lane % GROUP
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    _store(out, lse, place, valid, acc, logsum, V_SIZE, VALUES)


@triton.jit(do_not_specialize=RUNTIME)
def weigh(
    q, k, v, tables, positions, lse, out,
    scale, softcap, window, table_stride,
    q_row, q_head, k_block, k_head, k_token, v_block, v_head, v_token, heads, count, length,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr,
    INTERPRET: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """out [Hq, length]: what all rows of one query head pay to some keys."""
    start = tl.program_id(0) // (heads * GROUP) * TILE_KEYS
    query_head = tl.program_id(0) % (heads * GROUP)
    head = query_head // GROUP
    block = _blocks(tables, start, length, PAGE, TILE_KEYS)
    j = start + tl.arange(0, TILE_KEYS)
    inside = j < length
    places = _places(block, start, k_block, k_token, PAGE, TILE_KEYS)
    keys = _load_rows(k + head.to(tl.int64) * k_head, places, inside, SIZE, True)
    total = tl.zeros([TILE_KEYS], tl.float32)
    for first in range(0, count, TILE_ROWS):
        queries, row, _, valid = _load_queries(q, first, count, query_head, q_row, q_head, SIZE, 1, TILE_ROWS)
        position = tl.load(positions + row, mask=valid, other=-1)
        logsum = tl.load(lse + row.to(tl.int64) * heads * GROUP + query_head, mask=valid, other=0.0)
        s = _capped(_products(queries, keys, INTERPRET) * scale, softcap, CAPPED)
        seen = inside[None, :] & (j[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (j[None, :] > position[:, None] - window)
        # a row whose logsumexp is -inf sees nothing
        p = tl.exp2(s - (logsum * 1.4426950408889634)[:, None])
        total += tl.sum(tl.where(seen, p, 0.0), 0)
    if VALUES:
        places = _places(block, start, v_block, v_token, PAGE, TILE_KEYS)
        values = _load_rows(v + head.to(tl.int64) * v_head, places, inside, V_SIZE, True).to(tl.float32)
        total *= tl.sqrt(tl.sum(values * values, 1))
    tl.store(out + query_head.to(tl.int64) * length + j, total, mask=inside)


@triton.jit
def _turn(
    source, target, cos_sin, keep, to,
    SIZE: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEVIATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate a head of rows from `source` to `target` [ROWS]; which are read (keep) and written (to).

    With DEVIATION, the squared distance [ROWS] of what is written from what was there.
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
    """Store float32 x; with DEVIATION, the squared distance of each row from what was there."""
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
    """Some rows of one query head, of K's heads (one, or all with DEVIATION), or of one head of V."""
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
    """out [T]: the squared distance of new and old over heads, in their order, and channels."""
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
