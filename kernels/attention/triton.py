"""Sparse blend attention in Triton, and what goes with it: rotate and scatter, deviation, scores of keys.

What the kernels compute is the `reference` beside this; each function here gives the launches that compute
it, in order, and starts nothing. Attention is FlashAttention's (https://arxiv.org/abs/2205.14135), over
tiles of `Rows.tiles`: the query heads of a KV head times some rows are the rows of one matrix product; keys
that all rows see are taken without a mask, those that none sees are not touched; long tiles are split among
several programs where there would be too few (https://pytorch.org/blog/flash-decoding). Sums have a fixed
order: equal inputs give equal bits.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from triton.runtime.jit import JITFunction

from kvkit.kernels.attention.layer import RowTurns, Scoring
from kvkit.kernels.attention.rows import Rows, Tiles
from kvkit.kernels.attention.triton_kernels import attend, measure, merge, scatter_rows, weigh
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket
from kvkit.kernels.tuning.tables import best

PROGRAMS_PER_UNIT = 2  # so many programs per multiprocessor are enough not to split tiles
UNITS = 132  # multiprocessors, where no GPU is asked (an H100's)
LOG2_E = math.log2(math.e)
ROW_CONFIGS = {
    kernel: tuple(KernelConfig((("ROWS", n),), w, 1) for n in rows for w in warps)
    for kernel, rows, warps in (
        ("merge", (16, 8, 32), (4, 2, 8)),  # 256 channels spill from 2 warps, by Triton 3.6
        ("scatter_rows", (16, 8, 32, 64), (2, 4, 8)),
        ("measure", (8, 4, 16), (2, 4, 8)),
    )
}


def configs(launch: Launch, amd: bool = torch.version.hip is not None) -> tuple[KernelConfig, ...]:
    """The configurations that the kernel of `launch` can have on its arguments, the default first.

    The default for an AMD GPU has fewer stages: an MI300's shared memory is smaller.
    TILE_ROWS and TILE_KEYS are the sides of a tile of scores; ROWS are what a program of the others takes.
    """
    given, name = launch.arguments, _name(launch)
    if name in ("attend", "weigh"):
        size = triton.next_power_of_2(max(given["SIZE"], given.get("V_SIZE", 0)))
        packed = given["GROUP"] if name == "attend" else 1
        item_bytes, windowed = given["q"].element_size(), name == "attend" and given["WINDOWED"]
        return _tile_configs(name, item_bytes, size, packed, len(given["q"]), amd, windowed)
    return ROW_CONFIGS[name]


@functools.cache
def _tile_configs(
    kernel: str, item_bytes: int, size: int, group: int, count: int, amd: bool, windowed: bool
) -> tuple[KernelConfig, ...]:
    least = max(16, triton.next_power_of_2(group))  # a matrix product's, and one row
    most = max(least, min(128, triton.next_power_of_2(count * group)))
    stages: tuple[int, ...] = (2, 3, 4) if amd else (3, 2, 4)
    # 32 keys of 128 channels leave room for two programs on an H100: one multiplies while the other weighs
    first, keys, all_keys = most, 32 if size > 64 else 64, (32, 64, 128)
    if windowed and size > 64:  # a third loop takes registers
        first = min(64, most)
    if item_bytes == 4:  # products without tensor cores: operands are in registers
        first, keys, all_keys = min(32, most), 32, (16, 32, 64)
        stages = (1, 2) if kernel == "weigh" else (2, 1)  # as registers allow
    elif size > 128:
        first, keys, all_keys, stages = min(64, most), 32, (16, 32, 64), (2, 3)
    first = max(first, least)
    warps = 8 if first > 64 or first * size > 64 * 128 else 4
    default = KernelConfig((("TILE_ROWS", first), ("TILE_KEYS", keys)), warps, stages[0])
    others = [
        KernelConfig((("TILE_ROWS", rows), ("TILE_KEYS", n)), w, s)
        for rows in (128, 64, 32, 16)
        if least <= rows <= max(most, least)
        for n in all_keys
        for w in (4, 8)
        for s in stages
    ]
    return tuple(dict.fromkeys([default, *others]))


def bucket(launch: Launch) -> ProblemBucket:
    """The problems that share a best configuration with `launch`: compiled alike, of about as many tokens."""
    given, name = launch.arguments, _name(launch)
    main = next(iter(given.values()))
    constants = [key for key in given if key.isupper() and key not in ("INTERPRET", "SPLIT")]
    form = str(main.dtype).removeprefix("torch."), *(f"{key}={given[key]}" for key in constants)
    sizes = [len(main), given["heads"]]
    if name in ("attend", "weigh"):
        sizes.append(given["tables"].shape[1] * given["k"].shape[2])
    return ProblemBucket(name, " ".join(form), tuple(triton.next_power_of_2(max(1, n)) for n in sizes))


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scoring: Scoring,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    config: KernelConfig | None = None,
) -> tuple[Launch, ...]:
    """What computes `api.blend_attention` into `out` and `lse`, both contiguous; checks nothing.

    Without `v_pages` and `out`, only the logsumexp. `config` None means the best known one.
    """
    if not rows.count:
        return ()
    heads, group = k_pages.shape[1], q.shape[1] // k_pages.shape[1]
    v = k_pages if v_pages is None else v_pages
    given = {
        **_scored(q, k_pages, v_pages, rows, scoring),
        "ALIKE": k_pages.stride() == v.stride(),  # a token of V is as far from its start as one of K
    }
    config = config or _best(attend, given)
    tile_rows, tile_keys = (dict(config.tiles)[name] for name in ("TILE_ROWS", "TILE_KEYS"))
    tiles = _tiles(rows, tile_rows // group, tile_keys, heads, scoring.window)
    parts = tiles.parts, heads, tile_rows
    results = {
        "part_out": lse.new_empty(*parts, 0 if out is None else v.shape[3]),
        "part_lse": lse.new_empty(parts),
        "out": lse if out is None else out,
        "lse": lse,
    }
    work = {"work": tiles.items, "SPLIT": bool(tiles.parts), "INTERPRET": _interpreted()}
    first = Launch(attend, (len(tiles.items) * heads,), given | results | work, config)
    if not tiles.parts:
        return (first,)
    merging = {
        **results,
        "work": tiles.merges,
        "heads": heads,
        "part_rows": tile_rows,
        "V_SIZE": v.shape[3],
        "GROUP": group,
        "VALUES": v_pages is not None,
    }
    chosen = _best(merge, merging)
    steps = triton.cdiv(tile_rows, dict(chosen.tiles)["ROWS"])
    return first, Launch(merge, (len(tiles.merges) * heads, steps), merging, chosen)


def scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scoring: Scoring,
    lse: torch.Tensor | None,
    out: torch.Tensor,
    config: KernelConfig | None = None,
) -> tuple[Launch, ...]:
    """What computes `api.query_scores` into `out`, float32 [Hq, length]; checks nothing."""
    length = int(rows.lengths[0])
    if not length:
        return ()
    before: tuple[Launch, ...] = ()
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        before = attention(q, k_pages, None, rows, scoring, None, lse)
    given = {
        **_scored(q, k_pages, v_pages, rows, scoring),
        "lse": lse.contiguous(),
        "out": out,
        "count": rows.count,
        "length": length,
    }
    config = config or _best(weigh, given)
    programs = triton.cdiv(length, dict(config.tiles)["TILE_KEYS"]) * q.shape[1]
    return *before, Launch(weigh, (programs,), given | {"INTERPRET": _interpreted()}, config)


def scatter(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    turns: RowTurns,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviation: torch.Tensor | None,
    out: torch.Tensor,
    config: KernelConfig | None = None,
) -> tuple[Launch, ...]:
    """What computes `api.rope_scatter`, the rotated q into `out`, contiguous; checks nothing."""
    (q, k, v), rope = qkv, turns.rope
    count, query_heads, size = q.shape
    if not count:
        return ()
    heads, tokens = k_pages.shape[1:3]
    given = {
        "q": q,
        "k": k,
        "v": v,
        "cos_sin": turns.cos_sin,
        "slots": slots,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "out": out,
        "deviation": turns.cos_sin if deviation is None else deviation,
        **_strides(("row", "head"), q=q, k=k, v=v),
        **_strides(("block", "page_head", "token"), k=k_pages, v=v_pages),
        "count": count,
        "heads": heads,
        "query_heads": query_heads,
        "tokens": tokens,
        "limit": len(k_pages) * tokens,
        "SIZE": size,
        "V_SIZE": v.shape[2],
        "FIRST": rope.first,
        "CHANNELS": rope.channels,
        "INTERLEAVED": rope.interleaved,
        "DEVIATION": deviation is not None,
    }
    config = config or _best(scatter_rows, given)
    # a program has one head; but the K heads of a row, if their deviations are summed
    units = query_heads + (1 if deviation is not None else heads) + heads
    grid = triton.cdiv(count, dict(config.tiles)["ROWS"]), units
    return (Launch(scatter_rows, grid, given, config),)


def deviation(
    new: torch.Tensor, old: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None
) -> tuple[Launch, ...]:
    """What computes `api.token_deviation` into `out`, float32 [T]; checks nothing."""
    count, heads, size = new.shape
    if not count:
        return ()
    given = {
        "new": new,
        "old": old,
        "out": out,
        **_strides(("row", "head"), new=new, old=old),
        "count": count,
        "heads": heads,
        "SIZE": size,
    }
    config = config or _best(measure, given)
    return (Launch(measure, (triton.cdiv(count, dict(config.tiles)["ROWS"]),), given, config),)


def _scored(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor | None, rows: Rows, scoring: Scoring
) -> dict[str, object]:
    """Arguments of both kernels that compute scores. Without `v_pages`, V is K and is not read."""
    v = k_pages if v_pages is None else v_pages
    tokens = k_pages.shape[2]
    one_block = not rows.lengths.size or int(rows.lengths.max()) <= tokens
    scale, softcap = scoring.scale, scoring.softcap
    return {
        "q": q,
        "k": k_pages,
        "v": v,
        "tables": rows.device_tables,
        "positions": rows.device_positions,
        "table_stride": rows.device_tables.stride(0),
        # with a soft-cap c: c * tanh(s / c) = c * (1 - 2 / (1 + exp2(2 * log2(e) * s / c)))
        "scale": scale * LOG2_E if softcap is None else 2 * LOG2_E * scale / softcap,
        "softcap": (softcap or 0.0) * LOG2_E,
        "window": scoring.window or 0,
        **_strides(("block", "head", "token"), k=k_pages, v=v),
        **_strides(("row", "head"), q=q),
        "heads": k_pages.shape[1],
        "PAGE": 0 if one_block else tokens,
        "WINDOWED": scoring.window is not None,
        "CAPPED": softcap is not None,
        "SIZE": k_pages.shape[3],
        "V_SIZE": v.shape[3],
        "GROUP": q.shape[1] // k_pages.shape[1],
        "VALUES": v_pages is not None,
    }


def _strides(axes: tuple[str, ...], **tensors: torch.Tensor) -> dict[str, int]:
    """The strides of some tensors' first axes, as `<tensor>_<axis>`."""
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip(axes, tensor.stride(), strict=False)
    }


def _tiles(rows: Rows, rows_per_tile: int, tile_keys: int, heads: int, window: int | None) -> Tiles:
    """Whole tiles, or, where these are too few programs, as many more as keep all multiprocessors busy."""
    whole = rows.tiles(rows_per_tile, window=window)
    units = UNITS
    if rows.device.type == "cuda":
        units = torch.cuda.get_device_properties(rows.device).multi_processor_count
    programs = PROGRAMS_PER_UNIT * units
    if len(whole.items) * heads >= programs:
        return whole
    share = triton.cdiv(whole.keys * heads, programs)
    return rows.tiles(rows_per_tile, max(4 * tile_keys, triton.next_power_of_2(max(1, share))), window)


def _best(kernel: JITFunction[object], given: dict[str, object]) -> KernelConfig:
    draft = Launch(kernel, (), given, KernelConfig(()))
    space = configs(draft)
    return best(bucket(draft), space[0], space, kernel)


def _name(launch: Launch) -> str:
    return str(launch.kernel.__name__)


def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, whose matrix products cannot read bfloat16."""
    return not isinstance(attend, JITFunction)
