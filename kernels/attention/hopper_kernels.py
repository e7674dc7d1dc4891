"""Gluon kernel of attention on Hopper GPUs (sm_90), launched by `kvkit.kernels.attention.hopper`.

It computes what `triton_kernels.attend` does. Three warpgroups share a program: one fetches K and V into
buffers, two compute 64 rows each. The products overlap with the softmax as in FlashAttention-3
(https://arxiv.org/abs/2407.08608): Q K of a tile of keys starts beside P V of the tile before, and the
exponentials of the first are taken while the second runs.

The warpgroups wait for one another at barriers in shared memory. Buffer i % STAGES holds tile i. A `ready`
barrier completes a phase when all fetching threads' copies of a tile have arrived, an `empty` one when both
computing warpgroups have read it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RUNTIME = ["heads", "table_stride", "window"]
"""Arguments that differ from call to call: new values compile nothing."""
ROWS = gl.constexpr(128)
"""Rows of a tile of scores: 64 for each of two warpgroups."""
FETCHING_THREADS = gl.constexpr(128)

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def rows_per_thread(keys, size):
    """Return the rows of a tile of K or V that a fetching thread copies 16 bytes of each."""
    return keys * size // 8 // FETCHING_THREADS.value


@gluon.constexpr_function
def run_length(page, keys, size):
    """Return how many consecutive keys of a fetching thread are in one block for sure.

    Args:
        page: tokens of a block, 0 for one block.
        keys: keys of a tile.
        size: channels of a head.
    """
    run = rows_per_thread(keys, size)
    return run if page % run == 0 else 1


@gluon.constexpr_function
def fetching_layout(keys, size):
    """Return the layout of K or V [keys, size] in which a thread has 8 channels of consecutive rows."""
    return gl.BlockedLayout([rows_per_thread(keys, size), 8], [256 // size, size // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def runs_layout(run, keys, size):
    """Return the layout of keys [keys / run, run] in which a thread has those of its rows."""
    runs = rows_per_thread(keys, size) // run
    return gl.BlockedLayout([runs, run], [256 // size, size // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def product_layout(columns):
    """Return the layout of a warpgroup's product of 64 rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def _tiles(item, KEYS: gl.constexpr):
    """Return the first key of an item's first tile, and three counts of tiles.

    These are the tiles before the full ones, those before and the full ones, and all. Every row sees every
    key of a full tile. An item without keys has one tile, of which no row sees a key.
    """
    start = gl.load(item + 3) // KEYS * KEYS
    tiles = gl.maximum(gl.cdiv(gl.load(item + 6) - start, KEYS), 1)
    before = gl.minimum(gl.cdiv(gl.load(item + 4) - start, KEYS), tiles)
    return start, before, gl.maximum((gl.load(item + 5) - start) // KEYS, before), tiles


@gluon.jit
def _rows(ends, unit, PART: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, LAYOUT: gl.constexpr):
    """Return lane, row, query head and validity of a warpgroup's rows, between the rows at `ends`.

    Every call computes them again, because the loads are volatile and all divisions depend on them: otherwise
    they would take registers through the loops.
    """
    UNITS: gl.constexpr = (GROUP + PACK - 1) // PACK
    lane = PART * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=LAYOUT)
    packed_row = gl.load(ends, volatile=True) * PACK + lane
    row = packed_row // PACK
    group_head = unit % UNITS * PACK + packed_row % PACK
    valid = (lane < ROWS // PACK * PACK) & (row < gl.load(ends + 1, volatile=True))
    return lane, row, unit // UNITS * GROUP + group_head, valid & (group_head < GROUP)


@gluon.jit
def _blocks(table, first, begin, end, PAGE: gl.constexpr, KEYS: gl.constexpr, SIZE: gl.constexpr):
    """Return block ids of the runs of keys of the tile from `first` on; 0 for runs outside of the item."""
    RUN: gl.constexpr = run_length(PAGE, KEYS, SIZE)
    RUNS: gl.constexpr = gl.SliceLayout(1, runs_layout(RUN, KEYS, SIZE))
    if PAGE == 0:
        block = gl.zeros([KEYS // RUN], gl.int32, RUNS)
    else:
        j = first + RUN * gl.arange(0, KEYS // RUN, layout=RUNS)
        block = gl.load(table + j // PAGE, mask=(j + RUN > begin) & (j < end), other=0)
    return block


@gluon.jit
def _places(
    block, first, BLOCK: gl.constexpr, TOKEN: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    SIZE: gl.constexpr,
):  # fmt: skip
    """Return offsets of the keys from `first` on: of their runs, and within these.

    They are not added up, so that the latter become constants of the copies' instructions.
    """
    RUN: gl.constexpr = run_length(PAGE, KEYS, SIZE)
    RUNS: gl.constexpr = runs_layout(RUN, KEYS, SIZE)
    LANES: gl.constexpr = gl.SliceLayout(1, fetching_layout(KEYS, SIZE))
    token = first + RUN * gl.arange(0, KEYS // RUN, layout=gl.SliceLayout(1, RUNS))
    if PAGE:
        token = token % PAGE
    # in units of 16 bytes, so that the compiler knows the alignment
    run = block.to(gl.int64) * (BLOCK // 8) + token.to(gl.int64) * (TOKEN // 8)
    every = (run[:, None] + gl.zeros([KEYS // RUN, RUN], gl.int64, RUNS)).reshape([KEYS])
    within = gl.arange(0, KEYS, layout=LANES) % RUN * TOKEN
    return gl.convert_layout(every, LANES, assert_trivial=True) * 8, within


@gluon.jit
def _fetch(
    k, v, table, item, k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
    K_BLOCK: gl.constexpr, K_TOKEN: gl.constexpr, V_BLOCK: gl.constexpr, V_TOKEN: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of K and V into the buffers, zeros for keys outside of the item.

    The table is read one tile ahead, while this waits for a buffer.
    """
    LAYOUT: gl.constexpr = fetching_layout(KEYS, SIZE)
    start, _, _, tiles = _tiles(item, KEYS)
    begin, end = gl.load(item + 3), gl.load(item + 6)
    channel = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    k += channel[None, :]
    v += channel[None, :]
    block = _blocks(table, start, begin, end, PAGE, KEYS, SIZE)
    for i in range(tiles):
        stage, phase, first = i % STAGES, i // STAGES & 1, start + i * KEYS
        j = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
        inside = ((j >= begin) & (j < end))[:, None]
        following = _blocks(table, first + KEYS, begin, end, PAGE, KEYS, SIZE)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        run, within = _places(block, first, K_BLOCK, K_TOKEN, PAGE, KEYS, SIZE)
        copy_async(k_bufs.index(stage), k + run[:, None] + within[:, None], mask=inside)
        async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        run, within = _places(block, first, V_BLOCK, V_TOKEN, PAGE, KEYS, SIZE)
        copy_async(v_bufs.index(stage), v + run[:, None] + within[:, None], mask=inside)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
        block = following


@gluon.jit
def _weights(
    s, norm, top, first_seen, last_seen, first, scale, softcap,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Return the exponentials of a tile's products s, the factor of earlier sums, the norm and maximum.

    `first_seen` and `last_seen` are the first and last keys of the item that a row sees, if it sees any.
    """
    if CAPPED:
        s = softcap * (1.0 - 2.0 / (1.0 + gl.exp2(s * scale)))
    elif MASKED:
        s = s * scale
    if MASKED:
        j = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        seen = j[None, :] <= last_seen[:, None]
        if WINDOWED:
            seen = seen & (j[None, :] >= first_seen[:, None])
        s = gl.where(seen, s, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 1))
        # a row may have seen no key yet: -inf - -inf is NaN
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
        p = gl.exp2(s - shift[:, None])
    elif CAPPED:
        new_top = gl.maximum(top, gl.max(s, 1))
        shift = new_top
        p = gl.exp2(s - shift[:, None])
    else:  # the scale is not negative: products have their maximum where scores have it
        new_top = gl.maximum(top, gl.max(s, 1) * scale)
        shift = new_top
        p = gl.exp2(s * scale - shift[:, None])
    fade = gl.exp2(top - shift)
    return p, fade, norm * fade + gl.sum(p, 1), new_top


@gluon.jit
def _pack(p, DTYPE: gl.constexpr):
    """Round p [64, keys] to a dtype of 16 bits, and put two columns into each of int32 [64, keys / 2].

    So they take a register for two while a loop carries them; the compiler would give each its own.
    """
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    KIND: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + KIND + ".f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _unpack(packed, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return what `_pack` packed, as the first operand of a product with this layout."""
    low = packed.to(gl.int16).to(DTYPE, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    weights = gl.join(low, high).reshape([packed.shape[0], 2 * packed.shape[1]])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _attend_tiles(
    acc, norm, top, packed, first_tile, stop, queries, first_seen, last_seen, start, scale, softcap,
    k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Take the tiles from `first_tile`, at least 1, to `stop` into the running sums and maximum.

    `acc` is one tile behind: the product of a tile's weights and V runs beside the next tile's product of Q
    and K, and under its exponentials.
    """
    OUT: gl.constexpr = acc.type.layout
    zeros = gl.zeros([ROWS // 2, KEYS], gl.float32, product_layout(KEYS))
    for tile in range(first_tile, stop):
        stage, before = tile % STAGES, (tile - 1) % STAGES
        weights = _unpack(packed, v_bufs.dtype, OUT)
        mbarrier.wait(k_ready.index(stage), tile // STAGES & 1)
        mbarrier.wait(v_ready.index(before), (tile - 1) // STAGES & 1)
        fence_async_shared()  # before products read what was copied
        k_tile = k_bufs.index(stage).permute((1, 0))
        s_token = warpgroup_mma(queries, k_tile, zeros, use_acc=False, is_async=True)
        acc_token = warpgroup_mma(weights, v_bufs.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, fade, norm, top = _weights(
            s, norm, top, first_seen, last_seen, start + tile * KEYS, scale, softcap,
            WINDOWED, CAPPED, KEYS, MASKED,
        )  # fmt: skip
        # this never waits: as a branch, it keeps ptxas from moving the wait for P V above the exponentials
        mbarrier.wait(v_ready.index(before), (tile - 1) // STAGES & 1)
        acc = warpgroup_mma_wait(0, [acc_token])
        packed = _pack(p, v_bufs.dtype)  # no earlier: P V still read what is overwritten
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
    return acc, norm, top, packed


@gluon.jit
def _compute(
    q, positions, work, out, lse, part_out, part_lse, scale, softcap, window, q_row, q_head, heads,
    q_buf, k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
    SIZE: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, SPLIT: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Compute o and lse of one half of a program's rows: PART is 0 or 1."""
    UNITS: gl.constexpr = (GROUP + PACK - 1) // PACK
    HALF: gl.constexpr = ROWS // 2
    L: gl.constexpr = product_layout(KEYS)
    OUT: gl.constexpr = product_layout(SIZE)
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    item = work + gl.program_id(0) // (heads * UNITS) * 8
    unit = gl.program_id(0) % (heads * UNITS)
    _, row, query_head, valid = _rows(item + 1, unit, PART, GROUP, PACK, gl.SliceLayout(1, LOADS))
    channel = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOADS))
    places = row.to(gl.int64) * q_row + query_head.to(gl.int64) * q_head
    queries = q_buf.slice(PART * HALF, HALF)
    queries.store(gl.load(q + places[:, None] + channel[None, :], mask=valid[:, None], other=0.0))
    _, row, _, valid = _rows(item + 1, unit, PART, GROUP, PACK, gl.SliceLayout(1, L))
    position = gl.load(positions + row, mask=valid, other=-1)
    start, before, full, tiles = _tiles(item, KEYS)
    last_seen = gl.minimum(position, gl.load(item + 6) - 1)
    first_seen = last_seen
    if WINDOWED:
        first_seen = gl.maximum(position - window + 1, gl.load(item + 3))

    acc = gl.zeros([HALF, SIZE], gl.float32, OUT)
    norm = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, L))
    top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, L))
    zeros = gl.zeros([HALF, KEYS], gl.float32, L)
    mbarrier.wait(k_ready.index(0), 0)
    fence_async_shared()
    s_token = warpgroup_mma(queries, k_bufs.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s_token])
    mbarrier.arrive(k_empty.index(0), count=1)
    p, _, norm, top = _weights(
        s, norm, top, first_seen, last_seen, start, scale, softcap, WINDOWED, CAPPED, KEYS, True
    )
    packed = _pack(p, v_bufs.dtype)
    bounds = (1, gl.maximum(before, 1), gl.maximum(full, 1), tiles)
    for part in gl.static_range(0 if WINDOWED else 1, 3):
        acc, norm, top, packed = _attend_tiles(
            acc, norm, top, packed, bounds[part], bounds[part + 1], queries, first_seen, last_seen, start,
            scale, softcap, k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
            WINDOWED, CAPPED, KEYS, STAGES, part != 1,
        )  # fmt: skip
    mbarrier.wait(v_ready.index((tiles - 1) % STAGES), (tiles - 1) // STAGES & 1)
    fence_async_shared()
    weights = _unpack(packed, v_bufs.dtype, OUT)
    acc_token = warpgroup_mma(weights, v_bufs.index((tiles - 1) % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc_token])

    logsum = gl.where(norm == 0, float("-inf"), top + gl.log2(gl.where(norm == 0, 1.0, norm)))
    inverse = gl.convert_layout(1.0 / gl.where(norm == 0, 1.0, norm), gl.SliceLayout(1, OUT))
    acc = acc * inverse[:, None]
    _store(acc, logsum, item, unit, out, lse, part_out, part_lse, heads, SIZE, GROUP, PACK, SPLIT, PART)


@gluon.jit
def _store(
    o, logsum, item, unit, out, lse, part_out, part_lse, heads,
    SIZE: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, SPLIT: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Store o and lse of half a tile: the results or, for an item that is a part, what `merge` reads."""
    UNITS: gl.constexpr = (GROUP + PACK - 1) // PACK
    LANES: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    logsum = gl.convert_layout(logsum, LANES)
    channel = gl.arange(0, SIZE, layout=gl.SliceLayout(0, o.type.layout))[None, :]
    lane, row, query_head, valid = _rows(item + 1, unit, PART, GROUP, PACK, LANES)
    if SPLIT:
        part = gl.load(item + 7)
        if part >= 0:
            at = (part.to(gl.int64) * heads * UNITS + unit) * ROWS + lane
            gl.store(part_lse + at, logsum)
            gl.store(part_out + at[:, None] * SIZE + channel, o, mask=valid[:, None])
        valid = valid & (row < gl.where(part < 0, row + 1, 0))
    place = row.to(gl.int64) * heads * GROUP + query_head
    gl.store(lse + place, logsum * 0.6931471805599453, mask=valid)
    gl.store(out + place[:, None] * SIZE + channel, o.to(out.dtype.element_ty), mask=valid[:, None])


@gluon.constexpr_function
def registers(keys, size):
    """Return the registers of a thread of the second warpgroup that computes, and of the one that fetches.

    The first that computes gets the rest of the 504 that there are for three threads: as many as the second.
    """
    return [208, 88] if keys * size <= 8192 else [232, 40]


@gluon.jit(do_not_specialize=RUNTIME)
def attend_hopper(
    q, k, v, tables, positions, work, out, lse, part_out, part_lse,
    scale, softcap, window, table_stride, q_row, q_head, k_block, k_head, v_block, v_head, heads,
    K_BLOCK: gl.constexpr, K_TOKEN: gl.constexpr, V_BLOCK: gl.constexpr, V_TOKEN: gl.constexpr,
    SIZE: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, SPLIT: gl.constexpr, TILE_ROWS: gl.constexpr,
    TILE_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute o and lse, of all or part of the keys, for one item of `Tiles.items`, as `attend` does."""
    gl.static_assert(TILE_ROWS == ROWS, "two warpgroups have 64 rows each")
    UNITS: gl.constexpr = (GROUP + PACK - 1) // PACK
    item = work + gl.program_id(0) // (heads * UNITS) * 8
    head = gl.program_id(0) % (heads * UNITS) // UNITS
    table = tables + gl.load(item).to(gl.int64) * table_stride
    k += head.to(gl.int64) * k_head
    v += head.to(gl.int64) * v_head
    if PAGE == 0:  # one block has all keys
        only = gl.load(table).to(gl.int64)
        k += only * k_block
        v += only * v_block

    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [ROWS, SIZE], shared)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_KEYS, SIZE], shared)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_KEYS, SIZE], shared)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=FETCHING_THREADS)
        mbarrier.init(v_ready.index(i), count=FETCHING_THREADS)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_compute, (
                q, positions, work, out, lse, part_out, part_lse, scale, softcap, window, q_row, q_head,
                heads, q_buf, k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
                SIZE, GROUP, PACK, WINDOWED, CAPPED, SPLIT, TILE_KEYS, STAGES, gl.constexpr(0),
            )),
            (_compute, (
                q, positions, work, out, lse, part_out, part_lse, scale, softcap, window, q_row, q_head,
                heads, q_buf, k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
                SIZE, GROUP, PACK, WINDOWED, CAPPED, SPLIT, TILE_KEYS, STAGES, gl.constexpr(1),
            )),
            (_fetch, (
                k, v, table, item, k_bufs, v_bufs, k_ready, v_ready, k_empty, v_empty,
                K_BLOCK, K_TOKEN, V_BLOCK, V_TOKEN, PAGE, TILE_KEYS, SIZE, STAGES,
            )),
        ],
        [4, 4],
        registers(TILE_KEYS, SIZE),
    )  # fmt: skip
