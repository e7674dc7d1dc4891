"""The problems that kernels are compiled, tuned and checked with: one for each form that matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.attention import reference as attention_reference
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages import reference as pages_reference
from kvkit.kernels.tuning.configs import Bucket, Config, Launch


@dataclass(frozen=True, slots=True)
class Work:
    """What a problem cannot be done without.

    Args:
        moved_bytes: read from and written to memory.
        flops: multiplications and additions of its matrix products.
    """

    moved_bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A problem with its tensors on a device.

    Args:
        launches: the kernels of a configuration (None: the best that is known), in order, over these tensors.
        poison: overwrites whatever the kernels write.
        fault: compares what they wrote with the operation's `reference`: where it differs, "" if nowhere.
    """

    launches: Callable[[Config | None], tuple[Launch, ...]]
    poison: Callable[[], None]
    fault: Callable[[], str]

    def run(self, config: Config) -> None:
        """Start the kernels of `config` on the current stream; mutates what they write."""
        for launch in self.launches(config):
            launch.run()


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One problem of a bucket.

    Args:
        name: unique.
        bucket: that it stands for.
        space: configurations to choose from, the default first.
        make: its tensors on a device; with False they hold nothing, for a look at the launches alone.
        work: of a configuration, whose tiles may take more than the problem needs.
        wide: by kernel's name, how many of its instructions the layout lets load and store 16 bytes at least.
        gated: has a form of its own in the compile gate; False where another's is nearly the same.
        amd_space: `space` where an AMD GPU has another one.
    """

    name: str
    bucket: Bucket
    space: tuple[Config, ...]
    make: Callable[[torch.device, bool], Case]
    work: Callable[[Config], Work]
    wide: Mapping[str, tuple[int, int]]
    gated: bool = True
    amd_space: tuple[Config, ...] = ()

    def space_on(self, target: str) -> tuple[Config, ...]:
        """Configurations for a target, a name of `compiled.GPUS`; the default first."""
        return self.amd_space if self.amd_space and target.startswith("gfx") else self.space


@cache
def every_problem() -> tuple[Problem, ...]:
    """All problems, those of an operation one after another; made once, on the CPU, without contents."""
    return (
        *(_move_problem(move) for move in MOVES),
        *(_attention_problem(attention) for attention in ATTENTIONS),
        *(_scatter_problem(scatter) for scatter in SCATTERS),
        _deviation_problem(),
    )


@dataclass(frozen=True, slots=True)
class Move:
    """A pack (`to_records`) or unpack.

    Args:
        name: of the problem.
        group: of the pages.
        to_records: pack.
        chunks: of `CHUNK_TOKENS` tokens.
        slots: pages are named token by token, not block by block.
        quantised: form of the records.
        rope: keys are rotated on the way.
        wide, gated: as in `Problem`; `wide` of its one kernel.
    """

    name: str
    group: LayerGroup
    to_records: bool
    chunks: int = 8
    slots: bool = False
    quantised: Literal["fp8", "int8"] | None = None
    rope: Rope | None = None
    wide: tuple[int, int] = (1, 1)
    gated: bool = True


CHUNK_TOKENS = 256


def _rope(channels: int, base: float, **more: Any) -> Rope:
    return Rope(tuple(base ** (-2 * i / channels) for i in range(channels // 2)), **more)


LLAMA = LayerGroup(tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16)
"""Llama-3.1-8B."""
SMOLLM = LayerGroup(tuple(range(30)), kv_heads=3, k_size=64, v_size=64, dtype="float32", block_tokens=16)
"""SmolLM2-135M."""
DEEPSEEK = LayerGroup(tuple(range(61)), kv_heads=1, k_size=576, v_size=0, dtype="bfloat16", block_tokens=64)
"""DeepSeek-V3's latents, with 64 rotary channels at their end."""
INDEX = LayerGroup(tuple(range(61)), kv_heads=1, k_size=132, v_size=0, dtype="uint8", block_tokens=64)
"""DeepSeek-V3.2's index keys: rows of 4-byte words."""

LLAMA_ROPE = _rope(128, 500000.0)
INTERLEAVED = _rope(128, 10000.0, interleaved=True)
LATENT_ROPE = _rope(64, 10000.0, interleaved=True, first=512)

MOVES = (
    *(
        Move(f"{'pack' if to_records else 'unpack'} Llama, {chunks} chunks", LLAMA, to_records, chunks)
        for to_records in (True, False)
        for chunks in (1, 8)
    ),
    Move("pack Llama by slots", LLAMA, True, slots=True, gated=False),
    Move("unpack Llama by slots", LLAMA, False, slots=True, gated=False),
    Move("pack 132-byte rows", INDEX, True, wide=(0, 0)),
    Move("unpack 132-byte rows", INDEX, False, wide=(0, 0)),
    Move("rotate Llama, 1 chunk", LLAMA, False, 1, rope=LLAMA_ROPE, wide=(6, 2)),
    Move("rotate Llama, 8 chunks", LLAMA, False, rope=LLAMA_ROPE, wide=(6, 2)),
    Move("rotate Llama by slots", LLAMA, False, slots=True, rope=LLAMA_ROPE, wide=(6, 2)),
    Move("rotate interleaved", LLAMA, False, rope=INTERLEAVED, wide=(6, 2)),
    Move("rotate SmolLM2, float32", SMOLLM, False, rope=_rope(64, 100000.0), wide=(4, 2)),
    Move("rotate DeepSeek's latents", DEEPSEEK, False, rope=LATENT_ROPE, wide=(6, 2)),
    Move("pack fp8", LLAMA, True, quantised="fp8", wide=(1, 0)),
    Move("pack int8", LLAMA, True, quantised="int8", wide=(1, 0)),
    Move("unpack fp8", LLAMA, False, quantised="fp8", wide=(0, 2)),
    Move("unpack int8", LLAMA, False, quantised="int8", wide=(0, 2), gated=False),
    Move("rotate fp8", LLAMA, False, quantised="fp8", rope=LLAMA_ROPE, wide=(4, 2)),
    Move("rotate int8", LLAMA, False, quantised="int8", rope=LLAMA_ROPE, wide=(4, 2), gated=False),
)


def _move_problem(move: Move) -> Problem:
    from kvkit.kernels.pages import triton as pages

    (launch,) = _move_case(move, torch.device("cpu"), False).launches(None)
    record = move.group.quantised() if move.quantised else move.group
    moved = move.chunks * (move.group.chunk_bytes(CHUNK_TOKENS) + record.chunk_bytes(CHUNK_TOKENS))
    kernel = launch.kernel.__name__
    return Problem(
        name=move.name,
        bucket=pages.bucket(launch),
        space=pages.configs(kernel),
        make=partial(_move_case, move),
        work=lambda config: Work(moved),
        wide={kernel: move.wide},
        gated=move.gated,
    )


def _move_case(move: Move, device: torch.device, filled: bool) -> Case:
    from kvkit.kernels.pages import triton as pages
    from kvkit.kernels.pages.api import Pages

    group, random = move.group, np.random.default_rng(0)
    record = group.quantised() if move.quantised else group
    each = CHUNK_TOKENS // group.block_tokens
    used = move.chunks * each
    blocks = used + used // 4 if filled else 1  # of the pool: some are nobody's
    ids = (
        random.permutation(used + used // 4)[:used].reshape(move.chunks, each)
        if filled
        else np.zeros((move.chunks, each), np.int64)
    )
    slots = (ids[:, :, None] * group.block_tokens + np.arange(group.block_tokens)).reshape(move.chunks, -1)
    size = record.chunk_bytes(CHUNK_TOKENS)
    records = torch.empty(move.chunks, size, dtype=torch.uint8, device=device)
    pool = group.pages(blocks, POISON, str(device))
    engine = Pages.of(group, pool)
    rotation = None
    if move.rope is not None:
        rotation = Rotation(move.rope, random.integers(-5000, 5000, move.chunks))
    if filled and move.to_records:
        for tensor in pool:
            _fill(tensor)
    elif filled:
        for chunk in records:
            values = torch.empty(group.record_shape(CHUNK_TOKENS), dtype=pool[0].dtype, device=device)
            _fill(values)
            if move.quantised:
                values = pages_reference.quantise(values, group.k_size, move.quantised)
            chunk.copy_(values.view(torch.uint8).reshape(-1))

    def launches(config: Config | None) -> tuple[Launch, ...]:
        launch = pages.move(
            engine,
            records.data_ptr() + size * np.arange(move.chunks),
            slots if move.slots else ids,
            move.to_records,
            slots=move.slots,
            quantised=move.quantised,
            rope=move.rope,
            turns=rotation.resolve(*slots.shape) if rotation else None,
            config=config,
        )
        return (launch,)

    def poison() -> None:
        for tensor in [records] if move.to_records else pool:
            tensor.view(torch.uint8).fill_(POISON)

    @cache
    def expected() -> list[torch.Tensor]:
        host = (
            [np.full(size, POISON, np.uint8) for _ in records]
            if move.to_records
            else list(records.cpu().numpy())
        )
        shape = len(group.layers), engine.heads, CHUNK_TOKENS, engine.row_bytes
        if move.to_records:
            if move.quantised:
                pages_reference.encode(group, engine.parts, host, slots, move.quantised)
            else:
                pages_reference.pack(engine.parts, host, slots, shape)
            return [torch.from_numpy(np.stack(host)).to(device)]
        fresh = group.pages(blocks, POISON, str(device))
        parts = Pages.of(group, fresh).parts
        if move.quantised or rotation:
            pages_reference.decode(group, parts, host, slots, rotation, move.quantised)
        else:
            pages_reference.unpack(parts, host, slots, shape)
        return fresh

    def fault() -> str:
        for i, (want, got) in enumerate(zip(expected(), [records] if move.to_records else pool, strict=True)):
            where = "records" if move.to_records else f"pages of layer {i}"
            if rotation:  # a multiplication and an addition may or may not be rounded as one
                found = _far(where, got, want, 2 * torch.finfo(got.dtype).eps, 1e-5)
            else:
                found = _different(where, got.view(torch.uint8), want.view(torch.uint8))
            if found:
                return found
        return ""

    return Case(launches, poison, fault)


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention: query heads, KV heads, channels of K and of V, dtype."""

    query_heads: int
    heads: int
    size: int
    v_size: int
    dtype: torch.dtype = torch.bfloat16


LLAMA_8B = Heads(32, 8, 128, 128)
LLAMA_70B = Heads(64, 8, 128, 128)
LLAMA_2 = Heads(32, 32, 128, 128)
GEMMA_2 = Heads(16, 8, 256, 256)
SMOLLM_HEADS = Heads(9, 3, 64, 64, torch.float32)

SHARE = 0.15
"""Of the keys, those whose rows are computed again."""
QUESTION = 64
"""Rows at the end."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A `blend_attention` of SHARE of the rows and the question, or `query_scores` of the question.

    Args:
        name: of the problem.
        heads: of the model.
        length: keys.
        block_tokens: of the pages; None: one block has them all.
        what: "o": attention; "lse": its logsumexp alone; "scores", or "scores x v" with the norms of V.
        window, softcap: as in `blend_attention`.
        wide, gated: as in `Problem`; `wide` of the main kernel.
    """

    name: str
    heads: Heads
    length: int
    block_tokens: int | None = 16
    what: Literal["o", "lse", "scores", "scores x v"] = "o"
    window: int | None = None
    softcap: float | None = None
    wide: tuple[int, int] = (2, 0)
    gated: bool = True

    @property
    def kernel(self) -> str:
        """The kernel that is tuned."""
        return "weigh" if self.what.startswith("scores") else "attend"


ATTENTIONS = (
    *(Attention(f"attention Llama-3.1-8B, {n} keys", LLAMA_8B, n) for n in (4096, 8192, 32768)),
    Attention("attention Llama-3.1-8B, one block", LLAMA_8B, 8192, None),
    Attention("attention Llama-3.1-8B, window", LLAMA_8B, 8192, window=4096),
    Attention("attention Llama-3-70B", LLAMA_70B, 8192, gated=False),
    Attention("attention Llama-2-7B", LLAMA_2, 8192, gated=False),
    Attention("attention Gemma-2-9B", GEMMA_2, 4096, softcap=50.0),
    Attention("attention SmolLM2, float32", SMOLLM_HEADS, 4096, None),
    Attention("logsumexp Llama-3.1-8B", LLAMA_8B, 8192, what="lse"),
    Attention("scores Llama-3.1-8B", LLAMA_8B, 8192, what="scores"),
    Attention("scores x |v| Llama-3.1-8B", LLAMA_8B, 8192, what="scores x v"),
    Attention("scores SmolLM2, float32", SMOLLM_HEADS, 4096, None, what="scores"),
)


def _rows(spec: Attention, device: torch.device) -> Rows:
    """The question's rows, and for an attention SHARE of those before, drawn at random."""
    random, question = np.random.default_rng(0), np.arange(spec.length - QUESTION, spec.length)
    chosen = random.choice(spec.length - QUESTION, int(SHARE * spec.length), replace=False)
    positions = question if spec.kernel == "weigh" else np.sort(np.concatenate([chosen, question]))
    tokens = spec.block_tokens or spec.length
    tables = random.permutation(spec.length // tokens)[None]
    return Rows.of(positions, np.array([0, len(positions)]), np.array([spec.length]), tables, tokens, device)


def _attention_problem(spec: Attention) -> Problem:
    from kvkit.kernels.attention import triton

    cpu, heads = torch.device("cpu"), spec.heads
    launches = _attention_case(spec, cpu, False).launches(None)
    (launch,) = (launch for launch in launches if launch.kernel.__name__ == spec.kernel)
    rows, group = _rows(spec, cpu), heads.query_heads // heads.heads
    item = torch.empty((), dtype=heads.dtype).element_size()
    uses_v = spec.what in ("o", "scores x v")
    sizes = heads.size + (heads.v_size if uses_v else 0)
    moved = item * spec.length * heads.heads * sizes + item * rows.count * heads.query_heads * heads.size
    if spec.what == "o":
        moved += item * rows.count * heads.query_heads * heads.v_size

    def work(config: Config) -> Work:
        """Whole tiles, as the matrix units take them."""
        tiles = dict(config.tiles)
        if spec.kernel == "weigh":
            pairs = spec.length * -(-rows.count // tiles["TILE_ROWS"]) * tiles["TILE_ROWS"]
            return Work(moved, 2 * heads.query_heads * heads.size * pairs)
        pairs = rows.tiles(tiles["TILE_ROWS"] // group, window=spec.window).keys * tiles["TILE_ROWS"]
        return Work(moved, 2 * heads.heads * sizes * pairs)

    return Problem(
        name=spec.name,
        bucket=triton.bucket(launch),
        space=triton.configs(launch),
        make=partial(_attention_case, spec),
        work=work,
        wide={spec.kernel: spec.wide},
        gated=spec.gated,
        amd_space=triton.configs(launch, amd=True),
    )


def _attention_case(spec: Attention, device: torch.device, filled: bool) -> Case:
    from kvkit.kernels.attention import triton

    heads, rows = spec.heads, _rows(spec, device)
    tokens = spec.block_tokens or spec.length
    blocks, scale = spec.length // tokens, heads.size**-0.5
    new = partial(torch.empty, dtype=heads.dtype, device=device)
    q = new(rows.count, heads.query_heads, heads.size)
    pages = new(blocks, heads.heads, tokens, heads.size + heads.v_size)  # K and V side by side, as in vLLM
    k_pages, v_pages = _split(pages, heads.size)
    out = new(rows.count, heads.query_heads, heads.v_size)
    lse = torch.empty(rows.count, heads.query_heads, device=device)
    mass = torch.empty(heads.query_heads, spec.length, device=device)
    if filled:
        _fill(q)
        _fill(pages)
    scored = v_pages if spec.what == "scores x v" else None

    @cache
    def known_lse() -> torch.Tensor:
        """Of the question's rows, which `query_scores` is given."""
        if not filled:
            return lse
        return attention_reference.blend_attention(
            q, k_pages, v_pages, *_plan(rows, slice(None)), scale, spec.window, spec.softcap
        )[1]

    def launches(config: Config | None) -> tuple[Launch, ...]:
        if spec.kernel == "weigh":
            form = scale, spec.window, spec.softcap
            return triton.scores(q, k_pages, scored, rows, *form, known_lse(), mass, config)
        values = (v_pages, out) if spec.what == "o" else (None, None)
        return triton.attention(
            q, k_pages, values[0], rows, scale, spec.window, spec.softcap, values[1], lse, config
        )

    def poison() -> None:
        for tensor in (out, lse, mass):
            tensor.fill_(torch.nan)

    sample = np.unique(np.linspace(0, rows.count - 1, 64).astype(np.int64))

    @cache
    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        some = torch.from_numpy(sample).to(device)
        return attention_reference.blend_attention(
            q[some], k_pages, v_pages, *_plan(rows, sample), scale, spec.window, spec.softcap
        )

    def fault() -> str:
        tables, positions, _, _ = _plan(rows, slice(None))
        if spec.kernel == "weigh":
            want = attention_reference.query_scores(
                q, k_pages, scored, tables[0], positions, spec.length, scale, spec.window, spec.softcap
            )
            return _far("scores", mass, want, TOLERANCE[heads.dtype], 1e-6)
        if lse.isnan().any() or (spec.what == "o" and out.isnan().any()):
            return "some rows were not written"
        some = torch.from_numpy(sample).to(device)
        found = _far("lse", lse[some], expected()[1], 0, 1e-3)
        if not found and spec.what == "o":
            want, got = expected()[0].double(), out[some].double()
            error = ((got - want).norm(dim=2) / want.norm(dim=2)).max()  # of each row and head
            if not error <= TOLERANCE[heads.dtype]:
                found = f"o: a row is off by {error:.2g} of its norm"
        return found

    return Case(launches, poison, fault)


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative; weights are rounded to the dtype before they meet V."""


def _plan(
    rows: Rows, some: NDArray[np.int64] | slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables, positions, row starts and lengths of some rows of one request, as the reference takes them."""
    positions = rows.device_positions.cpu()[some]
    counts = torch.tensor([0, len(positions)])
    return rows.device_tables, positions.to(rows.device), counts, torch.from_numpy(rows.lengths)


@dataclass(frozen=True, slots=True)
class Scatter:
    """A `rope_scatter` of the rows of a blend.

    Args:
        name: of the problem.
        heads: of the model.
        rope: the model's.
        deviation: measured too.
        rows, tokens: how many rows, among how many tokens.
    """

    name: str
    heads: Heads
    rope: Rope
    deviation: bool = False
    rows: int = 1292
    tokens: int = 8192


SCATTERS = (
    Scatter("scatter Llama-3.1-8B", LLAMA_8B, LLAMA_ROPE),
    Scatter("scatter Llama-3.1-8B, deviation", LLAMA_8B, LLAMA_ROPE, deviation=True),
    Scatter("scatter interleaved", LLAMA_8B, INTERLEAVED),
    Scatter("scatter SmolLM2, float32", SMOLLM_HEADS, _rope(64, 100000.0)),
)


def _scatter_problem(spec: Scatter) -> Problem:
    from kvkit.kernels.attention import triton

    (launch,) = _scatter_case(spec, torch.device("cpu"), False).launches(None)
    heads = spec.heads
    item = torch.empty((), dtype=heads.dtype).element_size()
    channels = (heads.query_heads + heads.heads) * heads.size + heads.heads * heads.v_size
    moved = spec.rows * (2 * item * channels + 4 * spec.rope.channels + 8)
    if spec.deviation:
        moved += spec.rows * (item * heads.heads * heads.size + 4)
    return Problem(
        name=spec.name,
        bucket=triton.bucket(launch),
        space=triton.configs(launch),
        make=partial(_scatter_case, spec),
        work=lambda config: Work(moved),
        wide={},  # a head is too little for 16 bytes of each thread
    )


def _scatter_case(spec: Scatter, device: torch.device, filled: bool) -> Case:
    from kvkit.kernels.attention import triton

    heads, random, tokens = spec.heads, np.random.default_rng(0), 16
    new = partial(torch.empty, dtype=heads.dtype, device=device)
    sizes = heads.query_heads * heads.size, heads.heads * heads.size, heads.heads * heads.v_size
    fused = new(spec.rows, sum(sizes))  # of one projection
    q, k, v = (
        fused[:, first : first + count].view(spec.rows, -1, size)
        for first, count, size in zip(
            (0, sizes[0], sizes[0] + sizes[1]), sizes, (heads.size, heads.size, heads.v_size), strict=True
        )
    )
    positions = np.sort(random.choice(spec.tokens, spec.rows, replace=False))
    cos_sin = torch.from_numpy(spec.rope.table(positions)).to(device)
    slots = torch.from_numpy(random.permutation(spec.tokens)[: spec.rows]).to(device)
    pages = new(spec.tokens // tokens, heads.heads, tokens, heads.size + heads.v_size)
    out = new(spec.rows, heads.query_heads, heads.size)
    deviation = torch.empty(spec.rows, device=device) if spec.deviation else None
    before = torch.empty_like(pages)
    if filled:
        _fill(fused)
        _fill(before)

    def launches(config: Config | None) -> tuple[Launch, ...]:
        return triton.scatter(
            q, k, v, cos_sin, slots, *_split(pages, heads.size), spec.rope, deviation, out, config
        )

    def poison() -> None:
        pages.copy_(before)
        out.fill_(torch.nan)
        if deviation is not None:
            deviation.fill_(torch.nan)

    @cache
    def expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        want, moved = before.clone(), None if deviation is None else torch.empty_like(deviation)
        turned = attention_reference.rope_scatter(
            q, k, v, cos_sin, slots, *_split(want, heads.size), spec.rope, moved
        )
        return want, turned, moved

    def fault() -> str:
        want, turned, moved = expected()
        close = 2 * torch.finfo(heads.dtype).eps, 1e-5
        found = _far("pages", pages, want, *close) or _far("q", out, turned, *close)
        if not found and deviation is not None and moved is not None:
            found = _far("deviation", deviation, moved, 1e-2, 1e-4)
        return found

    return Case(launches, poison, fault)


def _deviation_problem(tokens: int = 8192, heads: int = 8, size: int = 128) -> Problem:
    from kvkit.kernels.attention import triton

    def make(device: torch.device, filled: bool) -> Case:
        new, old = (torch.empty(tokens, heads, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        out = torch.empty(tokens, device=device)
        if filled:
            _fill(new)
            old.copy_(new.flip(0))

        def fault() -> str:
            return _far("deviation", out, attention_reference.token_deviation(new, old), 1e-4, 1e-4)

        return Case(
            lambda config: triton.deviation(new, old, out, config), lambda: _poison_with_nan(out), fault
        )

    (launch,) = make(torch.device("cpu"), False).launches(None)
    return Problem(
        name="deviation Llama-3.1-8B",
        bucket=triton.bucket(launch),
        space=triton.configs(launch),
        make=make,
        work=lambda config: Work(tokens * (4 * heads * size + 4)),
        wide={},
    )


def _poison_with_nan(tensor: torch.Tensor) -> None:
    tensor.fill_(torch.nan)


def _split(pages: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of pages [B, H, N, D + Dv]."""
    return pages[..., :size], pages[..., size:]


POISON = 0xA5


def _fill(tensor: torch.Tensor) -> None:
    """Overwrite with normally distributed numbers, or with any bytes."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    if tensor.dtype.is_floating_point:
        tensor.normal_(generator=generator)
    else:
        tensor.random_(0, 256, generator=generator)


def _different(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    count = int((got != want).sum())
    return f"{name}: {count} of {got.numel()} bytes differ" if count else ""


def _far(name: str, got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> str:
    error = (got.double() - want.double()).abs()
    wrong = ~(error <= absolute + relative * want.double().abs())  # NaN is wrong too
    return (
        f"{name}: {int(wrong.sum())} of {got.numel()} numbers are off, by up to {error.max():.2g}"
        if wrong.any()
        else ""
    )
