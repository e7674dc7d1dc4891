"""Sparse blend attention in Triton, and its helpers: rotate and scatter, deviation, scores of keys.

The `reference` beside this defines what the kernels compute. Each function here returns the launches of an
operation, in order, and starts nothing. Attention is FlashAttention (https://arxiv.org/abs/2205.14135) over
the tiles of `Rows.tiles`: some rows times the query heads of a KV head are the rows of one matrix product.
Keys that all rows see need no mask; keys that no row sees are not read. Long tiles are split among several
programs where a launch then ends earlier, see `schedule`. Sums have a fixed order: equal inputs give equal
bits.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton
from triton.runtime.jit import JITFunction

from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.attention.schedule import TileCost, best_split
from kvkit.kernels.attention.triton_kernels import attend, main_channels, measure, merge, scatter_rows, weigh
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.once import form_of
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket
from kvkit.kernels.tuning.planned import LaunchPlan
from kvkit.kernels.tuning.tables import best

PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs of `attend` that a multiprocessor has at a time if they fit; `weigh` has as many by splitting."""
UNTUNED = ("INTERPRET", "PACK", "SPLIT", "K_BLOCK", "V_BLOCK", "K_TOKEN", "V_TOKEN")
"""Constants that follow from a configuration, or matter too little to be tuned for."""
LOG2_E = math.log2(math.e)
ROW_CONFIGS = {
    kernel: tuple(KernelConfig((("ROWS", n),), w, 1) for n in rows for w in warps)
    for kernel, rows, warps in (
        ("merge", (16, 8, 32), (4, 2, 8)),  # 256 channels spill in 2 warps, with Triton 3.6
        ("scatter_rows", (16, 8, 32, 64), (2, 4, 8)),
        ("measure", (8, 4, 16), (2, 4, 8)),
    )
}


MOST_CHANNELS = {2: 576, 4: 256}
"""Maximum channels of a head, by bytes of a channel: more do not fit a tile."""

Family = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
"""Family of a GPU: the target that it is most like."""

TILES: Mapping[Family, Mapping[int, tuple[tuple[int, int, int], ...]]] = {
    "sm_80": {
        2: ((128, 64, 8), (128, 32, 8), (64, 32, 8), (32, 16, 8)),
        4: ((32, 32, 4), (32, 32, 8), (16, 16, 8)),
    },
    "sm_90": {
        2: ((128, 64, 4), (128, 128, 8), (128, 32, 8), (64, 16, 8)),
        4: ((64, 32, 4), (32, 32, 8), (16, 16, 8)),
    },
    "sm_100": {
        2: ((128, 32, 8), (128, 64, 8), (128, 32, 8), (32, 16, 8)),
        4: ((32, 32, 4), (32, 32, 8), (16, 16, 8)),
    },
    "gfx942": {
        2: ((64, 32, 4), (64, 32, 4), (32, 32, 4), (16, 16, 4)),
        4: ((32, 32, 4), (32, 16, 4), (16, 16, 4)),
    },
}
"""Default TILE_ROWS, TILE_KEYS and warps of `attend`, by bytes of a channel, for up to 64, 128, 256 and more
channels.

The largest tiles that do not spill take the fewest instructions per product; those of sm_90 were the fastest
of a few on an H100 and an H200."""


def configs(launch: Launch, target: str | None = None) -> tuple[KernelConfig, ...]:
    """Return the configurations of a launch's kernel for its arguments, the default first.

    TILE_ROWS and TILE_KEYS are the sides of a tile of scores, PACK the query heads of a program if not those
    of `packed`; maxnreg limits a thread's registers. ROWS is the rows per program of other kernels.

    Args:
        launch: launch of one of the kernels here.
        target: name in `gpus.GPUS`; None: this process's GPU, or an H100 without one.
    """
    arguments, name = launch.arguments, _name(launch)
    family = _family_here() if target is None else _family_of(target)
    if name == "attend":
        size = max(arguments["SIZE"], arguments["V_SIZE"] if arguments["VALUES"] else 0)
        count = len(arguments["q"]) * arguments["GROUP"]
        simple = arguments["VALUES"] and arguments["PAGE"] > 0
        simple = simple and not arguments["WINDOWED"] and not arguments["CAPPED"]
        sizes = arguments["q"].element_size(), size, count
        return _tile_configs(family, *sizes, arguments["LATENT"], simple, arguments["GROUP"])
    if name == "weigh":
        return _weigh_configs(family, arguments["q"].element_size(), arguments["SIZE"], len(arguments["q"]))
    return ROW_CONFIGS[name]


def _family_of(target: str) -> Family:
    if target.startswith("gfx"):
        return "gfx942"
    return "sm_90" if target == "sm_90" else "sm_100" if target == "sm_100" else "sm_80"


@functools.cache
def _family_here() -> Family:
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    return _family_of(f"sm_{major}0")


@functools.cache
def _tile_configs(
    family: Family, item_bytes: int, size: int, count: int, latent: bool, simple: bool, group: int
) -> tuple[KernelConfig, ...]:
    """Return the configurations of `attend`; `simple`: V, in pages, with neither a window nor a soft-cap."""
    choices = TILES[family][item_bytes]
    rows, keys, warps = choices[min(bisect_left((64, 128, 256), size), len(choices) - 1)]
    if family == "sm_90" and item_bytes == 2 and 64 < size <= 128:
        keys = keys if size == 128 and simple else 64  # more spill
        warps = 8 if size == 128 else 4  # 4 do not spill yet
    if family == "sm_100" and 64 < size < 128:  # a head in two parts takes more registers
        keys //= 2
    if latent:  # keys are values, too
        rows, keys = (64, 32) if family == "sm_90" and size > 256 else (rows, 2 * keys)
    space = _space(family, (rows, keys, warps), count, (16, 32, 64, 128))
    found = {config: dict(config.tiles) for config in space if config.stages == space[0].stages}
    more = []
    if family == "sm_90" and item_bytes == 2 and size <= 128:  # so that two programs fit a multiprocessor
        few = [c for c in found if tiles_of(c) == (128, 32) and c.warps == 8]
        more += [c._replace(tiles=(*c.tiles, ("maxnreg", 128))) for c in few]
    wider = triton.next_power_of_2(group)
    if wider != group:  # a program takes heads that are not there, and divides by a power of two
        large = [c for c, tiles in found.items() if wider <= tiles["TILE_ROWS"] == tiles_of(space[0])[0]]
        more += [c._replace(tiles=(*c.tiles, ("PACK", wider))) for c in large]
    return *space, *more


def tiles_of(config: KernelConfig) -> tuple[int, int]:
    """Return the sides of a configuration's tiles of scores."""
    tiles = dict(config.tiles)
    return tiles["TILE_ROWS"], tiles["TILE_KEYS"]


@functools.cache
def _weigh_configs(family: Family, item_bytes: int, size: int, count: int) -> tuple[KernelConfig, ...]:
    if family == "sm_90" and item_bytes == 2:  # keys are the rows of a wgmma, which has 64
        return _space(family, (64, 128, 4) if size <= 128 else (32, 64, 4), count, (32, 64, 128))
    rows = 64 if size * item_bytes <= 256 and item_bytes == 2 else 32 if size <= 64 else 16
    keys = 32 if size * item_bytes > 256 or family == "sm_100" else 64
    warps = 8 if item_bytes == 4 and size > 128 else 4
    return _space(family, (rows, keys, warps), count, (32, 64, 128))


def _space(
    family: Family, first: tuple[int, int, int], count: int, all_keys: tuple[int, ...]
) -> tuple[KernelConfig, ...]:
    """Return configurations for tiles of at most `count` rows; `first`: the default's rows, keys, warps."""
    limit = max(16, min(128, triton.next_power_of_2(count)))
    # from 3 stages on, NVIDIA's copies overlap with the products; an MI300's shared memory is smaller
    stages = (2, 3, 4) if family == "gfx942" else (3, 2, 4)
    warps = 4 if limit < first[0] == 128 else first[2]
    default = KernelConfig((("TILE_ROWS", min(first[0], limit)), ("TILE_KEYS", first[1])), warps, stages[0])
    others = [
        KernelConfig((("TILE_ROWS", rows), ("TILE_KEYS", keys)), warps, s)
        for rows in (128, 64, 32, 16)
        if rows <= limit
        for keys in all_keys
        for warps in (4, 8)
        for s in stages
    ]
    return tuple(dict.fromkeys([default, *others]))


def bucket(launch: Launch) -> ProblemBucket:
    """Return the bucket of `launch`: problems that are compiled alike, with similar numbers of tokens."""
    arguments, name = launch.arguments, _name(launch)
    first_tensor = next(iter(arguments.values()))
    constants = [key for key in arguments if key.isupper() and key not in UNTUNED]
    dtype = str(first_tensor.dtype).removeprefix("torch.")
    compiled = " ".join([dtype, *(f"{key}={arguments[key]}" for key in constants)])
    sizes = [len(first_tensor), arguments["heads"]]
    if name in ("attend", "weigh"):
        sizes.append(arguments["tables"].shape[1] * arguments["k"].shape[2])
    return ProblemBucket(name, compiled, tuple(triton.next_power_of_2(max(1, n)) for n in sizes))


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
    """Return the launches of `api.blend_attention` into `out` and `lse`, both contiguous; checks nothing.

    Without `v_pages` and `out`, they compute only the logsumexp. `config` None means the best known.
    """
    v = k_pages if v_pages is None else v_pages
    same_address = v_pages is not None and v_pages.data_ptr() == k_pages.data_ptr()
    key = "attention", config, scoring, same_address, v_pages is None, *map(form_of, (q, k_pages, v))
    plan = rows.once(key, lambda: plan_attention(q, k_pages, v_pages, rows, scoring, config))
    return plan.launches(q, k_pages, v_pages, out, lse)


RESULTS = "part_out", "part_lse", "out", "lse"
"""Arguments of `attend` and `merge` that both write or read."""


class AttentionPlan(NamedTuple):
    """Launches that layers of a model share if their pages are alike, without a layer's tensors."""

    attending: LaunchPlan | None = None  # None: there are no rows
    grid: tuple[int, ...] = ()
    merging: LaunchPlan | None = None  # None: no keys are split
    merge_grid: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()  # shape of the logsumexp of the parts to merge

    def launches(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor,
    ) -> tuple[Launch, ...]:
        """Return the launches for tensors of the form that was planned for, as `attention` does."""
        if self.attending is None:
            return ()
        v = k_pages if v_pages is None else v_pages
        parts = lse, lse
        if self.merging is not None:
            parts = lse.new_empty(*self.parts, 0 if out is None else v.shape[3]), lse.new_empty(self.parts)
        results = (*parts, lse if out is None else out, lse)
        first = _planned(self.attending, self.grid, q, k_pages, v, *results)
        if self.merging is None:
            return (first,)
        return first, _planned(self.merging, self.merge_grid, *results)


def plan_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    rows: Rows,
    scoring: Scoring,
    config: KernelConfig | None = None,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Plan an attention for tensors of these forms; whether V begins where K does is a part of the form.

    Args:
        device: GPU that runs it; None: the rows' device.
    """
    if not rows.count:
        return AttentionPlan()
    heads, group = k_pages.shape[1], q.shape[1] // k_pages.shape[1]
    v = k_pages if v_pages is None else v_pages
    address = k_pages.data_ptr()  # 0: of a tensor without memory
    latent = v_pages is not None and 0 != address == v.data_ptr() and v.stride() == k_pages.stride()
    arguments = {
        **_score_arguments(q, k_pages, v_pages, rows, scoring),
        "LATENT": latent and v.shape[3] == main_channels(k_pages.shape[3]),
    }
    config, split = _split_of(config or _best(attend, arguments))
    tile_rows, tile_keys = tiles_of(config)
    pack = pack_of(config, group, int(np.diff(rows.row_starts).max()))
    units = heads * triton.cdiv(group, pack)
    v_size = 0 if v_pages is None else v.shape[3]
    size, resources = k_pages.shape[3], _resources(device or rows.device)
    stages = dict(config.tiles).get("STAGES", config.stages)
    loaded = stages * tile_keys * (size if arguments["LATENT"] else size + v_size)
    resident = resources.shared_bytes // (q.element_size() * (tile_rows * size + loaded))
    resident = min(PROGRAMS_PER_MULTIPROCESSOR, max(1, resident))
    cost = TileCost(tile_rows, tile_keys, units, size + v_size, v_size, resident)
    if split == "best":
        split = _best_split(rows, tile_rows // pack, cost, scoring.window, resources.processors)
    tiles = rows.tiles(tile_rows // pack, split, scoring.window)
    arguments |= {"work": tiles.items, "PACK": pack, "SPLIT": bool(tiles.parts), "INTERPRET": _interpreted()}
    own = "q", "k", "v"
    shared = {name: value for name, value in arguments.items() if name not in own}
    attending = LaunchPlan(attend, config, shared, (*own, *RESULTS))
    grid = (len(tiles.items) * units,)
    if not tiles.parts:
        return AttentionPlan(attending, grid)
    merging = {
        "work": tiles.merges,
        "heads": heads,
        "part_rows": tile_rows,
        "V_SIZE": v.shape[3],
        "GROUP": group,
        "PACK": pack,
        "VALUES": v_pages is not None,
    }
    merge_config = _best(merge, {"part_out": torch.empty(tiles.parts, 0), **merging})
    merge_grid = len(tiles.merges) * units, triton.cdiv(tile_rows, dict(merge_config.tiles)["ROWS"])
    merge_plan = LaunchPlan(merge, merge_config, merging, RESULTS)
    return AttentionPlan(attending, grid, merge_plan, merge_grid, (tiles.parts, units, tile_rows))


def _planned(plan: LaunchPlan, grid: tuple[int, ...], *tensors: torch.Tensor) -> Launch:
    return Launch(plan.kernel, grid, plan.arguments(*tensors), plan.config)


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
    """Return the launches of `api.query_scores` into `out`, float32 [Hq, length]; checks nothing."""
    length = int(rows.lengths[0])
    if not length:
        return ()
    before: tuple[Launch, ...] = ()
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        before = attention(q, k_pages, None, rows, scoring, None, lse)
    arguments = {
        **_score_arguments(q, k_pages, v_pages, rows, scoring),
        "lse": lse.contiguous(),
        "out": out,
        "count": rows.count,
        "length": length,
    }
    config = config or _best(weigh, arguments)
    heads, group = k_pages.shape[1], q.shape[1] // k_pages.shape[1]
    tiles = triton.cdiv(length, dict(config.tiles)["TILE_KEYS"])
    programs = PROGRAMS_PER_MULTIPROCESSOR * _resources(rows.device).processors
    pack = triton.cdiv(group, min(group, triton.cdiv(programs, tiles * heads)))
    work = {"pack": pack, "INTERPRET": _interpreted()}
    return *before, Launch(weigh, (tiles * heads * triton.cdiv(group, pack),), arguments | work, config)


def scatter(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotations: RowRotations,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviation: torch.Tensor | None,
    out: torch.Tensor,
    config: KernelConfig | None = None,
) -> tuple[Launch, ...]:
    """Return the launches of `api.rope_scatter`, rotated q into contiguous `out`; checks nothing."""
    key = "scatter", config, deviation is None, *map(form_of, (*qkv, k_pages, v_pages))
    plan = rotations.once(
        key, lambda: plan_scatter(qkv, rotations, k_pages, v_pages, deviation is not None, config)
    )
    return plan.launches(qkv, rotations, slots, k_pages, v_pages, deviation, out)


class ScatterPlan(NamedTuple):
    """A launch that layers of a model share if their pages are alike, without a layer's tensors."""

    scattering: LaunchPlan
    grid: tuple[int, ...]

    def launches(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotations: RowRotations,
        slots: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        deviation: torch.Tensor | None,
        out: torch.Tensor,
    ) -> tuple[Launch, ...]:
        """Return the launches for tensors of the form that was planned for, as `scatter` does."""
        if not self.grid[0]:
            return ()
        cos_sin = rotations.cos_sin
        moved = cos_sin if deviation is None else deviation
        tensors = (*qkv, cos_sin, slots, k_pages, v_pages, out, moved)
        return (_planned(self.scattering, self.grid, *tensors),)


def plan_scatter(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotations: RowRotations,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    deviates: bool,
    config: KernelConfig | None = None,
) -> ScatterPlan:
    """Plan a rotation and scatter for tensors of these forms; `deviates`: with a deviation."""
    (q, k, v), rope = qkv, rotations.rope
    count, query_heads, size = q.shape
    heads, tokens = k_pages.shape[1:3]
    own = "q", "k", "v", "cos_sin", "slots", "k_pages", "v_pages", "out", "deviation"
    shared = {
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
        "DEVIATION": deviates,
    }
    config = config or _best(scatter_rows, {"q": q, **shared})
    # a program has one head, or all K heads of a row if their deviations are summed
    units = query_heads + (1 if deviates else heads) + heads
    grid = triton.cdiv(count, dict(config.tiles)["ROWS"]), units
    return ScatterPlan(LaunchPlan(scatter_rows, config, shared, own), grid)


def deviation(
    new: torch.Tensor, old: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None
) -> tuple[Launch, ...]:
    """Return the launches of `api.token_deviation` into `out`, float32 [T]; checks nothing."""
    count, heads, size = new.shape
    if not count:
        return ()
    arguments = {
        "new": new,
        "old": old,
        "out": out,
        **_strides(("row", "head"), new=new, old=old),
        "count": count,
        "heads": heads,
        "SIZE": size,
    }
    config = config or _best(measure, arguments)
    return (Launch(measure, (triton.cdiv(count, dict(config.tiles)["ROWS"]),), arguments, config),)


def _score_arguments(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor | None, rows: Rows, scoring: Scoring
) -> dict[str, object]:
    """Return the arguments that `attend` and `weigh` share. Without `v_pages`, V is K and is not read."""
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        limit = MOST_CHANNELS[q.element_size()]
        if pages is not None and pages.shape[3] > limit:
            raise LaunchError(
                f"{name}: heads of {pages.shape[3]} channels of {q.dtype}, want at most {limit}"
            )
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
        **_strides(("block", "head"), k=k_pages, v=v),
        **_strides(("row", "head"), q=q),
        "heads": k_pages.shape[1],
        # fixed for an engine's pages; 0 for a single block, as its stride varies with the request's length
        "K_BLOCK": 0 if one_block else k_pages.stride(0),
        "V_BLOCK": 0 if one_block else v.stride(0),
        "K_TOKEN": k_pages.stride(2),
        "V_TOKEN": v.stride(2),
        "PAGE": 0 if one_block else tokens,
        "WINDOWED": scoring.window is not None,
        "CAPPED": softcap is not None,
        "SIZE": k_pages.shape[3],
        "V_SIZE": v.shape[3],
        "GROUP": q.shape[1] // k_pages.shape[1],
        "VALUES": v_pages is not None,
    }


def _strides(axes: tuple[str, ...], **tensors: torch.Tensor) -> dict[str, int]:
    """Return the strides of some tensors' first axes, named `<tensor>_<axis>`."""
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip(axes, tensor.stride(), strict=False)
    }


def _best_split(
    rows: Rows, rows_per_tile: int, cost: TileCost, window: int | None, processors: int
) -> int | None:
    """Return the multiple of keys at which tiles are split, so that the launch ends early; None: nowhere."""
    ranges = rows.tile_ranges(rows_per_tile, window)
    key = "split", rows_per_tile, cost, window, processors
    return rows.once(key, lambda: best_split(ranges.begin, ranges.end, cost, processors))


class _Resources(NamedTuple):
    """Multiprocessors of a device, and bytes of shared memory of each."""

    processors: int
    shared_bytes: int


@functools.cache
def _resources(device: torch.device) -> _Resources:
    """Return the resources of a GPU; for a CPU, those of an H100."""
    if device.type != "cuda":
        return _Resources(132, 228 << 10)
    found = torch.cuda.get_device_properties(device)
    return _Resources(found.multi_processor_count, found.shared_memory_per_multiprocessor)


def with_split(config: KernelConfig, keys: int | None) -> KernelConfig:
    """Return a configuration of `attend` that splits tiles at multiples of `keys`; None: nowhere.

    Without it, `schedule` decides where.
    """
    return config._replace(tiles=(*config.tiles, ("SPLIT_KEYS", keys or 0)))


def _split_of(config: KernelConfig) -> tuple[KernelConfig, int | Literal["best"] | None]:
    """Return a configuration as the kernel takes it, and where `with_split` has it split tiles."""
    tiles = dict(config.tiles)
    if "SPLIT_KEYS" not in tiles:
        return config, "best"
    split = tiles.pop("SPLIT_KEYS")
    return config._replace(tiles=tuple(tiles.items())), split or None


def pack_of(config: KernelConfig, group: int, rows: int) -> int:
    """Return the query heads of a KV head that a program of `attend` takes: PACK, or those of `packed`."""
    return dict(config.tiles).get("PACK") or packed(group, tiles_of(config)[0], rows)


def packed(group: int, tile_rows: int, rows: int) -> int:
    """Return the number of query heads of a KV head that one program of `attend` takes into its tile.

    With it, the fewest programs take all heads of the group and leave little of their tiles empty.

    Args:
        group: query heads of a KV head.
        tile_rows: rows of a tile, each of one query head.
        rows: maximum rows of a request.
    """
    packs = [-(-group // programs) for programs in range(1, group + 1)]
    filled = [group * min(rows, tile_rows // pack) / -(-group // pack) for pack in packs]
    return next(packs[i] for i, n in enumerate(filled) if n >= 0.85 * max(filled))


def _best(kernel: JITFunction[object], arguments: dict[str, object]) -> KernelConfig:
    draft = Launch(kernel, (), arguments, KernelConfig(()))
    space = configs(draft)
    return best(bucket(draft), space[0], space, kernel)


def _name(launch: Launch) -> str:
    return str(launch.kernel.__name__)


def _interpreted() -> bool:
    """Return whether Triton interprets kernels: its interpreter's products cannot read bfloat16."""
    return not isinstance(attend, JITFunction)
